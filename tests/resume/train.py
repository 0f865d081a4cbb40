"""Trains one scenario, or as much of it as it lives to see, and writes everything that it ends with to a file.

    python -m tests.resume.train '{"scenario": "arrays", "directory": "run1", "result": "end.npz", "death": "step:7"}'
    python -m tests.resume.train          # a server: a job in each line read, its exit status in each line written

The server runs each job in a process of its own, forked before TensorFlow's runtime has started: nothing of another run
can be in it, and the modules, which take most of a short run's time to load, are there already.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

import keras_monitored as km
from keras_monitored.observe import optimizers_of
from tests.resume import deaths
from tests.resume.scenarios import SCENARIOS, Scenario

LONGEST_SECONDS = 90
# Keras says so of every Dataset, of every end of data that comes before `steps_per_epoch`, and of its own variables.
warnings.filterwarnings("ignore", message="`shuffle=True` was passed, but will be ignored")
warnings.filterwarnings("ignore", message="Your input ran out of data")
warnings.filterwarnings("ignore", message="__array__ implementation doesn't accept a copy keyword")


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train, and how it ends."""

    scenario: str
    directory: str
    result: str
    death: str | None = None
    epochs: int | None = None
    last_step: int | None = None
    steps_per_loop: int | str = 1
    save_every: int | str = 5
    """Steps between two checkpoints, or `"epoch"`."""
    blocking: bool = True


class Recorder(km.Hook):
    """Notes which methods of hooks are called, and where the run is at its end."""

    priority = -1000

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.place: tuple[int, int] | None = None
        self.has_run = False

    def begin(self) -> None:
        self.calls.append("begin")

    def after_session_creation(self, session: km.Session) -> None:
        self.calls.append("after_session_creation")

    def end(self, session: km.Session) -> None:
        self.calls.append("end")
        self.place = session.step, session.epoch
        self.has_run = session.has_run


def train(job: Job) -> None:
    """Trains, and writes the result if this process is still there at the end."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    keras.utils.set_random_seed(7)
    scenario = SCENARIOS[job.scenario](job.directory)
    dying, before, after = deaths.prepare(job.death, job.directory)
    trigger = km.EpochHookTrigger(1) if job.save_every == "epoch" else km.StepHookTrigger(int(job.save_every))
    recorder = Recorder()
    hooks = [km.CheckpointSaver(trigger=trigger, blocking=job.blocking), km.NaNChecker(), recorder, dying]
    hooks += [km.StopAtStep(last_step=job.last_step)] if job.last_step is not None else []
    callback = km.HookCallback(
        hooks, working_dir=job.directory, stateful=scenario.stateful, steps_per_loop=job.steps_per_loop
    )
    history = scenario.model.fit(
        **scenario.fit,
        epochs=job.epochs or scenario.epochs,
        verbose=0,
        callbacks=[*before, *scenario.before, callback, *scenario.after, *after],
    )
    outcome = dict(_outcome(scenario, history))
    outcome["place"] = np.array(recorder.place)
    outcome["calls"] = np.array(recorder.calls)
    outcome["has_run"] = np.array(recorder.has_run)
    np.savez(job.result, **outcome)


def _outcome(scenario: Scenario, history: keras.callbacks.History) -> Iterator[tuple[str, Any]]:
    """Yields all that two runs have to agree in, bit by bit; what tells most of a difference comes first."""
    model = scenario.model
    for index, variable in enumerate(model.variables):  # seeds and the log of the batches among them
        yield f"variable {index}: {variable.name}", variable.numpy()
    for number, optimizer in enumerate(optimizers_of(model)):
        for index, variable in enumerate(optimizer.variables):
            yield f"optimizer {number}, variable {index}: {variable.name}", variable.numpy()
    for metric in model.metrics:
        for index, variable in enumerate(metric.variables):
            yield f"metric {metric.name}, variable {index}", variable.numpy()
    yield "epochs of the History", np.array(history.epoch)
    for name, values in history.history.items():
        yield f"History of {name}", np.array(values)
    for callback in scenario.stateful:
        for name, value in vars(callback).items():
            if name == "min_delta":
                continue  # an argument, whose sign Keras sets at the end of an epoch
            for index, part in enumerate(_numbers(value)):
                yield f"{type(callback).__name__}.{name} {index}", part
    for path in scenario.weight_files:
        with h5py.File(path) as file:
            for name in _datasets(file):
                yield f"{os.path.basename(path)} {name}", file[name][()]
    yield "next random number of Python", np.array(random.random())
    yield "next random number of NumPy", np.array(np.random.random())


def _datasets(file: h5py.File) -> list[str]:
    found: list[str] = []
    file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
    return found


def _numbers(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, (int, float, np.number, np.ndarray)):
        yield np.asarray(value)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)


def _serve() -> None:
    for line in sys.stdin:
        job = Job(**json.loads(line))
        child = os.fork()
        if child == 0:
            log = os.open(job.result + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            _run(job)
        print(_wait(child), flush=True)


def _wait(child: int) -> int:
    deadline = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 124


def _run(job: Job) -> None:
    status = 1
    try:
        train(job)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # an iterator over Python code may keep the interpreter from ending


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _run(Job(**json.loads(sys.argv[1])))
    _serve()
