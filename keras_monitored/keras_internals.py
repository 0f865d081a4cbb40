"""The places where this package reaches into Keras or TensorFlow; there are no others.

Each says what it is for and on which version it was seen, and `tests/test_keras_internals.py` fails when one moves.
Seen on Keras 3.15.1 and TensorFlow 2.21.0.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.trainers.epoch_iterator import EpochIterator
from tensorflow.python.ops import control_flow_util, stateful_random_ops


class Driver(NamedTuple):
    """The running `fit`, `evaluate` or `predict` that calls a callback."""

    frame: FrameType
    callbacks: keras.callbacks.CallbackList
    epoch_iterator: EpochIterator

    @property
    def epochs(self) -> int:
        """The epoch that `fit` ends before. A `CallbackList` made by hand need not tell it."""
        return int(self.frame.f_locals["epochs"])

    @property
    def validation_data(self) -> Any:
        """The validation data given to `fit`, or split off by it."""
        return self.frame.f_locals.get("validation_data")


def find_driver() -> Driver | None:
    """Finds the `fit`, `evaluate` or `predict` up the stack that calls us.

    A callback is not told of the other callbacks, nor of the iterator of batches: Keras keeps both as local variables.
    Which of them exist, and of which type, is what we rely on; not their names.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        values = list(frame.f_locals.values())
        callbacks = next((v for v in values if isinstance(v, keras.callbacks.CallbackList)), None)
        iterator = next((v for v in values if isinstance(v, EpochIterator)), None)
        if callbacks is not None and iterator is not None:
            return Driver(frame, callbacks, iterator)
        frame = frame.f_back
    return None


def called_from(frame: FrameType) -> bool:
    """Says whether `frame` is on the stack: is it still our `fit` that calls, or a later one?"""
    caller: FrameType | None = sys._getframe(2)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


class IteratorCount:
    """Counts how often Keras makes an iterator of a dataset, since that decides the next reshuffle.

    `EpochIterator._get_iterator` hands out the dataset each time. It is wrapped on the instance, which lives as long as
    one `fit`. A `PyDataset`'s `on_epoch_end` is counted along.
    """

    def __init__(self, epoch_iterator: EpochIterator) -> None:
        self.epoch_iterator = epoch_iterator
        self.made = 0
        self.epoch_ends = 0
        self._dataset = get_dataset = epoch_iterator._get_iterator
        adapter = epoch_iterator.data_adapter
        on_epoch_end = adapter.on_epoch_end

        def counted_dataset() -> Any:
            self.made += 1
            return get_dataset()

        def counted_epoch_end() -> None:
            self.epoch_ends += 1
            on_epoch_end()

        epoch_iterator._get_iterator = counted_dataset
        adapter.on_epoch_end = counted_epoch_end

    def make(self) -> Any:
        """Makes one more iterator, as Keras would have."""
        self.made += 1
        return iter(self._dataset())

    def reach_epoch_ends(self, number: int) -> None:
        """Tells a `PyDataset` of the ends of the epochs that an earlier process has trained."""
        py_dataset = getattr(self.epoch_iterator.data_adapter, "py_dataset", None)
        for _ in range(number - self.epoch_ends):
            self.epoch_ends += 1
            if py_dataset is not None:
                py_dataset.on_epoch_end()

    @property
    def renews(self) -> bool:
        """Says whether Keras will make a new iterator for the next epoch."""
        return self.epoch_iterator.steps_per_epoch is None or self.current is None

    @property
    def current(self) -> Any:
        """The iterator that Keras goes on with, if it keeps one."""
        return self.epoch_iterator._current_iterator

    @property
    def num_batches(self) -> int | None:
        """The batches of an iterator, as far as Keras knows: it takes an unknown number from the first epoch."""
        return self.epoch_iterator._num_batches

    @num_batches.setter
    def num_batches(self, number: int | None) -> None:
        self.epoch_iterator._num_batches = number

    def count_earlier_batches(self, number: int) -> None:
        """Tells Keras of batches taken from this iterator in earlier epochs: it renews the iterator by their number."""
        self.epoch_iterator._steps_seen += number


def element_spec(epoch_iterator: EpochIterator) -> Any:
    """Returns the spec of the batches, which Keras's iterator of epochs keeps in its dataset."""
    return epoch_iterator._distributed_dataset.element_spec


def silence_end_of_data(epoch_iterator: EpochIterator) -> None:
    """Keeps Keras from warning that the data ran out, where a stop ends the epoch."""
    epoch_iterator._interrupted_warning = lambda: None


def works_per_batch(callback: keras.callbacks.Callback, *, but_for_display: bool = False) -> bool:
    """Says whether a callback does something at the end or the beginning of training batches.

    `ModelCheckpoint` and `BackupAndRestore` override the methods and do nothing in them when they save per epoch.
    """
    saves_per_epoch = isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore))
    if saves_per_epoch and getattr(callback, "save_freq", None) == "epoch":
        return False
    if but_for_display and isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, n), "__func__", None) is not getattr(base, n) for n in names)


def evaluation_iterator(model: keras.Model) -> EpochIterator | None:
    """Returns the iterator over the validation data that Keras keeps for the length of a `fit`."""
    return getattr(model, "_eval_epoch_iterator", None)


def set_initial_epoch(model: keras.Model, epoch: int | None) -> Any:
    """Sets the epoch that the running `fit` starts from, and returns what was there before."""
    previous = model._initial_epoch
    model._initial_epoch = epoch
    return previous


