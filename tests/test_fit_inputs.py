"""Models and data of many kinds train under hooks as they do without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from tests.models import Recorder, arrays, assert_same_weights, dataset, dense_model, fit, weights_of

Made = tuple[keras.Model, Any, dict[str, Any]]
SLICES = tf.data.Dataset.from_tensor_slices


def unbuilt() -> Made:
    model = keras.Sequential([keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model, dataset(3), {}


def dict_inputs_and_nested_outputs() -> Made:
    a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    outputs = {"p": keras.layers.Dense(1, name="p")(joined), "q": keras.layers.Dense(2, name="q")(joined)}
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile("adam", {"p": "mse", "q": "mae"}, metrics={"q": ["mse"]})
    x = {"a": np.ones((8, 2), np.float32), "b": np.arange(24, dtype=np.float32).reshape(8, 3)}
    y = {"p": np.ones((8, 1), np.float32), "q": np.zeros((8, 2), np.float32)}
    return model, SLICES((x, y)).batch(4), {}


class SumOfRows(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.reduce_sum(x, axis=1, keepdims=True)


def ragged() -> Made:
    inputs = keras.Input((None,), ragged=True)
    model = keras.Model(inputs, keras.layers.Dense(1)(SumOfRows()(inputs)))
    model.compile("adam", "mse")
    x = tf.ragged.constant([[1.0, 2.0], [3.0], [], [4.0, 5.0, 6.0]])
    return model, SLICES((x, np.ones((4, 1), np.float32))).batch(2), {}


def sparse() -> Made:
    inputs = keras.Input((6,), sparse=True)
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("adam", "mse")
    x = tf.sparse.from_dense(np.eye(6, dtype=np.float32)[[0, 3, 5, 1]])
    return model, SLICES((x, np.ones((4, 1), np.float32))).batch(2), {}


def class_weight() -> Made:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    x, y = arrays(3)
    return model, (x, (y[:, 0] > 0).astype(np.int32)), {"class_weight": {0: 1.0, 1: 3.0}, "batch_size": 4}


def sample_weight() -> Made:
    x, y = arrays(3)
    return dense_model("adam"), (x, y), {"sample_weight": np.linspace(0, 1, 12), "batch_size": 4}


def mixed_float16() -> Made:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    return model, dataset(3), {"epochs": 3}


def dropout_and_batch_normalization() -> Made:
    layers = [
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)), "mse")
    return model, dataset(4), {}


KINDS = [
    unbuilt,
    dict_inputs_and_nested_outputs,
    ragged,
    sparse,
    class_weight,
    sample_weight,
    mixed_float16,
    dropout_and_batch_normalization,
]


@pytest.mark.parametrize(("make", "loop"), [*((make, 1) for make in KINDS), (ragged, "auto"), (KINDS[-1], "auto")])
def test_as_without_hooks(make: Callable[[], Made], loop: Any) -> None:
    def trained(hooks: bool) -> tuple[keras.Model, Any]:
        keras.utils.set_random_seed(3)
        model, data, options = make()
        x, y = data if isinstance(data, tuple) else (data, None)
        arguments = {"y": y, "epochs": 2, "verbose": 0, "shuffle": False, **options}
        if not hooks:
            return model, model.fit(x, **arguments)
        hook = Recorder(fetches="loss", every=1 if loop == 1 else 5)
        history = fit(model, x, [km.NaNChecker(), hook], steps_per_loop=loop, **arguments)
        assert hook.calls[-1].startswith("end") and np.all(np.isfinite(hook.values))
        return model, history

    (plain, expected), (model, found) = trained(False), trained(True)
    assert_same_weights(model, plain)
    assert found.history == expected.history


@pytest.fixture
def mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


class TestReplicas:
    """Two replicas, on the two logical CPUs of every test run."""

    def test_loss_and_steps(self, mirrored: tf.distribute.Strategy) -> None:
        with mirrored.scope():
            model = dense_model(keras.optimizers.SGD(0.0))
        single = dense_model(keras.optimizers.SGD(0.0))
        hooks = [Recorder(fetches=["loss", "global_step"]), Recorder(fetches=["loss", "global_step"])]
        fit(model, dataset(3), [hooks[0], km.NaNChecker(("loss", "gradients"))], epochs=2)
        fit(single, dataset(3), [hooks[1]], epochs=2)
        assert hooks[0].calls == hooks[1].calls
        np.testing.assert_allclose(hooks[0].values, hooks[1].values, rtol=1e-5)

    def test_as_plain_keras(self, mirrored: tf.distribute.Strategy) -> None:
        with mirrored.scope():
            plain, model = dense_model("adam"), dense_model("adam")
        expected = plain.fit(dataset(3), epochs=2, verbose=0, shuffle=False)
        found = fit(model, dataset(3), [Recorder()], epochs=2)
        for ours, theirs in zip(weights_of(model), weights_of(plain), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-6)

    def test_a_killed_run_goes_on_by_skipping(
        self, mirrored: tf.distribute.Strategy, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def trained(directory: Path | None, stop: int | None) -> keras.Model:
            keras.utils.set_random_seed(1)
            with mirrored.scope():
                model = dense_model("adam")
            hooks = [] if stop is None else [km.StopAtStep(last_step=stop)]
            fit(model, dataset(4), hooks, epochs=2, working_dir=directory)
            return model

        unbroken = trained(None, None)
        trained(tmp_path, 6)
        assert "The position in the data can't be saved" in caplog.text
        resumed = trained(tmp_path, None)
        assert int(resumed.optimizer.iterations.numpy()) == 8
        assert_same_weights(resumed, unbroken)
