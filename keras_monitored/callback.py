"""The door for `model.fit`: a Keras callback that runs hooks, and makes a killed run go on where it was."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Literal

import keras

from keras_monitored import keras_internals
from keras_monitored.compiled import Compiled
from keras_monitored.configuration import Configuration, NoCheckpoints, StepBasedCheckpoints, TimeBasedCheckpoints
from keras_monitored.fit import FitDriver
from keras_monitored.hooks.checkpoint_saver import CheckpointSaver
from keras_monitored.hooks.hook import Hook, ModelDependentHook
from keras_monitored.hooks.triggers import HookTrigger, StepHookTrigger, TimeHookTrigger
from keras_monitored.model_instance import ModelInstance
from keras_monitored.modes import Mode
from keras_monitored.other_modes import EvaluationDriver
from keras_monitored.session.wrapper import in_order


class HookCallback(keras.callbacks.Callback):
    """Runs hooks inside `model.fit`, `model.evaluate` and `model.predict`.

    With a `working_dir` the run is saved there, and the same script started again goes on where it was killed: its
    weights, optimizer, dropout masks, order of batches, metrics and `History` end bit-identical to an unbroken run.
    For that seed the run first: `keras.utils.set_random_seed(0)`.

    Args:
        hooks: The hooks.
        working_dir: Directory of the run, for its checkpoints and `run.jsonl`. Any path that `tf.io.gfile` knows.
            Defaults to that of `configuration`. Without one nothing is saved.
        configuration: Settings of the run. Defaults to `Configuration(working_dir)`.
        stateful: Other callbacks of the same `fit` whose counters, best values and best weights belong to the run, such
            as `EarlyStopping` and `ReduceLROnPlateau`.
        steps_per_loop: Most steps in one compiled loop, or `"auto"` for as many as there are up to the next due hook.
            Keras is handed the later batches of a loop as no-ops. It has no effect where another callback works at
            every batch. Defaults to 1.

    Raises:
        TypeError: If an argument, or one of the hooks or callbacks, is of the wrong type.
        ValueError: If a hook is listed twice, or the working directory is given twice.

    Example:

    >>> import numpy as np, keras_monitored as km
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> stop = km.HookCallback([km.StopAtStep(3)])
    >>> _ = model.fit(np.ones((64, 2)), np.ones((64, 1)), batch_size=8, verbose=0, callbacks=[stop])
    >>> int(model.optimizer.iterations.numpy())
    3
    """

    def __init__(
        self,
        hooks: Sequence[Hook] = (),
        *,
        working_dir: str | os.PathLike[str] | None = None,
        configuration: Configuration | None = None,
        stateful: Sequence[keras.callbacks.Callback] = (),
        steps_per_loop: int | Literal["auto"] = 1,
    ) -> None:
        super().__init__()
        self.hooks = _checked_hooks(hooks)
        self.configuration = _checked_configuration(working_dir, configuration)
        self.stateful = _checked_callbacks(stateful)
        if steps_per_loop != "auto" and (
            isinstance(steps_per_loop, bool) or not isinstance(steps_per_loop, int) or steps_per_loop < 1
        ):
            raise ValueError(
                "`steps_per_loop` must be 'auto' or an integer of at least 1. "
                f"Received: steps_per_loop={steps_per_loop!r}."
            )
        self.steps_per_loop = steps_per_loop
        self._sleep = time.sleep  # before a recovery
        self._fit: FitDriver | None = None
        self._compiled: Compiled | None = None
        self._evaluations: list[EvaluationDriver] = []

    # Training -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        if self._fit is not None:
            self._fit.uninstall()
        keras_driver = _find_driver("fit")
        _check_alone(self, keras_driver)
        if self.configuration.random_seed is not None:
            keras.utils.set_random_seed(self.configuration.random_seed)
        hooks = self._hooks_of(Mode.TRAINING)
        saver = _default_saver(self.configuration)
        if saver is not None and not any(isinstance(hook, CheckpointSaver) for hook in hooks):
            hooks = in_order([*hooks, saver])
        self._give_model(hooks, Mode.TRAINING)
        driver = FitDriver(
            self.model,
            keras_driver,
            hooks=hooks,
            configuration=self.configuration,
            stateful=self.stateful,
            steps_per_loop=self.steps_per_loop,
            epochs=keras_driver.epochs,
            compiled=self._compiled,
            sleep=self._sleep,
        )
        driver.begin()
        self._fit, self._compiled = driver, driver.compiled
        # Appended while Keras goes through its list, so it is told of the beginning too, after all others.
        keras_driver.callbacks.callbacks.append(_LastCallback(self, driver, keras_driver.callbacks))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._fit is not None:
            self._fit.forget_initial_epoch()

    def on_test_begin(self, logs: Any = None) -> None:
        keras_driver = _find_driver("evaluate")
        if self._fit is not None and self._fit.is_running:
            self._fit.validation_begins()
        self._begin(keras_driver, Mode.EVALUATION)

    def on_test_end(self, logs: Any = None) -> None:
        self._end(Mode.EVALUATION)

    def on_predict_begin(self, logs: Any = None) -> None:
        self._begin(_find_driver("predict"), Mode.INFERENCE)

    def on_predict_end(self, logs: Any = None) -> None:
        self._end(Mode.INFERENCE)

    def _begin(self, keras_driver: keras_internals.Driver, mode: Mode) -> None:
        hooks = self._hooks_of(mode)
        self._give_model(hooks, mode)
        driver = EvaluationDriver(self.model, keras_driver, mode, hooks, self.configuration)
        self._evaluations.append(driver)
        if hooks:
            driver.begin()

    def _end(self, mode: Mode) -> None:
        if self._evaluations:
            self._evaluations.pop().end()

    def _hooks_of(self, mode: Mode) -> list[Hook]:
        return in_order(hook for hook in self.hooks if mode in hook.modes)

    def _give_model(self, hooks: Sequence[Hook], mode: Mode) -> None:
        instance = ModelInstance(self.model, mode, self.configuration)
        for hook in hooks:
            if isinstance(hook, ModelDependentHook):
                hook.set_model_instance(instance)


class _LastCallback(keras.callbacks.Callback):
    """Comes after all other callbacks, so that what it tells the driver includes what they have done."""

    def __init__(self, owner: HookCallback, driver: FitDriver, callbacks: keras.callbacks.CallbackList) -> None:
        super().__init__()
        self._owner = owner
        self._driver = driver
        self._callbacks = callbacks

    def on_train_begin(self, logs: Any = None) -> None:
        if self._driver.is_running:
            self._driver.all_have_begun()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._driver.is_running:
            self._driver.epoch_begins(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._driver.is_running:
            self._driver.epoch_ends(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        # The list may be the user's own, and serve the next fit.
        self._callbacks.callbacks = [c for c in self._callbacks.callbacks if c is not self]
        if self._driver.is_running:
            self._owner._fit = None  # it holds the data
            self._driver.fit_ends()


def _find_driver(method: str) -> keras_internals.Driver:
    driver = keras_internals.find_driver()
    if driver is None:
        raise RuntimeError(
            f"HookCallback works inside `model.{method}`, and none was found that calls it. "
            "In a loop of your own use a session instead."
        )
    return driver


def _check_alone(callback: HookCallback, keras_driver: keras_internals.Driver) -> None:
    others = [c for c in keras_driver.callbacks.callbacks if isinstance(c, HookCallback) and c is not callback]
    twice = sum(c is callback for c in keras_driver.callbacks.callbacks) > 1
    if others or twice:
        raise ValueError("`callbacks` must hold one HookCallback. Received: several. Put all hooks into one.")
    missing = [c for c in callback.stateful if all(c is not k for k in keras_driver.callbacks.callbacks)]
    if missing:
        raise ValueError(
            f"`stateful` lists {type(missing[0]).__name__}, which is not among the `callbacks` of this fit. "
            "Pass it in both places: callbacks=[hook_callback, early_stopping]."
        )


def _checked_hooks(hooks: Sequence[Hook]) -> tuple[Hook, ...]:
    if isinstance(hooks, Hook) or not hasattr(hooks, "__iter__"):
        raise TypeError(f"`hooks` must be a list of hooks. Received: hooks={hooks!r}. Pass [hook].")
    hooks = tuple(hooks)
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise TypeError(
                f"`hooks` must hold Hook objects. Received: {hook!r} (of type {type(hook).__name__}). "
                "Derive your class from keras_monitored.Hook, and pass an object, not the class."
            )
    if len({id(hook) for hook in hooks}) < len(hooks):
        raise ValueError("`hooks` lists the same hook twice. Make a second object if you need two of its kind.")
    return hooks


def _checked_configuration(
    working_dir: str | os.PathLike[str] | None, configuration: Configuration | None
) -> Configuration:
    if configuration is None:
        return Configuration(working_dir)
    if not isinstance(configuration, Configuration):
        raise TypeError(f"`configuration` must be a Configuration. Received: configuration={configuration!r}.")
    if working_dir is not None:
        raise ValueError(
            f"`working_dir` is given twice: as {os.fspath(working_dir)!r} and in the `configuration`, as "
            f"{configuration.working_dir!r}. Leave one of them out."
        )
    return configuration


def _checked_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> tuple[keras.callbacks.Callback, ...]:
    if isinstance(callbacks, keras.callbacks.Callback):
        raise TypeError(f"`stateful` must be a list of callbacks. Received: stateful={callbacks!r}. Pass [callback].")
    callbacks = tuple(callbacks)
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(f"`stateful` must hold Keras callbacks. Received: {callback!r}.")
    return callbacks


def _default_saver(configuration: Configuration) -> CheckpointSaver | None:
    config = configuration.checkpoint_config
    if configuration.working_dir is None or isinstance(config, NoCheckpoints):
        return None
    trigger: HookTrigger
    if isinstance(config, StepBasedCheckpoints):
        trigger = StepHookTrigger(config.steps)
    else:
        assert isinstance(config, TimeBasedCheckpoints)
        trigger = TimeHookTrigger(config.seconds)
    return CheckpointSaver(
        trigger=trigger,
        max_checkpoints_to_keep=config.max_checkpoints_to_keep,
        keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
    )
