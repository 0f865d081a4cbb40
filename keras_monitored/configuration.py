"""What a run is told from outside: where it keeps its files, when it saves, which seed it starts from."""

import dataclasses
import os
from typing import Any

from keras_monitored.validation import check_integer, check_number

# What `keras.utils.set_random_seed` takes.
_LARGEST_SEED = 2**32 - 1


def _set(config: Any, name: str, value: Any) -> None:
    object.__setattr__(config, name, value)  # The way a frozen dataclass fills itself.


def _check_kept(config: Any) -> None:
    name = "max_checkpoints_to_keep"
    _set(config, name, check_integer(name, getattr(config, name), minimum=1, hint="To keep all pass a large number."))
    name = "keep_checkpoint_every_n_hours"
    hint = "To keep none for good pass a large number."
    _set(config, name, check_number(name, getattr(config, name), above=0, hint=hint))


def _check_directory(name: str, value: Any) -> str | None:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if path is not None and not isinstance(path, str):
        raise TypeError(
            f"`{name}` must be a string, a path or None. Received: {value!r} (of type {type(value).__name__}). "
            "Pass the directory to save in, or None to save nothing."
        )
    if path == "":
        raise ValueError(
            f"`{name}` must not be empty. Received: ''. "
            "Pass the directory to save in ('.' for the current one), or None to save nothing."
        )
    return path


def _check_seed(seed: Any) -> int:
    hint = "Pass None to leave the random state alone."
    checked = check_integer("random_seed", seed, minimum=0, hint=hint)
    if checked > _LARGEST_SEED:
        raise ValueError(f"`random_seed` must be at most {_LARGEST_SEED}. Received: {checked}. {hint}")
    return checked


@dataclasses.dataclass(frozen=True)
class NoCheckpoints:
    """No checkpoints are saved, unless a `CheckpointSaver` is among the hooks.

    Example:
        >>> Configuration("/tmp/run1", checkpoint_config=NoCheckpoints()).checkpoint_config
        NoCheckpoints()
    """


@dataclasses.dataclass(frozen=True)
class StepBasedCheckpoints:
    """A checkpoint is saved every `steps` steps.

    Args:
        steps: Steps between two checkpoints, at least 1. Defaults to 1000.
        max_checkpoints_to_keep: Newest checkpoints that are kept, at least 1. Defaults to 5.
        keep_checkpoint_every_n_hours: Hours after which one more checkpoint is kept for good. Defaults to 10,000.

    Raises:
        TypeError: An argument is no number.
        ValueError: An argument is too small or not finite.

    Example:
        >>> StepBasedCheckpoints(steps=200, max_checkpoints_to_keep=2)
        StepBasedCheckpoints(steps=200, max_checkpoints_to_keep=2, keep_checkpoint_every_n_hours=10000)
    """

    steps: int = 1000
    max_checkpoints_to_keep: int = 5
    keep_checkpoint_every_n_hours: float = 10_000

    def __post_init__(self) -> None:
        _set(self, "steps", check_integer("steps", self.steps, minimum=1, hint="To save nothing use NoCheckpoints()."))
        _check_kept(self)


@dataclasses.dataclass(frozen=True)
class TimeBasedCheckpoints:
    """A checkpoint is saved every `seconds` seconds.

    Args:
        seconds: Seconds between two checkpoints, above 0. Defaults to 600.
        max_checkpoints_to_keep: Newest checkpoints that are kept, at least 1. An evaluation that runs beside the
            training may find a checkpoint gone when this is small and saves are frequent. Defaults to 5.
        keep_checkpoint_every_n_hours: Hours after which one more checkpoint is kept for good. Defaults to 10,000.

    Raises:
        TypeError: An argument is no number.
        ValueError: An argument is too small or not finite.

    Example:
        >>> TimeBasedCheckpoints(seconds=60)
        TimeBasedCheckpoints(seconds=60, max_checkpoints_to_keep=5, keep_checkpoint_every_n_hours=10000)
    """

    seconds: float = 600
    max_checkpoints_to_keep: int = 5
    keep_checkpoint_every_n_hours: float = 10_000

    def __post_init__(self) -> None:
        hint = "To save nothing use NoCheckpoints()."
        _set(self, "seconds", check_number("seconds", self.seconds, above=0, hint=hint))
        _check_kept(self)


CheckpointConfig = NoCheckpoints | StepBasedCheckpoints | TimeBasedCheckpoints


@dataclasses.dataclass(frozen=True, init=False)
class Configuration:
    """Settings of a run that stay the same while it lasts; immutable, and equal when all settings are.

    Args:
        working_dir: Directory that the run keeps its checkpoints and summaries in, and resumes from. Any path that
            `tf.io.gfile` knows. Defaults to `None`: nothing is saved.
        checkpoint_config: When to save checkpoints. Defaults to `TimeBasedCheckpoints(600, 5, 10000)`.
        random_seed: Seed of Python, NumPy and TensorFlow, from 0 to 2**32 - 1, set when training begins. What is made
            before, weights and the order of arrays among it, wants `keras.utils.set_random_seed` at the top of the
            script. Defaults to `None`: seeds are left alone.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `working_dir` is empty, or `random_seed` out of its range.

    Example:
        >>> Configuration("/tmp/run1", checkpoint_config=StepBasedCheckpoints(100), random_seed=7).working_dir
        '/tmp/run1'
    """

    working_dir: str | None
    checkpoint_config: CheckpointConfig
    random_seed: int | None

    def __init__(
        self,
        working_dir: str | os.PathLike[str] | None = None,
        *,
        checkpoint_config: CheckpointConfig = TimeBasedCheckpoints(600, 5, 10_000),
        random_seed: int | None = None,
    ) -> None:
        _set(self, "working_dir", _check_directory("working_dir", working_dir))
        if not isinstance(checkpoint_config, CheckpointConfig):
            raise TypeError(
                "`checkpoint_config` must be a NoCheckpoints, StepBasedCheckpoints or TimeBasedCheckpoints. "
                f"Received: {checkpoint_config!r} (of type {type(checkpoint_config).__name__}). "
                "To save every 100 steps pass StepBasedCheckpoints(100)."
            )
        _set(self, "checkpoint_config", checkpoint_config)
        _set(self, "random_seed", None if random_seed is None else _check_seed(random_seed))
