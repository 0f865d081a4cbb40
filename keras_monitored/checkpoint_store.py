"""Writes the checkpoints of a run, and deletes those that are no longer kept."""

from __future__ import annotations

import concurrent.futures
import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_monitored.checkpoints import list_checkpoints
from keras_monitored.errors import CheckpointError
from keras_monitored.manifest import FORMAT, PREFIX, files_of, read_manifest, write_manifest, write_whole
from keras_monitored.state import Snapshot


class CheckpointStore:
    """Writes the checkpoints of one run into one directory, and deletes those that are no longer kept.

    Args:
        directory: Where the files go. Any path that `tf.io.gfile` knows.
        max_to_keep: Newest checkpoints that are kept. Defaults to 5.
        keep_every_n_hours: Hours after which one more is kept for good. Defaults to 10,000.
        run_id: The run. Checkpoints of another one are never deleted.
        started: When the run was first started, in seconds since 1970: where the hours begin.
        clock: Wall time in seconds since 1970. Defaults to `time.time`.
    """

    def __init__(
        self,
        directory: str,
        *,
        max_to_keep: int = 5,
        keep_every_n_hours: float = 10_000,
        run_id: str,
        started: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self.max_to_keep = max_to_keep
        self.keep_every_n_hours = keep_every_n_hours
        self.run_id = run_id
        self.started = started
        self._clock = clock
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future[Any] | None = None

    def save(
        self,
        snapshot: Snapshot,
        position: dict[str, Any],
        *,
        blocking: bool,
        on_saved: Callable[[str, float], None],
        on_refused: Callable[[str], None],
    ) -> None:
        """Saves a snapshot, in the background unless `blocking`; at most one save is under way at a time.

        Args:
            snapshot: What to save.
            position: What the manifest says of the step: `step`, `epoch`, `batch` and more.
            blocking: Whether to wait until it is written.
            on_saved: Called with the prefix and the seconds that writing took, in the thread that wrote.
            on_refused: Called with the reason when the state is not worth saving, in the thread that wrote.

        Raises:
            CheckpointError: If this save, or the one before that went on in the background, failed.
        """
        self.wait()
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "keras_monitored-save")
        self._pending = self._thread.submit(self._write, snapshot, position, on_saved, on_refused)
        if blocking:
            self.wait()

    @property
    def is_saving(self) -> bool:
        """Says whether a save in the background has been begun, and not been asked for its outcome."""
        return self._pending is not None

    @property
    def is_done(self) -> bool:
        """Says whether the save in the background has come to its end."""
        return self._pending is not None and self._pending.done()

    def check(self) -> None:
        """Raises the error of a save in the background, if it has failed by now."""
        if self.is_done:
            self.wait()

    def wait(self) -> None:
        """Waits for the save in the background, and raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the save in the background and ends its thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def finish(self, prefix: str, finished: dict[str, Any]) -> None:
        """Marks a checkpoint as the end of a finished run."""
        write_manifest(prefix, {**read_manifest(prefix), "finished": finished})

    def _write(
        self,
        snapshot: Snapshot,
        position: dict[str, Any],
        on_saved: Callable[[str, float], None],
        on_refused: Callable[[str], None],
    ) -> None:
        start = time.perf_counter()
        step = position["step"]
        bad = _non_finite(snapshot)
        if bad:
            on_refused(f"not saved: {len(bad)} variables are not finite, among them {', '.join(bad[:3])}")
            return
        prefix = os.path.join(self.directory, f"{PREFIX}{step}")
        try:
            tf.io.gfile.makedirs(self.directory)
            if tf.io.gfile.exists(prefix + ".json"):  # an older one of this step stops existing before it is replaced
                tf.io.gfile.remove(prefix + ".json")
            self._write_files(prefix, snapshot.tensors)
            write_manifest(prefix, self._manifest(prefix, snapshot, position))
            _update_state_file(self.directory, self._delete_old(prefix))
        except (tf.errors.OpError, OSError) as error:
            raise CheckpointError(f"The checkpoint {prefix} could not be written: {error}", step=step) from error
        on_saved(prefix, time.perf_counter() - start)

    def _write_files(self, prefix: str, tensors: dict[str, Any]) -> None:
        with tf.device("CPU"):
            tf.raw_ops.SaveV2(
                prefix=prefix,
                tensor_names=list(tensors),
                shape_and_slices=[""] * len(tensors),
                tensors=[tf.convert_to_tensor(value) for value in tensors.values()],
            )

    def _manifest(self, prefix: str, snapshot: Snapshot, position: dict[str, Any]) -> dict[str, Any]:
        from keras_monitored import __version__

        files = {name: size for name, size in files_of(prefix).items() if not name.endswith(".json")}
        return {
            "format": FORMAT,
            **position,  # step, epoch, batch, and whether the run is finished
            "time": self._clock(),
            "run_id": self.run_id,
            "started": self.started,
            "versions": {
                "keras_monitored": __version__,
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "files": files,
            "variables": snapshot.variables,
            "state": snapshot.record,
        }

    def _delete_old(self, newest: str) -> list[str]:
        """Deletes this run's checkpoints that are no longer kept; returns those that stay, by step."""
        infos = [info for info in list_checkpoints(self.directory) if info.valid]
        manifests = {info.prefix: read_manifest(info.prefix) for info in infos}
        own = [info for info in infos if manifests[info.prefix]["run_id"] == self.run_id and info.prefix != newest]
        last_kept = max([manifests[newest]["started"]] + [i.time for i in own if manifests[i.prefix].get("kept")])
        expendable = [info for info in own if not manifests[info.prefix].get("kept")]
        for info in expendable[: max(0, len(expendable) + 1 - self.max_to_keep)]:
            if info.time - last_kept >= self.keep_every_n_hours * 3600:
                last_kept = info.time
                write_manifest(info.prefix, {**manifests[info.prefix], "kept": True})
            else:
                _delete(info.prefix)
                infos.remove(info)
        # The newest comes last, though one of a higher step may be left by a part of the run that was given up.
        return [info.prefix for info in infos if info.prefix != newest] + [newest]


def _non_finite(snapshot: Snapshot) -> list[str]:
    bad = []
    for variable in snapshot.variables:
        tensor = snapshot.tensors[variable["key"]]
        if tf.as_dtype(tensor.dtype).is_floating:
            values = tensor.numpy()  # NumPy stays in this thread, TensorFlow would take the cores that train
            if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
                bad.append(variable["name"])
    return bad


def _delete(prefix: str) -> None:
    tf.io.gfile.remove(prefix + ".json")  # first: from here on it doesn't exist
    for name in files_of(prefix):
        tf.io.gfile.remove(os.path.join(os.path.dirname(prefix), name))


def _update_state_file(directory: str, prefixes: list[str]) -> None:
    """Writes TensorFlow's own list, which `tf.train.latest_checkpoint` reads."""
    names = [json.dumps(os.path.basename(prefix)) for prefix in prefixes]
    lines = [f"model_checkpoint_path: {names[-1]}", *(f"all_model_checkpoint_paths: {name}" for name in names)]
    write_whole(os.path.join(directory, "checkpoint"), "\n".join(lines) + "\n")
