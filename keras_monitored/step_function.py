"""The compiled step: one function that looks for the end of data, steps, counts and checks, for one step or many.

Synopsis:

    function = StepFunction(model, model.train_step, counter=Counter("global_step"), checks=[is_bad])
    outcome = function(iterator, steps=32)      # runs 32 steps, fewer at the end of data or when a check fails
    outcome.steps, outcome.failed_check, outcome.logs, outcome.observed

Nothing is computed on a batch that isn't there: Keras's own function runs part of a step when it meets the end of data
of unknown length. The step is always traced from the iterator's `element_spec`, never from a concrete batch: the two
graphs differ in the last bit of their results, and every process of a run has to compute the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_monitored import keras_internals, observe
from keras_monitored.counters import Counter

Check = Callable[[dict[str, Any]], Any]
"""Takes the observed values of a step, in its graph, and returns a scalar bool: did the step fail?"""


class StepOutcome(NamedTuple):
    """What came of a call: the values are those of the last step that ran, still on their device."""

    steps: int
    """Steps run; fewer than asked for when the data ended or a check failed."""
    failed_check: int | None
    """Index of the first check that the last step failed, or `None`."""
    logs: dict[str, Any]
    """What the step returned, as Keras logs."""
    observed: dict[str, Any]
    """What was observed in the step, by name."""


class StepFunction:
    """Runs steps of a model on the next batches of an iterator.

    Args:
        model: The Keras model. `run_eagerly`, `jit_compile` and the distribution strategy are taken from it.
        step: The step: a function of one batch that returns logs, such as `model.train_step`.
        counter: Counts the steps, in the graph.
        checks: Functions of the observed values, traced into the step. A step that one of them finds bad is the last
            of its loop.
        gradients: Whether to observe `gradients/<variable path>` for the checks. Defaults to `False`.
    """

    def __init__(
        self,
        model: keras.Model,
        step: Callable[[Any], Any],
        *,
        counter: Counter,
        checks: Sequence[Check] = (),
        gradients: bool = False,
    ) -> None:
        self.model = model
        self.step = step
        self.counter = counter
        self.checks = tuple(checks)
        self.gradients = gradients
        self.feeds: dict[str, observe.FeedInput] = {}
        self.required: set[str] = set()
        self.observable: tuple[str, ...] | None = None
        self.log_names: tuple[str, ...] = ()
        self._spec: Any = None
        self._functions: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]] | None = None
        self._empty: Any = None

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy that the steps run under."""
        return self.model.distribute_strategy

    def build(self, element_spec: Any) -> None:
        """Traces the step for batches of this spec, which makes all variables that it needs; runs nothing."""
        spec = keras_internals.without_optionals(element_spec)
        if self._spec is not None and self._spec == spec:
            return
        if self.model.run_eagerly:
            keras_internals.symbolic_build(self.model, spec)
            for optimizer in observe.optimizers_of(self.model):
                if not optimizer.built and optimizer is self.model.optimizer:
                    optimizer.build(self.model.trainable_variables)
        else:
            for optimizer in observe.optimizers_of(self.model):
                if self.model.built and optimizer is self.model.optimizer and not optimizer.built:
                    optimizer.build(self.model.trainable_variables)
            self._compile(spec)
        self._spec = spec

    def require(self, names: set[str]) -> None:
        """Makes values available that are too large to be handed out unasked: those called `gradients/...`."""
        missing = {name for name in names if name.startswith("gradients/")} - self.required
        if missing:
            self.required |= missing
            self.gradients = True
            spec, self._spec = self._spec, None
            if spec is not None:
                self.build(spec)

    def __call__(self, iterator: Any, steps: int = 1) -> StepOutcome:
        """Runs up to `steps` steps on the next batches of `iterator`; none if there is no batch left."""
        if self.model.run_eagerly:
            return self._run_eagerly(iterator, steps)
        self.build(iterator.element_spec)
        assert self._functions is not None
        single, loop, _ = self._functions
        outputs = single(iterator) if steps == 1 else loop(iterator, tf.constant(steps, tf.int64))
        return self._outcome(*outputs)

    def on_batch(self, data: Any, element_spec: Any) -> StepOutcome:
        """Runs one step on a batch that was taken from the iterator before, perhaps with parts of it replaced."""
        if self.model.run_eagerly:
            logs, observed, failed = self._observed_step(keras_internals.without_optionals(data))
            self.counter.increment()
            return self._outcome(1, failed, logs, observed)
        self.build(element_spec)
        assert self._functions is not None
        return self._outcome(*self._functions[2](keras_internals.without_optionals(data)))

    def _outcome(self, steps: Any, failed: Any, logs: Any, observed: Any) -> StepOutcome:
        # Both numbers are made by operations on the host: reading them is no copy from a device.
        failed_check = int(failed) if self.checks else 0
        return StepOutcome(int(steps), failed_check - 1 if failed_check else None, logs, observed)

    # One step -----------------------------------------------------------------------------------------------------

    def _replica_step(self, data: Any) -> tuple[Any, dict[str, Any], tf.Tensor]:
        with observe.collecting(self.feeds) as collector:
            optimizer = getattr(self.model, "optimizer", None)
            if optimizer is not None:
                observe.observe("learning_rate", optimizer.learning_rate, reduction="first")
            logs = self.step(data)
            failed = tf.zeros((), tf.int32)
            for index, check in reversed(list(enumerate(self.checks, 1))):
                failed = tf.where(tf.cast(check(dict(collector.values)), tf.bool), index, failed)
        values = collector.values
        self.log_names = tuple(logs) if isinstance(logs, dict) else ()
        self.observable = tuple(values)
        kept = {n: v for n, v in values.items() if not n.startswith("gradients/") or n in self.required}
        self._reductions = {n: collector.reductions[n] for n in kept}
        return logs, kept, failed

    def _observed_step(self, data: Any) -> tuple[Any, dict[str, Any], tf.Tensor]:
        with observe.observing_model(self.model, gradients=self.gradients):
            logs, observed, failed = self.strategy.run(self._replica_step, args=(data,))
        if self.strategy.num_replicas_in_sync > 1:
            logs = tf.nest.map_structure(lambda v: self._reduce(v, "mean"), logs)
            observed = {name: self._reduce(value, self._reductions[name]) for name, value in observed.items()}
            failed = tf.reduce_max(tf.stack(self.strategy.experimental_local_results(failed)))
        return logs, observed, failed

    def _reduce(self, value: Any, reduction: observe.Reduction) -> Any:
        results = self.strategy.experimental_local_results(value)
        if reduction == "first":
            return results[0]
        if reduction == "concat":
            return tf.concat(results, axis=0)
        return self.strategy.reduce(reduction.upper(), value, axis=None)

    def _run_eagerly(self, iterator: Any, steps: int) -> StepOutcome:
        done, failed = 0, 0
        logs: dict[str, Any] = {}
        observed: dict[str, Any] = {}
        while done < steps and not failed:
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                break
            data = keras_internals.without_optionals(optional.get_value())
            logs, observed, failed = self._observed_step(data)
            self.counter.increment()
            done, failed = done + 1, int(failed)
        return self._outcome(done, failed, logs, observed)

    # Compiled steps -----------------------------------------------------------------------------------------------

    def _compile(self, spec: Any) -> None:
        step = tf.function(self._observed_step, jit_compile=bool(self.model.jit_compile), autograph=False)
        # The first trace stands outside of any branch: it makes the variables of unbuilt layers, slots and metrics.
        outputs = step.get_concrete_function(spec).structured_outputs
        self._empty = tf.nest.map_structure(_empty_like, outputs)

        def counted_step(data: Any) -> Any:
            logs, observed, failed = step(keras_internals.without_optionals(data))
            with tf.control_dependencies([failed]):
                self.counter.variable.assign_add(1, read_value=False)
            with tf.device("CPU"):
                return tf.ones((), tf.int64), tf.identity(failed), logs, observed

        def no_step() -> Any:
            logs, observed, failed = tf.nest.map_structure(lambda make: make(), self._empty)
            with tf.device("CPU"):
                return tf.zeros((), tf.int64), tf.identity(failed), logs, observed

        def single(iterator: Any) -> Any:
            optional = iterator.get_next_as_optional()
            return tf.cond(optional.has_value(), lambda: counted_step(optional.get_value()), no_step)

        def loop(iterator: Any, steps: tf.Tensor) -> Any:
            def goes_on(done: tf.Tensor, failed: tf.Tensor, more: tf.Tensor, *_: Any) -> tf.Tensor:
                return tf.logical_and(more, tf.logical_and(done < steps, tf.equal(failed, 0)))

            def body(done: tf.Tensor, failed: tf.Tensor, more: tf.Tensor, logs: Any, observed: Any) -> Any:
                optional = iterator.get_next_as_optional()
                more = optional.has_value()

                def next_step() -> Any:
                    ran, failed_now, logs_now, observed_now = counted_step(optional.get_value())
                    return done + ran, failed_now, logs_now, observed_now

                done, failed, logs, observed = tf.cond(more, next_step, lambda: (done, failed, logs, observed))
                return done, failed, more, logs, observed

            done, failed, logs, observed = no_step()
            start = (done, failed, tf.constant(True), logs, observed)
            shapes = tf.nest.map_structure(_shape_invariant, (logs, observed), outputs[:2])
            scalar = tf.TensorShape(())
            done, failed, _, logs, observed = tf.while_loop(
                goes_on,
                body,
                start,
                shape_invariants=(scalar, scalar, scalar, *shapes),
                parallel_iterations=1,
            )
            return done, failed, logs, observed

        self._functions = (
            _concrete(tf.function(single, autograph=False)),
            _concrete(tf.function(loop, autograph=False)),
            tf.function(counted_step, autograph=False, input_signature=_signature(spec)),
        )


def _concrete(function: Any) -> Callable[..., Any]:
    """Looks the concrete function up once per iterator type instead of once per call."""
    found: dict[Any, Any] = {}

    def call(iterator: Any, *args: Any) -> Any:
        key = type(iterator)
        concrete = found.get(key)
        if concrete is None:
            concrete = found[key] = function.get_concrete_function(
                iterator, *(tf.TensorSpec(a.shape, a.dtype) for a in args)
            )
        return concrete(iterator, *args)

    return call


def _signature(spec: Any) -> tuple[Any, ...] | None:
    """Fixes the spec of a batch handed in, unless it holds parts that are not there."""
    return None if any(part is None for part in tf.nest.flatten(spec)) else (spec,)


def _empty_like(output: Any) -> Callable[[], Any]:
    """Returns a maker of a value that stands in for an output when no step ran."""
    shape = [size or 0 for size in output.shape] if output.shape.rank is not None else []
    return lambda: tf.zeros(shape, output.dtype)


def _shape_invariant(_: Any, output: Any) -> tf.TensorShape:
    return output.shape
