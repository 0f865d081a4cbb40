"""Runs hooks inside `model.evaluate` and `model.predict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_monitored import keras_internals
from keras_monitored.configuration import Configuration
from keras_monitored.counters import Counter
from keras_monitored.hooks.hook import Hook
from keras_monitored.modes import Mode
from keras_monitored.session.session import Session
from keras_monitored.session.wrapper import SessionWrapper, has_graph_check
from keras_monitored.step_function import StepFunction, StepOutcome


class EvaluationDriver:
    """Stands in for the test function of one `evaluate`, or for the predict function of one `predict`.

    The global step counts the batches of this evaluation or prediction, from 0.

    Args:
        model: The model.
        keras_driver: The running `evaluate` or `predict`.
        mode: Which of the two it is.
        hooks: Hooks for that mode, in order.
        configuration: Of the run.
    """

    def __init__(
        self,
        model: keras.Model,
        keras_driver: keras_internals.Driver,
        mode: Mode,
        hooks: Sequence[Hook],
        configuration: Configuration,
    ) -> None:
        self.model = model
        self._frame = keras_driver.frame
        self._spec = keras_internals.element_spec(keras_driver.epoch_iterator)
        self._epoch_iterator = keras_driver.epoch_iterator
        self._slot = "test_function" if mode is Mode.EVALUATION else "predict_function"
        self._stop_flag = "stop_evaluating" if mode is Mode.EVALUATION else "stop_predicting"
        self._mode = mode
        self._hooks = tuple(hooks)
        self._configuration = configuration
        self._wrapper: SessionWrapper | None = None
        self._original: Any = None
        self._installed = False
        self._data_ended = False

    def begin(self) -> None:
        """Calls `begin` and `after_session_creation` of the hooks, and takes the function's place."""
        for hook in self._hooks:
            hook.begin()
        with self.model.distribute_strategy.scope():
            counters = Counter("global_step"), Counter("global_epoch")
        self._original = keras_internals.put_train_function(self.model, self._slot, self)
        self._installed = True
        function: Any
        if self._mode is Mode.EVALUATION:
            checks = [hook.graph_check for hook in self._hooks if has_graph_check(hook)]
            function = StepFunction(self.model, self.model.test_step, counter=counters[0], checks=checks)
            function.build(self._spec)
        else:
            function = _PredictFunction(self.model, self._original, counters[0])
        session = Session(
            self.model,
            function,
            global_step=counters[0],
            global_epoch=counters[1],
            configuration=self._configuration,
            mode=self._mode,
        )
        self._wrapper = SessionWrapper(session, self._hooks)
        self._wrapper.session_created()
        if self._wrapper.should_stop:
            setattr(self.model, self._stop_flag, True)

    def __call__(self, data: Any) -> Any:
        """Runs the batches of one call of Keras's function."""
        if not keras_internals.called_from(self._frame):
            self.uninstall()
            return self._original(data)
        try:
            return self._call(data)
        except StopIteration:
            raise
        except BaseException:
            self.uninstall()
            raise

    def _call(self, data: Any) -> Any:
        assert self._wrapper is not None
        session = self._wrapper.session
        session.iterator = data
        if self._data_ended:
            raise StopIteration
        if self._wrapper.should_stop:
            keras_internals.silence_end_of_data(self._epoch_iterator)
            raise StopIteration
        steps = 1 if self._mode is Mode.INFERENCE else self.model.steps_per_execution
        first = session.step
        for _ in range(steps):
            if session.step >= first + steps or session.stop_reason is not None:
                break
            try:
                self._wrapper.run(self._wrapper.steps_ahead(first + steps - session.step))
            except tf.errors.OutOfRangeError as end:
                self._data_ended = True
                if session.step == first:
                    raise StopIteration from end
                break
        if session.stop_reason is not None:
            setattr(self.model, self._stop_flag, True)
        return session.outcome.observed["outputs"] if self._mode is Mode.INFERENCE else session.outcome.logs

    def end(self) -> None:
        """Calls `end` of the hooks, and puts the model back as it was."""
        try:
            if self._wrapper is not None and self._installed:
                self._wrapper.end()
        finally:
            self.uninstall()

    def uninstall(self) -> None:
        """Puts the model back as it was. Doing so again does nothing."""
        if self._installed:
            self._installed = False
            if getattr(self.model, self._slot) is self:
                keras_internals.put_train_function(self.model, self._slot, self._original)
        if self._wrapper is not None:
            self._wrapper.session.close()


class _PredictFunction:
    """Keras's own predict function in the place of a step function: its batches come from Keras, not an iterator."""

    observable = ("outputs",)
    log_names = ()
    compilations = 0

    def __init__(self, model: keras.Model, function: Any, counter: Counter) -> None:
        self.feeds: dict[str, Any] = {}
        self.strategy = model.distribute_strategy
        self._function = function
        self._counter = counter

    def require(self, names: set[str]) -> None:
        """Keras's function observes its outputs only."""

    def __call__(self, data: Any, steps: int = 1) -> StepOutcome:
        outputs = self._function(data)
        self._counter.increment(len(data))
        values: tuple[dict[str, Any], dict[str, Any]] = ({}, {"outputs": outputs})
        return StepOutcome(len(data), None, tf.nest.flatten(values, expand_composites=True), values)
