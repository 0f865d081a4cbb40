"""Where a run is in its data: saved with the iterator where it can be, found again by skipping where it can't.

Keras makes a new iterator for each epoch, and by the number of those it has made a shuffle knows its next order. So
the number is part of the position, and a resumed run makes up for the iterators that its earlier processes made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_monitored import keras_internals
from keras_monitored.errors import CheckpointError, RecoveryError
from keras_monitored.messages import say, warn
from keras_monitored.state import read_random_state, write_random_state

_PROGRESS_SECONDS = 5.0


class DataPosition:
    """The position in the training data, a part of the run's state.

    Args:
        count: Counts the iterators that Keras makes for this `fit`.
        batch: Returns how many batches of the epoch were read.

    Attributes:
        iterator: The iterator that the next step reads from.
        epoch_complete: Whether the epoch's last batch was read, so that the next step belongs to a new epoch.
        is_recovery: Whether a restore takes place in the process that read the data, which has its counts right.
    """

    def __init__(self, count: keras_internals.IteratorCount, batch: Callable[[], int]) -> None:
        self.count = count
        self._batch = batch
        self.iterator: Any = None
        self.epoch_complete = False
        self.is_recovery = False
        self._keras_iterator: Any = None
        self._before_epoch = 0  # batches of the iterator that were read in earlier epochs
        self._random_at_start: Any = None
        self._pending: tuple[Any, dict[str, Any]] | None = None

    def see(self, keras_iterator: Any) -> Any:
        """Takes the iterator that Keras hands to its train function; returns the one to read from."""
        if keras_iterator is not self._keras_iterator:
            self._keras_iterator = self.iterator = keras_iterator
            self._before_epoch = 0
            self._random_at_start = read_random_state()
            if self._pending is not None:
                (record, tensors), self._pending = self._pending, None
                self._restore(record, tensors)
        return self.iterator

    def end_epoch(self, batches: int) -> None:
        """Notes that an epoch of so many batches is complete; Keras may go on with the same iterator."""
        self._before_epoch += batches

    def can_be_saved(self) -> bool:
        """Says whether the iterator's state can be saved, or has to be found again by skipping."""
        return keras_internals.serialize_iterator(self.iterator) is not None

    # A part of the run's state ------------------------------------------------------------------------------------

    def save(self) -> tuple[Any, dict[str, Any]]:
        iterator, before_epoch, batch = self.iterator, self._before_epoch, self._batch()
        renews = self.epoch_complete and self.count.renews
        if self.epoch_complete and not renews and self.count.current is not self._keras_iterator:
            iterator, before_epoch = self.count.current, 0  # Keras has made the next epoch's already
        tensors = keras_internals.serialize_iterator(iterator)
        record: dict[str, Any] = {
            "made": self.count.made,
            "epoch_ends": self.count.epoch_ends,
            "before_epoch": before_epoch,
            "batch": batch,
            "renews": renews,
            "saved": tensors is not None,
        }
        if tensors is None and self._random_at_start is not None:
            record["random_at_start"], random_tensors = self._random_at_start
            tensors = {f"random_at_start/{key}": value for key, value in random_tensors.items()}
        return record, tensors or {}

    def load(self, record: Any, tensors: dict[str, Any]) -> None:
        if self._keras_iterator is None:
            self._pending = (record, tensors)  # until Keras has made an iterator
        else:
            self._restore(record, tensors)

    def _restore(self, record: Any, tensors: dict[str, Any]) -> None:
        made = record["made"] + (1 if record["renews"] else 0)
        if record["saved"]:
            # The order of the epochs to come is restored along: it lies in the dataset, which its iterators share.
            keras_internals.restore_iterator(self.iterator, tensors)
            self.count.made = record["made"]
            if record["renews"]:
                self.iterator = self.count.make()
        else:
            if self.is_recovery:
                raise RecoveryError(
                    "The data can't be taken back to an earlier batch within this process, as the state of its "
                    "iterator can't be saved. Start the script again: it will find its place by skipping."
                )
            self.count.reach_epoch_ends(record["epoch_ends"])
            while self.count.made < made:
                self.iterator = self.count.make()
            if not record["renews"]:
                self._skip(record, tensors)
        self._before_epoch = 0 if record["renews"] else record["before_epoch"]
        if not self.is_recovery:
            self.count.count_earlier_batches(self._before_epoch)

    def _skip(self, record: Any, tensors: dict[str, Any]) -> None:
        now = read_random_state()
        if "random_at_start" in record:
            prefix = "random_at_start/"
            at_start = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            self._random_at_start = (record["random_at_start"], at_start)
            write_random_state(record["random_at_start"], at_start)
        number = record["before_epoch"] + record["batch"]
        shown = time.monotonic()
        for index in range(number):
            if not self.iterator.get_next_as_optional().has_value():
                raise CheckpointError(
                    f"The data ended after {index} batches, and the checkpoint was made after {number} of them. "
                    "Give the run the data that it was started with, or another `working_dir`."
                )
            if time.monotonic() - shown > _PROGRESS_SECONDS:
                shown = time.monotonic()
                say(f"Skipped {index + 1} of {number} batches that were trained on before.")
        write_random_state(*now)


def warn_of_skipping(iterator: Any) -> None:
    """Says once what a resume will cost when the iterator can't be saved."""
    kind = type(iterator).__name__
    reason = (
        "it reads for several devices"
        if not isinstance(iterator, tf.data.Iterator)
        else "the data comes from Python code, or from stateful operations"
    )
    warn(
        f"The position in the data can't be saved ({kind}: {reason}). A resumed run reads the batches of the epoch "
        "under way again up to its place and drops them, which takes as long as reading them. It is exact where the "
        "order depends on seeds alone."
    )


class EvaluationCount:
    """How many iterators of the validation data were made, a part of the run's state: its shuffles depend on it.

    Args:
        data: The validation data of the `fit`.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._count: keras_internals.IteratorCount | None = None
        self._earlier = 0

    def see(self, epoch_iterator: Any) -> None:
        """Takes the iterator over the validation data that Keras keeps for the length of a `fit`."""
        if epoch_iterator is None or (self._count is not None and self._count.epoch_iterator is epoch_iterator):
            return
        self._count = keras_internals.IteratorCount(epoch_iterator)

    def save(self) -> tuple[Any, dict[str, Any]]:
        return {"made": self._earlier + (0 if self._count is None else self._count.made)}, {}

    def load(self, record: Any, tensors: dict[str, Any]) -> None:
        self._earlier = record["made"]
        if isinstance(self._data, tf.data.Dataset):
            for _ in range(self._earlier):
                iter(self._data)
