"""Where a run is in its data: saved with the iterator where it can be, found again by skipping where it can't.

Keras makes a new iterator for each epoch, and by the number of those it has made a shuffle knows its next order. So
the number is part of the position, and a resumed run makes up for the iterators that its earlier processes made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

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
        evaluations: Counts those of the validation data, which may be made of the same shuffle.
        batch: Returns how many batches of the epoch were read.

    Attributes:
        iterator: The iterator that the next step reads from.
        epoch_complete: Whether the epoch's last batch was read, so that the next step belongs to a new epoch.
        is_recovery: Whether a restore takes place in the process that read the data, which has its counts right.
    """

    def __init__(
        self, count: keras_internals.IteratorCount, evaluations: EvaluationCount, batch: Callable[[], int]
    ) -> None:
        self.count = count
        self.evaluations = evaluations
        self._batch = batch
        self.iterator: Any = None
        self.epoch_complete = False
        self.is_recovery = False
        self._keras_iterator: Any = None
        self._before_epoch = 0  # batches of the iterator that were read in earlier epochs
        self._start = _Start()
        self._has_warned = False
        self._pending: tuple[Any, dict[str, Any], bool] | None = None

    def see(self, keras_iterator: Any) -> Any:
        """Takes the iterator that Keras hands to its train function; returns the one to read from."""
        if keras_iterator is not self._keras_iterator:
            self._keras_iterator = self.iterator = keras_iterator
            self._before_epoch = 0
            self._start = self._start_of(keras_iterator)
            if self._pending is not None:
                pending, self._pending = self._pending, None
                self._restore(*pending)
        return self.iterator

    def _start_of(self, iterator: Any) -> _Start:
        state = keras_internals.serialize_iterator(iterator)
        return _Start(state, self.count.made, self.evaluations.made, *read_random_state())

    def begin(self, record: Any) -> None:
        """Tells Keras, before it begins an epoch, what it knew of the data in an earlier process."""
        self.count.num_batches = record["num_batches"]

    @property
    def batches_left(self) -> int | None:
        """How many batches Keras will take from the iterator; `None` if it doesn't know either."""
        number = self.count.num_batches
        return None if number is None else max(0, number - self._before_epoch - self._batch())

    def end_epoch(self, batches: int) -> None:
        """Notes that an epoch of so many batches is complete; Keras may go on with the same iterator."""
        self._before_epoch += batches

    def warn_if_skipping(self) -> None:
        """Says once what a resume will cost, if the iterator's state can't be saved."""
        if not self._has_warned and self._start.state is None:
            self._has_warned = True
            warn_of_skipping(self.iterator)

    # A part of the run's state ------------------------------------------------------------------------------------

    def save(self) -> tuple[Any, dict[str, Any]]:
        if self._pending is not None:
            return self._pending[:2]  # nothing was read since it was loaded
        iterator, start = self.iterator, self._start
        before_epoch, batch = self._before_epoch, self._batch()
        renews = self.epoch_complete and self.count.renews
        if self.epoch_complete and not renews and self.count.current is not self._keras_iterator:
            iterator, before_epoch = self.count.current, 0  # Keras has made the next epoch's already
            start = self._start_of(iterator)
        record: dict[str, Any] = {
            "made": self.count.made,
            "made_at_start": start.made,
            "evaluations": self.evaluations.made,
            "evaluations_at_start": start.evaluations,
            "epoch_ends": self.count.epoch_ends,
            "num_batches": self.count.num_batches,
            "before_epoch": before_epoch,
            "batch": batch,
            "renews": renews,
            "random_at_start": start.random,
        }
        parts = {"random_at_start": start.random_tensors}
        now = {} if renews or start.state is None else keras_internals.serialize_iterator(iterator)
        if now is None:  # a generator behind a shuffle: an iterator that nothing was read from does not show it
            self._start = start = start._replace(state=None)
            self.warn_if_skipping()
        if start.state is not None and now is not None:
            parts |= {"start": start.state, "now": now}
        record["saved"] = "start" in parts
        return record, {f"{part}/{key}": value for part, state in parts.items() for key, value in state.items()}

    def load(self, record: Any, tensors: dict[str, Any]) -> None:
        if self._keras_iterator is None:
            self._pending = (record, tensors, self.is_recovery)  # until Keras has made an iterator
        else:
            self._restore(record, tensors, self.is_recovery)

    def _restore(self, record: Any, tensors: dict[str, Any], is_recovery: bool) -> None:
        if record["saved"]:
            self._restore_saved(record, tensors)
        else:
            if is_recovery:
                raise RecoveryError(
                    "The data can't be taken back to an earlier batch within this process, as the state of its "
                    "iterator can't be saved. Start the script again: it will find its place by skipping."
                )
            self._restore_by_skipping(record, tensors)
        self._before_epoch = 0 if record["renews"] else record["before_epoch"]
        if not is_recovery:
            self.count.count_earlier_batches(self._before_epoch)

    def _restore_saved(self, record: Any, tensors: dict[str, Any]) -> None:
        """Restores the iterator, and along with it the shuffles in its dataset, which order the epochs to come."""
        start, now = _part(tensors, "start"), _part(tensors, "now")
        self.evaluations.make(record["evaluations_at_start"])
        if now and keras_internals.shuffles_in(now) == keras_internals.shuffles_in(start):
            keras_internals.restore_iterator(self.iterator, now)
        else:
            # The state has lost the shuffles. So the start is restored, and the epoch read again where it matters.
            keras_internals.restore_iterator(self.iterator, start)
            if now or keras_internals.repeats_in(start):
                self._skip(record, tensors)
        self._take_start(record, tensors)
        self.count.made = record["made"]
        if record["renews"]:
            self.count.made = record["made_at_start"]
            self._make(record["made"])
        self.evaluations.make(record["evaluations"])
        if record["renews"]:
            self._make_next(record)

    def _restore_by_skipping(self, record: Any, tensors: dict[str, Any]) -> None:
        self.count.reach_epoch_ends(record["epoch_ends"])
        # In the order in which they were made: the validation data may draw from the same shuffle.
        self._make(record["made_at_start"] - 1)
        self.evaluations.make(record["evaluations_at_start"])
        self._make(record["made"])
        self.evaluations.make(record["evaluations"])
        if record["renews"]:
            self._make_next(record)
        else:
            self._take_start(record, tensors)
            self._skip(record, tensors)

    def _take_start(self, record: Any, tensors: dict[str, Any]) -> None:
        state = _part(tensors, "start") if record["saved"] else None
        numbers = record["made_at_start"], record["evaluations_at_start"]
        self._start = _Start(state, *numbers, record["random_at_start"], _part(tensors, "random_at_start"))

    def _make_next(self, record: Any) -> None:
        """Makes the next epoch's iterator, after all others, as the process that goes on does."""
        self._make(record["made"] + 1)
        self._start = self._start_of(self.iterator)

    def _make(self, made: int) -> None:
        while self.count.made < made:
            self.iterator = self.count.make()

    def _skip(self, record: Any, tensors: dict[str, Any]) -> None:
        """Reads again what was read, from the random state in which that was begun."""
        now = read_random_state()
        write_random_state(record["random_at_start"], _part(tensors, "random_at_start"))
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


class _Start(NamedTuple):
    """What there was when the iterator had been made, and nothing read from it."""

    state: dict[str, Any] | None = None
    made: int = 0
    evaluations: int = 0
    random: Any = None
    random_tensors: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's defaults are never changed


def _part(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}/"
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


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
    """Counts the iterators of the validation data: its shuffles depend on their number.

    Args:
        data: The validation data of the `fit`.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._count: keras_internals.IteratorCount | None = None
        self._earlier = 0

    @property
    def made(self) -> int:
        """How many were made, over all processes of the run."""
        return self._earlier + (0 if self._count is None else self._count.made)

    def see(self, epoch_iterator: Any) -> None:
        """Takes the iterator over the validation data that Keras keeps for the length of a `fit`."""
        if epoch_iterator is None or (self._count is not None and self._count.epoch_iterator is epoch_iterator):
            return
        self._count = keras_internals.IteratorCount(epoch_iterator)

    def make(self, number: int) -> None:
        """Makes up for the iterators that earlier processes made, until so many were made in all."""
        missing = max(0, number - self.made)
        self._earlier += missing
        if isinstance(self._data, tf.data.Dataset):
            for _ in range(missing):
                iter(self._data)
