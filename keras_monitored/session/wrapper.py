"""Calls hooks around the runs of a session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_monitored.hooks.hook import Hook, SessionRunContext, SessionRunValues
from keras_monitored.session.arguments import Feeds, RunOptions, SessionRunArgs, feed_items
from keras_monitored.session.session import Session
from keras_monitored.step_function import StepOutcome

_LONGEST_LOOP_SECONDS = 1.0
"""A compiled loop can't be interrupted: signals and Ctrl-C wait for its end, so it is kept short."""


class SessionWrapper:
    """Runs a session's steps with hooks before and after, and knows whether a stop was requested.

    Args:
        session: The session.
        hooks: The hooks. Those of a higher priority are called first.
    """

    def __init__(self, session: Session, hooks: Iterable[Hook] = ()) -> None:
        self.session = session
        self.hooks: list[Hook] = in_order(hooks)
        self._next_steps: list[int | None] = []
        self._next_step: int | None = None
        self._on_time: list[tuple[int, Hook]] = []

    def session_created(self) -> None:
        """Calls `after_session_creation` of the hooks; the session is restored by now."""
        for hook in self.hooks:
            _call(hook.after_session_creation, self.session)
        self.plan()

    @property
    def should_stop(self) -> bool:
        """Says whether a stop was requested: no further step will run."""
        return self.session.stop_reason is not None

    def plan(self) -> None:
        """Asks every hook when it is due next."""
        self._next_steps = [None] * len(self.hooks)
        self._on_time = []
        self._plan(range(len(self.hooks)))

    def steps_ahead(self, limit: int) -> int:
        """Returns how many steps one loop may make, at most `limit`, so that it ends where the next hook is due."""
        steps = limit
        if self._next_step is not None:
            steps = min(steps, self._next_step - self.session.step)
        if steps > 1:
            seconds = min([_LONGEST_LOOP_SECONDS, *(_seconds_left(hook) for _, hook in self._on_time)])
            # The time of a step is known from the first loop on; the clock looks at the first step alone.
            per_step = self.session.seconds_per_step
            steps = 1 if per_step is None else min(steps, int(seconds / max(per_step, 1e-9)))
        return max(1, steps)

    def run(
        self,
        steps: int = 1,
        *,
        fetches: Any = None,
        feeds: Feeds | None = None,
        targets: Sequence[Callable[[], Any]] = (),
        options: RunOptions | None = None,
    ) -> Any:
        """Makes one run: the hooks that are due, the steps, the hooks again.

        Args:
            steps: Steps of the run, in one loop. Defaults to 1.
            fetches: What to return, as in `SessionRunArgs`.
            feeds: Values for this run, as in `SessionRunArgs`.
            targets: Functions to call after the steps.
            options: Options of the run.

        Returns:
            The values of `fetches`.

        Raises:
            RuntimeError: If two hooks, or a hook and the caller, feed the same thing.
            ValueError: If a name is unknown.
            tf.errors.OutOfRangeError: If there is no batch left.
        """
        session = self.session
        due = self._due(session.step + steps)
        if not due and fetches is None and feeds is None and not targets and options is None:
            outcome = session.run_steps(steps)
            if outcome.failed_check is None:
                return None
            context = SessionRunContext(session, session.step - outcome.steps, steps, SessionRunArgs())
            self._after(context, outcome, [], {}, RunOptions())
            return None
        own = SessionRunArgs(fetches, feeds, targets, options)
        context = SessionRunContext(session, session.step, steps, own)
        asked = {index: _call(self.hooks[index].before_run, context) for index in due}
        args = {index: given for index, given in asked.items() if given is not None}
        session_args = [own, *args.values()]
        merged_options = _merge_options([a.options for a in session_args if a.options is not None])
        merged_feeds = _merge_feeds([(None, own), *((self.hooks[i], a) for i, a in args.items())])
        for wanted in session_args:
            session.check_names(wanted.fetches)
        if session.function is not None:
            names = [n for a in session_args for n in tf.nest.flatten(a.fetches) if isinstance(n, str)]
            session.function.require(set(names))
        outcome = session.run_steps(steps, feeds=merged_feeds, options=merged_options)
        for args_of in session_args:
            for target in args_of.targets:
                target()
        # All that was asked for is read together.
        structures = {index: given.fetches for index, given in args.items()}
        values = session.fetch([own.fetches if own.fetches is not None else (), structures])
        self._after(context, outcome, due, values[1], merged_options or RunOptions())
        return values[0] if own.fetches is not None else None

    def end_epoch(self) -> None:
        """Calls the hooks that act at the end of an epoch; `session.epoch` epochs are complete."""
        for hook in self.hooks:
            _call(hook.after_epoch, self.session)
        self.plan()

    def end(self) -> None:
        """Calls `end` of every hook, whatever those before it raise; then raises the first error."""
        errors: list[Exception] = []
        for hook in self.hooks:
            try:
                _call(hook.end, self.session)
            except Exception as error:
                errors.append(error)
        for later in errors[1:]:
            errors[0].add_note(f"After it, another hook's `end` raised {type(later).__name__}: {later}")
        if errors:
            raise errors[0]

    def _due(self, last_step: int) -> list[int]:
        if (self._next_step is None or self._next_step > last_step) and not self._on_time:
            return []
        timely = {index for index, hook in self._on_time if _seconds_left(hook) <= 0}
        return [i for i, at in enumerate(self._next_steps) if (at is not None and at <= last_step) or i in timely]

    def _after(
        self,
        context: SessionRunContext,
        outcome: StepOutcome,
        due: list[int],
        results: dict[int, Any],
        options: RunOptions,
    ) -> None:
        session = self.session
        if outcome.failed_check is not None:
            checking = [hook for hook in self.hooks if has_graph_check(hook)][outcome.failed_check]
            _call(checking.graph_check_failed, context, outcome.observed)
        for index in due:
            values = SessionRunValues(results.get(index), session.step, outcome.steps, options)
            _call(self.hooks[index].after_run, context, values)
        self._plan(due)
        if context.stop_reason is not None:
            session.request_stop(context.stop_reason)

    def _plan(self, indices: Iterable[int]) -> None:
        on_time = dict(self._on_time)
        for index in indices:
            hook = self.hooks[index]
            self._next_steps[index] = _call(hook.next_step, self.session.step)
            on_time.pop(index, None)
            if _call(hook.seconds_left) is not None:
                on_time[index] = hook
        self._on_time = sorted(on_time.items(), key=lambda item: item[0])
        known = [at for at in self._next_steps if at is not None]
        self._next_step = min(known) if known else None


