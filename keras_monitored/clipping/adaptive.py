"""Adaptive clipping: each unit of a layer against the norm of its own weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_monitored.clipping.rescaling import Axes, Clipped, rescale, sum_of_squares
from keras_monitored.clipping.strategy import ClipGradients, registered
from keras_monitored.validation import check_number


@registered
class AdaptiveClipGradients(ClipGradients):
    """Bounds the gradient norm of each unit by a share of the norm of the unit's weights.

    From "High-Performance Large-Scale Image Recognition Without Normalization" (arXiv:2102.06171). A unit is what
    leads to one output: a column of a dense kernel, a filter of a convolution, in Keras's layout all axes but the
    last. Biases and other vectors are one unit each. The paper leaves the last layer unclipped.

    Args:
        clipping: Largest ratio of gradient norm to weight norm. Defaults to 0.01.
        eps: Weight norm that smaller ones count as, so that fresh zero weights can move. Defaults to 1e-3.

    Raises:
        TypeError: If an argument is no real number.
        ValueError: If it is not finite, or not above 0.

    Example:

    >>> import tensorflow as tf
    >>> kernel = tf.constant([[3.0, 0.0], [4.0, 1.0]])  # columns of norms 5 and 1
    >>> clip = AdaptiveClipGradients(clipping=0.1)
    >>> clip([(tf.constant([[1.0, 0.0], [0.0, 0.05]]), kernel)])[0][0].numpy().round(4).tolist()
    [[0.5, 0.0], [0.0, 0.05...]]
    """

    def __init__(self, clipping: float = 0.01, eps: float = 1e-3) -> None:
        self.clipping = check_number("clipping", clipping, above=0, hint="Pass a ratio such as 0.01.")
        self.eps = check_number("eps", eps, above=0, hint="Pass a small weight norm such as 1e-3.")

    def clip(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> list[tf.Tensor]:
        return self.clip_and_measure(gradients, variables).gradients

    def clip_and_measure(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> Clipped:
        weights = [tf.convert_to_tensor(variable) for variable in variables]
        axes = [_axes_of_unit(weight) for weight in weights]
        norms = [tf.sqrt(sum_of_squares(weight, axis)) for weight, axis in zip(weights, axes, strict=True)]
        bounds = [self.clipping * tf.maximum(norm, tf.cast(self.eps, norm.dtype)) for norm in norms]
        return rescale(gradients, bounds, axes=axes)

    def get_config(self) -> dict[str, Any]:
        return {"clipping": self.clipping, "eps": self.eps}


def _axes_of_unit(weight: tf.Tensor) -> Axes:
    """Returns the axes that lead to one output, or `None` for a weight that is one unit."""
    return None if weight.shape.rank <= 1 else tuple(range(weight.shape.rank - 1))
