"""The journal of a run: one line of JSON for each event of its life, in `run.jsonl`."""

import json
import logging
import math
import os
import threading
import time
from typing import Any

import tensorflow as tf

FILE_NAME = "run.jsonl"
_log = logging.getLogger(__name__)


class Journal:
    """Appends what happens in a run to `<directory>/run.jsonl`.

    A run that is started again goes on in the same file. Each line is written whole and the file closed again, so that
    a killed process leaves at most one broken line, which the next writer ends and `read_journal` skips. A line that
    can't be written, on a full disk say, is logged as a warning, and the run goes on.

    Args:
        directory: Directory of the run, made when it is not there; any path that `tf.io.gfile` knows. `None` for a
            journal that writes nothing.

    Raises:
        ValueError: The directory can't be made.

    Example:
        >>> journal = Journal("ram://run1")
        >>> journal.write("saved", step=1500, epoch=2, seconds=0.25, path="model.ckpt-1500")
        >>> [(entry["event"], entry["step"], entry["path"]) for entry in read_journal("ram://run1")]
        [('saved', 1500, 'model.ckpt-1500')]
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._path: str | None = None
        self._ends_with_newline = False
        # Saves in the background report from a thread of their own.
        self._lock = threading.Lock()
        if directory is not None:
            try:
                tf.io.gfile.makedirs(os.fspath(directory))
            except tf.errors.OpError as error:
                raise ValueError(
                    f"`directory` must be a directory that can be written. Received: {os.fspath(directory)!r}, which "
                    f"can't be made: {error.message}. Pass another one, or change its permissions."
                ) from error
            self._path = os.path.join(os.fspath(directory), FILE_NAME)

    def write(
        self,
        event: str,
        *,
        step: int | None = None,
        epoch: int | None = None,
        batch: int | None = None,
        seconds: float | None = None,
        **details: Any,
    ) -> None:
        """Adds a line, with the wall time as `time`.

        Args:
            event: What happened: created, restored, saved, recovered, stopped, ended.
            step: Global step at which it happened. Left out of the line when `None`, as are the next three.
            epoch: Number of completed epochs.
            batch: Number of batches trained in the current epoch.
            seconds: How long it took.
            **details: Whatever else belongs to the event. Values that JSON does not have are written as text.

        Raises:
            ValueError: A detail is called `time`, which the journal itself adds.
        """
        if "time" in details:
            raise ValueError("`time` can't be a detail of an event, the journal adds it. Pass it under another name.")
        if self._path is None:
            return
        counts = {"step": step, "epoch": epoch, "batch": batch, "seconds": seconds}
        entry = {"time": time.time(), "event": event}
        entry.update({name: value for name, value in counts.items() if value is not None})
        entry.update(details)
        line = json.dumps(_plain(entry)) + "\n"
        with self._lock:
            try:
                self._append(self._path, line)
            except tf.errors.OpError as error:  # no reason to end a training for
                _log.warning("Could not note %r in %s: %s", event, self._path, error.message)

    def _append(self, path: str, line: str) -> None:
        if not self._ends_with_newline and _ends_in_mid_line(path):
            line = "\n" + line
        self._ends_with_newline = False
        with tf.io.gfile.GFile(path, "a") as file:
            file.write(line)
        self._ends_with_newline = True


def read_journal(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the events of a run, the oldest first.

    Args:
        directory: Directory of the run.

    Returns:
        A dictionary for each event, empty when there is no journal. Lines that a killed process left half-written are
        skipped.

    Example:
        >>> read_journal("ram://nothing-here")
        []
    """
    path = os.path.join(os.fspath(directory), FILE_NAME)
    if not tf.io.gfile.exists(path):
        return []
    with tf.io.gfile.GFile(path, "rb") as file:
        lines = file.read().splitlines()
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except ValueError:  # Half a line.
            continue
    return entries


def _ends_in_mid_line(path: str) -> bool:
    if not tf.io.gfile.exists(path) or tf.io.gfile.stat(path).length == 0:
        return False
    with tf.io.gfile.GFile(path, "rb") as file:
        file.seek(tf.io.gfile.stat(path).length - 1)
        return bool(file.read(1) != b"\n")


def _plain(value: Any) -> Any:
    """Returns `value` in terms that JSON has; NumPy's numbers as Python's, NaN and infinities as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