def in_order(hooks: Iterable[Hook]) -> list[Hook]:
    """Returns hooks by falling priority, those of the same priority in the order given."""
    return sorted(hooks, key=lambda hook: -hook.priority)


def has_graph_check(hook: Hook) -> bool:
    """Says whether a hook looks at the step in its graph."""
    return type(hook).graph_check is not Hook.graph_check


def raised_by_hook(error: BaseException) -> bool:
    """Says whether an error came out of a hook: such a one is never retried."""
    return getattr(error, "_raised_by_hook", False)


def _call(method: Callable[..., Any], *args: Any) -> Any:
    with _marking_errors():
        return method(*args)


@contextlib.contextmanager
def _marking_errors() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(AttributeError):
            error._raised_by_hook = True  # type: ignore[attr-defined]
        raise


def _seconds_left(hook: Hook) -> float:
    left = _call(hook.seconds_left)
    return np.inf if left is None else left


def _merge_options(options: list[RunOptions]) -> RunOptions | None:
    if not options:
        return None
    directories = [o.trace_directory for o in options if o.trace_directory is not None]
    return RunOptions(any(o.trace for o in options), directories[0] if directories else None)


def _merge_feeds(asked: list[tuple[Hook | None, SessionRunArgs]]) -> list[tuple[Any, Any]]:
    merged: list[tuple[Any, Any]] = []
    givers: dict[Any, Hook | None] = {}
    for hook, args in asked:
        for target, value in feed_items(args.feeds or ()):
            key = target if isinstance(target, str) else id(target)
            if key in givers:
                names = ["the caller of the run" if g is None else repr(g) for g in (givers[key], hook)]
                raise RuntimeError(
                    f"`feeds`: {target if isinstance(target, str) else target.name!r} is fed twice in one run, by "
                    f"{names[0]} and by {names[1]}. Let one of them feed it."
                )
            givers[key] = hook
            merged.append((target, value))
    return merged
