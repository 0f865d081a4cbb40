"""What the clipping strategies do to certain gradients: extreme ones, spoilt ones, and those of the papers."""

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km

INF, NAN = math.inf, math.nan
ALL = [
    km.NoClipGradients(),
    km.ClipGradientsByValue(-1.0, 2.0),
    km.ClipGradientsByNorm(1.5),
    km.ClipGradientsByAverageNorm(0.1),
    km.ClipGradientsByGlobalNorm(1.0),
    km.AdaptiveClipGradients(0.02, eps=1e-4),
    km.AutoClipGradients(percentile=25, window=7),
]


def values(clip: km.ClipGradients, *gradients: Any, dtype: str = "float32") -> list[np.ndarray]:
    pairs = [(tf.constant(gradient, dtype), tf.ones_like(tf.constant(gradient, dtype))) for gradient in gradients]
    return [np.asarray(gradient) for gradient, _ in clip(pairs)]


def test_strategies_agree_with_tensorflow_where_it_is_right():
    random = np.random.default_rng(0)
    first, second = random.normal(size=(5, 3)).astype("float32"), random.normal(size=4).astype("float32")
    np.testing.assert_allclose(values(km.ClipGradientsByNorm(1.0), first)[0], tf.clip_by_norm(first, 1.0), rtol=1e-6)
    average = tf.compat.v1.clip_by_average_norm(first, 0.1)
    np.testing.assert_allclose(values(km.ClipGradientsByAverageNorm(0.1), first)[0], average, rtol=1e-6)
    theirs, norm = tf.clip_by_global_norm([first, second], 1.0)
    for ours, other in zip(values(km.ClipGradientsByGlobalNorm(1.0), first, second), theirs, strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-6)
    measured = km.ClipGradientsByGlobalNorm(1.0).call_and_measure([(first, None), (second, None)])
    np.testing.assert_allclose(measured[1:], [norm, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "large"), [("float16", 6e4), ("bfloat16", 3e38), ("float32", 3e38), ("float64", 1e308)]
)
@pytest.mark.parametrize("clip", [km.ClipGradientsByNorm(1.0), km.ClipGradientsByGlobalNorm(1.0)])
def test_huge_values_do_not_overflow(clip, dtype, large):
    (clipped,) = values(clip, [large, 0.0, -large], dtype=dtype)
    np.testing.assert_allclose(clipped.astype("float64"), [0.5**0.5, 0.0, -(0.5**0.5)], rtol=1e-2)


@pytest.mark.parametrize(("dtype", "tiny"), [("float32", 1e-30), ("float64", 1e-200)])
@pytest.mark.parametrize("strategy", [km.ClipGradientsByNorm, km.ClipGradientsByGlobalNorm])
def test_tiny_values_keep_their_norm(strategy, dtype, tiny):
    (clipped,) = values(strategy(tiny), [3 * tiny, 4 * tiny], dtype=dtype)
    np.testing.assert_allclose(clipped, [0.6 * tiny, 0.8 * tiny], rtol=1e-5)


@pytest.mark.parametrize("clip", ALL, ids=lambda clip: type(clip).__name__)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_stays_and_spoils_nothing(clip, bad):
    first, second = values(type(clip).from_config(clip.get_config()), [[bad, 1.0]], [0.5, 0.25])
    np.testing.assert_array_equal(first[0, 0], bad)
    assert np.all(np.isfinite(first[0, 1])) and np.all(np.isfinite(second))


def test_what_shares_a_norm_with_something_not_finite_becomes_zero():
    first, second = values(km.ClipGradientsByNorm(10.0), [INF, 1.0], [0.5])
    np.testing.assert_array_equal(first, [INF, 0.0])
    np.testing.assert_array_equal(second, [0.5])
    first, second = values(km.ClipGradientsByGlobalNorm(10.0), [INF, 1.0], [0.5])
    np.testing.assert_array_equal(first, [INF, 0.0])
    np.testing.assert_array_equal(second, [0.0])
    np.testing.assert_array_equal(values(km.ClipGradientsByValue(-1, 1), [NAN, -INF, 7.0])[0], [NAN, -INF, 1.0])
    column = values(km.AdaptiveClipGradients(1.0), [[NAN, 9.0], [1.0, 0.0]])[0]
    np.testing.assert_allclose(column, [[NAN, 2**0.5], [0.0, 0.0]], rtol=1e-6)
    keras_own = tf.clip_by_norm(tf.constant([INF, 1.0]), 10.0)  # hides one and spoils the other
    np.testing.assert_array_equal(keras_own, [NAN, 0.0])


def test_the_average_norm_of_a_sparse_gradient_counts_all_rows():
    rows = tf.IndexedSlices(tf.ones((1, 4)), tf.constant([2]), tf.constant([10, 4]))
    ((clipped, _),) = km.ClipGradientsByAverageNorm(0.01)([(rows, tf.zeros((10, 4)))])
    np.testing.assert_allclose(np.linalg.norm(clipped.values), 0.01 * 40, rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (3, 4, 2), (2, 3, 4, 2)])
