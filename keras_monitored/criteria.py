"""When a training run has done enough: the limits, and the counts that are held against them."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

from keras_monitored.validation import check_flag, check_integer, check_number


@dataclasses.dataclass(frozen=True)
class StopCriteria:
    """Limits of a training run; it stops as soon as one of them is reached.

    A limit of `None` is never reached. Every number is checked on construction.

    Args:
        max_steps: Steps to run. Defaults to 10,000.
        max_epochs: Epochs to complete. Defaults to 100.
        max_seconds: Wall-clock seconds to run, summed over the parts of a resumed run. Defaults to `None`.
        restart_counting: Whether `max_steps` and `max_epochs` count from where the run started (`True`, the default),
            or from the very first step of the model.
        abs_loss_change_tol: Bound on the absolute change of the loss from one step to the next. Defaults to `None`.
        rel_loss_change_tol: The same for the change relative to the previous loss. Defaults to `None`.
        max_steps_below_tol: The run stops once more than this many steps in a row change the loss by less than either
            tolerance. A loss that does not change at all counts whatever the tolerance, a change that is NaN never
            does. Defaults to 10.

    Raises:
        TypeError: A limit is no number, or `restart_counting` is no `bool`.
        ValueError: A limit is not above 0, a tolerance or `max_steps_below_tol` is negative, or one is not finite.

    Example:
        >>> StopCriteria.steps(500)
        StopCriteria(max_steps=500, max_epochs=None, max_seconds=None, restart_counting=True, ...)
    """

    max_steps: int | None = 10_000
    max_epochs: int | None = 100
    max_seconds: float | None = None
    restart_counting: bool = True
    abs_loss_change_tol: float | None = None
    rel_loss_change_tol: float | None = None
    max_steps_below_tol: int = 10

    def __post_init__(self) -> None:
        no_limit = "Pass None for no limit."
        checked: dict[str, Any] = {
            "restart_counting": check_flag(
                "restart_counting", self.restart_counting, hint="Pass False to count from the model's first step."
            ),
            "max_steps_below_tol": check_integer(
                "max_steps_below_tol",
                self.max_steps_below_tol,
                minimum=0,
                hint="Pass 0 to stop at the first such step.",
            ),
        }
        for name in ("max_steps", "max_epochs"):
            if (value := getattr(self, name)) is not None:
                checked[name] = check_integer(name, value, minimum=1, hint=no_limit)
        if self.max_seconds is not None:
            checked["max_seconds"] = check_number("max_seconds", self.max_seconds, above=0, hint=no_limit)
        for name in ("abs_loss_change_tol", "rel_loss_change_tol"):
            if (value := getattr(self, name)) is not None:
                checked[name] = check_number(name, value, minimum=0, hint=no_limit)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def none(cls) -> "StopCriteria":
        """Returns criteria without any limit."""
        return cls(max_steps=None, max_epochs=None)

    @classmethod
    def steps(cls, max_steps: int) -> "StopCriteria":
        """Returns criteria that stop after `max_steps` steps and know no other limit."""
        return cls(max_steps=max_steps, max_epochs=None)


class StopTracker:
    """Counts steps, epochs, seconds and small changes of the loss, and says when a `StopCriteria` is reached.

    Args:
        criteria: Limits to watch.
        clock: Monotonic clock in seconds. Defaults to `time.monotonic`; tests pass their own.

    Example:
        >>> tracker = StopTracker(StopCriteria.steps(2))
        >>> tracker.start(step=10, epoch=1)
        >>> tracker.update(11, epoch=1)
        >>> tracker.update(12, epoch=1)
        '2 steps were run since step 10 (max_steps=2)'
    """

    def __init__(self, criteria: StopCriteria, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.criteria = criteria
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forgets everything, for a new run; until `start`, the run counts as started now, at step 0."""
        self._started = False
        self._start_step = 0
        self._start_epoch = 0
        self._start_time = self._clock()
        self._previous_loss: float | None = None
        self._steps_below_tol = 0

    def start(self, step: int, epoch: int) -> None:
        """Takes the counts and the time of the run's start; a second call, after a recovery, changes nothing.

        Args:
            step: Global step at which the session was created.
            epoch: Number of epochs completed by then.
        """
        if not self._started:
            self._started = True
            self._start_step = int(step)
            self._start_epoch = int(epoch)
            self._start_time = self._clock()

    @property
    def needs_loss(self) -> bool:
        """Whether a tolerance is set, so that `update` must be given every step's loss."""
        return self.criteria.abs_loss_change_tol is not None or self.criteria.rel_loss_change_tol is not None

    def update(self, step: int, epoch: int, loss: float | None = None) -> str | None:
        """Takes in a step that was run; to be called once for each step when `needs_loss`.

        Args:
            step: Global step, this one included.
            epoch: Number of completed epochs.
            loss: This step's own loss, not a running mean. Defaults to `None`, for criteria without a tolerance.

        Returns:
            Why the run should stop, in words, or `None` when it should go on.

        Raises:
            ValueError: A tolerance is set and no loss was given.
        """
        if self.needs_loss:
            if loss is None:
                raise ValueError(
                    f"`loss` must be a number when a loss change tolerance is set. Received: None at step {step}. "
                    "Pass the loss of every step, or leave both tolerances out of the criteria."
                )
            self._count_loss(float(loss))
        return self.reason(step, epoch)

    def reason(self, step: int, epoch: int) -> str | None:
        """Returns why a run that stands at `step` should stop, or `None`.

        It counts nothing, so it can be asked before the first step: a finished run started again has nothing to do.
        """
        criteria = self.criteria
        from_step, from_epoch = self._origin()
        if criteria.max_steps is not None and step - from_step >= criteria.max_steps:
            return f"{step - from_step} steps were run since step {from_step} (max_steps={criteria.max_steps})"
        if criteria.max_epochs is not None and epoch - from_epoch >= criteria.max_epochs:
            return f"{epoch - from_epoch} epochs were run since epoch {from_epoch} (max_epochs={criteria.max_epochs})"
        if criteria.max_seconds is not None and self._elapsed_seconds() >= criteria.max_seconds:
            return f"{self._elapsed_seconds():.1f} seconds have passed (max_seconds={criteria.max_seconds})"
        if self._steps_below_tol > criteria.max_steps_below_tol:
            tolerances = {name: getattr(criteria, name) for name in ("abs_loss_change_tol", "rel_loss_change_tol")}
            shown = ", ".join(f"{name}={value}" for name, value in tolerances.items() if value is not None)
            return (
                f"the loss has hardly changed for {self._steps_below_tol} steps in a row "
                f"({shown}, max_steps_below_tol={criteria.max_steps_below_tol})"
            )
        return None

    def next_step(self, step: int) -> int | None:
        """Returns the first step after `step` at which `max_steps` stops the run, or `None` without that limit."""
        if self.criteria.max_steps is None:
            return None
        return max(self._origin()[0] + self.criteria.max_steps, step + 1)

    def seconds_left(self) -> float | None:
        """Returns the seconds until `max_seconds` is reached, 0.0 when it is, and `None` without that limit."""
        if self.criteria.max_seconds is None:
            return None
        return max(0.0, self.criteria.max_seconds - self._elapsed_seconds())

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on counting, as values that JSON can hold exactly."""
        loss = self._previous_loss
        return {
            "started": self._started,
            "start_step": self._start_step,
            "start_epoch": self._start_epoch,
            "elapsed_seconds": self._elapsed_seconds(),
            # JSON has no NaN and no infinity.
            "previous_loss": loss if loss is None or math.isfinite(loss) else str(loss),
            "steps_below_tol": self._steps_below_tol,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`; the time between saving and loading does not count."""
        self._started = state["started"]
        self._start_step = state["start_step"]
        self._start_epoch = state["start_epoch"]
        self._start_time = self._clock() - state["elapsed_seconds"]
        self._previous_loss = None if state["previous_loss"] is None else float(state["previous_loss"])
        self._steps_below_tol = state["steps_below_tol"]

    def _origin(self) -> tuple[int, int]:
        return (self._start_step, self._start_epoch) if self.criteria.restart_counting else (0, 0)

    def _elapsed_seconds(self) -> float:
        return self._clock() - self._start_time

    def _count_loss(self, loss: float) -> None:
        previous, self._previous_loss = self._previous_loss, loss
        if previous is not None and self._is_below_tol(previous, loss):
            self._steps_below_tol += 1
        else:
            self._steps_below_tol = 0

    def _is_below_tol(self, previous: float, loss: float) -> bool:
        change = abs(loss - previous)
        absolute, relative = self.criteria.abs_loss_change_tol, self.criteria.rel_loss_change_tol
        # Multiplied rather than divided: a previous loss of zero then needs no case of its own. NaN is below nothing.
        return (
            change == 0
            or (absolute is not None and change < absolute)
            or (relative is not None and change < relative * abs(previous))
        )
