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
from typing import Any

import keras
import tensorflow as tf

from keras_monitored import keras_internals, observe
from keras_monitored.counters import Counter

_STATUS_BASE = 2**32  # a call's steps and its failed check come back as one number

Check = Callable[[dict[str, Any]], Any]
"""Takes the observed values of a step, in its graph, and returns a scalar bool: did the step fail?"""


class StepOutcome:
    """What came of a call: the values are those of the last step that ran, still on their device.

    Attributes:
        steps: Steps run; fewer than asked for when the data ended or a check failed.
        failed_check: Index of the first check that the last step failed, or `None`.
    """

    __slots__ = ("_flat", "_structure", "failed_check", "steps")

    def __init__(self, steps: int, failed_check: int | None = None, flat: Any = (), structure: Any = ({}, {})) -> None:
        self.steps = steps
        self.failed_check = failed_check
        self._flat = flat  # put together only when somebody looks: most steps' values are never read
        self._structure = structure

    @property
    def logs(self) -> Any:
        """What the step returned, as Keras logs."""
        return self._values()[0]

    @property
    def observed(self) -> dict[str, Any]:
        """What was observed in the step, by name."""
        return dict(self._values()[1])

    def _values(self) -> Any:
        return tf.nest.pack_sequence_as(self._structure, list(self._flat), expand_composites=True)


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
        self.compilations = 0  # a call that compiles says nothing about the time of a step
        self._spec: Any = None
        self._structure: Any = ({}, {})
        self._on_batch: Callable[..., Any] | None = None
        self._one_or_many: tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None = None
        self._concrete: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._iterator: Any = None
        self._components: Any = None
        self._check_error: Exception | None = None

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
        else:
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
        if iterator is not self._iterator:
            self.build(iterator.element_spec)
            self._iterator, self._components = iterator, tf.nest.flatten(iterator, expand_composites=True)
            self._single, self._loop = self._functions_for(iterator)
        if steps == 1:
            status, *flat = self._single(*self._components)
        else:
            status, *flat = self._loop(tf.constant(steps, tf.int64), *self._components)
        return self._outcome(status, flat)

    def release(self) -> None:
        """Lets go of the iterator it has read from; what is compiled stays."""
        self._iterator = self._components = None

    def on_batch(self, data: Any, element_spec: Any) -> StepOutcome:
        """Runs one step on a batch that was taken from the iterator before, perhaps with parts of it replaced."""
        if self.model.run_eagerly:
            logs, observed, failed = self._observed_step(keras_internals.without_optionals(data))
            self.counter.increment()
            return self._eager_outcome(1, int(failed), logs, observed)
        self.build(element_spec)
        assert self._on_batch is not None
        status, *flat = self._on_batch(keras_internals.without_optionals(data))
        return self._outcome(status, flat)

    def _outcome(self, status: Any, flat: Any) -> StepOutcome:
        failed, done = divmod(int(status), _STATUS_BASE)
        return StepOutcome(done, failed - 1 if failed else None, flat, self._structure)

    def _eager_outcome(self, done: int, failed: int, logs: Any, observed: Any) -> StepOutcome:
        values = (logs, observed)
        flat = tf.nest.flatten(values, expand_composites=True)
        return StepOutcome(done, failed - 1 if failed else None, flat, values)

    # One step -----------------------------------------------------------------------------------------------------

    def _replica_step(self, data: Any) -> tuple[Any, dict[str, Any], tf.Tensor]:
        with observe.collecting(self.feeds) as collector:
            optimizer = getattr(self.model, "optimizer", None)
            if optimizer is not None:
                observe.observe("learning_rate", optimizer.learning_rate, reduction="first")
            logs = self.step(data)
            observe.observe_optimizers(self.model)
            failed = self._first_failed_check(collector.values)
        values = collector.values
        self.log_names = tuple(logs) if isinstance(logs, dict) else ()
        self.observable = tuple(values)
        kept = {n: v for n, v in values.items() if not n.startswith("gradients/") or n in self.required}
        self._reductions = {n: collector.reductions[n] for n in kept}
        return logs, kept, failed

    def _first_failed_check(self, observed: dict[str, Any]) -> tf.Tensor:
        failed = tf.zeros((), tf.int32)
        try:
            for index, check in reversed(list(enumerate(self.checks, 1))):
                failed = tf.where(tf.cast(check(dict(observed)), tf.bool), index, failed)
        except Exception as error:
            if tf.executing_eagerly():
                raise
            # Raised after the trace: broken off in it, variables made there would stay without a value for good.
            self._check_error = error
        return failed

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
        return self._eager_outcome(done, failed, logs, observed)

    # Compiled steps -----------------------------------------------------------------------------------------------

    def _compile(self, spec: Any) -> None:
        step = tf.function(self._observed_step, jit_compile=bool(self.model.jit_compile), autograph=False)
        # The first trace stands outside of any branch: it makes the variables of unbuilt layers, slots and metrics.
        self._check_error = None
        logs, observed, _ = step.get_concrete_function(spec).structured_outputs
        if self._check_error is not None:
            raise self._check_error
        self._structure = (logs, observed)
        outputs = tf.nest.flatten(self._structure, expand_composites=True)

        def counted_step(data: Any) -> Any:
            logs, observed, failed = step(keras_internals.without_optionals(data))
            with tf.control_dependencies([failed]):
                self.counter.variable.assign_add(1, read_value=False)
            with tf.device("CPU"):
                head = [tf.ones((), tf.int64), tf.identity(failed)]
            return head + tf.nest.flatten((logs, observed), expand_composites=True)

        def no_step() -> Any:
            with tf.device("CPU"):
                head = [tf.zeros((), tf.int64), tf.zeros((), tf.int32)]
            return head + [tf.zeros([size or 0 for size in out.shape or ()], out.dtype) for out in outputs]

        def with_status(done: tf.Tensor, failed: tf.Tensor, *values: Any) -> list[Any]:
            with tf.device("CPU"):  # made on the host: reading it is no copy from a device
                return [done + tf.cast(failed, tf.int64) * _STATUS_BASE, *values]

        def one(iterator: Any) -> Any:
            optional = iterator.get_next_as_optional()
            return with_status(*tf.cond(optional.has_value(), lambda: counted_step(optional.get_value()), no_step))

        def many(iterator: Any, steps: tf.Tensor) -> Any:
            def goes_on(more: tf.Tensor, done: tf.Tensor, failed: tf.Tensor, *_: Any) -> tf.Tensor:
                return tf.logical_and(more, tf.logical_and(done < steps, tf.equal(failed, 0)))

            def body(_: tf.Tensor, done: tf.Tensor, *values: Any) -> Any:
                optional = iterator.get_next_as_optional()
                more = optional.has_value()

                def next_step() -> Any:
                    ran, *new = counted_step(optional.get_value())
                    return [done + ran, *new]

                return [more, *tf.cond(more, next_step, lambda: [done, *values])]

            start = [tf.constant(True), *no_step()]
            shapes = [tf.TensorShape(())] * 3 + [out.shape for out in outputs]
            ended = tf.while_loop(goes_on, body, start, shape_invariants=shapes, parallel_iterations=1)
            return with_status(*ended[1:])

        self._one_or_many = (one, many)
        self._concrete = {}
        self._iterator = None
        self._on_batch = tf.function(
            lambda data: with_status(*counted_step(data)), autograph=False, input_signature=_signature(spec)
        )

    def _functions_for(self, iterator: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Compiles for the type of an iterator. It is handed over in its parts, which costs less than as a whole."""
        spec = tf.type_spec_from_value(iterator)
        if spec not in self._concrete:
            assert self._one_or_many is not None
            one, many = self._one_or_many
            parts = [tf.TensorSpec(part.shape, part.dtype) for part in self._components]

            def one_step(*components: Any) -> Any:
                return one(tf.nest.pack_sequence_as(spec, list(components), expand_composites=True))

            def many_steps(steps: tf.Tensor, *components: Any) -> Any:
                return many(tf.nest.pack_sequence_as(spec, list(components), expand_composites=True), steps)

            single = tf.function(one_step, autograph=False)
            loop = tf.function(many_steps, autograph=False)
            number = tf.TensorSpec((), tf.int64)
            self._concrete[spec] = (
                self._when_called(lambda: single.get_concrete_function(*parts)),
                self._when_called(lambda: loop.get_concrete_function(number, *parts)),
            )
        return self._concrete[spec]

    def _when_called(self, compile_function: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """Compiles a function when it is first called: most runs need either loops or single steps."""
        compiled: list[Callable[..., Any]] = []

        def call(*args: Any) -> Any:
            if not compiled:
                compiled.append(compile_function())
                self.compilations += 1
            return compiled[0](*args)

        return call


def _signature(spec: Any) -> tuple[Any, ...] | None:
    """Fixes the spec of a batch handed in, unless it holds parts that are not there."""
    return None if any(part is None for part in tf.nest.flatten(spec)) else (spec,)
