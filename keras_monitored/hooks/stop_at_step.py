"""Stops a run at a step."""

from __future__ import annotations

from typing import Any

from keras_monitored.hooks.hook import Hook, SessionRunContext, SessionRunValues
from keras_monitored.session.session import Session
from keras_monitored.validation import check_integer


class StopAtStep(Hook):
    """Stops the run after a number of steps, or at a global step: exactly one of the two is given.

    Args:
        num_steps: Steps to run from where the run began. A run that was killed counts on where it was.
        last_step: Global step after which no further one is run.

    Raises:
        ValueError: If none or both are given, or one is less than 1.
        TypeError: If one is no integer.

    Example:

    >>> StopAtStep(last_step=1000)
    StopAtStep(last_step=1000)
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ValueError(
                "Exactly one of `num_steps` and `last_step` must be given. "
                f"Received: num_steps={num_steps!r}, last_step={last_step!r}. Leave the other one out."
            )
        hint = "Pass a number of steps."
        self.num_steps = None if num_steps is None else check_integer("num_steps", num_steps, minimum=1, hint=hint)
        self.last_step = None if last_step is None else check_integer("last_step", last_step, minimum=1, hint=hint)
        self._start: int | None = None

    def begin(self) -> None:
        self._start = None

    def after_session_creation(self, session: Session) -> None:
        if self._start is None:  # taken once: a recovery, or a restart, does not start the count again
            self._start = session.step
        if session.step >= self._stop_at():
            session.request_stop(repr(self))

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_values.step >= self._stop_at():
            run_context.request_stop(repr(self))

    def next_step(self, step: int) -> int | None:
        return max(self._stop_at(), step + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = state["start"]

    def _stop_at(self) -> int:
        return (self._start or 0) + (self.num_steps or 0) if self.last_step is None else self.last_step

    def __repr__(self) -> str:
        given = f"num_steps={self.num_steps}" if self.last_step is None else f"last_step={self.last_step}"
        return f"StopAtStep({given})"
