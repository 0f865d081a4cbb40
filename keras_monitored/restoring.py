"""Finds the newest checkpoint that can be used."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_monitored.checkpoints import CheckpointInfo, list_checkpoints
from keras_monitored.errors import CheckpointError
from keras_monitored.manifest import NewerFormatError, read_manifest, read_tensors
from keras_monitored.messages import warn


class Opened(NamedTuple):
    """A checkpoint that was read and found whole."""

    prefix: str
    manifest: dict[str, Any]
    tensors: dict[str, Any]

    def tensors_of(self, part: str) -> dict[str, Any]:
        """Returns the tensors of a part of the state, by its own names."""
        prefix = f"{part}/"
        return {key.removeprefix(prefix): v for key, v in self.tensors.items() if key.startswith(prefix)}


def open_newest(directories: Iterable[str]) -> Opened | None:
    """Reads the newest checkpoint in some directories that is not damaged.

    A damaged one is reported and set aside: its manifest is renamed, nothing is deleted.

    Returns:
        The checkpoint, or `None` if there has never been one.

    Raises:
        CheckpointError: If there are checkpoints, and all are damaged, or if one is of a newer format.
    """
    directories = list(dict.fromkeys(directories))
    infos = [info for directory in directories for info in list_checkpoints(directory)]
    damaged: list[str] = []
    # At the same step the one written later comes first.
    for info in sorted(infos, key=lambda i: (i.step, i.time), reverse=True):
        try:
            manifest = read_manifest(info.prefix)
            opened = Opened(info.prefix, manifest, read_tensors(info.prefix))
        except NewerFormatError:
            raise
        except CheckpointError as error:
            damaged.append(str(error))
            warn(f"The checkpoint of step {info.step} is not used: {error}")
            continue
        for worse in infos:
            if worse.step > info.step:
                _set_aside(worse)
        return opened
    if damaged:
        shown = "\n".join(f"  {problem}" for problem in damaged)
        raise CheckpointError(
            f"None of the {len(damaged)} checkpoints in {', '.join(directories)} can be used:\n{shown}\n"
            "To start anew, choose another `working_dir` or move these files away."
        )
    return None


def _set_aside(info: CheckpointInfo) -> None:
    manifest = info.prefix + ".json"
    if tf.io.gfile.exists(manifest):
        tf.io.gfile.rename(manifest, manifest + ".damaged", overwrite=True)
        warn(f"Set aside {os.path.basename(manifest)} as {os.path.basename(manifest)}.damaged.")
