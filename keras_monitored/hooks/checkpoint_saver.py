"""Saves checkpoints of a run."""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any, Literal, get_args

import tensorflow as tf

from keras_monitored.checkpoint_store import CheckpointStore
from keras_monitored.errors import CheckpointError
from keras_monitored.hooks.hook import SessionRunContext, TriggeredHook
from keras_monitored.hooks.triggers import Elapsed, HookTrigger, StepHookTrigger
from keras_monitored.session.arguments import SessionRunArgs
from keras_monitored.session.session import Session
from keras_monitored.validation import check_flag, check_integer, check_number

OnError = Literal["raise", "warn"]
_PENDING_SECONDS = 0.05
_log = logging.getLogger(__name__)


class CheckpointSaver(TriggeredHook):
    """Saves the whole state of the run, from which a killed run goes on as if nothing had happened.

    A state with a NaN or an Inf in a variable is never written.

    Args:
        directory: Where checkpoints go. Defaults to the run's `working_dir`.
        trigger: When to save. Defaults to every 1000 steps.
        blocking: Whether training waits until a checkpoint is written. Defaults to `False`: it is written in the
            background, from a copy that later steps don't change.
        on_error: `"raise"` a `CheckpointError` when a save failed, at the next step if it failed in the background, or
            `"warn"` and train on. Defaults to `"raise"`.
        max_checkpoints_to_keep: Newest checkpoints that are kept. Defaults to 5.
        keep_checkpoint_every_n_hours: Hours after which one more is kept for good. Defaults to 10,000.
        trigger_at_end: Whether to save the finished state too, by which a finished run is known when it is started
            again. Defaults to `True`.

    Raises:
        ValueError: If an argument is not allowed; when training begins, if there is no directory for checkpoints.
        TypeError: If an argument is of the wrong type.
        CheckpointError: When training begins, if the directory can't be written.

    Example:

    >>> CheckpointSaver("run1", trigger=StepHookTrigger(200), max_checkpoints_to_keep=2).directory
    'run1'
    """

    priority = 1000

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        trigger: HookTrigger | None = None,
        blocking: bool = False,
        on_error: OnError = "raise",
        max_checkpoints_to_keep: int = 5,
        keep_checkpoint_every_n_hours: float = 10_000,
        trigger_at_end: bool = True,
    ) -> None:
        super().__init__(StepHookTrigger(1000) if trigger is None else trigger, trigger_at_end=trigger_at_end)
        if on_error not in get_args(OnError):
            raise ValueError(f"`on_error` must be one of {get_args(OnError)}. Received: on_error={on_error!r}.")
        self.directory = None if directory is None else os.fspath(directory)
        self.blocking = check_flag("blocking", blocking, hint="Pass True to wait for every save.")
        self.on_error = on_error
        self.max_checkpoints_to_keep = check_integer(
            "max_checkpoints_to_keep", max_checkpoints_to_keep, minimum=1, hint="Keep at least one."
        )
        self.keep_checkpoint_every_n_hours = check_number(
            "keep_checkpoint_every_n_hours", keep_checkpoint_every_n_hours, above=0, hint="Pass a time in hours."
        )
        self.store: CheckpointStore | None = None
        self.last_saved: str | None = None
        self._saved_at: tuple[int, int, int] | None = None

    def place(self, working_dir: str | None) -> str:
        """Returns the directory of the checkpoints, in a run with this working directory."""
        directory = self.directory or working_dir
        if directory is None:
            raise ValueError(
                "`directory` of CheckpointSaver is needed: the run has no `working_dir`. "
                "Pass CheckpointSaver('some/directory') or HookCallback(working_dir='some/directory')."
            )
        return directory

    def begin(self) -> None:
        super().begin()
        self.last_saved = self._saved_at = None
        check_writable(self.place(self.model_instance.configuration.working_dir))

    def after_session_creation(self, session: Session) -> None:
        super().after_session_creation(session)
        if session.restored_from is not None and self._saved_at is None:
            self._saved_at = _place(session)
        if self.store is not None:
            self.store.close()
        self.store = CheckpointStore(
            self.place(session.configuration.working_dir),
            max_to_keep=self.max_checkpoints_to_keep,
            keep_every_n_hours=self.keep_checkpoint_every_n_hours,
            run_id=session.run_record.run_id,
            started=session.run_record.started,
        )

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        # A save that failed in the background is told of at the next step.
        self._guarded(self._store().check, run_context.session)
        return None

    def on_trigger(self, session: Session, results: Any, elapsed: Elapsed | None) -> None:
        self.save(session, blocking=self.blocking)

    def end(self, session: Session) -> None:
        try:
            # At the same step a later place in the epoch is another state: between the two lies the epoch's end.
            if self.trigger_at_end and (session.has_run or session.restored_from is not None):
                if self._saved_at != _place(session):
                    self.save(session, blocking=True)
                elif self.last_saved is not None and session.run_record.finished is not None:
                    self._guarded(lambda: self._finish(session), session)
        finally:
            self._guarded(self._store().close, session)

    def save(self, session: Session, *, blocking: bool) -> None:
        """Saves the state of a session as it is now.

        Raises:
            CheckpointError: If this save failed, or the one before it.
        """
        journal = session.run_record.journal
        self._saved_at = _place(session)
        where = dict(zip(("step", "epoch", "batch"), self._saved_at, strict=True))
        position = {**where, "finished": session.run_record.finished}
        snapshot = session.require_state().snapshot()

        def on_saved(prefix: str, seconds: float) -> None:
            self.last_saved = prefix
            journal.write("saved", **where, seconds=seconds, checkpoint=prefix)

        def on_refused(reason: str) -> None:
            _log.error("Checkpoint of step %d %s", where["step"], reason)
            journal.write("refused", **where, reason=reason)

        store = self._store()
        self._guarded(
            lambda: store.save(snapshot, position, blocking=blocking, on_saved=on_saved, on_refused=on_refused), session
        )

    def next_step(self, step: int) -> int | None:
        return step + 1 if self._save_is_done() else super().next_step(step)

    def seconds_left(self) -> float | None:
        left = super().seconds_left()
        if self.store is None or not self.store.is_saving:
            return left
        wait = 0.0 if self._save_is_done() else _PENDING_SECONDS
        return wait if left is None else min(left, wait)

    def _save_is_done(self) -> bool:
        return self.store is not None and self.store.is_saving and self.store.is_done

    def _finish(self, session: Session) -> None:
        store = self._store()
        store.wait()
        if self.last_saved is not None and session.run_record.finished is not None:
            store.finish(self.last_saved, session.run_record.finished)

    def _store(self) -> CheckpointStore:
        assert self.store is not None
        return self.store

    def _guarded(self, save: Any, session: Session) -> None:
        try:
            save()
        except CheckpointError as error:
            session.run_record.journal.write("save_failed", step=error.step, error=str(error))
            if self.on_error == "raise":
                raise
            _log.warning("%s Training goes on.", error)


def _place(session: Session) -> tuple[int, int, int]:
    return session.step, session.epoch, session.batch


def check_writable(directory: str) -> None:
    """Raises a `CheckpointError` if no file can be written in a directory, which is made if needed."""
    probe = os.path.join(directory, f".writable-{uuid.uuid4().hex}")
    try:
        tf.io.gfile.makedirs(directory)
        with tf.io.gfile.GFile(probe, "w") as file:
            file.write("")
        tf.io.gfile.remove(probe)
    except (tf.errors.OpError, OSError) as error:
        raise CheckpointError(
            f"The directory {directory!r} can't be written: {error} Choose another `working_dir` or `directory`."
        ) from error
