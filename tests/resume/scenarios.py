"""The trainings whose resume is tested: each function sets one up, the same way in every process.

A model's first layer writes the ids of the samples it is trained on into a variable. So the order of all batches is a
part of what a run ends with: of the restored past, and of what the resumed process has read from there on.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

import keras_monitored as km
from tests.resume import data

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


@dataclasses.dataclass
class Scenario:
    """One training."""

    model: keras.Model
    fit: dict[str, Any]
    epochs: int = 4
    before: Sequence[keras.callbacks.Callback] = ()
    """Callbacks that stand before the HookCallback in the list."""
    after: Sequence[keras.callbacks.Callback] = ()
    stateful: Sequence[keras.callbacks.Callback] = ()
    hooks: Sequence[km.Hook] = ()
    weight_files: Sequence[str] = ()
    """Files of weights that belong to the outcome."""


SCENARIOS: dict[str, Callable[[str], Scenario]] = {}


def scenario(make: Callable[[str], Scenario]) -> Callable[[str], Scenario]:
    """Registers a function of the working directory under its name."""
    SCENARIOS[make.__name__] = make
    return make


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


# Data -------------------------------------------------------------------------------------------------------------


@scenario
def seeded_shuffle(directory: str) -> Scenario:
    return Scenario(dropout_network(), {"x": data.shuffled().batch(BATCH).prefetch(2)})


@scenario
def repeated(directory: str) -> Scenario:
    return Scenario(dropout_network(), {"x": data.shuffled().repeat().batch(BATCH).prefetch(2), "steps_per_epoch": 6})


@scenario
def repeated_within_epochs(directory: str) -> Scenario:
    # Each pass shuffles anew, two in every epoch: by the number of iterators alone the next order is not known.
    return Scenario(dropout_network(), {"x": data.shuffled().batch(BATCH).repeat(2)}, epochs=3)


@scenario
def finite_with_steps(directory: str) -> Scenario:
    # Keras goes on with the same iterator, and makes a new one where it ends: in epoch 1 after two batches.
    return Scenario(dropout_network(), {"x": data.shuffled().batch(BATCH), "steps_per_epoch": 5}, epochs=6)


@scenario
def unknown_length(directory: str) -> Scenario:
    some = data.shuffled().filter(lambda x, y: x[1] > -1.5)
    return Scenario(dropout_network(), {"x": some.batch(BATCH).prefetch(2)})


@scenario
def arrays(directory: str) -> Scenario:
    x, y = data.samples()
    return Scenario(dropout_network(), {"x": x, "y": y, "batch_size": BATCH, "shuffle": True})


@scenario
def validation(directory: str) -> Scenario:
    x, y = data.samples(seed=1, number=20)
    return Scenario(dropout_network(), {"x": data.shuffled().batch(BATCH), "validation_data": (x, y)})


@scenario
def shared_shuffle(directory: str) -> Scenario:
    both = data.dataset().shuffle(data.NUMBER, seed=5)  # each new iterator of either reshuffles for both
    train, rest = both.take(36).batch(BATCH), both.skip(36).batch(BATCH)
    return Scenario(dropout_network(), {"x": train, "validation_data": rest})


@scenario
def generator(directory: str) -> Scenario:
    return Scenario(dropout_network(), {"x": data.endless_batches(BATCH), "steps_per_epoch": 6})


@scenario
def py_dataset(directory: str) -> Scenario:
    return Scenario(dropout_network(), {"x": data.OwnOrder(BATCH)})


@scenario
def from_generator(directory: str) -> Scenario:
    return Scenario(dropout_network(), {"x": data.generated().shuffle(20, seed=3).batch(BATCH)})


@scenario
def py_function(directory: str) -> Scenario:
    return Scenario(dropout_network(), {"x": data.shuffled().map(data.through_python).batch(BATCH)})


@scenario
def shared_py_function(directory: str) -> Scenario:
    both = data.shuffled()  # the validation data draws from the shuffle too, and no iterator can be saved
    return Scenario(
        dropout_network(), {"x": both.map(data.through_python).batch(BATCH), "validation_data": both.batch(9)}
    )


@scenario
def interleave(directory: str) -> Scenario:
    return Scenario(dropout_network(), {"x": data.interleaved().batch(BATCH)})


# Models -----------------------------------------------------------------------------------------------------------


@scenario
def steps_per_execution(directory: str) -> Scenario:
    return Scenario(dropout_network(steps_per_execution=3), {"x": data.shuffled().batch(BATCH)})


@scenario
def unknown_length_many(directory: str) -> Scenario:
    some = data.shuffled().filter(lambda x, y: x[1] > -1.5)
    return Scenario(dropout_network(steps_per_execution=3), {"x": some.batch(BATCH)})


@scenario
def varying_length(directory: str) -> Scenario:
    # Keras takes the number of batches from the first epoch, and cuts longer ones off.
    some = data.shuffled().batch(BATCH).filter(lambda x, y: tf.reduce_sum(x[:, 1]) > -1)
    return Scenario(dropout_network(), {"x": some}, epochs=8)


@scenario
def run_eagerly(directory: str) -> Scenario:
    return Scenario(dropout_network(run_eagerly=True), {"x": data.shuffled().batch(BATCH)}, epochs=3)


@scenario
def jit_compile(directory: str) -> Scenario:
    return Scenario(dropout_network(jit_compile=True), {"x": data.shuffled().batch(BATCH, drop_remainder=True)})


@scenario
def mixed_float16(directory: str) -> Scenario:
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = dropout_network(optimizer=keras.optimizers.Adam(0.01))
    return Scenario(model, {"x": data.shuffled().batch(BATCH)})


@scenario
def augmentation(directory: str) -> Scenario:
    middle = [
        layers.RandomFlip(),
        layers.RandomRotation(0.2),
        layers.RandomContrast(0.3),
        layers.Conv2D(4, 3, activation="relu"),
        layers.SpatialDropout2D(0.2),
        layers.Flatten(),
        layers.Dropout(0.3),
        layers.Dense(8, activation="relu"),
        layers.GaussianNoise(0.1),
        layers.Dropout(0.3),
    ]
    return Scenario(network(*middle, shape=(6, 6, 1)), {"x": data.shuffled(shape=(6, 6, 1)).batch(BATCH)})


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


@scenario
def two_optimizers(directory: str) -> Scenario:
    model = TwoOptimizers()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01, momentum=0.5))
    return Scenario(model, {"x": data.shuffled().batch(BATCH)})


# Callbacks --------------------------------------------------------------------------------------------------------


@scenario
def keras_callbacks(directory: str) -> Scenario:
    best = os.path.join(directory, "best.weights.h5")
    stateful = [
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5, cooldown=1),
        keras.callbacks.ModelCheckpoint(best, "val_loss", save_best_only=True, save_weights_only=True),
    ]
    fit = {"x": data.shuffled().batch(BATCH), "validation_data": data.samples(seed=1, number=20)}
    model = dropout_network(optimizer=keras.optimizers.Adam(0.1))
    return Scenario(model, fit, epochs=12, after=stateful, stateful=stateful, weight_files=[best])


@scenario
def schedule_before(directory: str) -> Scenario:
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)
    model = dropout_network(optimizer=keras.optimizers.Adam(0.05))
    return Scenario(model, {"x": data.shuffled().batch(BATCH)}, before=[scheduler])


@scenario
def schedule_after(directory: str) -> Scenario:
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)
    model = dropout_network(optimizer=keras.optimizers.Adam(0.05))
    return Scenario(model, {"x": data.shuffled().batch(BATCH)}, after=[scheduler])
