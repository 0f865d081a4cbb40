"""`ClippedOptimizer` on one replica: what it clips, what it leaves to the wrapped optimizer, what it refuses."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from keras_monitored import keras_internals
from tests.models import arrays, dense_model, weights_of

INF, NAN = float("inf"), float("nan")
NO_CLIPPING = km.ClipGradientsByGlobalNorm(1e9)


def clipped(clip: km.ClipGradients | None = None, optimizer: Any = None, **options: Any) -> km.ClippedOptimizer:
    return km.ClippedOptimizer(optimizer or keras.optimizers.SGD(1.0), clip or km.ClipGradientsByNorm(1.0), **options)


def on_variable(optimizer: Any, *steps: Any, variable: Any = (0.0, 0.0)) -> list[list[float]]:
    """Applies a gradient a step; returns what the variable is after each."""
    weights = keras.Variable(np.asarray(variable, np.float32))
    optimizer.build([weights])
    apply = tf.function(lambda gradient: optimizer.apply([gradient], [weights]), autograph=False)
    seen = []
    for gradient in steps:
        apply(tf.constant(gradient, tf.float32))
        seen.append(weights.numpy().tolist())
    return seen


def trained(optimizer: Any, epochs: int = 2, callbacks: Any = (), **options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = dense_model(optimizer, **options)
    model.fit(*arrays(6), batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.1, weight_decay=0.1),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
        lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=3),
        lambda: keras.optimizers.Nadam(0.1, loss_scale_factor=8.0),
        lambda: keras.optimizers.Lion(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
    ],
)
@pytest.mark.parametrize("on_nonfinite", ["propagate", "skip", "raise"])
def test_without_anything_to_clip_it_is_the_wrapped_optimizer(make, on_nonfinite):
    ours, theirs = trained(clipped(NO_CLIPPING, make(), on_nonfinite=on_nonfinite)), trained(make())
    inner = [variable.numpy() for variable in ours.optimizer.inner_optimizer.variables]
    for one, other in zip([*ours.get_weights(), *inner], weights_of(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_accumulated_gradients_are_clipped_once_when_they_are_used():
    optimizer = clipped(optimizer=keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
    seen = on_variable(optimizer, [30.0, 0.0], [-29.0, 0.0], [3.0, 4.0], [3.0, 4.0])
    np.testing.assert_allclose(seen, [[0, 0], [-0.5, 0], [-0.5, 0], [-1.1, -0.8]], rtol=1e-6)
    assert float(optimizer.observed_values()["gradient_norm"]) == 5.0


def test_unscaled_gradients_are_clipped():
    optimizer = clipped(optimizer=keras.optimizers.SGD(1.0, loss_scale_factor=100.0))
    assert float(optimizer.scale_loss(2.0)) == 200.0
    np.testing.assert_allclose(
        on_variable(optimizer, [50.0, 0.0], [300.0, 400.0]), [[-0.5, 0], [-1.1, -0.8]], rtol=1e-6
    )


def test_sparse_gradients_can_be_unscaled():
    table = keras.Variable(np.zeros((3, 1), np.float32))
    optimizer = clipped(optimizer=keras.optimizers.SGD(1.0, loss_scale_factor=2.0))
    optimizer.build([table])
    optimizer.apply([tf.IndexedSlices([[1.0], [0.5]], tf.constant([1, 1]), tf.constant([3, 1]))], [table])
    np.testing.assert_allclose(table.numpy(), [[0], [-0.75], [0]])


def test_weight_decay_is_not_clipped():
    optimizer = clipped(optimizer=keras.optimizers.SGD(1.0, weight_decay=0.5))
    np.testing.assert_allclose(on_variable(optimizer, [3.0, 4.0], variable=[8.0, 8.0]), [[3.4, 3.2]], rtol=1e-6)


def test_embeddings_keep_the_bound_that_keras_breaks():
    def norm_of_update(optimizer: Any) -> float:
        keras.utils.set_random_seed(0)
        layers = [keras.Input((3,)), keras.layers.Embedding(5, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(optimizer, "mse")
        before = model.get_weights()
        ids = np.random.default_rng(0).integers(0, 5, (16, 3))
        model.fit(ids, 9 * np.ones((16, 1)), batch_size=16, verbose=0)
        return float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(before, model.get_weights(), strict=True))))

    assert norm_of_update(clipped(km.ClipGradientsByGlobalNorm(1.0))) == pytest.approx(1.0, rel=1e-5)
    assert norm_of_update(keras.optimizers.SGD(1.0, global_clipnorm=1.0)) > 1.05


@pytest.mark.parametrize("accumulation", [None, 2])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_skip_leaves_everything_as_it_was(bad, accumulation):
    inner = keras.optimizers.Adam(
        0.1, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=accumulation
    )
    optimizer = clipped(km.AutoClipGradients(), inner, on_nonfinite="skip")
    weights = keras.Variable(np.ones(2, np.float32))
    optimizer.build([weights])

    def state() -> list[Any]:
        return [v.numpy() for v in [weights, *optimizer.variables] if "skipped" not in v.path]

    apply = tf.function(lambda gradient: optimizer.apply([gradient], [weights]), autograph=False)
    for step, gradient in enumerate([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], 1):
        apply(tf.constant(gradient))
        before = state()
        apply(tf.constant([bad, 1.0]))
        for ours, old in zip(state(), before, strict=True):
            np.testing.assert_array_equal(ours, old)
        assert int(optimizer.observed_values()["skipped_steps"]) == step
    assert int(optimizer.inner_optimizer._iterations) == 3


def test_skip_sees_a_sum_of_accumulated_gradients_that_overflows():
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = clipped(optimizer=inner, on_nonfinite="skip")
    seen = on_variable(optimizer, [3e38, 0.0], [3e38, 0.0], [-3e38, 2.0])
    np.testing.assert_allclose(seen, [[0, 0], [0, 0], [0, -1]])
    assert int(optimizer.observed_values()["skipped_steps"]) == 1


def test_large_gradients_are_not_mistaken_for_infinite_ones():
    optimizer = clipped(on_nonfinite="skip")
    np.testing.assert_allclose(on_variable(optimizer, [3e30, 4e30]), [[-0.6, -0.8]], rtol=1e-6)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_raise_ends_the_step_before_any_change(run_eagerly):
    model = dense_model(
        clipped(optimizer=keras.optimizers.Adam(weight_decay=0.1), on_nonfinite="raise"), run_eagerly=run_eagerly
    )
    model.optimizer.build(model.trainable_variables)
    before, x = weights_of(model), np.array([[NAN, 1.0]] * 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Gradients are not finite.*Nothing has been updated"):
        model.fit(x, np.ones((4, 1)), verbose=0)
    for ours, old in zip(weights_of(model), before, strict=True):
        np.testing.assert_array_equal(ours, old)


def test_xla_skips_too():
    model = dense_model(clipped(on_nonfinite="skip"), jit_compile=True)
    x, y = arrays(3)
    x[4:8] = NAN
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert np.all(np.isfinite(model.get_weights()[0])) and int(model.optimizer.iterations) == 2
    assert int(model.optimizer.observed_values()["skipped_steps"]) == 1


@pytest.mark.parametrize("on_nonfinite", ["propagate", "skip"])
def test_variables_that_are_overwritten_with_their_gradient_are_not_clipped(on_nonfinite):
    scale, kernel = keras.Variable(1.0), keras.Variable(1.0)
    scale.overwrite_with_gradient = True
    optimizer = clipped(on_nonfinite=on_nonfinite)
    optimizer.build([scale, kernel])
    optimizer.apply([tf.constant(300.0), tf.constant(300.0)], [scale, kernel])
    assert (float(scale), float(kernel)) == (300.0, 0.0)


def test_raise_is_refused_where_xla_would_drop_it():
    model = dense_model(clipped(on_nonfinite="raise"), jit_compile=True)
    with pytest.raises(ValueError, match="can't work in a step compiled by XLA"):
        model.fit(*arrays(1), verbose=0)


def test_propagate_hides_and_spoils_nothing():
    np.testing.assert_array_equal(on_variable(clipped(km.ClipGradientsByValue(-1, 1)), [INF, 3.0]), [[-INF, -1.0]])
    np.testing.assert_array_equal(on_variable(clipped(), [NAN, 3.0]), [[NAN, 0.0]])


# Half precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("on_nonfinite", ["propagate", "skip"])
def test_mixed_precision_equals_float32(by_hand, on_nonfinite):
    def train(policy: str) -> keras.Model:
        keras.utils.set_random_seed(0)
        clip = km.ClipGradientsByGlobalNorm(0.005)
        optimizer: Any = clipped(clip, keras.optimizers.SGD(10.0), on_nonfinite=on_nonfinite)
        if by_hand and policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        init = keras.initializers.GlorotUniform(seed=7)
        layers = [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer=init, dtype=policy)]
        model = keras.Sequential(layers)
        model.dtype_policy = policy
        model.compile(optimizer, "mse", loss_weights=[0.01])  # so small that the first scale is not too large
        model.fit(*arrays(20), batch_size=4, shuffle=False, verbose=0)
        return model

    half, single = train("mixed_float16"), train("float32")
    assert isinstance(half.optimizer, keras.optimizers.LossScaleOptimizer)
    assert isinstance(half.optimizer.inner_optimizer, km.ClippedOptimizer)
    for ours, theirs in zip(half.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-3)
    assert int(half.optimizer.iterations) == 20


def test_a_loss_scale_takes_over_from_a_fixed_one():
    optimizer = keras.optimizers.LossScaleOptimizer(clipped(optimizer=keras.optimizers.SGD(1.0, loss_scale_factor=4.0)))
    assert optimizer.inner_optimizer.inner_optimizer.loss_scale_factor is None


# What it is asked for, and refuses -----------------------------------------------------------------------------------


def test_what_belongs_to_the_wrapped_optimizer_is_read_and_written_through():
    inner = keras.optimizers.Adam(0.25, weight_decay=0.1, name="inner")
    optimizer = clipped(optimizer=inner)
    assert optimizer.name == "inner" and not hasattr(optimizer, "optimizers") and not optimizer.built
    optimizer.learning_rate, optimizer.weight_decay = 0.5, 0.2
    assert (float(inner.learning_rate), inner.weight_decay) == (0.5, 0.2)
    assert optimizer.learning_rate is inner.learning_rate and optimizer.iterations is inner.iterations
    kernel = keras.Variable([1.0, 2.0], name="kernel")
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    optimizer.build([kernel])
    assert optimizer.built and inner.built and not inner._use_weight_decay(kernel)
    assert optimizer.variables[: len(inner.variables)] == inner.variables
    names = ["gradient_norm", "clipped_gradient_norm", "skipped_steps"]
    assert [v.name for v in optimizer.variables[len(inner.variables) :]] == names
    assert optimizer.apply_gradients([(tf.constant([1.0, 1.0]), kernel)]) is inner._iterations
    assert int(optimizer.iterations) == 1
    with pytest.raises(AttributeError, match="no attribute 'beta_7'"):
        _ = optimizer.beta_7


def test_a_schedule_raises_what_it_raises_unwrapped():
    inner = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))
    with pytest.raises(TypeError, match="learning rate is not settable"):
        clipped(optimizer=inner).learning_rate = 0.5


@pytest.mark.parametrize("name", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_an_optimizer_that_clips_is_refused(name):
    with pytest.raises(ValueError, match=rf"must not clip by itself.*Received one with {name}=1\.0"):
        clipped(optimizer=keras.optimizers.SGD(**{name: 1.0}))


def test_wrong_arguments_are_refused():
    right_nesting = r"LossScaleOptimizer\(ClippedOptimizer\(optimizer, clip\)\)"
    with pytest.raises(ValueError, match=right_nesting):
        clipped(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    wrapper = clipped()
    with pytest.raises(ValueError, match="must not be a ClippedOptimizer already"):
        clipped(optimizer=wrapper)
    with pytest.raises(ValueError, match="belongs to another ClippedOptimizer"):
        clipped(optimizer=wrapper.inner_optimizer)
    for wrong in ("adam", keras.optimizers.Adam, object(), 1):
        with pytest.raises(TypeError, match="`optimizer` must be a Keras optimizer"):
            clipped(optimizer=wrong)
    for wrong in (1.0, km.ClipGradientsByNorm, lambda pairs: pairs):
        with pytest.raises(TypeError, match="`clip` must be a clipping strategy"):
            km.ClippedOptimizer(keras.optimizers.SGD(), wrong)
    with pytest.raises(ValueError, match="`on_nonfinite` must be one of"):
        clipped(on_nonfinite="ignore")
    with pytest.raises(ValueError, match="`apply` needs `trainable_variables`"):
        clipped().apply([tf.constant(1.0)])


def test_the_place_where_keras_sums_gradients_is_still_there():
    optimizer = keras.optimizers.SGD()
    seen: list[Any] = []
    keras_internals.change_summed_gradients(optimizer, lambda pairs: seen.append(len(pairs)) or pairs)
    on_variable(optimizer, [1.0, 2.0])
    assert seen == [1] and keras_internals.changes_summed_gradients(optimizer)
