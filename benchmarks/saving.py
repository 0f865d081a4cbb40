"""How long a save of 600 MB keeps training from going on, against a blocking `tf.train.Checkpoint.save`."""

from __future__ import annotations

import os
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

import keras_monitored as km
from benchmarks.measuring import alternate, check, show

_WIDTH = 5000


def large_model() -> keras.Model:
    """Returns a model of 50 million weights: 200 MB, 600 MB with Adam's two slots."""
    layers = [keras.layers.Dense(_WIDTH, use_bias=False) for _ in range(2)]
    model = keras.Sequential([keras.Input((_WIDTH,)), *layers])
    model.compile("adam", "mse")
    return model


class StepTimes(km.Hook):
    """Notes when each step has ended, after all other hooks."""

    priority = -1000

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_run(self, run_context: km.SessionRunContext, run_values: km.SessionRunValues) -> None:
        self.times.append(time.perf_counter())


def main() -> bool:
    """Measures and prints; returns whether the bound is kept."""
    model = large_model()
    x = np.zeros((4, _WIDTH), "float32")
    model.train_on_batch(x, x)
    data = tf.data.Dataset.from_tensors((x, x)).repeat()

    def plain() -> float:
        with tempfile.TemporaryDirectory() as directory:
            start = time.perf_counter()
            tf.train.Checkpoint(model=model).save(os.path.join(directory, "plain"))
            return (time.perf_counter() - start) * 1000

    def in_background() -> float:
        """What the step with the save took longer than the steps before it, and the one after it, too."""
        times = StepTimes()
        with tempfile.TemporaryDirectory() as directory:
            saver = km.CheckpointSaver(directory, trigger=km.StepHookTrigger(6), trigger_at_end=False)
            callback = km.HookCallback([saver, times])
            model.fit(data, steps_per_epoch=8, epochs=1, verbose=0, shuffle=False, callbacks=[callback])
        steps = np.diff(times.times)
        usual = float(np.median(steps[:4]))
        return (float(steps[4]) - usual + float(steps[5]) - usual) * 1000

    measured = alternate({"tf.train.Checkpoint.save": plain, "CheckpointSaver": in_background}, rounds=5)
    medians = show("A save of 600 MB keeps training waiting", "milliseconds", measured)
    return check(
        "CheckpointSaver / blocking save", medians["CheckpointSaver"] / medians["tf.train.Checkpoint.save"], 0.1
    )
