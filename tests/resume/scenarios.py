"""The trainings whose resume is tested: each function sets one up, the same way in every process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

import keras_monitored as km
from tests.resume import data
from tests.resume.models import BATCH, TwoOptimizers, dropout_network, network

layers = keras.layers


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
    weight_files: Sequence[str] = ()
    """Files of weights that belong to the outcome."""


SCENARIOS: dict[str, Callable[[str], Scenario]] = {}


def scenario(make: Callable[[str], Scenario]) -> Callable[[str], Scenario]:
    """Registers a function of the working directory under its name."""
    SCENARIOS[make.__name__] = make
    return make


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


@scenario
def two_optimizers(directory: str) -> Scenario:
    model = TwoOptimizers()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01, momentum=0.5))
    return Scenario(model, {"x": data.shuffled().batch(BATCH)})


@scenario
def clipped(directory: str) -> Scenario:
    optimizer = km.ClippedOptimizer(
        keras.optimizers.Adam(0.01), km.AutoClipGradients(30, window=9), on_nonfinite="skip"
    )
    return Scenario(dropout_network(optimizer=optimizer), {"x": data.shuffled().batch(BATCH)})


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
