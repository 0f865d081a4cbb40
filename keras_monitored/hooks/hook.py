"""What a hook is: the life cycle that a run calls, and what passes between the two.

begin -> after_session_creation -> (before_run -> the run -> after_run)* -> end
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_monitored.hooks.triggers import Elapsed, HookTrigger
from keras_monitored.model_instance import ModelInstance
from keras_monitored.modes import Mode
from keras_monitored.session.arguments import RunOptions, SessionRunArgs
from keras_monitored.session.session import Session


class SessionRunContext:
    """What a hook is told of a run, and how it asks for a stop.

    Attributes:
        session: The session that runs.
        step: The global step before the run.
        steps: How many steps the run is planned to make; more than one in a compiled loop.
        arguments: What the caller of the run asked for, without what hooks add.
    """

    def __init__(self, session: Session, step: int, steps: int, arguments: SessionRunArgs) -> None:
        self.session = session
        self.step = step
        self.steps = steps
        self.arguments = arguments
        self.stop_reason: str | None = None

    @property
    def stop_requested(self) -> bool:
        """Says whether a hook has asked for a stop during this run."""
        return self.stop_reason is not None

    def request_stop(self, reason: str = "a hook asked for it") -> None:
        """Asks that the run be the last one. `after_run` of the other hooks is still called.

        Args:
            reason: Why, for the log and `run.jsonl`.
        """
        if self.stop_reason is None:
            self.stop_reason = reason


@dataclasses.dataclass(frozen=True)
class SessionRunValues:
    """What came of a run.

    Attributes:
        results: What the hook fetched, in the structure that it asked for, as NumPy values.
        step: The global step after the run.
        steps: How many steps were run.
        options: The options the run was made with.
    """

    results: Any
    step: int
    steps: int
    options: RunOptions


class Hook:
    """Base class of hooks: code that accompanies a run.

    Override what you need; the methods here do nothing. A hook that overrides `before_run` or `after_run` is called at
    every step, which keeps compiled loops at one step. If it is due less often, override `next_step` too, or derive
    from `TriggeredHook`.

    Attributes:
        priority: Hooks of a higher priority are called first, those of the same in the order given. Defaults to 0.
        modes: The modes in which the hook takes part. Defaults to training only.
        watches_gradients: Whether its `graph_check` looks at `gradients/<variable path>`. Defaults to `False`.

    Example:

    >>> class Printer(Hook):
    ...     def before_run(self, run_context):
    ...         return SessionRunArgs("loss")
    ...     def after_run(self, run_context, run_values):
    ...         print(run_values.step, run_values.results)
    """

    priority: int = 0
    modes: frozenset[Mode] = frozenset({Mode.TRAINING})
    watches_gradients: bool = False

    def begin(self) -> None:
        """Called once, before the session is created."""

    def after_session_creation(self, session: Session) -> None:
        """Called when the session is created and restored; again after each recovery."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before a run. What it returns is added to the run."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after a run, with what `before_run` fetched."""

    def after_epoch(self, session: Session) -> None:
        """Called when an epoch is complete: before the next one's first run, or before the end."""

    def end(self, session: Session) -> None:
        """Called once at the end, unless the run ended with an error."""

    def next_step(self, step: int) -> int | None:
        """Returns the next step after `step` whose run the hook takes part in, `None` if there is none known.

        Asked when the session is created and after each run that the hook took part in.
        """
        takes_part = type(self).before_run is not Hook.before_run or type(self).after_run is not Hook.after_run
        return step + 1 if takes_part else None

    def seconds_left(self) -> float | None:
        """Returns the seconds after which the hook wants to take part in the next run; `None` if no clock decides."""

    def graph_check(self, observed: dict[str, Any]) -> Any:
        """Traced into the step of a hook that overrides it: a scalar bool tensor, true when the step went wrong.

        A step that a check finds wrong is the last of its loop, and `graph_check_failed` is called. It costs no copy
        from the device to look at every step in this way.

        Args:
            observed: The tensors observed in the step, by name.
        """

    def graph_check_failed(self, run_context: SessionRunContext, observed: dict[str, Any]) -> None:
        """Called after a run whose last step `graph_check` found wrong, with what was observed in that step."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what the hook has to remember over a restart, as JSON values; saved with every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` returned, before `after_session_creation`."""


