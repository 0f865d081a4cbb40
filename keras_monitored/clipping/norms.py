"""Clipping by a fixed L2 norm: of each gradient, of its average element, or of all gradients together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_monitored.clipping.rescaling import Clipped, rescale
from keras_monitored.clipping.strategy import ClipGradients, registered
from keras_monitored.validation import check_number


class _ClipToNorm(ClipGradients):
    """What has a single bound, `clip_norm`."""

    def __init__(self, clip_norm: float) -> None:
        self.clip_norm = check_number("clip_norm", clip_norm, above=0, hint="Pass the largest norm to let through.")

    def clip(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> list[tf.Tensor]:
        return self.clip_and_measure(gradients, variables).gradients

    def get_config(self) -> dict[str, Any]:
        return {"clip_norm": self.clip_norm}


@registered
class ClipGradientsByNorm(_ClipToNorm):
    """Scales each gradient down to an L2 norm of at most `clip_norm`, by itself.

    Args:
        clip_norm: The bound, above 0.

    Raises:
        TypeError: If the bound is no real number.
        ValueError: If it is not finite, or not above 0.

    Example:

    >>> import tensorflow as tf
    >>> clip = ClipGradientsByNorm(1.0)
    >>> [gradient.numpy().tolist() for gradient, _ in clip([(tf.constant([0.0, 8.0]), "a"), (tf.constant(0.5), "b")])]
    [[0.0, 1.0], 0.5]
    """

    def clip_and_measure(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> Clipped:
        return rescale(gradients, [self.clip_norm] * len(gradients))


@registered
class ClipGradientsByAverageNorm(_ClipToNorm):
    """Scales each gradient down to an average norm of at most `clip_norm`: its L2 norm over its number of elements.

    Of a sparse gradient, the number of elements is that of its variable.

    Args:
        clip_norm: The bound, above 0.

    Raises:
        TypeError: If the bound is no real number.
        ValueError: If it is not finite, or not above 0.

    Example:

    >>> import tensorflow as tf
    >>> clip = ClipGradientsByAverageNorm(1.0)
    >>> [gradient.numpy().tolist() for gradient, _ in clip([(tf.constant([0.0, 8.0]), "a")])]  # 8 / 2 is above 1
    [[0.0, 2.0]]
    """

    def clip_and_measure(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> Clipped:
        counts = [_number_of_elements(g, v) for g, v in zip(gradients, variables, strict=True)]
        return rescale(gradients, [_times(self.clip_norm, count) for count in counts])


@registered
class ClipGradientsByGlobalNorm(_ClipToNorm):
    """Scales all gradients by one factor, so that their common L2 norm is at most `clip_norm`.

    It keeps the direction of the whole update, and is the usual choice.

    Args:
        clip_norm: The bound, above 0.

    Raises:
        TypeError: If the bound is no real number.
        ValueError: If it is not finite, or not above 0.

    Example:

    >>> import tensorflow as tf
    >>> clip = ClipGradientsByGlobalNorm(1.0)
    >>> [gradient.numpy().tolist() for gradient, _ in clip([(tf.constant([0.0, 8.0]), "a"), (tf.constant(6.0), "b")])]
    [[0.0, 0.8...], 0.6...]
    """

    def clip_and_measure(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> Clipped:
        return rescale(gradients, [self.clip_norm], shared=True)


def _number_of_elements(gradient: tf.Tensor, variable: Any) -> Any:
    """Counts the elements of a variable, or of the gradient if what it belongs to has no shape."""
    shape = tf.TensorShape(getattr(variable, "shape", gradient.shape))
    return shape.num_elements() if shape.is_fully_defined() else tf.size(gradient)


def _times(clip_norm: float, count: Any) -> Any:
    return clip_norm * count if isinstance(count, int) else clip_norm * tf.cast(count, tf.float64)
