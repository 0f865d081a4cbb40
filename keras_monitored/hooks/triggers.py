"""When a hook acts, kept apart from what it does.

A hook asks its trigger after each run whether it `is_due`, and tells it once it has `fired`. Before a loop of several
steps the engine asks for the `next_step`, and for the `seconds_left`, so that the loop stops exactly where the next
hook is due:

    trigger.start(step, epoch)                    # the session was created
    while training:
        run_steps(until=trigger.next_step(step))  # None: nothing known ahead
        if trigger.is_due(step, epoch):
            elapsed = trigger.fired(step, epoch)
"""

import abc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from keras_monitored.validation import check_integer, check_number

Clock = Callable[[], float]


class Elapsed(NamedTuple):
    """Seconds and steps between two firings of a trigger."""

    seconds: float
    steps: int


class HookTrigger(abc.ABC):
    """Decides at which steps a hook acts; the base of all triggers.

    A trigger of your own implements `next_step` and `is_due`; what happened so far is kept here.

    Args:
        clock: Monotonic clock in seconds. Defaults to `time.monotonic`; tests pass their own.

    Example:
        >>> class AtPowersOfTwo(HookTrigger):
        ...     def next_step(self, step):
        ...         return 1 << step.bit_length()
        ...
        ...     def is_due(self, step, epoch, epoch_end=False):
        ...         return step > 0 and step & (step - 1) == 0 and step != self.last_step
        >>> trigger = AtPowersOfTwo()
        >>> trigger.start(step=0, epoch=0)
        >>> [step for step in range(10) if trigger.is_due(step, epoch=0)]
        [1, 2, 4, 8]
    """

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forgets everything, for a new run; until `start`, the run counts as started now, at step 0."""
        self._started = False
        self._start_step = 0
        self._start_epoch = 0
        self._last_step: int | None = None
        self._last_epoch: int | None = None
        self._reference_time = self._clock()

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
            self._reference_time = self._clock()

    @property
    def last_step(self) -> int | None:
        """Step of the last firing, `None` before the first one."""
        return self._last_step

    @abc.abstractmethod
    def next_step(self, step: int) -> int | None:
        """Returns the first step after `step` at which the trigger is known to fire, or `None` when none is known."""

    @abc.abstractmethod
    def is_due(self, step: int, epoch: int, epoch_end: bool = False) -> bool:
        """Says whether the hook should act now.

        Args:
            step: Global step, the number of steps run.
            epoch: Number of completed epochs.
            epoch_end: Whether an epoch has just been completed. Defaults to `False`.
        """

    def seconds_left(self) -> float | None:
        """Returns the seconds until the trigger is due, 0.0 when overdue, and `None` when time plays no part."""
        return None

    def fired(self, step: int, epoch: int) -> Elapsed | None:
        """Records that the hook has acted.

        Args:
            step: Global step at which it acted.
            epoch: Number of completed epochs.

        Returns:
            What has passed since the previous firing, or since the start before the first one; `None` when there was
            neither. Steps are never negative, also when a recovery went back behind the previous firing.
        """
        elapsed = None
        if self._started or self._last_step is not None:
            since = self._start_step if self._last_step is None else self._last_step
            elapsed = Elapsed(self._elapsed_seconds(), max(0, int(step) - since))
        self._last_step = int(step)
        self._last_epoch = int(epoch)
        self._reference_time = self._clock()
        return elapsed

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on counting, as values that JSON can hold."""
        return {
            "started": self._started,
            "start_step": self._start_step,
            "start_epoch": self._start_epoch,
            "last_step": self._last_step,
            "last_epoch": self._last_epoch,
            "elapsed_seconds": self._elapsed_seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`; the time between saving and loading does not count."""
        self._started = state["started"]
        self._start_step = state["start_step"]
        self._start_epoch = state["start_epoch"]
        self._last_step = state["last_step"]
        self._last_epoch = state["last_epoch"]
        self._reference_time = self._clock() - state["elapsed_seconds"]

    def _elapsed_seconds(self) -> float:
        return self._clock() - self._reference_time


class StepHookTrigger(HookTrigger):
    """Fires every `steps` steps.

    It fires first at a multiple of `steps`, after the step the run started at and not before `start_step`, then each
    time at least `steps` have passed since it last did. Where a loop ran past the planned step, it fires at once.

    Args:
        steps: Steps between two firings, at least 1.
        start_step: First step at which it may fire. Defaults to 0.
        clock: Monotonic clock in seconds. Defaults to `time.monotonic`.

    Raises:
        TypeError: An argument is no integer.
        ValueError: An argument is too small.

    Example:
        >>> trigger = StepHookTrigger(10, start_step=15)
        >>> trigger.start(step=3, epoch=0)
        >>> trigger.next_step(3)
        20
        >>> trigger.is_due(20, epoch=0)
        True
    """

    def __init__(self, steps: int, start_step: int = 0, *, clock: Clock = time.monotonic) -> None:
        self.steps = check_integer("steps", steps, minimum=1, hint="For a hook that never acts use NoHookTrigger().")
        self.start_step = _check_start_step(start_step)
        super().__init__(clock=clock)

    def next_step(self, step: int) -> int | None:
        return max(self._planned_step(), step + 1)

    def is_due(self, step: int, epoch: int, epoch_end: bool = False) -> bool:
        return step >= self._planned_step()

    def _planned_step(self) -> int:
        if self.last_step is not None:
            return max(self.last_step + self.steps, self.start_step)
        return _next_multiple(self.steps, after=max(self._start_step, self.start_step - 1))

    def __repr__(self) -> str:
        return f"StepHookTrigger(steps={self.steps}{_shown_start_step(self.start_step)})"


class TimeHookTrigger(HookTrigger):
    """Fires once at least `seconds` have passed since it last did, or since the run started.

    Args:
        seconds: Seconds between two firings, above 0. They are counted on across a resume.
        start_step: First step at which it may fire. Defaults to 0.
        clock: Monotonic clock in seconds. Defaults to `time.monotonic`.

    Raises:
        TypeError: An argument is no number.
        ValueError: An argument is too small or not finite.

    Example:
        >>> now = 0.0
        >>> trigger = TimeHookTrigger(60, clock=lambda: now)
        >>> trigger.start(step=0, epoch=0)
        >>> now = 45.0
        >>> trigger.is_due(100, epoch=0), trigger.seconds_left()
        (False, 15.0)
        >>> now = 60.0
        >>> trigger.is_due(150, epoch=0), trigger.seconds_left()
        (True, 0.0)
    """

    def __init__(self, seconds: float, start_step: int = 0, *, clock: Clock = time.monotonic) -> None:
        self.seconds = check_number("seconds", seconds, above=0, hint="For a hook that never acts use NoHookTrigger().")
        self.start_step = _check_start_step(start_step)
        super().__init__(clock=clock)

    def next_step(self, step: int) -> int | None:
        return max(step + 1, self.start_step) if self.seconds_left() == 0.0 else None

    def is_due(self, step: int, epoch: int, epoch_end: bool = False) -> bool:
        # One step can be asked about twice, after the run and at the end of the epoch.
        return self.start_step <= step != self.last_step and self.seconds_left() == 0.0

    def seconds_left(self) -> float:
        return max(0.0, self.seconds - self._elapsed_seconds())

    def __repr__(self) -> str:
        return f"TimeHookTrigger(seconds={self.seconds}{_shown_start_step(self.start_step)})"


class EpochHookTrigger(HookTrigger):
    """Fires at the end of every `epochs`-th epoch.

    It fires first when the number of completed epochs is a multiple of `epochs`, then at the end of an epoch whenever
    at least `epochs` have been completed since it last did.

    Args:
        epochs: Epochs between two firings, at least 1.
        clock: Monotonic clock in seconds. Defaults to `time.monotonic`.

    Raises:
        TypeError: `epochs` is no integer.
        ValueError: `epochs` is smaller than 1.

    Example:
        >>> trigger = EpochHookTrigger(2)
        >>> trigger.start(step=0, epoch=0)
        >>> trigger.is_due(100, epoch=1, epoch_end=True)
        False
        >>> trigger.is_due(200, epoch=2, epoch_end=True)
        True
    """

    def __init__(self, epochs: int, *, clock: Clock = time.monotonic) -> None:
        self.epochs = check_integer("epochs", epochs, minimum=1, hint="For a hook that never acts use NoHookTrigger().")
        super().__init__(clock=clock)

    def next_step(self, step: int) -> int | None:
        return None

    def is_due(self, step: int, epoch: int, epoch_end: bool = False) -> bool:
        return epoch_end and epoch >= self._planned_epoch()

    def _planned_epoch(self) -> int:
        if self._last_epoch is not None:
            return self._last_epoch + self.epochs
        return _next_multiple(self.epochs, after=self._start_epoch)

    def __repr__(self) -> str:
        return f"EpochHookTrigger(epochs={self.epochs})"


class NoHookTrigger(HookTrigger):
    """Never fires by itself; a hook with `trigger_at_end=True` then acts at the end alone.

    Example:
        >>> NoHookTrigger().is_due(step=100, epoch=1, epoch_end=True)
        False
    """

    def next_step(self, step: int) -> int | None:
        return None

    def is_due(self, step: int, epoch: int, epoch_end: bool = False) -> bool:
        return False

    def __repr__(self) -> str:
        return "NoHookTrigger()"


def _next_multiple(of: int, *, after: int) -> int:
    return (after // of + 1) * of


def _check_start_step(start_step: Any) -> int:
    return check_integer("start_step", start_step, minimum=0, hint="Pass the first step at which the hook may act.")


def _shown_start_step(start_step: int) -> str:
    return f", start_step={start_step}" if start_step else ""
