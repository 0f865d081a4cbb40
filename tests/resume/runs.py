"""Runs trainings in processes of their own, two at a time, and compares what they end with."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
SERVERS = 2
# A job is given 90 seconds by its server.
LONGEST_CASE_SECONDS = 400
_NOT_COMPARED = ("calls", "has_run")
# The options that decide where a run ends.
_ENDS = ("epochs", "last_step")

Result = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A training that dies at some moments, is started again after each, and comes to its end at last.

    Args:
        scenario: Name of the training.
        *deaths: The moments, as in `deaths.py`, one for each process but the last.
        last: Options of the last process that differ.
        **options: Options of all processes, as in `train.Job`.

    The unbroken run that it is compared with has of these only the ones that decide where a run ends: that it saves at
    other steps, or runs other loops, makes no difference.
    """

    scenario: str
    deaths: tuple[str, ...]
    last: dict[str, Any]
    options: dict[str, Any]

    def __init__(self, scenario: str, *deaths: str, last: dict[str, Any] | None = None, **options: Any) -> None:
        for name, value in (("scenario", scenario), ("deaths", deaths), ("last", last or {}), ("options", options)):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        return "-".join([self.scenario, *self.deaths, *options, *(f"last_{n}={v}" for n, v in self.last.items())])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run has ended with, and what its last process printed."""

    result: Result
    log: str


class Runs:
    """Runs cases, each once, and unbroken runs to compare them with.

    Args:
        directory: Where all files go.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._servers = [_Server() for _ in range(SERVERS)]
        self._free: queue.SimpleQueue[_Server] = queue.SimpleQueue()
        for server in self._servers:
            self._free.put(server)
        self._pool = concurrent.futures.ThreadPoolExecutor(SERVERS)
        self._futures: dict[str, concurrent.futures.Future[Outcome]] = {}
        self._number = 0
        self._lock = threading.Lock()

    def start(self, cases: Iterable[Case]) -> None:
        """Begins with cases that will be asked for."""
        for case in cases:
            self._unbroken(case)
            self._broken(case)

    def check(self, case: Case) -> Outcome:
        """Asserts that a case ends with the same bits as the unbroken run; returns what it ended with."""
        unbroken, broken = self._unbroken(case), self._broken(case)
        expected = unbroken.result(LONGEST_CASE_SECONDS).result
        outcome = broken.result(LONGEST_CASE_SECONDS)
        assert_same(outcome.result, expected, f"{case} differs from the unbroken run.\n{outcome.log}")
        return outcome

    def train(self, scenario: str, directory: str, *, status: int = 0, **options: Any) -> Outcome:
        """Trains in one process, and asserts the exit status that it ends with; -9 is a kill."""
        with self._lock:
            self._number += 1
        job = {"scenario": scenario, "directory": str(self._directory / directory), **options}
        job["result"] = str(self._directory / f"{self._number}.npz")
        server = self._free.get(timeout=LONGEST_CASE_SECONDS)
        try:
            ended = server.run(job)
        finally:
            self._free.put(server)
        log = pathlib.Path(job["result"] + ".log").read_text(errors="replace")
        assert ended == status, f"The training {job} ended with {ended}, expected was {status}. It printed:\n{log}"
        if status:
            return Outcome({}, log)
        with np.load(job["result"]) as file:
            return Outcome(dict(file), log)

    def close(self) -> None:
        """Ends all processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for server in self._servers:
            server.close()

    def _unbroken(self, case: Case) -> concurrent.futures.Future[Outcome]:
        options = {n: v for n, v in {**case.options, **case.last}.items() if n in _ENDS}
        name = f"unbroken-{case.scenario}-{options}"
        return self._once(name, functools.partial(self.train, case.scenario, _file_name(name), **options))

    def _broken(self, case: Case) -> concurrent.futures.Future[Outcome]:
        return self._once(str(case), functools.partial(self._run, case))

    def _run(self, case: Case) -> Outcome:
        directory = _file_name(str(case))
        for death in case.deaths:
            self.train(case.scenario, directory, status=-signal.SIGKILL, death=death, **case.options)
        return self.train(case.scenario, directory, **{**case.options, **case.last})

    def _once(self, name: str, call: Any) -> concurrent.futures.Future[Outcome]:
        if name not in self._futures:
            self._futures[name] = self._pool.submit(call)
        return self._futures[name]


class _Server:
    """A process that forks one for every job; see `train.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.resume.train"],
            cwd=ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        with self._process as process:
            os.killpg(process.pid, signal.SIGKILL)  # and what it has forked


def assert_same(ours: Result, expected: Result, message: str) -> None:
    """Asserts that two results hold the same names, dtypes and bits; names the first that differs."""
    assert list(ours) == list(expected), message
    for name, value in expected.items():
        if name in _NOT_COMPARED:
            continue
        same = ours[name].dtype == value.dtype and ours[name].shape == value.shape
        same = same and ours[name].tobytes() == value.tobytes()
        assert same, f"{name!r}: {_difference(ours[name], value)}\n{message}"


def _difference(ours: np.ndarray, expected: np.ndarray) -> str:
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return f"{ours.dtype}{ours.shape} instead of {expected.dtype}{expected.shape}: {ours} instead of {expected}"
    first = tuple(np.argwhere(np.atleast_1d(ours != expected))[0])[:1] if ours.ndim else ()
    return f"at {first} it is {ours[first]} instead of {expected[first]}"


def _file_name(name: str) -> str:
    return re.sub(r"[^\w=-]+", "_", name)
