"""The manifest that makes the files of a checkpoint a checkpoint, and the reading of those files.

Beside TensorFlow's files of `model.ckpt-<step>` lies `model.ckpt-<step>.json`, written last and by rename. It lists the
files with their sizes, the variables with their keys, and what the parts of the run's state remember; a checksum guards
it. TensorFlow guards the values.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from typing import Any

import tensorflow as tf

from keras_monitored.errors import CheckpointError

FORMAT = 1
PREFIX = "model.ckpt-"


class NewerFormatError(CheckpointError):
    """Raised when a later version of this package wrote the checkpoint: it is not damaged."""


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
    write_whole(prefix + ".json", json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1))


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


def files_of(prefix: str) -> dict[str, int]:
    """Returns the files of a checkpoint, by name, with their sizes."""
    directory, start = os.path.split(prefix)
    # Only these are ours: a user may keep notes beside a checkpoint.
    ours = re.compile(re.escape(start) + r"\.(index|json|data-\d+-of-\d+)")
    names = [name for name in tf.io.gfile.listdir(directory) if ours.fullmatch(name)]
    return {name: tf.io.gfile.stat(os.path.join(directory, name)).length for name in sorted(names)}


def write_whole(path: str, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    with tf.io.gfile.GFile(temporary, "w") as file:
        file.write(text)
    tf.io.gfile.rename(temporary, path, overwrite=True)


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode("utf-8")).hexdigest()
