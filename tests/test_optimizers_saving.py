"""`ClippedOptimizer` saved, loaded, cloned and resumed, and under Keras's callbacks and our hooks."""

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from tests.models import arrays, assert_same_weights, dataset, dense_model, fit, weights_of

# What NumPy says to Keras, which reads its variables through `np.array`.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

OBSERVED = ["gradient_norm", "clipped_gradient_norm", "clip_ratio", "skipped_steps"]


def optimizer_of(**options: Any) -> km.ClippedOptimizer:
    inner = keras.optimizers.Adam(0.1, weight_decay=0.01, use_ema=True, ema_momentum=0.5)
    return km.ClippedOptimizer(inner, km.AutoClipGradients(percentile=30, window=5), **options)


def train(model: keras.Model, batches: int = 6, **options: Any) -> Any:
    return model.fit(*arrays(batches), batch_size=4, shuffle=False, verbose=0, **options)


def test_a_saved_model_loads_without_custom_objects_and_trains_on(tmp_path):
    model = dense_model(optimizer_of(on_nonfinite="skip"))
    train(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, km.ClippedOptimizer)
    assert (loaded.optimizer.clip, loaded.optimizer.on_nonfinite) == (model.optimizer.clip, "skip")
    assert_same_weights(loaded, model)
    train(model), train(loaded)
    assert_same_weights(loaded, model)


def test_a_saved_model_loads_in_half_precision_with_its_loss_scale(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = dense_model(optimizer_of())
        train(model)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(loaded.optimizer.inner_optimizer, km.ClippedOptimizer)
    assert_same_weights(loaded, model)


def test_a_checkpoint_brings_every_slot_back(tmp_path):
    model, other = dense_model(optimizer_of()), dense_model(optimizer_of())
    train(model)
    other.optimizer.build(other.trainable_variables)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "model"))
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
    assert len(weights_of(model)) > 8
    assert_same_weights(other, model)
    train(model), train(other)
    assert_same_weights(other, model)


def test_a_clone_trains_identically():
    original = optimizer_of(on_nonfinite="skip")
    clone = km.ClippedOptimizer.from_config(original.get_config())
    assert clone.get_config() == original.get_config()
    assert clone.inner_optimizer is not original.inner_optimizer
    again = keras.optimizers.deserialize(keras.optimizers.serialize(original))
    models = [dense_model(optimizer) for optimizer in (original, clone, again)]
    for model in models:
        train(model)
    assert_same_weights(models[0], models[1])
    assert_same_weights(models[0], models[2])


def test_a_run_that_is_taken_up_again_ends_with_the_same_bits(tmp_path):
    def run(directory: pathlib.Path, *stops: int) -> keras.Model:
        for stop in stops:
            keras.utils.set_random_seed(0)
            model = dense_model(optimizer_of(on_nonfinite="skip"))
            hooks = [km.CheckpointSaver(trigger=km.StepHookTrigger(3)), km.StopAtStep(last_step=stop)]
            fit(model, dataset(6), hooks, working_dir=directory, epochs=4)
        return model

    assert_same_weights(run(tmp_path / "broken", 4, 9, 20), run(tmp_path / "whole", 20))


def test_hooks_see_norms_ratio_and_skipped_steps():
    class Seen(km.Hook):
        rows: list[Any]

        def begin(self) -> None:
            self.rows = []

        def before_run(self, run_context: km.SessionRunContext) -> km.SessionRunArgs:
            return km.SessionRunArgs(OBSERVED)

        def after_run(self, run_context: km.SessionRunContext, run_values: km.SessionRunValues) -> None:
            self.rows.append([float(value) for value in run_values.results])

    hook = Seen()
    clip = km.ClipGradientsByGlobalNorm(1e-3)
    model = dense_model(km.ClippedOptimizer(keras.optimizers.SGD(0.1), clip, on_nonfinite="skip"))
    x, y = arrays(3)
    x[4:8] = np.nan
    fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(4), [hook])
    norms = [row[0] for row in hook.rows]
    assert norms[0] == norms[1] != norms[2]  # of the last update
    for norm, clipped_norm, ratio, _ in hook.rows:
        np.testing.assert_allclose([clipped_norm, ratio], [1e-3, 1e-3 / norm], rtol=1e-5)
    assert [row[3] for row in hook.rows] == [0, 1, 1]


def test_values_of_a_second_optimizer_carry_its_name():
    class Two(keras.Sequential):
        def train_step(self, batch: Any) -> Any:
            logs = super().train_step(batch)
            self.second.apply([tf.constant([3.0, 4.0])], [extra])
            return logs

    clip, extra = km.ClipGradientsByNorm(1.0), keras.Variable([0.0, 0.0])
    model = Two([keras.Input((2,)), keras.layers.Dense(1)])
    model.second = km.ClippedOptimizer(keras.optimizers.SGD(1.0, name="second"), clip)
    model.second.build([extra])
    model.compile(km.ClippedOptimizer(keras.optimizers.SGD(0.1), clip), "mse")

    class Check(km.Hook):
        def before_run(self, run_context: km.SessionRunContext) -> km.SessionRunArgs:
            return km.SessionRunArgs(["gradient_norm", "second/gradient_norm", "second/clip_ratio"])

        def after_run(self, run_context: km.SessionRunContext, run_values: km.SessionRunValues) -> None:
            np.testing.assert_allclose(run_values.results[1:], [5.0, 0.2], rtol=1e-6)

    fit(model, dataset(2), [Check()])


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_keras_callbacks_act_on_the_wrapped_optimizer(tmp_path, policy):
    def trained(optimizer: Any) -> tuple[keras.Model, list[float]]:
        keras.config.set_dtype_policy(policy)
        try:
            keras.utils.set_random_seed(0)
            model = dense_model(optimizer)
        finally:
            keras.config.set_dtype_policy("float32")
        rates: list[float] = []
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch == 1 else rate),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=1e9),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.TensorBoard(tmp_path / "logs", update_freq=1),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate.numpy()))
            ),
        ]
        train(model, epochs=4, callbacks=callbacks)
        return model, rates

    inner = keras.optimizers.Adam(0.1, use_ema=True)
    ours, rates = trained(km.ClippedOptimizer(inner, km.ClipGradientsByGlobalNorm(1e9)))
    theirs, expected = trained(keras.optimizers.Adam(0.1, use_ema=True))
    assert rates == expected and len(set(rates)) > 2
    assert float(inner.learning_rate.numpy()) == rates[-1]
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert list((tmp_path / "logs" / "train").glob("events*"))


def test_averages_end_up_in_the_weights_after_a_fit():
    model = dense_model(optimizer_of())
    train(model)
    averages = model.optimizer.inner_optimizer._model_variables_moving_average
    for weight, average in zip(model.trainable_variables, averages, strict=True):
        np.testing.assert_array_equal(weight.numpy(), average.numpy())