def test_adaptive_clipping_follows_the_paper(shape):
    random = np.random.default_rng(0)
    gradient, weight = random.normal(size=shape), random.normal(size=shape)
    axes = {0: None, 1: None, 2: (0,), 3: (0, 1), 4: (0, 1, 2)}[len(shape)]

    def unit_norm(x: np.ndarray) -> np.ndarray:
        return np.sqrt(np.sum(x**2, axis=axes, keepdims=axes is not None))

    largest = 0.1 * np.maximum(unit_norm(weight), 1e-3)
    expected = np.where(unit_norm(gradient) > largest, gradient * (largest / unit_norm(gradient)), gradient)
    ((clipped, _),) = km.AdaptiveClipGradients(0.1)([(tf.constant(gradient), tf.Variable(weight))])
    np.testing.assert_allclose(clipped, expected, rtol=1e-6)


def test_auto_clip_uses_the_percentile_of_the_window():
    random = np.random.default_rng(0)
    clip, norms = km.AutoClipGradients(percentile=30, window=4), random.uniform(1, 10, 12)
    for step, norm in enumerate(norms, 1):
        expected = min(norm, np.percentile(norms[max(0, step - 4) : step].astype("float32"), 30))
        np.testing.assert_allclose(values(clip, [norm, 0.0])[0], [expected, 0.0], rtol=1e-5)


def test_auto_clip_remembers_neither_zero_nor_what_is_not_finite():
    clip = km.AutoClipGradients(percentile=0, window=10)
    for gradient in (0.0, NAN, INF, 4.0, 0.0):
        values(clip, gradient)
    np.testing.assert_array_equal(values(clip, 8.0)[0], 4.0)


def test_auto_clip_alone_is_checkpointed_and_used_in_a_function(tmp_path):
    clip = km.AutoClipGradients(percentile=50, window=3)
    step = tf.function(lambda g: clip([(g, None)])[0][0], autograph=False)
    assert [float(step(tf.constant(norm))) for norm in (1.0, 3.0, 8.0)] == [1.0, 2.0, 3.0]
    path = tf.train.Checkpoint(clip=clip).save(str(tmp_path / "clip"))
    again = km.AutoClipGradients(percentile=50, window=3)
    again.build()
    tf.train.Checkpoint(clip=again).restore(path).assert_consumed()
    assert float(again([(tf.constant(5.0), None)])[0][0]) == float(step(tf.constant(5.0))) == 5.0


def test_an_auto_clip_in_use_is_not_shared():
    clip = km.AutoClipGradients()
    clip.build()
    with pytest.raises(ValueError, match="Make one for each optimizer"):
        km.ClippedOptimizer(keras.optimizers.SGD(), clip).build([keras.Variable([1.0])])


@pytest.mark.parametrize("clip", ALL, ids=lambda clip: type(clip).__name__)
def test_strategies_are_made_again_from_their_configs(clip):
    again = type(clip).from_config(clip.get_config())
    assert again == clip and hash(again) == hash(clip) and repr(again) == repr(clip)
    assert keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(clip)) == clip
    assert km.ClipGradientsByNorm(1.0) != km.ClipGradientsByNorm(2.0) != km.ClipGradientsByGlobalNorm(2.0)
    assert repr(km.ClipGradientsByNorm(2.0)) == "ClipGradientsByNorm(clip_norm=2.0)"


@pytest.mark.parametrize(
    "strategy", [km.ClipGradientsByNorm, km.ClipGradientsByAverageNorm, km.ClipGradientsByGlobalNorm]
)
@pytest.mark.parametrize("bound", [0, -1.0, NAN, INF, -INF, None, "1", True, [1.0], np.ones(2), tf.ones(2)])
def test_bounds_that_are_no_positive_number_are_refused(strategy, bound):
    error = ValueError if isinstance(bound, (int, float)) and bound is not True else TypeError
    with pytest.raises(error, match=r"`clip_norm` must be a finite number above 0\. Received: "):
        strategy(bound)


def test_other_bad_arguments_are_refused():
    for low, high in [(1.0, -1.0), (0.0, 0.0), (1, 1)]:
        with pytest.raises(ValueError, match="`clip_value_min` must be smaller than `clip_value_max`"):
            km.ClipGradientsByValue(low, high)
    for low, high in [(0.5, 1.0), (-1.0, -0.5)]:
        with pytest.raises(ValueError, match="must have 0 between them"):
            km.ClipGradientsByValue(low, high)
    for low, high, name in [(NAN, 1, "min"), (-1, INF, "max"), (-INF, 1, "min")]:
        with pytest.raises(ValueError, match=rf"`clip_value_{name}` must be a finite number\. Received"):
            km.ClipGradientsByValue(low, high)
    with pytest.raises(TypeError, match="`clip_value_min` must be a finite number"):
        km.ClipGradientsByValue([0.0], 1.0)
    for options in ({"clipping": 0}, {"clipping": NAN}, {"eps": -1e-3}, {"eps": INF}):
        with pytest.raises(ValueError, match=rf"`{next(iter(options))}` must be a finite number above 0"):
            km.AdaptiveClipGradients(**options)
    for percentile in (-1, 101, NAN, INF):
        with pytest.raises(ValueError, match="`percentile` must be"):
            km.AutoClipGradients(percentile=percentile)
    for window, error in [(0, ValueError), (-5, ValueError), (2.5, TypeError), ("9", TypeError)]:
        with pytest.raises(error, match="`window` must be an integer of at least 1"):
            km.AutoClipGradients(window=window)
