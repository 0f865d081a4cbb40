"""A model, its compiled step, its counters and its state: what hooks and drivers call the session."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_monitored.configuration import Configuration
from keras_monitored.counters import Counter
from keras_monitored.errors import CheckpointError
from keras_monitored.journal import Journal
from keras_monitored.modes import Mode
from keras_monitored.session.arguments import Feeds, RunOptions, feed_items
from keras_monitored.state import TrainingState, plain
from keras_monitored.step_function import StepFunction, StepOutcome


@dataclasses.dataclass
class RunRecord:
    """Which run this is, over all its processes, and where it notes what happens."""

    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    started: float = dataclasses.field(default_factory=time.time)
    journal: Journal = dataclasses.field(default_factory=lambda: Journal(None))
    finished: dict[str, Any] | None = None


class Session:
    """Runs steps of one model on one iterator, and answers for what can be fetched and fed.

    `model.fit` with a `HookCallback` and custom loops both make their steps through a session. Hooks are given it in
    `after_session_creation` and `end`.

    Args:
        model: The Keras model.
        function: The compiled step, or `None` where Keras's own function runs (in inference).
        global_step: Counts the steps.
        global_epoch: Counts the completed epochs.
        configuration: Of the run.
        mode: What the model is run for.
        state: The state of the run, if it can be saved.
        run: Identity and journal of the run.
    """

    def __init__(
        self,
        model: keras.Model,
        function: StepFunction | None,
        *,
        global_step: Counter,
        global_epoch: Counter,
        configuration: Configuration,
        mode: Mode = Mode.TRAINING,
        state: TrainingState | None = None,
        run: RunRecord | None = None,
    ) -> None:
        self.model = model
        self.function = function
        self.configuration = configuration
        self.mode = mode
        self.state = state
        self.run_record = RunRecord() if run is None else run
        self.iterator: Any = None
        self.batch = 0
        self.has_run = False
        self.restored_from: str | None = None
        self.stop_reason: str | None = None
        self.seconds_per_step: float | None = None
        self.outcome = StepOutcome(0)
        self._global_step = global_step
        self._global_epoch = global_epoch
        self._closed = False
        self.read_counters()

    # Where the run is ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The global step: how many steps the run has made, over all its processes."""
        return self._step

    @property
    def epoch(self) -> int:
        """How many epochs are complete, which is the number of the epoch that is under way, from 0."""
        return self._epoch

    def read_counters(self) -> None:
        """Takes step and epoch from their variables, after these were restored."""
        self._step, self._epoch = int(self._global_step), int(self._global_epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Says that `epoch` epochs are complete and the next one begins."""
        self._global_epoch.assign(epoch)
        self._epoch, self.batch = epoch, 0

    def request_stop(self, reason: str) -> None:
        """Asks that no further step be run."""
        if self.stop_reason is None:
            self.stop_reason = reason

    # Running ------------------------------------------------------------------------------------------------------

    def run_steps(
        self, steps: int = 1, *, feeds: Feeds | None = None, options: RunOptions | None = None
    ) -> StepOutcome:
        """Runs up to `steps` steps in one compiled loop.

        Returns:
            Their outcome, as tensors on their device.

        Raises:
            tf.errors.OutOfRangeError: If there is no batch left.
            RuntimeError: If the session is closed.
        """
        if self._closed:
            raise RuntimeError("The session is closed. Create a new one to run more steps.")
        assert self.function is not None
        start, compilations = time.perf_counter(), self.function.compilations
        with self._traced(options), self._fed(feeds or ()) as parts:
            outcome = self._run_fed_batch(parts) if parts else self.function(self.iterator, steps)
        if outcome.steps == 0:
            raise tf.errors.OutOfRangeError(None, None, "The data has no further batch.")
        if self.function.compilations == compilations:
            self.seconds_per_step = (time.perf_counter() - start) / outcome.steps
        self._step += outcome.steps
        self.batch += outcome.steps
        self.has_run = True
        self.outcome = outcome
        return outcome

    def close(self) -> None:
        """Ends the session. Closing it again does nothing."""
        self._closed = True
        self.iterator = None

    def _run_fed_batch(self, parts: dict[str, Any]) -> StepOutcome:
        assert self.function is not None
        optional = self.iterator.get_next_as_optional()
        if not optional.has_value():
            return StepOutcome(0)
        if self.function.strategy.num_replicas_in_sync > 1:
            raise ValueError(
                "`feeds` of 'x' and 'y' replace the batch of one device. Received them under a strategy with "
                f"{self.function.strategy.num_replicas_in_sync} replicas. Feed a variable or a `feed` input instead."
            )
        batch = optional.get_value()
        whole = batch if isinstance(batch, tuple) else (batch,)
        if "y" in parts and len(whole) < 2:
            raise ValueError("`feeds` has a 'y', but the data has no targets. Feed 'x' only.")
        spec = self.iterator.element_spec
        specs = spec if isinstance(spec, tuple) else (spec,)
        fed = list(whole)
        for index, name in enumerate(("x", "y")):
            if name in parts:
                fed[index] = tf.nest.map_structure(
                    lambda s, v: tf.convert_to_tensor(v, dtype=s.dtype), specs[index], parts[name]
                )
        return self.function.on_batch(tuple(fed) if isinstance(batch, tuple) else fed[0], spec)

    @contextlib.contextmanager
    def _fed(self, feeds: Feeds) -> Iterator[dict[str, Any]]:
        parts = {}
        previous: list[tuple[Any, Any]] = []
        try:
            for target, value in feed_items(feeds):
                if isinstance(target, str) and target in ("x", "y"):
                    parts[target] = value
                    continue
                variable = self._feed_variable(target)
                previous.append((variable, variable.read_value()))
                variable.assign(tf.cast(tf.convert_to_tensor(value), variable.dtype))
            yield parts
        finally:
            for variable, value in previous:
                variable.assign(value)

    def _feed_variable(self, target: Any) -> Any:
        if not isinstance(target, str):
            return target
        known = {} if self.function is None else self.function.feeds
        if target not in known:
            raise ValueError(
                f"`feeds` names an unknown input {target!r}. Known are: {', '.join(sorted(known)) or 'none'}, and 'x' "
                "and 'y' for the batch. Declare it in the train step with `feed(name, default)`, or pass a variable."
            )
        return known[target].variable

    @contextlib.contextmanager
    def _traced(self, options: RunOptions | None) -> Iterator[None]:
        if options is None or not options.trace:
            yield
            return
        directory = options.trace_directory or self.configuration.working_dir
        if directory is None:
            raise ValueError(
                "`options` asks for a trace, and there is no directory for it. Give the run a `working_dir` or pass "
                "RunOptions(trace=True, trace_directory=...)."
            )
        tf.profiler.experimental.start(directory)
        try:
            with tf.profiler.experimental.Trace("train", step_num=self._step + 1, _r=1):
                yield
        finally:
            tf.profiler.experimental.stop()

    # Fetching -----------------------------------------------------------------------------------------------------

    def fetch(self, fetches: Any) -> Any:
        """Returns the values of `fetches` after the last step, as NumPy values in the same structure.

        Args:
            fetches: A nested structure as in `SessionRunArgs`.

        Raises:
            ValueError: If a name is unknown; the message lists the known ones.
        """
        if fetches is None:
            return None
        found = tf.nest.map_structure(self._find, fetches)
        return to_host(found)

    def check_names(self, fetches: Any) -> None:
        """Raises the error that fetching would raise, before anything has run."""
        for name in tf.nest.flatten(fetches):
            if isinstance(name, str):
                self._check_name(name)

    def _check_name(self, name: str) -> None:
        if self.function is not None and self.function.observable is None:
            return  # a model that runs eagerly shows what it observes only when it runs
        known = self.known_names()
        if name not in known and not (name.startswith("gradients/") and self.function is not None):
            hint = ""
            if name == "loss":
                hint = " The train step doesn't call `compute_loss`: add observe('loss', loss) to it."
            raise ValueError(f"`fetches` asks for {name!r}, which is unknown.{hint} Known are: {', '.join(known)}.")

    def known_names(self) -> list[str]:
        """Lists the names that can be fetched."""
        observable = () if self.function is None else self.function.observable or ()
        logs = self.function.log_names if self.function is not None else ()
        names = ["global_step", "global_epoch", *observable]
        names += [f"metrics/{name}" for name in logs] + [f"variables/{v.path}" for v in self.model.variables]
        optimizer = getattr(self.model, "optimizer", None)
        return names + [f"variables/{v.path}" for v in (optimizer.variables if optimizer is not None else ())]

    def _find(self, fetch: Any) -> Any:
        if callable(fetch) and not isinstance(fetch, (keras.Variable, tf.Variable)):
            return fetch()
        if not isinstance(fetch, str):
            return plain(fetch).read_value() if isinstance(fetch, (keras.Variable, tf.Variable)) else fetch
        if fetch == "global_step":
            return np.int64(self._step)
        if fetch == "global_epoch":
            return np.int64(self._epoch)
        kind, _, rest = fetch.partition("/")
        if fetch in self.outcome.observed:
            return self.outcome.observed[fetch]
        if kind == "metrics" and rest in self.outcome.logs:
            return self.outcome.logs[rest]
        if kind == "variables":
            optimizer = getattr(self.model, "optimizer", None)
            variables: Sequence[Any] = [*self.model.variables, *(optimizer.variables if optimizer is not None else ())]
            for variable in variables:
                if variable.path == rest:
                    return plain(variable).read_value()
        self._check_name(fetch)
        raise ValueError(f"`fetches` asks for {fetch!r}, which has no value before the first step.")

    # Saving -------------------------------------------------------------------------------------------------------

    def require_state(self) -> TrainingState:
        """Returns the state of the run.

        Raises:
            CheckpointError: If this session has none that could be saved.
        """
        if self.state is None:
            raise CheckpointError(f"A session in mode {self.mode.name} has no state to save.", step=self._step)
        return self.state


def to_host(values: Any) -> Any:
    """Copies a structure of tensors to the host, in one copy for all that lie on another device."""
    flat = tf.nest.flatten(values)
    remote = [
        index
        for index, value in enumerate(flat)
        if tf.is_tensor(value) and "CPU" not in value.device and value.dtype not in (tf.string, tf.variant)
    ]
    if len(remote) > 1:
        for index, array in zip(remote, packed_copy([flat[index] for index in remote]), strict=True):
            flat[index] = array
    host = [value.numpy() if hasattr(value, "numpy") else value for value in flat]
    return tf.nest.pack_sequence_as(values, host)


def packed_copy(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
    """Copies tensors to the host as one string of bytes, and takes it apart there."""
    as_bytes = [tf.cast(t, tf.uint8) if t.dtype == tf.bool else t for t in tensors]
    flat = [tf.reshape(t if t.dtype == tf.uint8 else tf.bitcast(t, tf.uint8), [-1]) for t in as_bytes]
    data = tf.concat(flat, axis=0).numpy().tobytes()
    arrays, offset = [], 0
    for tensor in tensors:
        dtype = np.dtype(tensor.dtype.as_numpy_dtype)
        size = int(np.prod(tensor.shape)) * dtype.itemsize
        arrays.append(np.frombuffer(data, dtype, count=size // dtype.itemsize, offset=offset).reshape(tensor.shape))
        offset += size
    return arrays
