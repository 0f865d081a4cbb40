"""An optimizer around another one, that clips gradients once: summed over replicas, unscaled and accumulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import keras
import tensorflow as tf

from keras_monitored import keras_internals
from keras_monitored.clipping.rescaling import arithmetic_dtype, sum_of_squares
from keras_monitored.clipping.strategy import ClipGradients, Pair

OnNonfinite = Literal["propagate", "skip", "raise"]


@keras.saving.register_keras_serializable(package="keras_monitored")
class ClippedOptimizer(keras.optimizers.Optimizer):
    """Clips the gradients of another optimizer, and means the same on one replica and on many.

    Keras clips the gradients of each replica before it sums them, so that its bounds depend on the number of replicas.
    This clips once: after the sum over replicas, after a loss scale is taken out, on the mean of accumulated gradients.

    Everything but the clipping stays the wrapped optimizer's: learning rate, weight decay, averages, accumulation.
    Under a float16 policy `compile` puts a loss scale around this one; by hand it is
    `LossScaleOptimizer(ClippedOptimizer(optimizer, clip))`. With several replicas the loss scale is made to skip a step
    when any of them has an overflow, where Keras looks at the first alone.

    Hooks see `gradient_norm` (the global norm before clipping), `clipped_gradient_norm` and `clip_ratio` (the second
    over the first) of the last update, and with `on_nonfinite="skip"` also `skipped_steps`.

    Args:
        optimizer: The Keras optimizer to wrap, without clipping of its own.
        clip: The strategy, such as `ClipGradientsByGlobalNorm(1.0)`.
        on_nonfinite: What to do when the summed gradients hold a NaN or an Inf. `"propagate"`: they stay in the
            elements they are in, and finite ones that share a norm with them become 0. `"skip"`: the step leaves
            variables, slots, averages, accumulators and counters as they are, on every replica. `"raise"`: the step
            ends with an `InvalidArgumentError`, before any change; XLA can't raise, so it is refused with
            `jit_compile`. Defaults to `"propagate"`.
        name: Defaults to that of the wrapped optimizer.

    Raises:
        TypeError: If `optimizer` is no Keras optimizer, or `clip` no strategy.
        ValueError: If `optimizer` clips itself, is a wrapper, or is wrapped already, or `on_nonfinite` is not allowed.

    Example:

    >>> import keras, keras_monitored as km
    >>> optimizer = km.ClippedOptimizer(keras.optimizers.Adam(0.01), km.ClipGradientsByGlobalNorm(1.0))
    >>> optimizer.learning_rate = 0.5
    >>> float(optimizer.inner_optimizer.learning_rate)
    0.5
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        clip: ClipGradients,
        on_nonfinite: OnNonfinite = "propagate",
        name: str | None = None,
    ) -> None:
        _check_optimizer(optimizer)
        if not isinstance(clip, ClipGradients):
            raise TypeError(
                "`clip` must be a clipping strategy. "
                f"Received: {clip!r} (of type {type(clip).__name__}). Pass one such as ClipGradientsByGlobalNorm(1.0)."
            )
        if on_nonfinite not in get_args(OnNonfinite):
            raise ValueError(f"`on_nonfinite` must be one of {get_args(OnNonfinite)}. Received: {on_nonfinite!r}.")
        super().__init__(learning_rate=0.0, name=optimizer.name if name is None else name)
        keras_internals.forget_base_variables(self)
        self.inner_optimizer = optimizer
        self.clip = clip
        self.on_nonfinite = on_nonfinite
        keras_internals.change_summed_gradients(optimizer, self._sum_and_clip)

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the variables of the wrapped optimizer, of the strategy, and those for the observed values."""
        loss_scale = keras_internals.enclosing_loss_scale(self)
        if loss_scale is not None and self._distribution_strategy.num_replicas_in_sync > 1:
            keras_internals.ask_all_replicas(loss_scale)
        if self.built:
            return
        self.inner_optimizer.build(variables)

        def add_scalar(name: str, dtype: str) -> Any:
            # The same on all replicas, so one's will do; without a say, Keras would average what is mirrored.
            return self.add_variable((), dtype=dtype, name=name, aggregation="only_first_replica")

        self._gradient_norm = add_scalar("gradient_norm", "float32")
        self._clipped_gradient_norm = add_scalar("clipped_gradient_norm", "float32")
        self._skipped_steps = add_scalar("skipped_steps", "int64")
        self.clip.build(self.add_variable)
        super().build(variables)

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Clips and applies gradients, one for each variable."""
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                with keras.name_scope(self.name, caller=self):
                    self.build(trainable_variables)
        elif not self.built:
            raise ValueError(
                "`apply` needs `trainable_variables` as long as the optimizer has not been built. Pass them, or call "
                "`build` with them first."
            )
        if self.inner_optimizer.loss_scale_factor is not None:
            # Keras can't divide sparse gradients by it.
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        if self.on_nonfinite == "propagate":
            self.inner_optimizer.apply(grads, trainable_variables)
        else:
            variables = self._trainable_variables if trainable_variables is None else trainable_variables
            self._apply_if_finite(grads, list(variables))

    # Clipping ------------------------------------------------------------------------------------------------------

    def _sum_and_clip(self, grads_and_vars: Iterable[Pair]) -> list[Pair]:
        pairs = list(grads_and_vars)
        if self.on_nonfinite == "propagate":
            pairs = keras_internals.sum_gradients(self.inner_optimizer, pairs)
        clipped, norm, clipped_norm = self.clip.call_and_measure(pairs)
        # Kept in variables: an update may run in a branch, from where no tensor can be handed out.
        self._gradient_norm.assign(tf.cast(norm, tf.float32))
        self._clipped_gradient_norm.assign(tf.cast(clipped_norm, tf.float32))
        return clipped

    # Gradients that are not finite -----------------------------------------------------------------------------------

    def _apply_if_finite(self, grads: list[Any], variables: list[Any]) -> None:
        """Sums over replicas, then asks: what is finite on each replica may not be so in sum."""
        places = [
            i
            for i, (g, v) in enumerate(zip(grads, variables, strict=True))
            if g is not None and not keras_internals.overwritten_with_gradient(v)
        ]
        if places:
            pairs = keras_internals.sum_gradients(self.inner_optimizer, [(grads[i], variables[i]) for i in places])
            for i, (summed, _) in zip(places, pairs, strict=True):
                grads[i] = summed
        used = [variables[i] for i in places]
        accumulators = keras_internals.accumulators_of(self.inner_optimizer, used)
        finite = _all_finite([grads[i] for i in places], accumulators)
        if self.on_nonfinite == "raise":
            self._apply_or_raise(finite, grads, variables)
        elif keras_internals.merge_calls_needed():
            # Replicas have to meet before a branch in which they will meet again.
            context = tf.distribute.get_replica_context()
            context.merge_call(self._apply_or_skip_on_all_replicas, args=(finite, grads, variables))
        else:
            self._apply_or_skip(finite, lambda: self.inner_optimizer.apply(grads, variables))

    def _apply_or_raise(self, finite: tf.Tensor, grads: list[Any], variables: list[Any]) -> None:
        if keras_internals.compiled_by_xla():
            raise ValueError(
                "`on_nonfinite='raise'` can't work in a step compiled by XLA, which raises nothing. Compile the model "
                "with `jit_compile=False`, or use on_nonfinite='skip' and the NaNChecker hook."
            )
        message = "Gradients are not finite (ClippedOptimizer with on_nonfinite='raise'). Nothing has been updated."
        # All of the update waits for it: weight decay needs no gradient, and would come first.
        with tf.control_dependencies([tf.debugging.Assert(finite, [message, self.iterations])]):
            self.inner_optimizer.apply(grads, variables)

    def _apply_or_skip(self, finite: tf.Tensor, apply: Callable[[], Any]) -> None:
        def update() -> None:
            apply()

        def skip() -> None:
            self._skipped_steps.assign_add(1)

        keras.ops.cond(finite, update, skip)

    def _apply_or_skip_on_all_replicas(
        self, strategy: tf.distribute.Strategy, finite: Any, grads: list[Any], variables: list[Any]
    ) -> None:
        def update() -> None:
            strategy.extended.call_for_each_replica(self.inner_optimizer.apply, args=(grads, variables))

        self._apply_or_skip(strategy.experimental_local_results(finite)[0], update)

    def observed_values(self) -> dict[str, tf.Tensor]:
        """Returns what hooks can see of the last update, by name; nothing before the optimizer is built."""
        if not self.built:
            return {}
        norm, clipped_norm = (
            tf.convert_to_tensor(self._gradient_norm),
            tf.convert_to_tensor(self._clipped_gradient_norm),
        )
        same = tf.equal(norm, clipped_norm)
        ratio = tf.where(same, 1.0, clipped_norm / tf.where(same, 1.0, norm))
        values = {"gradient_norm": norm, "clipped_gradient_norm": clipped_norm, "clip_ratio": ratio}
        if self.on_nonfinite == "skip":
            values["skipped_steps"] = tf.convert_to_tensor(self._skipped_steps)
        return values

    # What the wrapped optimizer is asked for -------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Only what Keras's callbacks and trainers read; for all else there is `inner_optimizer`.
        if name in ("_iterations", "_learning_rate", "_model_variables_moving_average"):
            inner = self.__dict__.get("inner_optimizer")
            if inner is not None:
                return getattr(inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def variables(self) -> list[Any]:
        """The variables of the wrapped optimizer, then those of the clipping."""
        return [*self.inner_optimizer.variables, *keras_internals.added_variables(self)]

    @property
    def iterations(self) -> Any:
        """Updates of the wrapped optimizer."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the wrapped optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def weight_decay(self) -> Any:
        """The weight decay of the wrapped optimizer."""
        return self.inner_optimizer.weight_decay

    @weight_decay.setter
    def weight_decay(self, weight_decay: Any) -> None:
        self._set_inner("weight_decay", weight_decay)

    @property
    def loss_scale_factor(self) -> Any:
        """The fixed loss scale of the wrapped optimizer."""
        return self.inner_optimizer.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, loss_scale_factor: Any) -> None:
        self._set_inner("loss_scale_factor", loss_scale_factor)

    def _set_inner(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("inner_optimizer")
        if inner is not None:  # Keras's constructor sets its defaults before there is one
            setattr(inner, name, value)

    def scale_loss(self, loss: Any) -> Any:
        return self.inner_optimizer.scale_loss(loss)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Any) -> None:
        self.inner_optimizer.finalize_variable_values(var_list)

    # Saving ----------------------------------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        return {
            "optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "clip": keras.saving.serialize_keras_object(self.clip),
            "on_nonfinite": self.on_nonfinite,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> ClippedOptimizer:
        parts = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
            for name in ("optimizer", "clip")
        }
        return cls(**{**config, **parts})


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`optimizer` must be a Keras optimizer. "
            f"Received: {optimizer!r} (of type {type(optimizer).__name__}). Pass one such as keras.optimizers.Adam()."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`optimizer` must not be a LossScaleOptimizer: gradients have to be unscaled before they are clipped. "
            "Nest the other way round: LossScaleOptimizer(ClippedOptimizer(optimizer, clip))."
        )
    if isinstance(optimizer, ClippedOptimizer):
        raise ValueError(
            f"`optimizer` must not be a ClippedOptimizer already. Received one that clips with {optimizer.clip!r}. "
            "Wrap its `inner_optimizer` in a single strategy."
        )
    if hasattr(optimizer, "optimizers") or hasattr(optimizer, "inner_optimizer"):
        raise ValueError(
            f"`optimizer` must not be a wrapper of other optimizers. Received: a {type(optimizer).__name__}. "
            "Wrap each optimizer in it with a ClippedOptimizer."
        )
    if keras_internals.changes_summed_gradients(optimizer):
        raise ValueError("`optimizer` belongs to another ClippedOptimizer. Make a new one.")
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        value = getattr(optimizer, name, None)
        if value is not None:
            raise ValueError(
                f"`optimizer` must not clip by itself, that is before the sum over replicas. Received one with "
                f"{name}={value!r}. Leave it out, and pass the bound to the strategy."
            )


def _all_finite(gradients: list[Any], accumulators: list[Any]) -> tf.Tensor:
    """Says whether all gradients, and with what is accumulated so far their sums, are finite."""
    if not gradients:
        return tf.constant(True)
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    if accumulators:
        values = [
            tf.convert_to_tensor(g) + tf.convert_to_tensor(a) for g, a in zip(gradients, accumulators, strict=True)
        ]
    dtype = arithmetic_dtype(values)
    total = tf.add_n([tf.cast(sum_of_squares(value), dtype) for value in values])

    def look_at_each() -> tf.Tensor:
        return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values]))

    return tf.cond(tf.math.is_finite(total), lambda: tf.constant(True), look_at_each)
