"""Prints the loss of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_monitored.hooks.hook import TriggeredHook
from keras_monitored.hooks.triggers import Elapsed, HookTrigger, StepHookTrigger
from keras_monitored.messages import say
from keras_monitored.session.session import Session

Formatter = Callable[[int, float, Elapsed | None], str]


class LossLogger(TriggeredHook):
    """Prints the loss of the step just run: that step's own, not the mean over the epoch that Keras shows.

    Args:
        trigger: When to print. Defaults to every step.
        formatter: Makes the line from the step, the loss, and what has elapsed since the last line (`seconds` and
            `steps`, or `None`). Defaults to `step 100: loss = 0.5 (2.3 s)`.
        trigger_at_end: Whether to print the last step's loss too. Defaults to `True`.

    Raises:
        TypeError: If an argument is of the wrong type.

    Example:

    >>> hook = LossLogger(StepHookTrigger(100), formatter=lambda step, loss, elapsed: f"{step}: {loss:.2f}")
    >>> hook.formatter(100, 0.123, None)
    '100: 0.12'
    """

    def __init__(
        self, trigger: HookTrigger | None = None, *, formatter: Formatter | None = None, trigger_at_end: bool = True
    ) -> None:
        super().__init__(StepHookTrigger(1) if trigger is None else trigger, trigger_at_end=trigger_at_end)
        if formatter is not None and not callable(formatter):
            raise TypeError(
                f"`formatter` must be a function of step, loss and elapsed. Received: formatter={formatter!r}. "
                "Pass a function that returns the line, or leave it out."
            )
        self.formatter = _line if formatter is None else formatter

    def fetches(self) -> Any:
        return "loss"

    def on_trigger(self, session: Session, results: Any, elapsed: Elapsed | None) -> None:
        say(self.formatter(session.step, float(results), elapsed))


def _line(step: int, loss: float, elapsed: Elapsed | None) -> str:
    time = "" if elapsed is None else f" ({elapsed.seconds:.1f} s)"
    return f"step {step}: loss = {loss:.6g}{time}"
