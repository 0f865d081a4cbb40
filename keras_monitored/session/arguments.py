"""What a run is asked for: values to fetch and to feed, functions to call, options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from keras_monitored.state import plain

Feeds = dict[Any, Any] | Sequence[tuple[Any, Any]]
"""Values by what they are fed to; pairs too, as TensorFlow's variables can be keys only as `variable.ref()`."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of one run.

    Args:
        trace: Whether to profile the run; the profile is written for TensorBoard. Defaults to `False`.
        trace_directory: Where the profile goes. Defaults to the run's working directory.
    """

    trace: bool = False
    trace_directory: str | None = None


@dataclasses.dataclass(frozen=True)
class SessionRunArgs:
    """What a hook adds to a run.

    Args:
        fetches: Any nested structure of names of observed values, variables, or functions of no argument, which are
            read after the step, all in one copy from the device. Names are those given to `observe`, `loss`,
            `learning_rate`, `global_step`, `global_epoch`, `metrics/<name>` and `variables/<path>`.
        feeds: Values for this run only: for a variable, for the name of a `feed` input, or for `"x"` and `"y"`, the
            parts of the batch. A dict, or pairs; a TensorFlow variable is a key as `variable.ref()`.
        targets: Functions of no argument, run for their effect after the step.
        options: Options of the run.

    Example:

    >>> SessionRunArgs({"loss": "loss", "rate": "learning_rate"}).targets
    ()
    """

    fetches: Any = None
    feeds: Feeds | None = None
    targets: Sequence[Callable[[], Any]] = ()
    options: RunOptions | None = None


def feed_items(feeds: Feeds) -> list[tuple[Any, Any]]:
    """Returns what is fed, and the value, as pairs; variables are TensorFlow's own."""
    pairs = feeds.items() if isinstance(feeds, dict) else feeds
    return [(t if isinstance(t, str) else plain(t.deref() if hasattr(t, "deref") else t), v) for t, v in pairs]
