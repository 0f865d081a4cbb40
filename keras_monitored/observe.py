"""Values that a train step shows to hooks, and inputs that hooks may set.

`observe` and `feed` are called while a step is traced: in a train step, a loss, a layer, or a clipping strategy. They
do for Keras what graph collections and placeholders did for TensorFlow 1. Outside a monitored step both do nothing,
so a model that calls them still trains with plain Keras.

    class Model(keras.Model):
        def train_step(self, data):
            ...
            km.observe("discriminator/loss", loss)
            noise_scale = km.feed("noise_scale", 1.0)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import keras
import tensorflow as tf

Reduction = Literal["mean", "sum", "concat", "first"]

_collectors = threading.local()


class Collector:
    """What one replica observes in one traced step."""

    def __init__(self, feeds: dict[str, FeedInput] | None = None) -> None:
        self.values: dict[str, Any] = {}
        self.reductions: dict[str, Reduction] = {}
        self.feeds = {} if feeds is None else feeds
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def reaches(self, value: Any) -> bool:
        """Says whether `value` belongs to the step itself and not to a function or a branch nested in it."""
        if self._graph is None:
            return True
        parts = tf.nest.flatten(value, expand_composites=True)
        return all(isinstance(part, tf.__internal__.EagerTensor) or part.graph is self._graph for part in parts)


class FeedInput:
    """An input made by `feed`: a variable that holds its default but for the runs that feed it."""

    def __init__(self, default: Any) -> None:
        with tf.init_scope():
            self.default = tf.convert_to_tensor(default)
            self.variable = tf.Variable(
                self.default, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )


def current_collector() -> Collector | None:
    """Returns the collector of the step that this thread traces or runs, or `None`."""
    return getattr(_collectors, "current", None)


@contextlib.contextmanager
def collecting(feeds: dict[str, FeedInput] | None = None) -> Iterator[Collector]:
    """Collects what is observed in this thread until the end of the block."""
    outer = current_collector()
    collector = Collector(feeds)
    _collectors.current = collector
    try:
        yield collector
    finally:
        _collectors.current = outer


def observe(name: str, value: Any, *, reduction: Reduction = "mean") -> Any:
    """Makes a tensor of the train step available to hooks under `name`.

    Call it where the value is computed, while the step is traced. Hooks then ask for it by its name: in
    `SessionRunArgs(fetches=...)`, in `NaNChecker(names=...)`. A value that no hook asks for stays on its device. A
    second call with the same name in one step replaces the first.

    Args:
        name: Name for hooks. Not one of `global_step` and `global_epoch`, which are always there.
        value: A tensor of any shape, or what converts to one.
        reduction: How values of several replicas become one: `"mean"`, `"sum"`, `"concat"` along the first axis, or
            `"first"` (that of the first replica). Defaults to `"mean"`.

    Returns:
        `value`, unchanged.

    Raises:
        ValueError: If `reduction` or `name` is not allowed, or if `value` belongs to a `tf.function` or a branch
            nested in the step, from where it can't be handed out.

    Example:

    >>> import keras_monitored as km
    >>> float(km.observe("twice", tf.constant(2.0)))  # outside a monitored step: nothing happens
    2.0
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"`name` must be a non-empty string. Received: name={name!r}. Name the observed value.")
    if name in ("global_step", "global_epoch"):
        raise ValueError(f"`name` can't be {name!r}: the run counts it itself. Choose another name.")
    if reduction not in get_args(Reduction):
        raise ValueError(f"`reduction` must be one of {get_args(Reduction)}. Received: reduction={reduction!r}")
    collector = current_collector()
    if collector is not None:
        tensor = value if isinstance(value, tf.__internal__.CompositeTensor) else tf.convert_to_tensor(value)
        if not collector.reaches(tensor):
            raise ValueError(
                f"observe({name!r}, ...) was called inside a `tf.function`, a branch or a loop nested in the train "
                "step, from where the value can't be handed out. Return it to the train step and observe it there."
            )
        collector.values[name] = tensor
        collector.reductions[name] = reduction
    return value


