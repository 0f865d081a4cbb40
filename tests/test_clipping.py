"""Laws of the clipping strategies: every strategy, dtype, shape; dense, sparse and missing gradients."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import keras_monitored as km

DTYPES = ["float16", "bfloat16", "float32", "float64"]
NORM_STRATEGIES: dict[str, Callable[[float], km.ClipGradients]] = {
    "norm": km.ClipGradientsByNorm,
    "average_norm": km.ClipGradientsByAverageNorm,
    "global_norm": km.ClipGradientsByGlobalNorm,
    "adaptive": km.AdaptiveClipGradients,
    "auto": lambda bound: AutoClipTo(bound),
}
STRATEGIES: dict[str, Callable[[float], km.ClipGradients]] = {
    **NORM_STRATEGIES,
    "none": lambda bound: km.NoClipGradients(),
    "value": lambda bound: km.ClipGradientsByValue(-bound, bound / 2),
}
Pairs = list[tuple[Any, Any]]


class AutoClipTo(km.AutoClipGradients):
    """Has seen nothing but one norm, and remembers no other, so that its bound is known."""

    def __init__(self, bound: float) -> None:
        super().__init__(percentile=0, window=1)
        self.bound = bound

    def _bound_with(self, norm: tf.Tensor) -> tf.Tensor:
        return tf.constant(self.bound)


shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)
bounds = st.sampled_from([1e-3, 0.1, 1.0, 7.0])
by_norm = st.sampled_from(sorted(NORM_STRATEGIES))
by_any = st.sampled_from(sorted(STRATEGIES))


@st.composite
def gradients(draw: Any, *, dtypes: Any = DTYPES) -> Pairs:
    """Gradients of one to three variables, in `None`, dense and sparse, from zero to large."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(dtypes))
    pairs: Pairs = []
    for kind in draw(st.lists(st.sampled_from(["dense", "sparse", "zero", "none"]), min_size=1, max_size=3)):
        shape = draw(shapes)
        if kind == "sparse" and not shape:
            shape = (3,)
        scale = draw(st.sampled_from([1e-4, 0.1, 1.0, 100.0]))
        variable = tf.cast(random.normal(size=shape), dtype)
        gradient: Any = tf.cast(random.normal(size=shape) * scale, dtype)
        if kind == "sparse":
            ids = random.integers(0, shape[0], 5)
            rows = tf.cast(random.normal(size=(5, *shape[1:])) * scale, dtype)
            gradient = tf.IndexedSlices(rows, tf.constant(ids), tf.constant(shape, tf.int64))
        elif kind == "zero":
            gradient = tf.zeros(shape, dtype)
        pairs.append((None if kind == "none" else gradient, variable))
    return pairs


def dense(pairs: Pairs) -> list[np.ndarray | None]:
    """Gradients in float64, sparse ones as dense."""
    return [None if g is None else np.asarray(tf.cast(_dense_of(g), tf.float64)) for g, _ in pairs]


def _dense_of(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, gradient.dense_shape[0])