def symbolic_build(model: keras.Model, batch_spec: Any) -> None:
    """Builds model, metrics, loss and optimizer from the spec of a batch without running anything."""
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=batch_spec)


def without_optionals(data: Any) -> Any:
    """Puts `None` where Keras's adapters had to use an empty `Optional`, in a batch or its spec."""
    return tf.nest.map_structure(
        lambda part: None if isinstance(part, (tf.experimental.Optional, tf.OptionalSpec)) else part, data
    )


def serialize_iterator(iterator: Any) -> Any:
    """Returns the state of a `tf.data` iterator as tensors by name, or `None` if it can't be saved.

    The parts of a checkpoint are public, but not for values that are written later, in the background.
    """
    if not isinstance(iterator, tf.data.Iterator) or not hasattr(iterator, "_serialize_to_tensors"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about dataset options, which say nothing about saving
        try:
            return dict(iterator._serialize_to_tensors())
        except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError, NotImplementedError):
            return None


def restore_iterator(iterator: Any, tensors: dict[str, Any]) -> None:
    """Puts a `tf.data` iterator where `serialize_iterator` found it."""
    iterator._restore_from_tensors(tensors)


def shuffles_in(tensors: dict[str, Any]) -> int:
    """Counts the shuffles that the state of an iterator holds.

    A shuffle carries the order of the epochs to come. It is missing from the state once the steps behind it have read
    the last of its elements ahead, which can be several batches before the epoch's end.
    """
    return sum(tf.io.serialize_tensor(t).numpy().count(b"epoch_num_random_samples") for t in tensors.values())


def repeats_in(tensors: dict[str, Any]) -> bool:
    """Says whether a part of the data is repeated within an iterator, going by the iterator's state."""
    return any(b"Repeat" in tf.io.serialize_tensor(t).numpy() for t in tensors.values())


def global_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns Keras's global seed generator if something has used it; asking Keras would make one."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)


def global_generator() -> tf.random.Generator | None:
    """Returns TensorFlow's global generator if something has used it; asking TensorFlow would make one."""
    return stateful_random_ops.global_generator


def put_train_function(model: keras.Model, name: str, function: Callable[..., Any] | None) -> Any:
    """Puts a function where `fit`, `evaluate` and `predict` look theirs up at every step; returns the previous one."""
    previous = getattr(model, name)
    setattr(model, name, function)
    return previous


def change_summed_gradients(optimizer: keras.optimizers.Optimizer, change: Callable[..., Any]) -> None:
    """Puts `change` where an optimizer sums its gradients over replicas; it is called with pairs yet to be summed.

    The one place that comes after unscaling and after the mean of accumulated gradients, and before the update. What
    Keras has for clipping comes before the sum. Set on the instance, as optimizers override everything around it.
    """
    optimizer.__dict__["_all_reduce_sum_gradients"] = change


def changes_summed_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Says whether `change_summed_gradients` was called for an optimizer."""
    return "_all_reduce_sum_gradients" in vars(optimizer)


def sum_gradients(optimizer: keras.optimizers.Optimizer, grads_and_vars: list[Any]) -> list[Any]:
    """Sums gradients over replicas as an optimizer does, one all-reduce a gradient."""
    return type(optimizer)._all_reduce_sum_gradients(optimizer, grads_and_vars)


def accumulators_of(optimizer: keras.optimizers.Optimizer, variables: list[Any]) -> list[Any]:
    """Returns where an optimizer accumulates the gradients of variables, if it does."""
    if not optimizer.gradient_accumulation_steps:
        return []
    return [optimizer._accumulated_gradients[optimizer._get_variable_index(variable)] for variable in variables]


def overwritten_with_gradient(variable: Any) -> bool:
    """Says whether the "gradient" of a variable is its next value (float8 scales), and no gradient to be summed."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def forget_base_variables(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets an optimizer look elsewhere for the counter and the learning rate that Keras gives to every one."""
    for name in ("_iterations", "_learning_rate"):
        delattr(optimizer, name)


def added_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables of an optimizer but for those two, which come first.

    They can't be taken out: the list is tracked for checkpoints, and may only grow.
    """
    return list(optimizer._variables[2:])


def enclosing_loss_scale(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.LossScaleOptimizer | None:
    """Finds the loss scale that is building the optimizer within it: an inner optimizer is not told of its outer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.optimizers.LossScaleOptimizer) and caller.inner_optimizer is optimizer:
            return caller
        frame = frame.f_back
    return None


def ask_all_replicas(loss_scale: keras.optimizers.LossScaleOptimizer) -> None:
    """Makes a loss scale see the gradients of all replicas where it asks whether they are finite.

    It takes the answer of the first replica for all: an Inf on another one is applied, and the scale stays (Keras
    3.15.1). `check_finite` runs on every replica, before they are summed.
    """
    if "check_finite" in vars(loss_scale):
        return
    check_finite = loss_scale.check_finite

    def check_finite_everywhere(grads: Any) -> Any:
        bad = tf.cast(tf.logical_not(check_finite(grads)), tf.float32)
        return tf.equal(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, bad), 0)

    loss_scale.__dict__["check_finite"] = check_finite_everywhere


def compiled_by_xla() -> bool:
    """Says whether the function being traced is one with `jit_compile`."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def merge_calls_needed() -> bool:
    """Says whether replicas are threads that have to meet before a branch: `MirroredStrategy`, not several workers."""
    return not tf.__internal__.distribute.strategy_supports_no_merge_call()