def feed(name: str, default: Any) -> Any:
    """Declares an input of the train step that hooks and runs may set for one run.

    Args:
        name: Name for `SessionRunArgs(feeds={name: value})`. Not `"x"` or `"y"`, which stand for the batch.
        default: Value for the runs that don't feed it. Its shape and dtype are those of every fed value.

    Returns:
        A tensor: the fed value, or `default`.

    Raises:
        ValueError: If `name` is empty or stands for a part of the batch.

    Example:

    >>> import keras_monitored as km
    >>> float(km.feed("temperature", 0.5))  # outside a monitored step: the default
    0.5
    """
    if not isinstance(name, str) or not name or name in ("x", "y"):
        raise ValueError(f"`name` must be a non-empty string other than 'x' and 'y'. Received: name={name!r}")
    collector = current_collector()
    if collector is None:
        return tf.convert_to_tensor(default)
    if name not in collector.feeds:
        collector.feeds[name] = FeedInput(default)
    return collector.feeds[name].variable.read_value()


@contextlib.contextmanager
def observing_model(model: keras.Model, *, gradients: bool = False) -> Iterator[None]:
    """Observes, until the end of the block, what a model's own step computes.

    `compute_loss` gives `loss` (the sum, if a step calls it several times), and with `gradients=True` every
    optimizer's `apply` gives `gradients/<variable path>`. Both are methods that users override, so they are wrapped
    on the instance, and only while a step is traced or runs eagerly.
    """

    def loss_of(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        def compute_and_observe(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            collector = current_collector()
            if collector is not None and loss is not None and collector.reaches(loss):
                # Keras divides by the number of replicas, so that the replicas' gradients add up to the global mean's.
                whole = tf.convert_to_tensor(loss) * tf.distribute.get_strategy().num_replicas_in_sync
                seen = collector.values.get("loss")
                observe("loss", whole if seen is None else seen + tf.cast(whole, seen.dtype))
            return loss

        return compute_and_observe

    def gradients_of(apply: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        def observe_and_apply(grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
            collector = current_collector()
            for gradient, variable in zip(grads, variables, strict=False):
                values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
                if collector is not None and values is not None and collector.reaches(values):
                    observe(f"gradients/{variable.path}", values, reduction="first")
            return apply(grads, trainable_variables)

        return observe_and_apply

    wrapped: list[tuple[Any, str, Callable[..., Any]]] = [(model, "compute_loss", loss_of(model.compute_loss))]
    if gradients:
        wrapped += [(opt, "apply", gradients_of(opt.apply, opt)) for opt in optimizers_of(model)]
    for owner, name, method in wrapped:
        owner.__dict__[name] = method
    try:
        yield
    finally:
        for owner, name, _ in wrapped:
            owner.__dict__.pop(name, None)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that a model holds, its compiled one first, as attributes or in lists and dicts."""
    found: list[keras.optimizers.Optimizer] = []
    candidates = [getattr(model, "optimizer", None), *tf.nest.flatten(list(_plain_attributes(model)))]
    for candidate in candidates:
        if isinstance(candidate, keras.optimizers.Optimizer) and all(candidate is not known for known in found):
            found.append(candidate)
    return found


def observe_optimizers(model: keras.Model) -> None:
    """Observes what the optimizers of a model tell of their last update, through a method `observed_values`.

    Those of the first one that tells something have plain names, others `<name of the optimizer>/<name>`.
    """
    prefix = ""
    for optimizer in optimizers_of(model):
        told: Any = optimizer
        while told is not None and not hasattr(told, "observed_values"):
            told = getattr(told, "inner_optimizer", None)
        if told is not None:
            for name, value in told.observed_values().items():
                observe(f"{prefix and told.name + prefix}{name}", value, reduction="first")
            prefix = "/"


def _plain_attributes(model: keras.Model) -> Iterator[Any]:
    for value in vars(model).values():
        if isinstance(value, keras.optimizers.Optimizer):
            yield value
        elif isinstance(value, dict):
            yield from (v for v in value.values() if isinstance(v, keras.optimizers.Optimizer))
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, keras.optimizers.Optimizer))
