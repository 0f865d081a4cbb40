"""Clipping to a percentile of the gradient norms seen so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_monitored.clipping.rescaling import Clipped, global_norm, rescale, sum_of_squares
from keras_monitored.clipping.strategy import ClipGradients, registered
from keras_monitored.validation import check_integer, check_number


@registered
class AutoClipGradients(ClipGradients, tf.Module):
    """Scales all gradients down to a percentile of the global norms of the last steps, this one included.

    From "AutoClip: Adaptive Gradient Clipping for Source Separation Networks" (arXiv:2007.14469). In a
    `ClippedOptimizer` the remembered norms are among the optimizer's variables, so that they are saved and restored
    with it. Norms that are 0 or not finite are not remembered: they would turn into a bound that ends the training.

    Args:
        percentile: From 0 to 100, with linear interpolation as in `numpy.percentile`. Defaults to 10.
        window: Number of norms remembered. Defaults to 1000.

    Raises:
        TypeError: If `percentile` is no real number, or `window` no integer.
        ValueError: If `percentile` is outside of 0 to 100, or `window` smaller than 1.

    Example:

    >>> import tensorflow as tf
    >>> clip = AutoClipGradients(percentile=50)
    >>> [float(clip([(tf.constant(norm), "kernel")])[0][0]) for norm in (1.0, 2.0, 9.0)]  # the median so far
    [1.0, 1.5, 2.0]
    """

    def __init__(self, percentile: float = 10, window: int = 1000) -> None:
        tf.Module.__init__(self, name="auto_clip_gradients")
        hint = "Pass a percentile from 0 to 100."
        self.percentile = check_number("percentile", percentile, minimum=0, hint=hint)
        if self.percentile > 100:
            raise ValueError(f"`percentile` must be at most 100. Received: {percentile!r}. {hint}")
        self.window = check_integer("window", window, minimum=1, hint="Pass the number of norms to remember.")
        self._norms: Any = None
        self._seen: Any = None

    def build(self, add_variable: Callable[..., Any] | None = None) -> None:
        """Makes the window of norms.

        Needed by hand only where a strategy is used alone in `strategy.run`: call it in `strategy.scope()`.
        """
        if self._norms is not None:
            raise ValueError(
                "An AutoClipGradients remembers norms and can't be shared. Received one that is in use already. "
                "Make one for each optimizer."
            )
        if add_variable is not None:
            shared = {"initializer": "zeros", "aggregation": "only_first_replica"}
            self._norms = add_variable((self.window,), dtype="float32", name="auto_clip_norms", **shared)
            self._seen = add_variable((), dtype="int64", name="auto_clip_seen", **shared)
        else:
            with tf.init_scope():
                first = tf.VariableAggregation.ONLY_FIRST_REPLICA
                self._norms = tf.Variable(tf.zeros((self.window,)), trainable=False, aggregation=first)
                self._seen = tf.Variable(tf.zeros((), tf.int64), trainable=False, aggregation=first)

    def clip(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> list[tf.Tensor]:
        return self.clip_and_measure(gradients, variables).gradients

    def clip_and_measure(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> Clipped:
        squares = [sum_of_squares(gradient) for gradient in gradients]
        bound = self._bound_with(tf.cast(global_norm(gradients, squares), tf.float32))
        return rescale(gradients, [bound], shared=True, squares=squares)

    def _bound_with(self, norm: tf.Tensor) -> tf.Tensor:
        """Remembers a norm, and returns the percentile of all that are remembered."""
        if self._norms is None:
            self.build()
        norms, seen = tf.convert_to_tensor(self._norms), tf.convert_to_tensor(self._seen)
        positions = tf.range(self.window, dtype=tf.int64)
        counts = tf.logical_and(tf.math.is_finite(norm), norm > 0)
        norms = tf.where(tf.logical_and(counts, tf.equal(positions, seen % self.window)), norm, norms)
        seen += tf.cast(counts, tf.int64)
        self._norms.assign(norms)
        self._seen.assign(seen)
        known = tf.minimum(seen, self.window)
        ordered = tf.sort(tf.where(positions < known, norms, norms.dtype.max))
        bound = _percentile(ordered, known, self.percentile)
        return tf.where(known > 0, bound, norms.dtype.max)

    def get_config(self) -> dict[str, Any]:
        return {"percentile": self.percentile, "window": self.window}


def _percentile(ordered: tf.Tensor, count: tf.Tensor, percentile: float) -> tf.Tensor:
    """Interpolates linearly in the first `count` values."""
    last = tf.maximum(count - 1, 0)
    place = tf.cast(last, tf.float64) * (percentile / 100)
    below = tf.minimum(tf.cast(tf.floor(place), tf.int64), last)
    low, high = tf.gather(ordered, below), tf.gather(ordered, tf.minimum(below + 1, last))
    return low + (high - low) * tf.cast(place - tf.cast(below, tf.float64), ordered.dtype)
