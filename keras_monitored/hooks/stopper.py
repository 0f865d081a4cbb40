"""Stops a run when its criteria are reached."""

from __future__ import annotations

from typing import Any

from keras_monitored.criteria import StopCriteria, StopTracker
from keras_monitored.hooks.hook import Hook, SessionRunContext, SessionRunValues
from keras_monitored.session.arguments import SessionRunArgs
from keras_monitored.session.session import Session


class Stopper(Hook):
    """Stops the run when one of its `StopCriteria` is reached.

    Limits of steps are met exactly. With a tolerance for the change of the loss the hook reads every step's loss,
    which keeps compiled loops at one step.

    Args:
        criteria: When to stop. Defaults to `StopCriteria()`: 10,000 steps or 100 epochs.

    Raises:
        TypeError: If `criteria` is no `StopCriteria`.

    Example:

    >>> Stopper(StopCriteria.steps(500))
    Stopper(StopCriteria(max_steps=500, max_epochs=None, max_seconds=None, ...))
    """

    def __init__(self, criteria: StopCriteria | None = None) -> None:
        criteria = StopCriteria() if criteria is None else criteria
        if not isinstance(criteria, StopCriteria):
            raise TypeError(
                f"`criteria` must be a StopCriteria. Received: criteria={criteria!r}. "
                "Pass one, such as StopCriteria(max_steps=10_000)."
            )
        self.criteria = criteria
        self.tracker = StopTracker(criteria)

    def begin(self) -> None:
        self.tracker.reset()

    def after_session_creation(self, session: Session) -> None:
        self.tracker.start(session.step, session.epoch)
        if self.tracker.needs_loss:
            session.check_names("loss")
        self._stop_if_due(session)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return SessionRunArgs("loss") if self.tracker.needs_loss else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        loss = None if run_values.results is None else float(run_values.results)
        reason = self.tracker.update(session.step, session.epoch, loss)
        if reason is not None:
            run_context.request_stop(f"{self!r}: {reason}")

    def after_epoch(self, session: Session) -> None:
        self._stop_if_due(session)

    def next_step(self, step: int) -> int | None:
        return step + 1 if self.tracker.needs_loss else self.tracker.next_step(step)

    def seconds_left(self) -> float | None:
        return self.tracker.seconds_left()

    def state_dict(self) -> dict[str, Any]:
        return self.tracker.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tracker.load_state_dict(state)

    def __repr__(self) -> str:
        return f"Stopper({self.criteria!r})"

    def _stop_if_due(self, session: Session) -> None:
        reason = self.tracker.reason(session.step, session.epoch)
        if reason is not None:
            session.request_stop(f"{self!r}: {reason}")
