"""Counters of a run: its global step and its epoch, counted where the steps run."""

from __future__ import annotations

import tensorflow as tf


class Counter:
    """Counts events in a TensorFlow variable, so that compiled loops and checkpoints see the same number.

    The global step counts steps that were run. `optimizer.iterations` is another number: it doesn't move when a loss
    scale skips an update, and moves more often with several optimizers.

    Args:
        name: Name of the counter, `"global_step"` or `"global_epoch"` for those of a run.
        initial_value: Where counting starts. Defaults to 0.

    Example:

    >>> counter = Counter("global_step")
    >>> _ = counter.increment(3)
    >>> int(counter)
    3
    """

    def __init__(self, name: str, initial_value: int = 0) -> None:
        if isinstance(initial_value, bool) or not isinstance(initial_value, int) or initial_value < 0:
            raise ValueError(
                f"`initial_value` must be an integer of at least 0. Received: initial_value={initial_value!r}"
            )
        self.name = name
        # Without this aggregation the replicas of a strategy would average or add up the counts.
        self.variable = tf.Variable(
            initial_value,
            dtype=tf.int64,
            trainable=False,
            name=name,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    def increment(self, by: int | tf.Tensor = 1) -> tf.Tensor:
        """Adds `by` in one operation, in a graph or eagerly, and returns the new count, an int64 scalar."""
        return tf.identity(self.variable.assign_add(tf.cast(by, tf.int64)))

    def assign(self, value: int) -> None:
        """Sets the count."""
        self.variable.assign(value)

    def __int__(self) -> int:
        return int(self.variable.numpy())

    def __repr__(self) -> str:
        return f"Counter({self.name!r}, {int(self)})"
