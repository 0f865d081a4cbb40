"""The script that `python -m keras_monitored demo` starts, kills and starts again: handwritten digits, five hooks.

    python -m keras_monitored.demo_training run1 --kill-at-step 155     # ends with SIGKILL in mid-epoch
    python -m keras_monitored.demo_training run1                        # goes on, and ends as if nothing had happened

There is nothing in `train` that knows of a restart: the callback sees to it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_monitored as km

BATCH_SIZE = 32
STEPS_PER_EPOCH = 45
LAST_STEP = 6 * STEPS_PER_EPOCH
SAVE_EVERY = 25

LOSSES = "losses.csv"
LOSSES_BEFORE_KILL = "losses_before_kill.csv"
RESULT = "result.json"
VARIABLES = "variables.npz"


class LossRecorder(km.Hook):
    """Writes the loss of every step to a file. A hook of your own looks like this one."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def before_run(self, run_context: km.SessionRunContext) -> km.SessionRunArgs:
        return km.SessionRunArgs(fetches="loss")

    def after_run(self, run_context: km.SessionRunContext, run_values: km.SessionRunValues) -> None:
        self._file.write(f"{run_values.step},{float(run_values.results)!r}\n")

    def end(self, session: km.Session) -> None:
        self._file.close()


class KillAtStep(km.Hook):
    """Kills the process after a step, as a scheduler that takes a machine away would: nothing can be saved."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_run(self, run_context: km.SessionRunContext, run_values: km.SessionRunValues) -> None:
        if run_values.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)

    def next_step(self, step: int) -> int | None:
        return self._step if step < self._step else None


def train(directory: Path, kill_at_step: int | None = None) -> None:
    """Trains, in `directory`, and writes there what came of it."""
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()  # GPUs add in any order without it
    training, validation, test = load_data()
    model = make_model()
    hooks: list[km.Hook] = [
        km.CheckpointSaver(trigger=km.StepHookTrigger(SAVE_EVERY), max_checkpoints_to_keep=3),
        km.NaNChecker(),
        km.LossLogger(km.EpochHookTrigger(1)),
        km.StepRateLogger(km.EpochHookTrigger(1)),
        km.StopAtStep(last_step=LAST_STEP),
        km.Stopper(km.StopCriteria(max_epochs=20, max_seconds=600)),
        LossRecorder(directory / (LOSSES if kill_at_step is None else LOSSES_BEFORE_KILL)),
    ]
    if kill_at_step is not None:
        hooks.append(KillAtStep(kill_at_step))
    callback = km.HookCallback(hooks, working_dir=directory)
    history = model.fit(
        *training, batch_size=BATCH_SIZE, epochs=20, validation_data=validation, verbose=1, callbacks=[callback]
    )
    write_result(directory, model, history, model.evaluate(*test, verbose=0, return_dict=True))


def load_data() -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns images and labels for training, validation and test: 1437, 180 and 180 digits of 8x8 pixels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 16).astype("float32")[..., np.newaxis]
    order = np.random.default_rng(0).permutation(len(images))
    parts = np.split(order, [STEPS_PER_EPOCH * BATCH_SIZE - 3, 1617])
    return [(images[part], digits.target[part]) for part in parts]


def make_model() -> keras.Model:
    """Makes a small convolutional network with layers that hold random and running state."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    return model


def write_result(directory: Path, model: keras.Model, history: Any, test: dict[str, float]) -> None:
    """Writes every variable, the `History` and the test metrics, without a bit lost."""
    groups = {
        "weights": model.weights,
        "random state of the layers": [v for v in model.variables if all(v is not w for w in model.weights)],
        "optimizer state": model.optimizer.variables,
        "metrics": [variable for metric in model.metrics for variable in metric.variables],
    }
    arrays = {f"{group}/{i}": np.asarray(v) for group, variables in groups.items() for i, v in enumerate(variables)}
    np.savez(directory / VARIABLES, allow_pickle=False, **arrays)
    result = {"epoch": history.epoch, "history": history.history, "test": test}
    (directory / RESULT).write_text(json.dumps(result, indent=1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory of the run")
    parser.add_argument("--kill-at-step", type=int, metavar="STEP", help="kill the process after this step")
    parsed = parser.parse_args(arguments)
    parsed.directory.mkdir(parents=True, exist_ok=True)
    train(parsed.directory, parsed.kill_at_step)


if __name__ == "__main__":
    main()
