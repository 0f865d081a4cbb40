"""The arithmetic of all strategies that clip by a norm.

Norms are computed in float32 (float64 once a gradient is float64), by one fused reduction a gradient. Below the bound
nothing is touched, not even multiplied. Where the squares overflow or vanish, or where a gradient holds NaN or Inf, a
branch that is rarely taken computes everything again, in float64 and relative to the largest magnitude.

Non-finite gradients have one meaning for all strategies: a NaN or an Inf stays where it is, so that nothing is hidden,
and the finite elements that share its norm become 0, so that nothing else is spoiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

Axes = tuple[int, ...] | None

# Below these, what vanishes from a sum of squares could matter to a bound as small: sum and bound, by dtype.
_VANISHING = {tf.float32: (1e-22, 1e-12), tf.float64: (1e-280, 1e-141)}


class Clipped(NamedTuple):
    """Clipped gradients, and the global norm before and after."""

    gradients: list[tf.Tensor]
    norm: tf.Tensor
    clipped_norm: tf.Tensor


def arithmetic_dtype(gradients: Sequence[tf.Tensor]) -> tf.DType:
    """Returns the dtype that norms of these gradients are computed in."""
    return tf.float64 if any(gradient.dtype == tf.float64 for gradient in gradients) else tf.float32


def sum_of_squares(values: tf.Tensor, axes: Axes = None) -> tf.Tensor:
    """Returns the sum of squares of all elements, or over some axes, which stay with size 1."""
    values = values if values.dtype == tf.float64 else tf.cast(values, tf.float32)
    if axes is None:
        return 2.0 * tf.nn.l2_loss(values)
    return tf.reduce_sum(tf.square(values), axes, keepdims=True)


def global_norm(gradients: Sequence[tf.Tensor], squares: Sequence[tf.Tensor] | None = None) -> tf.Tensor:
    """Returns the L2 norm over all elements of all gradients.

    Args:
        gradients: The gradients.
        squares: Sums of squares of each, where they are known already.

    Returns:
        A scalar; Inf or NaN only if a gradient holds one, or if the norm itself is too large for the dtype.
    """
    dtype = arithmetic_dtype(gradients)
    squares = [sum_of_squares(gradient) for gradient in gradients] if squares is None else squares
    total = tf.add_n([tf.cast(square, dtype) for square in squares])
    tiny = tf.constant(_VANISHING[dtype][0], dtype)

    def with_care() -> tf.Tensor:
        units = _Units(gradients, [None] * len(gradients), shared=True)
        return tf.cast(units.norms[0], dtype)

    # An exact zero is left to be one: squares that all vanish make no norm that anybody could clip to.
    usual = tf.logical_and(tf.math.is_finite(total), tf.logical_or(total >= tiny, tf.equal(total, 0)))
    return tf.cond(usual, lambda: tf.sqrt(total), with_care)


def rescale(
    gradients: Sequence[tf.Tensor],
    bounds: Sequence[Any],
    *,
    axes: Sequence[Axes] | None = None,
    shared: bool = False,
    squares: Sequence[tf.Tensor] | None = None,
) -> Clipped:
    """Multiplies what has a norm above its bound by `bound / norm`, and leaves the rest as it is, bit for bit.

    Args:
        gradients: Dense tensors.
        bounds: A bound for each gradient, or the only one if `shared`: numbers or tensors, of the shape of the norms.
        axes: Axes that a norm goes over, a tuple for each gradient, or `None` for all elements.
        shared: Whether all gradients together have one norm. Defaults to a norm for each.
        squares: Sums of squares, where they are known already.

    Returns:
        The gradients, and their global norm before and after.
    """
    dtype = arithmetic_dtype(gradients)
    all_axes = [None] * len(gradients) if axes is None else list(axes)
    if squares is None:
        squares = [sum_of_squares(g, a) for g, a in zip(gradients, all_axes, strict=True)]
    squares = [tf.cast(square, dtype) for square in squares]
    sizes = [1 if axis is None else square.shape.num_elements() for square, axis in zip(squares, all_axes, strict=True)]
    limits = [_limit(bound, dtype) for bound in bounds]
    if shared:
        sums, limit = tf.reshape(tf.add_n(squares), [1]), tf.reshape(limits[0], [1])
    else:
        sums = tf.concat([tf.reshape(square, [-1]) for square in squares], 0)
        limit = tf.concat([tf.reshape(each, [-1]) for each in limits], 0)
    norms, total = tf.sqrt(sums), tf.reduce_sum(sums)
    tiny, small = _VANISHING[dtype]
    vanishes = tf.reduce_any(tf.logical_and(sums < tiny, limit < small))
    careful = tf.logical_or(tf.logical_not(tf.math.is_finite(total)), vanishes)

    def as_they_are() -> list[tf.Tensor]:
        return [*(tf.identity(gradient) for gradient in gradients), tf.sqrt(total), tf.sqrt(total)]

    def scaled() -> list[tf.Tensor]:
        factors = limit / tf.maximum(norms, limit)
        if shared:
            parts = [tf.reshape(factors, [])] * len(gradients)
        elif axes is None:
            parts = tf.unstack(factors, len(gradients))
        else:
            cut = tf.split(factors, sizes)
            parts = [tf.reshape(part, square.shape) for part, square in zip(cut, squares, strict=True)]
        clipped = [_times(gradient, part) for gradient, part in zip(gradients, parts, strict=True)]
        return [*clipped, tf.sqrt(total), tf.sqrt(tf.reduce_sum(tf.square(tf.minimum(norms, limit))))]

    def with_care() -> list[tf.Tensor]:
        clipped, norm, clipped_norm = _rescale_with_care(gradients, bounds, all_axes, shared)
        return [*clipped, tf.cast(norm, dtype), tf.cast(clipped_norm, dtype)]

    exceeds = tf.reduce_any(norms > limit)
    branch = tf.where(careful, 2, tf.where(exceeds, 1, 0))
    *clipped, norm, clipped_norm = tf.switch_case(branch, [as_they_are, scaled, with_care])
    return Clipped(clipped, norm, clipped_norm)


def _limit(bound: Any, dtype: tf.DType) -> tf.Tensor:
    if isinstance(bound, (int, float)):
        return tf.constant(min(float(bound), dtype.max), dtype)
    return tf.minimum(tf.cast(bound, dtype), dtype.max)


def _times(gradient: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    wide = gradient if gradient.dtype == tf.float64 else tf.cast(gradient, tf.float32)
    return tf.cast(wide * tf.cast(factor, wide.dtype), gradient.dtype)


class _Units:
    """Norms in float64, relative to the largest magnitude, and what is not finite; a value for each gradient."""

    def __init__(self, gradients: Sequence[tf.Tensor], axes: Sequence[Axes], *, shared: bool) -> None:
        self.values = [tf.cast(gradient, tf.float64) for gradient in gradients]
        self.finite = [tf.math.is_finite(value) for value in self.values]
        sizes = [tf.abs(value) for value in self.values]
        zero = tf.zeros((), tf.float64)
        triples = list(zip(sizes, self.finite, axes, strict=True))

        def over(axis: Axes) -> dict[str, Any]:
            return {"axis": axis, "keepdims": axis is not None}

        largest = [tf.maximum(tf.reduce_max(tf.where(f, s, zero), **over(a)), zero) for s, f, a in triples]
        # 0 where everything is finite, otherwise Inf or NaN.
        spoilt = [tf.reduce_sum(tf.where(f, zero, s), **over(a)) for s, f, a in triples]
        if shared:
            largest = [tf.reduce_max(tf.stack(largest))] * len(sizes)
            spoilt = [tf.add_n(spoilt)] * len(sizes)
        self.largest = [tf.where(large > 0, large, 1) for large in largest]
        sums = [
            tf.reduce_sum(tf.square(tf.where(f, s / large, zero)), **over(a))
            for (s, f, a), large in zip(triples, self.largest, strict=True)
        ]
        if shared:
            sums = [tf.add_n(sums)] * len(sizes)
        self.spoilt = spoilt
        self.relative = [tf.sqrt(each) for each in sums]
        self.norms = [m * r + s for m, r, s in zip(self.largest, self.relative, spoilt, strict=True)]


def _rescale_with_care(
    gradients: Sequence[tf.Tensor], bounds: Sequence[Any], axes: Sequence[Axes], shared: bool
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    units = _Units(gradients, axes, shared=shared)
    limits = [_limit(bound, tf.float64) for bound in bounds] * (len(gradients) if shared else 1)
    clipped, after = [], []
    for index, gradient in enumerate(gradients):
        value, limit, relative = units.values[index], limits[index], units.relative[index]
        whole = tf.equal(units.spoilt[index], 0)
        exceeds = units.norms[index] > limit
        factor = limit / tf.where(exceeds, relative, 1)
        scaled = tf.where(exceeds, value / units.largest[index] * factor, value)
        kept = tf.where(whole, scaled, tf.zeros((), tf.float64))
        clipped.append(tf.cast(tf.where(units.finite[index], kept, value), gradient.dtype))
        after.append(tf.where(whole, tf.minimum(units.norms[index], limit), units.norms[index]))
    norms = [units.norms[0], after[0]] if shared else [_norm_of_norms(units.norms), _norm_of_norms(after)]
    return clipped, norms[0], norms[1]


def _norm_of_norms(norms: Sequence[tf.Tensor]) -> tf.Tensor:
    flat = tf.concat([tf.reshape(norm, [-1]) for norm in norms], 0)
    largest = tf.maximum(tf.reduce_max(flat), tf.zeros((), tf.float64))
    scale = tf.where(tf.logical_and(largest > 0, tf.math.is_finite(largest)), largest, 1)
    return scale * tf.sqrt(tf.reduce_sum(tf.square(flat / scale)))