class ModelDependentHook(Hook):
    """A hook that works with the model itself, which it finds in `model_instance` from `begin` on."""

    model_instance: ModelInstance

    def set_model_instance(self, model_instance: ModelInstance) -> None:
        """Called before `begin`."""
        self.model_instance = model_instance


class TriggeredHook(ModelDependentHook):
    """A hook that acts when its trigger fires.

    Override `on_trigger`, and `fetches` to have values at hand there. In a run that is not due such a hook costs
    nothing and copies nothing from the device.

    Args:
        trigger: When to act.
        trigger_at_end: Whether to act at the end too, unless the trigger fired at that very step. Defaults to `True`.

    Raises:
        TypeError: If `trigger` is no `HookTrigger` or `trigger_at_end` no bool.
    """

    def __init__(self, trigger: HookTrigger, *, trigger_at_end: bool = True) -> None:
        if not isinstance(trigger, HookTrigger):
            raise TypeError(
                f"`trigger` must be a HookTrigger. Received: trigger={trigger!r} (of type {type(trigger).__name__}). "
                "Pass one, such as StepHookTrigger(100), TimeHookTrigger(60), EpochHookTrigger(1) or NoHookTrigger()."
            )
        if not isinstance(trigger_at_end, bool):
            raise TypeError(f"`trigger_at_end` must be True or False. Received: trigger_at_end={trigger_at_end!r}")
        self.trigger = trigger
        self.trigger_at_end = trigger_at_end

    def fetches(self) -> Any:
        """Returns what `on_trigger` wants to see: a structure as in `SessionRunArgs(fetches=...)`. Defaults to none."""

    def on_trigger(self, session: Session, results: Any, elapsed: Elapsed | None) -> str | None:
        """Acts. Called after the run at whose step the trigger fired.

        Args:
            session: The session; `session.step` is the step that fired.
            results: What `fetches` asked for, as NumPy values.
            elapsed: Time and steps since the last firing, or since the start.

        Returns:
            A reason if the run has to stop, or `None`.
        """

    def begin(self) -> None:
        self.trigger.reset()

    def after_session_creation(self, session: Session) -> None:
        self.trigger.start(session.step, session.epoch)
        session.check_names(self.fetches())

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        fetches = self.fetches()
        return None if fetches is None else SessionRunArgs(fetches)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        if self.trigger.is_due(session.step, session.epoch):
            reason = self._fire(session, run_values.results)
            if reason is not None:
                run_context.request_stop(reason)

    def after_epoch(self, session: Session) -> None:
        if self.trigger.is_due(session.step, session.epoch, epoch_end=True):
            reason = self._fire(session, session.fetch(self.fetches()))
            if reason is not None:
                session.request_stop(reason)

    def end(self, session: Session) -> None:
        if self.trigger_at_end and session.has_run and self.trigger.last_step != session.step:
            self._fire(session, session.fetch(self.fetches()))

    def next_step(self, step: int) -> int | None:
        return self.trigger.next_step(step)

    def seconds_left(self) -> float | None:
        return self.trigger.seconds_left()

    def state_dict(self) -> dict[str, Any]:
        return {"trigger": self.trigger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trigger.load_state_dict(state["trigger"])

    def _fire(self, session: Session, results: Any) -> str | None:
        # Recorded first: what is saved while the hook acts must know that it has fired.
        elapsed = self.trigger.fired(session.step, session.epoch)
        return self.on_trigger(session, results, elapsed)
