"""What all clipping strategies have in common: pairs in, pairs out; sparse gradients stay sparse; configs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_monitored.clipping.rescaling import Clipped, global_norm

Pair = tuple[Any, Any]


class ClipGradients:
    """Clips gradients: the base of all strategies.

    A strategy is called with pairs of gradients and variables, alone in a custom train step, or by a
    `ClippedOptimizer`, which does so after the gradients are summed over replicas, unscaled and accumulated. Gradients
    are of any floating dtype, dense or `IndexedSlices`; of the latter, rows with the same index are summed first, and
    they stay sparse. `None` stays where it is. Norms are computed in float32 or wider.

    NaN and Inf stay in the gradients they are in. What shares a norm with them becomes 0.

    To write a strategy, override `clip` and, if it has arguments, `get_config`.

    Example:

    >>> import tensorflow as tf, keras_monitored as km
    >>> clip = km.ClipGradientsByNorm(1.0)
    >>> clip([(tf.constant([3.0, 4.0]), "kernel"), (None, "bias")])
    [(<tf.Tensor: shape=(2,), dtype=float32, numpy=array([0.6, 0.8], dtype=float32)>, 'kernel'), (None, 'bias')]
    """

    def __call__(self, grads_and_vars: Iterable[Pair]) -> list[Pair]:
        """Clips the gradients of `(gradient, variable)` pairs.

        Args:
            grads_and_vars: The pairs, as `zip(gradients, variables)`.

        Returns:
            Pairs of clipped gradients and the same variables, in the same order.
        """
        return self.call_and_measure(grads_and_vars)[0]

    def call_and_measure(self, grads_and_vars: Iterable[Pair]) -> tuple[list[Pair], tf.Tensor, tf.Tensor]:
        """Clips as a call does, and returns the global norm before and after as well."""
        pairs = [(_merged(gradient, variable), variable) for gradient, variable in grads_and_vars]
        present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        if not present:
            return pairs, tf.zeros(()), tf.zeros(())
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g, _ in present]
        clipped, norm, clipped_norm = self.clip_and_measure(values, [variable for _, variable in present])
        rest = iter(clipped)
        return [(_with_values(g, rest), v) for g, v in pairs], norm, clipped_norm

    def clip(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> list[tf.Tensor]:
        """Clips gradients; what a strategy overrides.

        Args:
            gradients: Dense tensors. Of sparse gradients the rows that are there, no two of the same index.
            variables: The variables they belong to.

        Returns:
            The clipped gradients, of the same shapes and dtypes.
        """
        raise NotImplementedError(f"{type(self).__name__} must override `clip(gradients, variables)`.")

    def clip_and_measure(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> Clipped:
        """Clips, and tells the global norm before and after; overridden where the norms are known anyway."""
        clipped = self.clip(gradients, variables)
        return Clipped(clipped, global_norm(gradients), global_norm(clipped))

    def build(self, add_variable: Callable[..., Any] | None = None) -> None:
        """Makes the variables of a strategy that remembers. Most don't.

        Args:
            add_variable: The method of the optimizer that is to own them. Defaults to a strategy that is used alone.
        """

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ClipGradients:
        """Makes a strategy from what `get_config` returned."""
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.get_config() == other.get_config()

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.get_config().items())))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


def registered(strategy: type) -> type:
    """Registers a strategy with Keras, so that a model that holds it loads without `custom_objects`."""
    return keras.saving.register_keras_serializable(package="keras_monitored")(strategy)


def _merged(gradient: Any, variable: Any) -> Any:
    """Sums the rows of `IndexedSlices` that name the same index; anything else becomes a tensor."""
    if gradient is None:
        return None
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    shape = gradient.dense_shape
    if shape is None and hasattr(variable, "shape"):
        shape = tf.constant(tuple(variable.shape), gradient.indices.dtype)
    indices, positions = tf.unique(gradient.indices, out_idx=gradient.indices.dtype)
    rows = tf.math.unsorted_segment_sum(gradient.values, positions, tf.shape(indices)[0])
    rows.set_shape([None, *gradient.values.shape[1:]])
    return tf.IndexedSlices(rows, indices, shape)


def _with_values(gradient: Any, values: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(next(values), gradient.indices, gradient.dense_shape)
    return next(values)
