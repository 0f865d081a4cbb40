"""Small models, their data, and hooks that remember what they were told."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_monitored as km

BATCH = 4


def dense_model(optimizer: Any = "sgd", **compile_options: Any) -> keras.Sequential:
    """A model of three weights; equal weights each time in one test, once the seeds are set."""
    init = keras.initializers.GlorotUniform(seed=7)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer=init)])
    model.compile(optimizer, "mse", **compile_options)
    return model


def arrays(batches: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    shape = (batches * BATCH, 2)
    return random.normal(size=shape).astype(np.float32), random.normal(size=(shape[0], 1)).astype(np.float32)


def dataset(batches: int, *, known_length: bool = True) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices(arrays(batches)).batch(BATCH, drop_remainder=True)
    return data if known_length else data.filter(lambda x, y: True)


class TableModel(keras.Model):
    """Has the losses that its data lists: its batches are single numbers, its one weight counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.add_weight(shape=(), initializer="zeros", name="steps")
        self.loss_mean = keras.metrics.Mean("loss")
        self.compile(optimizer="sgd")
        self.built = True

    def call(self, x: Any) -> Any:
        return x * self.steps

    def train_step(self, data: Any) -> dict[str, Any]:
        loss = tf.reduce_mean(data)
        km.observe("loss", loss)
        self.steps.assign_add(1.0)
        self.loss_mean.update_state(loss)
        return {"loss": self.loss_mean.result()}


def table(losses: Sequence[float]) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(np.asarray(losses, np.float32)).batch(1)


def fit(
    model: keras.Model,
    data: Any,
    hooks: Sequence[km.Hook] = (),
    *,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    working_dir: Any = None,
    steps_per_loop: Any = 1,
    **options: Any,
) -> keras.callbacks.History:
    """Fits under hooks; in silence, and without Keras's warning that it does not shuffle a dataset."""
    callback = km.HookCallback(hooks, working_dir=working_dir, steps_per_loop=steps_per_loop)
    callback._sleep = lambda seconds: None
    return model.fit(data, callbacks=[*callbacks, callback], **{"verbose": 0, "shuffle": False, **options})


def evaluate(model: keras.Model, data: Any, hooks: Sequence[km.Hook]) -> Any:
    return model.evaluate(data, verbose=0, callbacks=[km.HookCallback(hooks)])


def predict(model: keras.Model, data: Any, hooks: Sequence[km.Hook]) -> Any:
    return model.predict(data, verbose=0, callbacks=[km.HookCallback(hooks)])


def weights_of(model: keras.Model) -> list[np.ndarray]:
    """Every variable of the model and its optimizer."""
    optimizer = model.optimizer.variables if model.optimizer is not None else []
    return [variable.numpy() for variable in [*model.variables, *optimizer]]


def assert_same_weights(model: keras.Model, other: keras.Model) -> None:
    for ours, theirs in zip(weights_of(model), weights_of(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Recorder(km.Hook):
    """Remembers the calls of its life cycle, in a list that several may share.

    Args:
        calls: The list. Defaults to a new one.
        name: Put before each call. Defaults to none.
        fetches: What to ask for at every run; the values end up in `values`.
        stop_at: Step after which a stop is asked for; 0 for before the first.
        every: Steps between two runs that the hook takes part in. Defaults to 1.
    """

    def __init__(
        self,
        calls: list[str] | None = None,
        name: str = "",
        *,
        fetches: Any = None,
        stop_at: int | None = None,
        every: int = 1,
        priority: int = 0,
        modes: Any = None,
    ) -> None:
        self.calls = [] if calls is None else calls
        self.name = name
        self.fetches = fetches
        self.stop_at = stop_at
        self.every = every
        self.priority = priority
        self.values: list[Any] = []
        if modes is not None:
            self.modes = frozenset(modes)

    def _note(self, call: str) -> None:
        self.calls.append(f"{self.name} {call}".strip())

    def begin(self) -> None:
        self._note("begin")

    def after_session_creation(self, session: km.Session) -> None:
        self._note(f"created {session.step}")
        if self.stop_at == 0:
            session.request_stop("asked for by a test")

    def before_run(self, run_context: km.SessionRunContext) -> km.SessionRunArgs | None:
        self._note(f"before {run_context.step}")
        return None if self.fetches is None else km.SessionRunArgs(self.fetches)

    def after_run(self, run_context: km.SessionRunContext, run_values: km.SessionRunValues) -> None:
        self._note(f"after {run_values.step}")
        self.values.append(run_values.results)
        if self.stop_at is not None and run_values.step >= self.stop_at:
            run_context.request_stop("asked for by a test")

    def end(self, session: km.Session) -> None:
        self._note(f"end {session.step}")

    def next_step(self, step: int) -> int | None:
        return (step // self.every + 1) * self.every


def life(*steps: int, start: int = 0) -> list[str]:
    """The calls of a plain run whose runs end at these steps."""
    runs = zip([start, *steps], steps, strict=False)
    calls = [call for before, after in runs for call in (f"before {before}", f"after {after}")]
    return ["begin", f"created {start}", *calls, f"end {steps[-1] if steps else start}"]
