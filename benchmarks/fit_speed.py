"""`fit` with six hooks against bare `fit`, and against Keras's own callbacks for the same jobs.

A small dense model, where what a step costs beside its arithmetic shows most: batches of 64 by 16, layers of 32 and 1,
Adam. Compiling is left out: every variant has run before it is measured.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

import keras_monitored as km
from benchmarks.measuring import alternate, check, show

STEPS = 3000
NEVER = 10**9


def small_model() -> keras.Model:
    """Returns the compiled model."""
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def endless_data() -> tf.data.Dataset:
    """Returns batches of 64 by 16, cached."""
    x = np.random.default_rng(0).normal(size=(64 * 100, 16)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(64).cache().repeat().prefetch(4)


def microseconds_per_step(
    model: keras.Model, data: tf.data.Dataset, callbacks: Sequence[keras.callbacks.Callback]
) -> float:
    """Fits one epoch and returns what a step took."""
    start = time.perf_counter()
    model.fit(data, steps_per_epoch=STEPS, epochs=1, verbose=0, shuffle=False, callbacks=list(callbacks))
    return (time.perf_counter() - start) / STEPS * 1e6


class Monitored:
    """A model with a `HookCallback` of six hooks, each run in a new directory."""

    def __init__(self, steps_per_loop: int | str, idle_hooks: int = 0) -> None:
        self.model = small_model()
        self.saver = km.CheckpointSaver("unused", trigger=km.StepHookTrigger(1000), trigger_at_end=False)
        hooks: list[km.Hook] = [
            self.saver,
            km.NaNChecker(),
            km.LossLogger(km.StepHookTrigger(NEVER), trigger_at_end=False),
            km.StepRateLogger(km.StepHookTrigger(NEVER), trigger_at_end=False),
            km.Stopper(km.StopCriteria(max_steps=NEVER)),
            km.StopAtStep(last_step=NEVER),
        ]
        hooks += [km.LossLogger(km.StepHookTrigger(NEVER), trigger_at_end=False) for _ in range(idle_hooks)]
        self.callback = km.HookCallback(hooks, steps_per_loop=steps_per_loop)  # type: ignore[arg-type]

    def measure(self, data: tf.data.Dataset) -> float:
        """Returns microseconds per step of one fit."""
        self.saver.directory = tempfile.mkdtemp()
        try:
            return microseconds_per_step(self.model, data, [self.callback])
        finally:
            shutil.rmtree(self.saver.directory)


def keras_callbacks(directory: str) -> list[keras.callbacks.Callback]:
    """Returns Keras's own callbacks for the jobs of the hooks, as often."""
    return [
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.ModelCheckpoint(os.path.join(directory, "model.keras"), save_freq=1000),
        keras.callbacks.BackupAndRestore(os.path.join(directory, "backup"), save_freq=1000),
    ]


def main() -> bool:
    """Measures and prints; returns whether all bounds are kept."""
    data = endless_data()
    bare, with_keras = small_model(), small_model()
    step, auto, idle = Monitored(1), Monitored("auto"), Monitored(1, idle_hooks=10)

    def keras_own() -> float:
        with tempfile.TemporaryDirectory() as directory:
            return microseconds_per_step(with_keras, data, keras_callbacks(directory))

    measured = alternate(
        {
            "bare fit": lambda: microseconds_per_step(bare, data, []),
            "fit with Keras's own callbacks": keras_own,
            "six hooks, step by step": lambda: step.measure(data),
            "six hooks and ten idle ones": lambda: idle.measure(data),
            "six hooks, loops": lambda: auto.measure(data),
        }
    )
    medians = show("A step of fit", "microseconds", measured)
    bare_median, keras_median = medians["bare fit"], medians["fit with Keras's own callbacks"]
    hooks, loops = medians["six hooks, step by step"], medians["six hooks, loops"]
    idle_each = [
        (many - few) / 10
        for many, few in zip(measured["six hooks and ten idle ones"], measured["six hooks, step by step"], strict=True)
    ]
    return all(
        [
            check("six hooks / bare fit", hooks / bare_median, 0.90),
            check("six hooks in loops / bare fit", loops / bare_median, 0.30),
            check("six hooks / Keras's own callbacks", hooks / keras_median, 0.85),
            check("six hooks in loops / Keras's own callbacks", loops / keras_median, 0.30),
            check("microseconds for each idle hook", sorted(idle_each)[len(idle_each) // 2], 5.0),
        ]
    )