def norms_of(strategy: str, pairs: Pairs, bound: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """What a strategy bounds: arrays of norms, each with its bound."""
    found = [(g, np.asarray(tf.cast(v, tf.float64))) for g, (_, v) in zip(dense(pairs), pairs, strict=True)]
    present = [(gradient, variable) for gradient, variable in found if gradient is not None]
    if strategy in ("global_norm", "auto"):
        total = np.sqrt(sum(np.sum(np.square(gradient)) for gradient, _ in present))
        return [(np.asarray(total), np.asarray(bound))]
    if strategy == "adaptive":
        axes = [None if v.ndim <= 1 else tuple(range(v.ndim - 1)) for _, v in present]
        return [
            (np.sqrt(np.square(g).sum(axis)), bound * np.maximum(np.sqrt(np.square(v).sum(axis)), 1e-3))
            for (g, v), axis in zip(present, axes, strict=True)
        ]
    sizes = [gradient.size if strategy == "average_norm" else 1 for gradient, _ in present]
    norms = [np.sqrt(np.sum(np.square(gradient))) for gradient, _ in present]
    return [(norm / size, np.asarray(bound)) for norm, size in zip(norms, sizes, strict=True)]


def tolerance(pairs: Pairs) -> float:
    dtypes = [gradient.dtype for gradient, _ in pairs if gradient is not None]
    return max([float(np.finfo(np.float32).eps) * 8, *(4 * float(keras.ops.cast(_eps(d), "float32")) for d in dtypes)])


def _eps(dtype: tf.DType) -> float:
    return {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7, tf.float32: 2.0**-23, tf.float64: 2.0**-52}[dtype]


def assert_same(ours: Pairs, theirs: Pairs, rtol: float = 0.0) -> None:
    for one, other in zip(dense(ours), dense(theirs), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol and 1e-7)


@given(by_norm, bounds, gradients())
def test_the_bound_holds(strategy, bound, pairs):
    clipped = NORM_STRATEGIES[strategy](bound)(pairs)
    for norm, limit in norms_of(strategy, clipped, bound):
        assert np.all(norm <= limit * (1 + tolerance(pairs)) + 1e-7)


@given(bounds, gradients())
def test_the_bounds_by_value_hold(bound, pairs):
    for gradient in dense(km.ClipGradientsByValue(-bound, bound / 2)(pairs)):
        if gradient is not None:
            assert np.all(gradient >= -bound * (1 + tolerance(pairs)))
            assert np.all(gradient <= bound / 2 * (1 + tolerance(pairs)))


@given(by_any, gradients())
def test_below_the_bound_nothing_changes_bit_for_bit(strategy, pairs):
    clipped = STRATEGIES[strategy](1e9)(pairs)
    for (ours, variable), (gradient, same_variable) in zip(clipped, pairs, strict=True):
        assert variable is same_variable
        if isinstance(gradient, tf.IndexedSlices):
            np.testing.assert_array_equal(*dense([(ours, None), (gradient, None)]))
        elif gradient is not None:
            assert ours.dtype == gradient.dtype
            assert ours.numpy().tobytes() == gradient.numpy().tobytes()


@given(by_norm, bounds, gradients())
def test_a_norm_below_its_bound_is_left_alone_beside_one_above(strategy, bound, pairs):
    before = norms_of(strategy, pairs, bound)
    clipped = NORM_STRATEGIES[strategy](bound)(pairs)
    kept = [np.all(norm < limit * 0.999) for norm, limit in before]
    present = [(a, b) for a, b in zip(dense(clipped), dense(pairs), strict=True) if a is not None]
    if len(before) == len(present):
        for untouched, (ours, theirs) in zip(kept, present, strict=True):
            if untouched:
                np.testing.assert_array_equal(ours, theirs)


@given(by_any, bounds, gradients())
def test_twice_is_once(strategy, bound, pairs):
    clip = STRATEGIES[strategy](bound)
    once = clip(pairs)
    assert_same(clip(once), once, tolerance(pairs))


@given(by_norm, bounds, gradients(dtypes=["float32", "float64"]))
def test_directions_are_kept(strategy, bound, pairs):
    for ours, theirs in zip(dense(NORM_STRATEGIES[strategy](bound)(pairs)), dense(pairs), strict=True):
        if ours is None or theirs is None:
            continue
        if strategy == "adaptive" and ours.ndim > 1:  # one direction for each unit
            ours, theirs = ours.reshape(-1, ours.shape[-1]).T, theirs.reshape(-1, theirs.shape[-1]).T
        else:
            ours, theirs = ours.reshape(1, -1), theirs.reshape(1, -1)
        factors = np.linalg.norm(ours, axis=1) / np.maximum(np.linalg.norm(theirs, axis=1), 1e-300)
        np.testing.assert_allclose(ours, theirs * factors[:, None], rtol=1e-5, atol=1e-9)


@given(by_any, bounds, gradients())
def test_sparse_gradients_stay_sparse_and_equal_the_dense_result(strategy, bound, pairs):
    clipped = STRATEGIES[strategy](bound)(pairs)
    for (ours, _), (gradient, _) in zip(clipped, pairs, strict=True):
        assert isinstance(ours, tf.IndexedSlices) == isinstance(gradient, tf.IndexedSlices)
        if isinstance(ours, tf.IndexedSlices):
            assert len(set(ours.indices.numpy())) == len(ours.indices)
    made_dense = [(None if g is None else _dense_of(g), v) for g, v in pairs]
    assert_same(clipped, STRATEGIES[strategy](bound)(made_dense), tolerance(pairs))


@given(by_any, bounds, shapes, st.sampled_from(DTYPES))
def test_zero_gradients_stay_zero(strategy, bound, shape, dtype):
    zeros = tf.zeros(shape, dtype)
    (clipped, _), (nothing, _) = STRATEGIES[strategy](bound)([(zeros, zeros), (None, zeros)])
    assert nothing is None and np.all(np.asarray(tf.cast(clipped, tf.float32)) == 0)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_graph_and_xla_give_what_eager_code_gives(strategy, jit_compile):
    random = np.random.default_rng(0)
    kernel, table = random.normal(size=(3, 2)).astype("float32"), random.normal(size=(4, 2)).astype("float32")

    @tf.function(jit_compile=jit_compile, autograph=False)
    def clipped(bias: Any) -> Any:
        return [gradient for gradient, _ in clip(pairs_with(bias))]

    def pairs_with(bias: Any) -> Pairs:
        rows = tf.IndexedSlices(kernel, tf.constant([1, 3, 1]), tf.constant([4, 2]))
        return [(kernel, kernel), (None, None), (rows, table), (bias, kernel[0])]

    clip = STRATEGIES[strategy](0.1)
    bias = tf.constant(random.normal(size=2).astype("float32"))
    assert_same([(gradient, None) for gradient in clipped(bias)], clip(pairs_with(bias)), 1e-5)


def test_nothing_to_clip_is_no_error():
    assert km.ClipGradientsByGlobalNorm(1.0)([]) == []
    assert km.ClipGradientsByValue(-1, 1)([(None, "kernel")]) == [(None, "kernel")]


def test_a_strategy_of_ones_own():
    class Halve(km.ClipGradients):
        def clip(self, gradients: Any, variables: Any) -> list[tf.Tensor]:
            return [gradient / 2 for gradient in gradients]

    pairs, norm, clipped_norm = Halve().call_and_measure([(tf.constant([3.0, 4.0]), "kernel"), (None, "bias")])
    np.testing.assert_array_equal(pairs[0][0], [1.5, 2.0])
    assert (float(norm), float(clipped_norm)) == (5.0, 2.5)
    with pytest.raises(NotImplementedError, match=r"ClipGradients must override `clip"):
        km.ClipGradients()([(tf.constant(1.0), "kernel")])
