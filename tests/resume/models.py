"""The models that are trained. Their first layer notes the ids of the samples it sees.

So the order of all batches is a part of what a run ends with: of the restored past, and of what the resumed process has
read from there on.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import keras_monitored as km

BATCH = 8
layers = keras.layers


class BatchLog(layers.Layer):
    """Notes the ids of every batch that it is trained on; each sample's first number is its id / 64."""

    def __init__(self) -> None:
        super().__init__(dtype="float32")
        self.ids = self.add_weight(shape=(64, BATCH), dtype="int32", initializer="zeros", trainable=False, name="ids")
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            count = tf.shape(x)[0]
            ids = tf.cast(tf.round(tf.reshape(x, (count, -1))[:, 0] * 64), tf.int32)
            row = tf.pad(ids + 1, [[0, BATCH - count]])  # 0 where a batch is not full
            self.ids.assign(tf.tensor_scatter_nd_update(self.ids.value, [[self.steps.value]], [row]))
            self.steps.assign_add(1)
        return x


def network(*middle: keras.Layer, optimizer: Any = "adam", shape: tuple[int, ...] = (5,), **compiled: Any) -> Any:
    """Returns a compiled model with these layers in its middle."""
    ends = [layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input(shape), BatchLog(), *middle, *ends])
    model.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return model


def dropout_network(**compiled: Any) -> Any:
    """Returns a model with random and moving state: Dropout, BatchNormalization and a learning rate schedule."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.8)
    middle = [layers.Dense(8, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3)]
    optimizer = compiled.pop("optimizer", keras.optimizers.SGD(schedule, momentum=0.9))  # traced sooner than Adam
    return network(*middle, optimizer=optimizer, **compiled)


class TwoOptimizers(keras.Model):
    """Trains two networks, one against the other's output, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log = BatchLog()
        self.first = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dropout(0.3), layers.Dense(1)])
        self.second = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dropout(0.2), layers.Dense(1)])
        self.first_loss, self.second_loss = keras.metrics.Mean(name="first"), keras.metrics.Mean(name="second")

    def compile(self, first: Any, second: Any) -> None:
        super().compile(optimizer=first)
        self.second_optimizer = second

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        x = self.log(x, training=True)
        with tf.GradientTape(persistent=True) as tape:
            first = self.first(x, training=True)
            first_loss = tf.reduce_mean(tf.square(first - y))
            second_loss = tf.reduce_mean(tf.square(self.second(x, training=True) - tf.stop_gradient(first)))
        pairs = [(self.optimizer, self.first, first_loss), (self.second_optimizer, self.second, second_loss)]
        for optimizer, net, loss in pairs:
            optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        km.observe("loss", first_loss + second_loss)
        self.first_loss.update_state(first_loss)
        self.second_loss.update_state(second_loss)
        # Not the mean over the epoch: only the step itself knows these two.
        return {"first": self.first_loss.result(), "second": self.second_loss.result(), "last": first_loss}
