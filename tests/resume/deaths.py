"""The moments at which a training kills itself, written `<moment>:<number>`.

step:7              after step 7, when all other hooks were called
epoch_end_before:1  in the end of epoch 1 (from 0), in a callback that stands before the HookCallback
epoch_end_after:1   the same, in a callback that stands after it
epoch_begin:1       in the beginning of epoch 1
validation:1        in the validation of epoch 1, after its first batch
train_end:0         in the end of the training, when the finished state is saved
half_saved:10       in the save of step 10, when the data is written and the manifest is not
being_saved:10      in the save of step 10, as soon as a file of it can be seen
saved:10            in the save of step 10, when the manifest is written and TensorFlow's list is not
"""

from __future__ import annotations

import glob
import os
import signal
import threading
import time
from typing import Any

import keras

import keras_monitored as km
from keras_monitored import checkpoint_store


def kill() -> None:
    """Ends this process at once, as the kernel or a scheduler would."""
    os.kill(os.getpid(), signal.SIGKILL)


class DieAfterStep(km.Hook):
    """Kills the process after a step, as the last of all hooks; it belongs to every run, and mostly does nothing."""

    priority = -2000

    def __init__(self, step: int | None) -> None:
        self.step = step

    def after_run(self, run_context: km.SessionRunContext, run_values: km.SessionRunValues) -> None:
        if self.step is not None and run_values.step >= self.step:
            kill()

    def next_step(self, step: int) -> int | None:
        return self.step

    def __repr__(self) -> str:
        return "DieAfterStep()"


class DieInCallback(keras.callbacks.Callback):
    """Kills the process in one of the methods of a Keras callback."""

    def __init__(self, moment: str, number: int) -> None:
        super().__init__()
        self.moment, self.number, self.epoch = moment, number, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self._die_if("epoch_begin")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._die_if("validation")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._die_if("epoch_end")

    def on_train_end(self, logs: Any = None) -> None:
        if self.moment == "train_end":
            kill()

    def _die_if(self, moment: str) -> None:
        if self.moment == moment and self.epoch == self.number:
            kill()


def prepare(
    death: str | None, directory: str
) -> tuple[DieAfterStep, list[keras.callbacks.Callback], list[keras.callbacks.Callback]]:
    """Returns what has to join a training for it to die: a hook, and callbacks before and after the HookCallback."""
    if death is None:
        return DieAfterStep(None), [], []
    moment, _, number = death.partition(":")
    at = int(number)
    if moment == "step":
        return DieAfterStep(at), [], []
    if moment == "half_saved":
        _die_in(checkpoint_store.CheckpointStore, "_write_files", f"model.ckpt-{at}", argument=1)
    elif moment == "saved":
        _die_in(checkpoint_store, "write_manifest", f"model.ckpt-{at}", argument=0)
    elif moment == "being_saved":
        threading.Thread(target=_die_when_seen, args=(f"{directory}/model.ckpt-{at}*",), daemon=True).start()
    else:
        callback = DieInCallback(moment.removesuffix("_before").removesuffix("_after"), at)
        return DieAfterStep(None), *(([callback], []) if moment.endswith("_before") else ([], [callback]))
    return DieAfterStep(None), [], []


def _die_in(owner: Any, name: str, file_name: str, *, argument: int) -> None:
    function = getattr(owner, name)

    def deadly(*args: Any) -> None:
        function(*args)
        if os.path.basename(args[argument]) == file_name:
            kill()

    setattr(owner, name, deadly)


def _die_when_seen(pattern: str) -> None:
    while not glob.glob(pattern):
        time.sleep(0.0001)
    kill()
