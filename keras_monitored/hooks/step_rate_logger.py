"""Prints how many steps a second are run."""

from __future__ import annotations

from typing import Any

from keras_monitored.hooks.hook import TriggeredHook
from keras_monitored.hooks.triggers import Elapsed, HookTrigger, StepHookTrigger
from keras_monitored.messages import say
from keras_monitored.session.session import Session


class StepRateLogger(TriggeredHook):
    """Prints the number of steps per second since it last did, the time of other hooks and callbacks included.

    Args:
        trigger: When to print. Defaults to every 10 steps.
        tag: What the line calls the rate. Defaults to `"Steps/Sec"`.
        trigger_at_end: Whether to print at the end too. Defaults to `True`.

    Attributes:
        rate: The rate printed last, in steps per second; `None` before the first.

    Raises:
        TypeError: If an argument is of the wrong type.

    Example:

    >>> StepRateLogger(StepHookTrigger(100), tag="rate").tag
    'rate'
    """

    def __init__(
        self, trigger: HookTrigger | None = None, *, tag: str = "Steps/Sec", trigger_at_end: bool = True
    ) -> None:
        super().__init__(StepHookTrigger(10) if trigger is None else trigger, trigger_at_end=trigger_at_end)
        if not isinstance(tag, str) or not tag:
            raise TypeError(f"`tag` must be a non-empty string. Received: tag={tag!r}. Name the rate.")
        self.tag = tag
        self.rate: float | None = None

    def on_trigger(self, session: Session, results: Any, elapsed: Elapsed | None) -> None:
        if elapsed is not None and elapsed.seconds > 0 and elapsed.steps > 0:
            self.rate = elapsed.steps / elapsed.seconds
            say(f"step {session.step}: {self.tag} = {self.rate:.4g}")
