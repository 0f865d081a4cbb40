"""The checkpoints of a run, as a user finds them.

    list_checkpoints("run1")                 # [CheckpointInfo(step=500, epoch=3, batch=20, ...), ...]
    latest_checkpoint("run1")                # "run1/model.ckpt-500"
    load_weights(model, "run1")

Plain `tf.train.Checkpoint(model=model)` reads the files too. A checkpoint without a manifest does not exist.
"""

from __future__ import annotations

import dataclasses
import os

import keras
import tensorflow as tf

from keras_monitored.errors import CheckpointError
from keras_monitored.manifest import PREFIX, files_of, read_manifest, read_tensors
from keras_monitored.state import check_variables, plain


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


def _info(prefix: str) -> CheckpointInfo:
    step = int(digits) if (digits := prefix.rpartition("-")[2]).isdigit() else -1
    size = sum(files_of(prefix).values())
    try:
        manifest = read_manifest(prefix)
    except CheckpointError as error:
        return CheckpointInfo(prefix, step, -1, -1, 0.0, size, str(error))
    return CheckpointInfo(prefix, step, manifest["epoch"], manifest["batch"], manifest["time"], size)
