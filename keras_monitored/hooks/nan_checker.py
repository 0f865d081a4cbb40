"""Looks for NaN and Inf at every step, in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from keras_monitored.errors import NaNLossError
from keras_monitored.hooks.hook import Hook, SessionRunContext
from keras_monitored.messages import warn
from keras_monitored.observe import observe
from keras_monitored.session.session import to_host

OnNaN = Literal["raise", "stop"]
_GRADIENTS = "gradients"
_FLAGS = "nan_checker/gradients"


class NaNChecker(Hook):
    """Ends the run at the first step with a NaN or an Inf in one of the watched values.

    The step itself decides, in its graph: it costs no copy from the device, and a compiled loop stops exactly at the
    bad step. Its update has been applied by then; checkpoints with such variables are never written, so the newest one
    is from before.

    Args:
        names: Observed values to watch. `"gradients"` stands for all gradients, before clipping. With a loss scale
            (`mixed_float16`) gradients overflow now and then by design, and such steps are skipped by the optimizer:
            watch the loss alone there. Defaults to the loss.
        on_nan: `"raise"` a `NaNLossError`, or `"stop"` the run as if it were finished. Defaults to `"raise"`.

    Raises:
        ValueError: If `on_nan` is not allowed, `names` is empty, or, when training starts, a name is unknown.
        TypeError: If `names` holds something else than strings.

    Example:

    >>> NaNChecker(("loss", "gradients"), on_nan="stop").names
    ('loss', 'gradients')
    """

    def __init__(self, names: str | Sequence[str] = ("loss",), *, on_nan: OnNaN = "raise") -> None:
        names = (names,) if isinstance(names, str) else tuple(names)
        if not names:
            raise ValueError("`names` must name at least one observed value. Received: names=(). Pass ('loss',).")
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"`names` must hold strings. Received: names={names!r}. Pass names of observed values.")
        if on_nan not in get_args(OnNaN):
            raise ValueError(f"`on_nan` must be one of {get_args(OnNaN)}. Received: on_nan={on_nan!r}.")
        self.names = names
        self.on_nan = on_nan
        self.watches_gradients = _GRADIENTS in names
        self._gradients: tuple[str, ...] = ()

    def graph_check(self, observed: dict[str, Any]) -> Any:
        bad = []
        for name in self.names:
            if name == _GRADIENTS:
                self._gradients = tuple(key for key in observed if key.startswith(f"{_GRADIENTS}/"))
                flags = tf.stack([_has_non_finite(observed[key]) for key in self._gradients])
                observe(_FLAGS, tf.cast(flags, tf.int32), reduction="sum")
                bad.append(tf.reduce_any(flags))
            elif name in observed:
                bad.append(_has_non_finite(observed[name]))
            else:
                hint = " Add observe('loss', loss) to your train step." if name == "loss" else ""
                raise ValueError(
                    f"`names` of NaNChecker asks for {name!r}, which the step does not observe.{hint} "
                    f"Known are: {', '.join(n for n in observed if '/' not in n or not n.startswith(_GRADIENTS))}, "
                    f"and '{_GRADIENTS}'."
                )
        return tf.reduce_any(tf.stack(bad))

    def graph_check_failed(self, run_context: SessionRunContext, observed: dict[str, Any]) -> None:
        step = run_context.session.step
        values = to_host({name: observed[name] for name in self.names if name in observed})
        found = {name: value for name, value in values.items() if not np.all(np.isfinite(value))}
        shown = [f"{name} = {value}" if np.size(value) == 1 else name for name, value in found.items()]
        if _FLAGS in observed:
            flags = to_host([observed[_FLAGS]])[0]
            gradients = [name for name, flag in zip(self._gradients, flags, strict=True) if flag]
            found.update(dict.fromkeys(gradients))
            shown += gradients
        message = f"Not finite at step {step}: {', '.join(shown)}."
        if self.on_nan == "raise":
            raise NaNLossError(
                f"{message} The newest checkpoint is from before. Lower the learning rate, clip the gradients, or look "
                "at the batch of this step.",
                step=step,
                names=tuple(found),
            )
        warn(message)
        run_context.request_stop(f"NaNChecker: {message}")

    def __repr__(self) -> str:
        return f"NaNChecker({self.names!r}, on_nan={self.on_nan!r})"


def _has_non_finite(value: Any) -> tf.Tensor:
    value = value.values if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        return tf.constant(False)
    return tf.logical_not(tf.reduce_all(tf.math.is_finite(value)))
