"""Runs a session under hooks from inside `model.fit`.

`fit` looks its train function up at every batch, and hands it the live iterator. For the length of a fit a `FitDriver`
stands in that place. A killed run goes on like this:

1. At the beginning the newest checkpoint is read, and `fit` is told to start in the epoch that was under way.
2. The batches of that epoch that were trained before are handed out as no-ops, so that Keras's counters, the progress
   bar and all callbacks see what they would have seen. With the last of them everything is restored.
3. Or, if the checkpoint was made between two epochs, everything but the position in the data is restored before the
   first epoch begins, and that with its first batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from keras_monitored import keras_internals
from keras_monitored.compiled import Compiled, compiled_for
from keras_monitored.configuration import Configuration
from keras_monitored.errors import RecoveryError
from keras_monitored.hooks.checkpoint_saver import CheckpointSaver
from keras_monitored.hooks.hook import Hook
from keras_monitored.journal import Journal
from keras_monitored.messages import say
from keras_monitored.modes import Mode
from keras_monitored.position import DataPosition, EvaluationCount
from keras_monitored.restoring import Opened, open_newest
from keras_monitored.session.recoverable import RecoverableSession
from keras_monitored.session.session import RunRecord, Session
from keras_monitored.session.wrapper import SessionWrapper
from keras_monitored.state import TrainingState, plain
from keras_monitored.stateful import CallbackState, HistoryState, HookStates, LogsState
from keras_monitored.step_function import StepOutcome

_ENDLESS = 1_000_000_000


class FitDriver:
    """Stands in for the train function of one `fit`.

    Args:
        model: The model.
        keras_driver: The running `fit`.
        hooks: Hooks for training, in order.
        configuration: Of the run.
        stateful: Keras callbacks whose state belongs to the run's.
        steps_per_loop: Most steps in one compiled loop.
        epochs: The epoch that `fit` ends before.
        compiled: What an earlier fit has compiled; used again if it still serves.
        sleep: Waits before a recovery.
    """

    def __init__(
        self,
        model: keras.Model,
        keras_driver: keras_internals.Driver,
        *,
        hooks: Sequence[Hook],
        configuration: Configuration,
        stateful: Sequence[keras.callbacks.Callback],
        steps_per_loop: int | Literal["auto"],
        epochs: int,
        compiled: Compiled | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model = model
        self.hooks = tuple(hooks)
        self.configuration = configuration
        self.epochs = epochs
        self._frame = keras_driver.frame
        self._epoch_iterator = keras_driver.epoch_iterator
        self._sleep = sleep
        self._savers = [hook for hook in hooks if isinstance(hook, CheckpointSaver)]
        self._directories = [saver.place(configuration.working_dir) for saver in self._savers]
        if configuration.working_dir is not None:
            self._directories.append(configuration.working_dir)

        self.run = RunRecord(journal=Journal(configuration.working_dir))
        self.compiled = (
            compiled_for(model, hooks) if compiled is None or not compiled.serves(model, hooks) else compiled
        )
        self.compiled.global_step.assign(0)
        self.compiled.global_epoch.assign(0)
        self._evaluations = EvaluationCount(keras_driver.validation_data)
        count = keras_internals.IteratorCount(keras_driver.epoch_iterator)
        self._position = DataPosition(count, self._evaluations, lambda: self.session.batch)
        self._callback_state = CallbackState(stateful)
        self._history_state = HistoryState(model)
        self._logs_state = LogsState(lambda: self.session.outcome.logs)
        self._state: TrainingState | None = None
        self._opened: Opened | None = None
        self._recoverable: RecoverableSession | None = None

        callbacks = keras_driver.callbacks.callbacks
        self._logs_are_read = any(keras_internals.works_per_batch(callback) for callback in callbacks)
        self._steps_per_call = model.steps_per_execution
        self._steps_per_loop = _ENDLESS if steps_per_loop == "auto" else steps_per_loop
        per_batch = [c for c in callbacks if keras_internals.works_per_batch(c, but_for_display=True)]
        if per_batch and self._steps_per_loop > self._steps_per_call:
            name = type(per_batch[0]).__name__
            say(f"steps_per_loop={steps_per_loop!r} has no effect in this fit: {name} works at every batch.")
            self._steps_per_loop = 1

        self._calls = 0  # calls of the train function in this epoch
        self._logs: dict[str, Any] = {}  # what Keras is given for batches whose logs nobody reads
        self._data_ended = False
        self._is_finished = False
        self._has_ended = False
        self._stop_is_told = False
        self._original: Any = None
        self._previous_initial_epoch: Any = None
        self._installed = False
        self._begun = time.perf_counter()

    # The length of a fit ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Calls `begin` of all hooks, reads the newest checkpoint, and takes the train function's place."""
        for hook in self.hooks:
            hook.begin()
        self._opened = open_newest(self._directories)
        if self._opened is not None:
            self.run.run_id = self._opened.manifest["run_id"]
            self.run.started = self._opened.manifest["started"]
        self._original = keras_internals.put_train_function(self.model, "train_function", self)
        self._previous_initial_epoch = keras_internals.set_initial_epoch(self.model, None)
        self._installed = True

    def all_have_begun(self) -> None:
        """Called when every callback's `on_train_begin` was called: creates the session, or prepares the replay."""
        with self._aborting_on_error():
            self._begin_session()

    def forget_initial_epoch(self) -> None:
        """Called when `fit` has read from the model which epoch to start from, and a later one must not."""
        keras_internals.set_initial_epoch(self.model, self._previous_initial_epoch)

    def _begin_session(self) -> None:
        if self._opened is None:
            self._create(keras_internals.element_spec(self._epoch_iterator))
            if self._stop_is_due():
                self._skip_all_epochs()
            return
        manifest = self._opened.manifest
        self._is_finished = self._was_finished(manifest) or manifest["epoch"] >= self.epochs
        self._tell_of_resume(manifest)
        self._history_state.load(manifest["state"]["history"], self._opened.tensors_of("history"))
        keras_internals.set_initial_epoch(self.model, manifest["epoch"])
        self._position.begin(manifest["state"]["data"])
        # Between two epochs everything is restored now, in mid-epoch by the last batch to be replayed.
        if manifest["batch"] == 0 or manifest["epoch"] >= self.epochs:
            self._create(keras_internals.element_spec(self._epoch_iterator))
            if self._is_finished or self._stop_is_due():
                self._skip_all_epochs()

    def epoch_begins(self, epoch: int) -> None:
        """Called when every callback's `on_epoch_begin` was called."""
        self._calls = 0
        self._logs = {}
        self._data_ended = False
        if self._recoverable is not None and self.session.epoch != epoch:
            self.session.begin_epoch(epoch)

    def epoch_ends(self, epoch: int) -> None:
        """Called when every callback's `on_epoch_end` was called."""
        with self._aborting_on_error():
            self._end_epoch(epoch)

    def _end_epoch(self, epoch: int) -> None:
        if self._recoverable is None or self._has_ended:
            return
        self._position.epoch_complete = self._epoch_is_complete()
        if self._position.epoch_complete:
            self._position.end_epoch(self.session.batch)
            self.session.begin_epoch(epoch + 1)
            self.wrapper.end_epoch()
        if self._stop_is_due():
            self._tell_keras_to_stop()
        if epoch + 1 >= self.epochs or self.model.stop_training:
            self._end()
        self._position.epoch_complete = False

    def validation_begins(self) -> None:
        """Called before an evaluation within the fit."""
        self._evaluations.see(keras_internals.evaluation_iterator(self.model))
        if self.model.stop_training and self._recoverable is not None and not self._epoch_is_complete():
            self._end()  # before the metrics of the epoch, which a longer run goes on with, are lost

    def fit_ends(self) -> None:
        """Called when every callback's `on_train_end` was called."""
        try:
            if self._recoverable is not None:
                self._end()
        finally:
            self.uninstall()

    def uninstall(self) -> None:
        """Puts the model back as it was. Doing so again does nothing."""
        if self._installed:
            self._installed = False
            if self.model.train_function is self:
                keras_internals.put_train_function(self.model, "train_function", self._original)
            keras_internals.set_initial_epoch(self.model, self._previous_initial_epoch)
        if self._recoverable is not None:
            self._recoverable.close()
        self.compiled.function.release()

    @property
    def is_running(self) -> bool:
        """Says whether the fit is under way."""
        return self._installed

    @property
    def wrapper(self) -> SessionWrapper:
        """The session with its hooks."""
        assert self._recoverable is not None
        return self._recoverable.wrapper

    @property
    def session(self) -> Session:
        """The session that runs at present."""
        return self.wrapper.session

    # The train function -------------------------------------------------------------------------------------------

    def __call__(self, iterator: Any) -> Any:
        """Runs the steps of one call of Keras's train function; returns the logs."""
        if not keras_internals.called_from(self._frame):  # a later fit, after one that ended with an error
            self.uninstall()
            return self._original(iterator)
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            return self._original(iterator)  # train_on_batch, called from another callback
        try:
            return self._call(iterator)
        except StopIteration:  # the end of the data, or of the run
            raise
        except BaseException as error:
            self._abort(error)
            raise

    def _call(self, iterator: Any) -> Any:
        self._calls += 1
        keras_batch = self._calls * self._steps_per_call  # where Keras will be after this call
        if self._recoverable is None:
            assert self._opened is not None
            batch = self._opened.manifest["batch"]
            if keras_batch < batch:
                return self._logs
            self._position.see(iterator)
            self._create(iterator.element_spec)
            if self._is_finished or self._stop_is_due():
                self._tell_keras_to_stop()
                return self.session.outcome.logs
            if keras_batch == batch:
                return self.session.outcome.logs
        session = self.session
        session.iterator = self._position.see(iterator)
        if self._savers:
            self._position.warn_if_skipping()
        target = min(keras_batch, session.batch + self._steps_left_in_epoch())
        if session.batch < target:
            if self._stop_is_due():
                raise self._quiet_stop()
            self._run_until(target)
        return self._logs_of_call(keras_batch)

    def _run_until(self, target: int) -> None:
        """Runs steps up to a batch of the epoch; in loops, beyond it."""
        first = self.session.batch
        last = min(first + self._steps_left_in_epoch(), max(target, first + self._steps_per_loop))
        while self.session.batch < target and not self._stop_is_due() and not self._data_ended:
            try:
                assert self._recoverable is not None
                self._recoverable.run(last - self.session.batch)
            except tf.errors.OutOfRangeError:
                self._data_ended = True
        if self._data_ended and self.session.batch <= (self._calls - 1) * self._steps_per_call:
            # The batch before has turned out to be the epoch's last: Keras holds its logs, which are empty so far.
            self._logs.update(self.session.outcome.logs)
            raise StopIteration

    def _logs_of_call(self, keras_batch: int) -> Any:
        session = self.session
        if session.batch > keras_batch:
            return self._logs  # a loop has run ahead: its logs belong to its last batch
        logs = session.outcome.logs
        if self._stop_is_due():
            self._tell_keras_to_stop()
            if not self._epoch_is_complete():
                self._end()
            return logs
        # Keras turns logs to numbers at every batch. It gets them where somebody reads them, and at the epoch's end.
        return logs if self._logs_are_read or self._epoch_is_complete() else self._logs

    def _steps_left_in_epoch(self) -> int:
        steps, batches = self._epoch_iterator.steps_per_epoch, self._position.batches_left
        left = _ENDLESS if steps is None else max(0, int(steps) - self.session.batch)
        return left if batches is None else min(left, batches)

    def _epoch_is_complete(self) -> bool:
        return self._data_ended or self._steps_left_in_epoch() == 0

    def _quiet_stop(self) -> StopIteration:
        self._tell_keras_to_stop()
        keras_internals.silence_end_of_data(self._epoch_iterator)
        return StopIteration()

    # Creating and restoring the session ---------------------------------------------------------------------------

    def _create(self, element_spec: Any) -> None:
        start = time.perf_counter()
        self.compiled.function.build(element_spec)
        self._state = TrainingState(self.model, (self.compiled.global_step, self.compiled.global_epoch))
        self._state.parts = {
            "history": self._history_state,
            "logs": self._logs_state,
            "callbacks": self._callback_state,
            "hooks": HookStates(self.hooks),
            "data": self._position,
            **self._state.parts,  # the random state comes last: finding a place in the data may draw from it
        }
        self._recoverable = RecoverableSession(self._new_session, can_restore=self._can_restore, sleep=self._sleep)
        session = self.session
        self.run.journal.write(
            "created" if session.restored_from is None else "restored",
            step=session.step,
            epoch=session.epoch,
            batch=session.batch,
            seconds=time.perf_counter() - start,
            checkpoint=session.restored_from,
            run_id=self.run.run_id,
        )
        self._opened = None
        self._position.is_recovery = True

    def _new_session(self) -> SessionWrapper:
        assert self._state is not None
        opened = self._opened if self._recoverable is None else self._reopen()
        if opened is not None:
            self._restore(opened)
        session = Session(
            self.model,
            self.compiled.function,
            global_step=self.compiled.global_step,
            global_epoch=self.compiled.global_epoch,
            configuration=self.configuration,
            mode=Mode.TRAINING,
            state=self._state,
            run=self.run,
        )
        session.iterator = self._position.iterator
        if opened is not None:
            session.batch = opened.manifest["batch"]
            session.restored_from = opened.prefix
            logs = self._logs_state.restored
            session.outcome = StepOutcome(0, None, tf.nest.flatten(logs), (logs, {}))
        wrapper = SessionWrapper(session, self.hooks)
        wrapper.session_created()
        return wrapper

    def _restore(self, opened: Opened) -> None:
        assert self._state is not None
        variables, record = opened.manifest["variables"], opened.manifest["state"]
        self._state.check(variables, opened.prefix)
        in_code = self._learning_rate()
        if self._recoverable is not None:  # what only a new process has lost stays as it is
            record = {name: part for name, part in record.items() if name in ("data", "random")}
        self._state.restore(opened.tensors, record, variables)
        restored = self._learning_rate()
        if self._recoverable is None and in_code != restored:
            say(f"The checkpoint's learning rate {restored:g} replaces the {in_code:g} given in code.")

    def _reopen(self) -> Opened:
        step, epoch = self.session.step, self.session.epoch
        self._wait_for_saves()
        opened = open_newest(self._directories)
        if opened is None:
            raise RecoveryError("There is no checkpoint to go on from.", step=step)
        if opened.manifest["epoch"] != epoch:
            raise RecoveryError(
                f"The newest checkpoint, {opened.prefix}, is of epoch {opened.manifest['epoch']}, and Keras is in "
                f"epoch {epoch}: it can't be taken back to an earlier one. Start the script again: it goes on there.",
                step=step,
            )
        return opened

    def _can_restore(self) -> bool:
        self._wait_for_saves()
        return any(saver.last_saved for saver in self._savers) or self.session.restored_from is not None

    def _wait_for_saves(self) -> None:
        for saver in self._savers:
            if saver.store is not None:
                saver.store.wait()

    def _learning_rate(self) -> float | None:
        rate = getattr(getattr(self.model, "optimizer", None), "_learning_rate", None)
        return float(plain(rate).read_value()) if isinstance(rate, keras.Variable) else None

    # Stopping and ending ------------------------------------------------------------------------------------------

    def _stop_is_due(self) -> bool:
        return self._recoverable is not None and self.wrapper.should_stop

    def _skip_all_epochs(self) -> None:
        keras_internals.set_initial_epoch(self.model, max(self.epochs, self.session.epoch))
        if self._stop_is_due():
            self._note_stop()

    def _tell_keras_to_stop(self) -> None:
        self.model.stop_training = True
        self._note_stop()

    def _note_stop(self) -> None:
        if not self._stop_is_told:
            self._stop_is_told = True
            session = self.session
            where = {"step": session.step, "epoch": session.epoch, "batch": session.batch}
            reason = session.stop_reason or "the run is finished"
            self.run.journal.write("stopped", **where, seconds=time.perf_counter() - self._begun, reason=reason)

    def _end(self) -> None:
        """Ends the run's life cycle: once, where the last step was run or the last epoch has ended."""
        if self._has_ended:
            return
        self._has_ended = True
        session = self.session
        reason = session.stop_reason or ("epochs" if session.epoch >= self.epochs else "stop_training")
        self.run.finished = {"epochs": self.epochs, "reason": reason, "hooks": _descriptions(self.hooks)}
        try:
            self.wrapper.end()
        finally:
            self.run.journal.write(
                "ended",
                step=session.step,
                epoch=session.epoch,
                batch=session.batch,
                seconds=time.perf_counter() - self._begun,
                reason=reason,
            )

    @contextlib.contextmanager
    def _aborting_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._abort(error)
            raise

    def _abort(self, error: BaseException) -> None:
        self._has_ended = True
        with contextlib.suppress(Exception):  # the error that ends the fit is the one to tell of
            step = self.session.step if self._recoverable is not None else None
            seconds = time.perf_counter() - self._begun
            self.run.journal.write("failed", step=step, seconds=seconds, error=f"{type(error).__name__}: {error}")
            self._wait_for_saves()
        self.uninstall()

    def _was_finished(self, manifest: dict[str, Any]) -> bool:
        """Says whether the run had come to its end, and nothing that decides on it has changed since."""
        finished = manifest["finished"]
        if finished is None or self.epochs > finished["epochs"]:
            return False
        return bool(finished["hooks"] == _descriptions(self.hooks))

    def _tell_of_resume(self, manifest: dict[str, Any]) -> None:
        assert self._opened is not None
        where = f"step {manifest['step']}, epoch {manifest['epoch']}, batch {manifest['batch']}"
        if self._is_finished:
            say(f"The run of {self._opened.prefix} is finished ({where}): there is nothing left to train.")
        else:
            say(f"The run goes on from {self._opened.prefix} ({where}).")


def _descriptions(hooks: Sequence[Hook]) -> list[str]:
    """Describes the hooks that may decide where a run ends, so that a change of them is seen."""
    own = [hook for hook in hooks if not isinstance(hook, CheckpointSaver)]
    return [type(hook).__name__ if type(hook).__repr__ is object.__repr__ else repr(hook) for hook in own]
