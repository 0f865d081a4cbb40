"""How long a save of 600 MB blocks training, against a blocking `tf.train.Checkpoint.save`.

Two things are told apart: how long the loop is held between two steps, and what the two steps after it lose beside
that, to copying what the save still reads and to the writing that goes on next to them.
"""

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
    """Notes when each step has ended: before all other hooks are called, or after them."""

    def __init__(self, priority: int) -> None:
        self.priority = priority
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

    lost: list[float] = []

    def in_background() -> float:
        """Returns how long the loop was held at the step of the save, and notes what the steps after it lost."""
        before, times = StepTimes(2000), StepTimes(-1000)
        with tempfile.TemporaryDirectory() as directory:
            saver = km.CheckpointSaver(directory, trigger=km.StepHookTrigger(6), trigger_at_end=False)
            callback = km.HookCallback([before, saver, times])
            model.fit(data, steps_per_epoch=8, epochs=1, verbose=0, shuffle=False, callbacks=[callback])
        steps = np.diff(times.times) * 1000
        held = [(after - start) * 1000 for start, after in zip(before.times, times.times, strict=True)]
        lost.append(float(steps[5] + steps[6] - 2 * np.median(steps[:4])))
        return held[5] - float(np.median(held[:5]))

    measured = alternate({"tf.train.Checkpoint.save": plain, "CheckpointSaver": in_background}, rounds=5)
    medians = show("A save of 600 MB holds the loop", "milliseconds", measured)
    print(f"  the two steps after it lose {np.median(lost[1:]):.0f} milliseconds beside that")
    return check(
        "CheckpointSaver / blocking save", medians["CheckpointSaver"] / medians["tf.train.Checkpoint.save"], 0.1
    )
