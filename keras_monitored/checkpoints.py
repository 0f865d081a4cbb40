"""The files of a run's checkpoints: written whole or not at all, checked before they are used, deleted with care.

Beside TensorFlow's files of `model.ckpt-<step>` lies a manifest, `model.ckpt-<step>.json`, written last and by rename.
A checkpoint without a manifest does not exist. Plain `tf.train.Checkpoint(model=model)` reads the files too.

    list_checkpoints("run1")                 # [CheckpointInfo(step=500, epoch=3, batch=20, ...), ...]
    latest_checkpoint("run1")                # "run1/model.ckpt-500"
    load_weights(model, "run1")
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import platform
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_monitored.errors import CheckpointError
from keras_monitored.state import Snapshot, check_variables, plain

FORMAT = 1
PREFIX = "model.ckpt-"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint, as its manifest describes it.

    Attributes:
        prefix: Path without the endings, as `tf.train.Checkpoint.read` takes it.
        step: Global step of the state.
        epoch: Epoch that the run was in, from 0.
        batch: Batches of that epoch that were done.
        time: When it was written, in seconds since 1970.
        size: Bytes of all its files.
        problem: What is wrong with it as far as the manifest and the sizes of the files show, or `None`.
    """

    prefix: str
    step: int
    epoch: int
    batch: int
    time: float
    size: int
    problem: str | None = None

    @property
    def valid(self) -> bool:
        """Says whether nothing is wrong with it."""
        return self.problem is None


class NewerFormatError(CheckpointError):
    """Raised when a later version of this package wrote the checkpoint: it is not damaged."""


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Lists the checkpoints of a run, by step.

    Args:
        directory: The `working_dir` of the run, or the `directory` of its `CheckpointSaver`.

    Returns:
        A `CheckpointInfo` for every manifest, the damaged ones included: see `problem`. Empty if there is no such
        directory.

    Example:

    >>> list_checkpoints("/nowhere")
    []
    """
    directory = os.fspath(directory)
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    manifests = [name for name in names if name.startswith(PREFIX) and name.endswith(".json")]
    found = [_info(os.path.join(directory, name.removesuffix(".json"))) for name in manifests]
    return sorted(found, key=lambda info: info.step)


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Returns the prefix of the newest checkpoint with which nothing seems wrong, or `None`.

    Args:
        directory: The `working_dir` of the run, or the `directory` of its `CheckpointSaver`.

    Example:

    >>> latest_checkpoint("/nowhere") is None
    True
    """
    valid = [info for info in list_checkpoints(directory) if info.valid]
    return valid[-1].prefix if valid else None


def load_weights(model: keras.Model, path: str | os.PathLike[str]) -> int:
    """Loads a model's weights, its seed generators' states among them, from a run's checkpoint.

    Use it to evaluate or export what a run has trained; a run that goes on restores itself.

    Args:
        model: The model, built.
        path: A checkpoint's prefix, or a directory whose newest valid checkpoint is used.

    Returns:
        The global step of the checkpoint.

    Raises:
        ValueError: If the model is not built.
        CheckpointError: If there is no checkpoint, it is damaged, or belongs to another model.

    Example:

    >>> load_weights(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), "/nowhere")
    Traceback (most recent call last):
    ...
    keras_monitored.errors.CheckpointError: There is no checkpoint at /nowhere.
    """
    if not model.built:
        raise ValueError("`model` must be built before its weights are loaded. Call it on a batch or model.build(...).")
    path = os.fspath(path)
    # Asked in this order since on some file systems a path that others begin with passes for a directory.
    prefix = path if tf.io.gfile.exists(path + ".json") else latest_checkpoint(path)
    if prefix is None:
        raise CheckpointError(f"There is no checkpoint at {path}.")
    manifest = read_manifest(prefix)
    # The replicas of a strategy hold the same weights: the first one's stand for all.
    saved = [{**v, "name": v["name"].removesuffix(":replica0")} for v in manifest["variables"] if v["group"] == "model"]
    saved = [v for v in saved if ":replica" not in v["name"]]
    ours = [
        {"name": v.path, "shape": list(v.shape), "dtype": tf.as_dtype(plain(v).dtype).name} for v in model.variables
    ]
    check_variables(ours, saved, prefix)
    tensors = read_tensors(prefix, [v["key"] for v in saved])
    for variable, its_saved in zip(model.variables, saved, strict=True):
        plain(variable).assign(tensors[its_saved["key"]])
    return int(manifest["step"])


