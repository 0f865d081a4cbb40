"""The data of the trainings: 52 samples, which make seven batches, the last of them not full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

NUMBER = 52


def samples(seed: int = 0, number: int = NUMBER, shape: tuple[int, ...] = (5,)) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets; the first number of each input is its id / 64."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, *shape)).astype("float32")
    y = x.reshape(number, -1).sum(axis=1, keepdims=True) + rng.normal(size=(number, 1)).astype("float32")
    x.reshape(number, -1)[:, 0] = np.arange(number) / 64
    return x, y


def dataset(shape: tuple[int, ...] = (5,)) -> tf.data.Dataset:
    """Returns the samples in order."""
    return tf.data.Dataset.from_tensor_slices(samples(shape=shape))


def shuffled(shape: tuple[int, ...] = (5,)) -> tf.data.Dataset:
    """Returns the samples in another order each time, through a buffer that does not hold them all."""
    return dataset(shape).shuffle(20, seed=3)


def interleaved() -> tf.data.Dataset:
    """Returns the samples from four shuffled parts in turn."""
    x, y = samples()

    def part(index: tf.Tensor) -> tf.data.Dataset:
        start = index * 13
        own = tf.data.Dataset.from_tensor_slices((x, y)).skip(start).take(13)
        return own.shuffle(6, seed=11)

    return tf.data.Dataset.range(4).shuffle(4, seed=2).interleave(part, cycle_length=3)


def through_python(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Passes a sample through Python code."""
    passed = tf.py_function(lambda part: part, [x], tf.float32)
    return tf.ensure_shape(passed, x.shape), y


def generated() -> tf.data.Dataset:
    """Returns the samples from a Python generator."""
    x, y = samples()
    spec = (tf.TensorSpec((5,), tf.float32), tf.TensorSpec((1,), tf.float32))
    return tf.data.Dataset.from_generator(lambda: zip(x, y, strict=True), output_signature=spec)


def endless_batches(size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches in an order of the generator's own."""
    x, y = samples()
    rng = np.random.default_rng(9)
    while True:
        chosen = rng.choice(NUMBER, size, replace=False)
        yield x[chosen], y[chosen]


class OwnOrder(keras.utils.PyDataset):
    """Shuffles at the end of every epoch, by a generator of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._samples = samples()
        self._rng = np.random.default_rng(5)
        self._order = self._rng.permutation(NUMBER)

    def __len__(self) -> int:
        return -(-NUMBER // self._size)

    def __getitem__(self, index: int) -> Any:
        chosen = self._order[index * self._size : (index + 1) * self._size]
        return self._samples[0][chosen], self._samples[1][chosen]

    def on_epoch_end(self) -> None:
        self._order = self._rng.permutation(NUMBER)
