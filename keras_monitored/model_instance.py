"""The model of a run, as hooks that depend on it are given it."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from keras_monitored.configuration import Configuration
from keras_monitored.modes import Mode


@dataclasses.dataclass(frozen=True)
class ModelInstance:
    """A model as a run uses it, handed to every `ModelDependentHook` before the run begins.

    Attributes:
        model: The Keras model.
        mode: What the model is run for.
        configuration: The configuration of the run.
        strategy: The `tf.distribute` strategy that the model was made under.
        optimizer: The compiled optimizer, or `None`.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> ModelInstance(model, Mode.TRAINING, Configuration()).strategy.num_replicas_in_sync
    1
    """

    model: keras.Model
    mode: Mode
    configuration: Configuration

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy that the model was made under; TensorFlow's default one without any."""
        return self.model.distribute_strategy

    @property
    def optimizer(self) -> Any:
        """The compiled optimizer, or `None`."""
        return getattr(self.model, "optimizer", None)