def read_manifest(prefix: str) -> dict[str, Any]:
    """Reads and checks the manifest of a checkpoint.

    Raises:
        CheckpointError: If it is damaged or of a newer format, or if files of the checkpoint are missing or cut short.
    """
    try:
        with tf.io.gfile.GFile(prefix + ".json", "rb") as file:
            manifest = json.loads(file.read().decode("utf-8"))
        checksum = manifest.pop("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, tf.errors.OpError) as error:
        raise CheckpointError(f"The manifest {prefix}.json can't be read: {error}") from error
    if checksum != _checksum(manifest):
        raise CheckpointError(f"The manifest {prefix}.json is damaged: its checksum is wrong.")
    if manifest["format"] > FORMAT:
        raise NewerFormatError(
            f"{prefix}.json has format {manifest['format']}, this version of keras_monitored reads up to {FORMAT}. "
            f"It was written by version {manifest['versions']['keras_monitored']}: upgrade to that one."
        )
    directory = os.path.dirname(prefix)
    for name, size in manifest["files"].items():
        path = os.path.join(directory, name)
        found = tf.io.gfile.stat(path).length if tf.io.gfile.exists(path) else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(f"{path} {state}.", step=manifest["step"])
    return manifest


def write_manifest(prefix: str, manifest: dict[str, Any]) -> None:
    """Writes a manifest whole or not at all."""
    _write_whole(prefix + ".json", json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1))


def read_tensors(prefix: str, keys: list[str] | None = None) -> dict[str, Any]:
    """Reads tensors of a checkpoint, all of them by default; TensorFlow checks their checksums.

    Raises:
        CheckpointError: If a file is damaged.
    """
    try:
        # tf.train.load_checkpoint takes a prefix on ram:// for a directory.
        dtypes = tf.compat.v1.train.NewCheckpointReader(prefix).get_variable_to_dtype_map()
        names = [key for key in dtypes if not key.startswith("_CHECKPOINTABLE")] if keys is None else keys
        with tf.device("CPU"):
            values = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                dtypes=[dtypes[name] for name in names],
            )
    except (tf.errors.OpError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"The files of {prefix} can't be read: {error}") from error
    return {n: v if v.dtype == tf.variant else v.numpy() for n, v in zip(names, values, strict=True)}


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

        files = {name: size for name, size in _files_of(prefix).items() if not name.endswith(".json")}
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


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode("utf-8")).hexdigest()


def _files_of(prefix: str) -> dict[str, int]:
    directory, start = os.path.split(prefix)
    # Only these are ours: a user may keep notes beside a checkpoint.
    ours = re.compile(re.escape(start) + r"\.(index|json|data-\d+-of-\d+)")
    names = [name for name in tf.io.gfile.listdir(directory) if ours.fullmatch(name)]
    return {name: tf.io.gfile.stat(os.path.join(directory, name)).length for name in sorted(names)}


def _delete(prefix: str) -> None:
    tf.io.gfile.remove(prefix + ".json")  # first: from here on it doesn't exist
    for name in _files_of(prefix):
        tf.io.gfile.remove(os.path.join(os.path.dirname(prefix), name))


def _update_state_file(directory: str, prefixes: list[str]) -> None:
    """Writes TensorFlow's own list, which `tf.train.latest_checkpoint` reads."""
    names = [json.dumps(os.path.basename(prefix)) for prefix in prefixes]
    lines = [f"model_checkpoint_path: {names[-1]}", *(f"all_model_checkpoint_paths: {name}" for name in names)]
    _write_whole(os.path.join(directory, "checkpoint"), "\n".join(lines) + "\n")


def _write_whole(path: str, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    with tf.io.gfile.GFile(temporary, "w") as file:
        file.write(text)
    tf.io.gfile.rename(temporary, path, overwrite=True)


def _info(prefix: str) -> CheckpointInfo:
    step = int(digits) if (digits := prefix.rpartition("-")[2]).isdigit() else -1
    size = sum(_files_of(prefix).values())
    try:
        manifest = read_manifest(prefix)
    except CheckpointError as error:
        return CheckpointInfo(prefix, step, -1, -1, 0.0, size, str(error))
    return CheckpointInfo(prefix, step, manifest["epoch"], manifest["batch"], manifest["time"], size)
