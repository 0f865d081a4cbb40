"""Trains on handwritten digits, kills the process in mid-epoch, starts it again, and compares with an unbroken run."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from keras_monitored import demo_training as training
from keras_monitored.demo_plot import Losses, draw_losses
from keras_monitored.journal import FILE_NAME

HELP = "kill a training, start it again, and compare it with an unbroken one"

_KILL_AT_STEP = 155
_PICTURE = "losses.png"
_NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


class Row(NamedTuple):
    """A line of the comparison: what the two runs have, and whether it is the same bit for bit."""

    what: str
    unbroken: str
    resumed: str
    equal: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), metavar="DIR", help="where files go (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns 0 if the two runs are equal bit for bit, 1 if they differ, 2 if it could not be run."""
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f"The demo needs {' and '.join(missing)}, which can't be found. "
            "Install all that it needs with: pip install 'keras_monitored[demo]'",
            file=sys.stderr,
        )
        return 2
    begun = time.perf_counter()
    unbroken, killed = arguments.output / "unbroken", arguments.output / "killed"
    try:
        for directory in (unbroken, killed):
            _make_empty(directory)
        _train_both(unbroken, killed)
    except _DemoError as error:
        print(error, file=sys.stderr)
        return 2
    rows = compare(unbroken, killed)
    picture = arguments.output / _PICTURE
    draw_losses(_losses_of(unbroken, killed), picture)
    print("\n".join(["", *_table(rows)]))
    equal = all(row.equal for row in rows)
    verdict = "The killed run ended exactly where the unbroken one did." if equal else "The two runs differ."
    print(f"\n{verdict} Took {time.perf_counter() - begun:.0f} s.\nThe loss of both, step by step: {picture.resolve()}")
    return 0 if equal else 1


class _DemoError(Exception):
    pass


# The two runs -----------------------------------------------------------------------------------------------------


def _make_empty(directory: Path) -> None:
    if directory.exists():
        marks = (FILE_NAME, training.LOSSES, training.LOSSES_BEFORE_KILL)
        if any(directory.iterdir()) and not any((directory / mark).exists() for mark in marks):
            raise _DemoError(f"{directory} exists and is not from a demo. Choose another place with --output.")
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _train_both(unbroken: Path, killed: Path) -> None:
    log = unbroken.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        beside = _start(unbroken, output=file)
        try:
            print(f"Training in {killed}, to be killed at step {_KILL_AT_STEP}. An unbroken run goes on beside it.\n")
            status = _start(killed, "--kill-at-step", str(_KILL_AT_STEP)).wait()
            if status != -signal.SIGKILL:
                raise _DemoError(f"The training to be killed ended by itself, with exit status {status}.")
            print(f"\n\nKilled by SIGKILL at step {_KILL_AT_STEP}. The same training is started again.\n")
            for process, output in ((_start(killed), "what it printed above"), (beside, str(log))):
                if process.wait() != 0:
                    raise _DemoError(f"A training ended with exit status {process.returncode}: see {output}.")
        finally:
            beside.kill()
            beside.wait()


def _start(directory: Path, *arguments: str, output: IO[str] | None = None) -> subprocess.Popen[bytes]:
    sys.stdout.flush()
    return subprocess.Popen(
        [sys.executable, "-m", training.__name__, str(directory), *arguments],
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},  # what TensorFlow says of the machine is not the point here
    )


# The comparison ---------------------------------------------------------------------------------------------------


def compare(unbroken: Path, killed: Path) -> list[Row]:
    """Compares what two runs have left in their directories, bit for bit."""
    rows = _compare_variables(unbroken / training.VARIABLES, killed / training.VARIABLES)
    ours, theirs = (json.loads((d / training.RESULT).read_text(encoding="utf-8")) for d in (unbroken, killed))
    rows.append(
        _row(f"History ({len(ours['epoch'])} epochs)", *(_digest(r["epoch"], r["history"]) for r in (ours, theirs)))
    )
    losses, before, after = _losses_of(unbroken, killed)
    rows.append(_row(f"loss of each step ({len(losses)})", _digest(losses), _digest({**before, **after})))
    twice = sorted(before.keys() & after.keys())
    first, second = (_digest([part[step] for step in twice]) for part in (before, after))
    rows.append(_row(f"loss of steps run twice ({len(twice)})", first, second))
    unbroken_accuracy, killed_accuracy = (f"{result['test']['accuracy']:.2%}" for result in (ours, theirs))
    rows.append(Row("test accuracy", unbroken_accuracy, killed_accuracy, equal=ours["test"] == theirs["test"]))
    return rows


def _compare_variables(unbroken: Path, killed: Path) -> list[Row]:
    with np.load(unbroken) as ours, np.load(killed) as theirs:
        groups = dict.fromkeys(key.partition("/")[0] for key in [*ours, *theirs])
        rows = []
        for group in groups:
            parts = [[file[key] for key in file if key.startswith(f"{group}/")] for file in (ours, theirs)]
            rows.append(_row(f"{group} ({len(parts[0])} variables)", *(_digest(*part) for part in parts)))
    return rows


def _losses_of(unbroken: Path, killed: Path) -> Losses:
    def read(file: Path) -> dict[int, float]:
        pairs = [line.split(",") for line in file.read_text(encoding="utf-8").splitlines()]
        return {int(step): float(loss) for step, loss in pairs}

    return Losses(
        unbroken=read(unbroken / training.LOSSES),
        before_kill=read(killed / training.LOSSES_BEFORE_KILL),
        after_kill=read(killed / training.LOSSES),
    )


def _digest(*values: Any) -> str:
    """Returns a few characters that stand for all bits of arrays, or of what JSON can hold."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
        else:
            digest.update(json.dumps(value, sort_keys=True).encode())  # floats are written with all their digits
    return digest.hexdigest()[:12]


def _row(what: str, unbroken: str, resumed: str) -> Row:
    return Row(what, unbroken, resumed, equal=unbroken == resumed)


def _table(rows: list[Row]) -> list[str]:
    encoding = sys.stdout.encoding or "ascii"
    try:
        "✓✗─".encode(encoding)
        yes, no, line = "✓", "✗", "─"
    except UnicodeError:
        yes, no, line = "yes", "NO", "-"
    cells = [("", "unbroken", "killed, resumed", "equal")]
    cells += [(row.what, row.unbroken, row.resumed, yes if row.equal else no) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [lines[0], line * max(map(len, lines)), *lines[1:], "Twelve digits of a SHA-256 stand for all bits."]
