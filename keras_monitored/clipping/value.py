"""Clipping by value, and not clipping at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_monitored.clipping.rescaling import Clipped, global_norm
from keras_monitored.clipping.strategy import ClipGradients, registered
from keras_monitored.validation import check_number


@registered
class NoClipGradients(ClipGradients):
    """Lets all gradients through as they are, for a `ClippedOptimizer` that only watches norms and non-finite values.

    Example:

    >>> NoClipGradients()([(2.0, "kernel")])
    [(<tf.Tensor: shape=(), dtype=float32, numpy=2.0>, 'kernel')]
    """

    def clip(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> list[tf.Tensor]:
        return list(gradients)

    def clip_and_measure(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> Clipped:
        norm = global_norm(gradients)
        return Clipped(list(gradients), norm, norm)


@registered
class ClipGradientsByValue(ClipGradients):
    """Bounds each element by itself. NaN and Inf stay what they are: a bound must not hide them.

    Args:
        clip_value_min: The lower bound, at most 0.
        clip_value_max: The upper bound, at least 0 and above the lower one. A range without 0 would give every
            parameter that has no part in a batch a gradient.

    Raises:
        TypeError: If a bound is no real number.
        ValueError: If a bound is not finite, or the range is empty or does not hold 0.

    Example:

    >>> import tensorflow as tf
    >>> ClipGradientsByValue(-1.0, 0.5)([(tf.constant([-3.0, 0.25, 2.0]), "kernel")])[0][0].numpy().tolist()
    [-1.0, 0.25, 0.5]
    """

    def __init__(self, clip_value_min: float, clip_value_max: float) -> None:
        hint = "Pass bounds such as -1.0 and 1.0."
        low, high = (
            check_number("clip_value_min", clip_value_min, hint=hint),
            check_number("clip_value_max", clip_value_max, hint=hint),
        )
        if not low < high:
            raise ValueError(
                "`clip_value_min` must be smaller than `clip_value_max`. "
                f"Received: clip_value_min={low}, clip_value_max={high}. {hint}"
            )
        if not low <= 0 <= high:
            raise ValueError(
                "`clip_value_min` and `clip_value_max` must have 0 between them: gradients that are 0 would become "
                f"non-zero, those of absent embedding rows too. Received: clip_value_min={low}, "
                f"clip_value_max={high}. {hint}"
            )
        self.clip_value_min, self.clip_value_max = low, high

    def clip(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> list[tf.Tensor]:
        return self.clip_and_measure(gradients, variables).gradients

    def clip_and_measure(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> Clipped:
        norm = global_norm(gradients)

        def bounded() -> list[tf.Tensor]:
            return [self._bounded(gradient) for gradient in gradients]

        def bounded_where_finite() -> list[tf.Tensor]:
            return [tf.where(tf.math.is_finite(gradient), self._bounded(gradient), gradient) for gradient in gradients]

        # The norm says whether anything could be hidden; the usual case has no look at the elements of its own.
        clipped = tf.cond(tf.math.is_finite(norm), bounded, bounded_where_finite)
        return Clipped(clipped, norm, global_norm(clipped))

    def _bounded(self, gradient: tf.Tensor) -> tf.Tensor:
        low = max(self.clip_value_min, gradient.dtype.min)
        high = min(self.clip_value_max, gradient.dtype.max)
        return tf.clip_by_value(gradient, tf.constant(low, gradient.dtype), tf.constant(high, gradient.dtype))

    def get_config(self) -> dict[str, Any]:
        return {"clip_value_min": self.clip_value_min, "clip_value_max": self.clip_value_max}
