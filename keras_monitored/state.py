"""What a run consists of: every value that has to come back for it to go on bit by bit as if nothing had happened.

    state = TrainingState(model, counters)
    snapshot = state.snapshot()                # tensors that later steps don't change, and what JSON can hold
    state.restore(snapshot.tensors, snapshot.record)

Variables are the model's (its seed generators included), all its optimizers', its metrics' and the counters. Other
parts (the position in the data, random states, hooks, callbacks) join as `StatePart`s.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from keras_monitored import keras_internals
from keras_monitored.counters import Counter
from keras_monitored.errors import CheckpointError
from keras_monitored.observe import optimizers_of

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""Where TensorFlow keeps the object graph by which `tf.train.Checkpoint(model=model)` finds the variables."""


class StatePart(Protocol):
    """A part of a run's state beside its variables."""

    def save(self) -> tuple[Any, dict[str, Any]]:
        """Returns a JSON value and tensors by name."""

    def load(self, record: Any, tensors: dict[str, Any]) -> None:
        """Takes back what `save` returned; `tensors` hold NumPy arrays, or variants as tensors."""


class Snapshot(NamedTuple):
    """The state of a run between two steps."""

    tensors: dict[str, Any]
    """Values by their key in the checkpoint."""
    variables: list[dict[str, Any]]
    """Name, key, shape and dtype of each variable."""
    record: dict[str, Any]
    """What the parts remember, as JSON values; their tensors are among `tensors`."""


class _Entry(NamedTuple):
    group: str
    name: str
    variable: Any  # what is assigned on restore
    read: Callable[[], tf.Tensor]


class TrainingState:
    """Gathers, checks and puts back the state of a run.

    Args:
        model: The model, with all variables made.
        counters: The counters of the run, by name.
    """

    def __init__(self, model: keras.Model, counters: Iterable[Counter]) -> None:
        self.model = model
        self.counters = tuple(counters)
        self.parts: dict[str, StatePart] = {"random": RandomState()}
        self._lay_out(list(_entries(model, self.counters)))

    def _lay_out(self, entries: list[_Entry]) -> None:
        self._entries = entries
        self._keys, self._graph = _layout(self.model, self.counters, entries)

    @property
    def variables(self) -> list[dict[str, Any]]:
        """Group, name, key, shape and dtype of each variable, as a manifest lists them."""
        return [
            {
                "group": entry.group,
                "name": entry.name,
                "key": key,
                "shape": list(entry.variable.shape),
                "dtype": tf.as_dtype(entry.variable.dtype).name,
            }
            for entry, key in zip(self._entries, self._keys, strict=True)
        ]

    def snapshot(self) -> Snapshot:
        """Returns the state as it is now. Reading shares the buffers; a later step writes to copies of its own."""
        entries = list(_entries(self.model, self.counters))
        if [id(entry.variable) for entry in entries] != [id(entry.variable) for entry in self._entries]:
            self._lay_out(entries)  # a model that runs eagerly may make variables in its first step
        tensors = {key: entry.read() for key, entry in zip(self._keys, self._entries, strict=True)}
        record = {}
        for name, part in self.parts.items():
            record[name], extra = part.save()
            tensors.update({f"{name}/{key}": value for key, value in extra.items()})
        tensors[GRAPH_KEY] = self._graph
        return Snapshot(tensors, self.variables, record)

    def check(self, variables: list[dict[str, Any]], where: str) -> None:
        """Checks that a checkpoint's variables are those of this model.

        Raises:
            CheckpointError: If they are not, with a list of those that differ.
        """
        check_variables(self.variables, variables, where)

    def restore(self, tensors: dict[str, Any], record: dict[str, Any], variables: list[dict[str, Any]]) -> None:
        """Puts a state back. Call `check` first: from here on values are overwritten."""
        for entry, saved in zip(self._entries, variables, strict=True):
            entry.variable.assign(tensors[saved["key"]])
        for name, part in self.parts.items():
            if name in record:
                prefix = f"{name}/"
                own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
                part.load(record[name], own)


def check_variables(ours: list[dict[str, Any]], saved: list[dict[str, Any]], where: str) -> None:
    """Compares two lists of variables; see `TrainingState.check`."""

    def facts(variable: dict[str, Any]) -> tuple[Any, ...]:
        # Keras numbers its automatic names by how many were made before in the process: the numbers say nothing.
        return re.sub(r"_\d+(?=[_/:]|$)", "", variable["name"]), tuple(variable["shape"]), variable["dtype"]

    def line(variable: dict[str, Any] | None) -> str:
        return "nothing" if variable is None else f"{variable['name']} {tuple(variable['shape'])} {variable['dtype']}"

    longest = max(len(ours), len(saved))
    pairs = zip(ours + [None] * (longest - len(ours)), saved + [None] * (longest - len(saved)), strict=True)
    differing = [(o, s) for o, s in pairs if o is None or s is None or facts(o) != facts(s)]
    if differing:
        shown = "\n".join(f"  model: {line(o)}   checkpoint: {line(s)}" for o, s in differing[:20])
        more = f"\n  and {len(differing) - 20} more" if len(differing) > 20 else ""
        raise CheckpointError(
            f"The checkpoint {where} belongs to another model: {len(differing)} of {longest} variables differ.\n"
            f"{shown}{more}\n"
            "Nothing was overwritten. Use another `working_dir`, or the model that wrote the checkpoint."
        )


class RandomState:
    """The random states of Python and NumPy, which shuffling and seeds of new layers draw from."""

    def save(self) -> tuple[Any, dict[str, Any]]:
        return read_random_state()

    def load(self, record: Any, tensors: dict[str, Any]) -> None:
        write_random_state(record, tensors)


def read_random_state() -> tuple[Any, dict[str, Any]]:
    """Returns the global random states of Python and NumPy as a JSON value and tensors."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    record = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"name": name, "position": int(position), "has_gauss": int(has_gauss), "gauss": float(cached)},
    }
    return record, {"python": np.asarray(words, np.int64), "numpy": np.asarray(keys, np.int64)}


def write_random_state(record: Any, tensors: dict[str, Any]) -> None:
    """Puts the global random states of Python and NumPy back."""
    words = tuple(int(word) for word in np.asarray(tensors["python"]))
    random.setstate((record["python"]["version"], words, record["python"]["gauss"]))
    numpy = record["numpy"]
    keys = np.asarray(tensors["numpy"]).astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))


def encode(value: Any, tensors: dict[str, Any], key: str) -> Any:
    """Turns a value into JSON, with its arrays put into `tensors` under keys that begin with `key`.

    Raises:
        TypeError: If the value is neither a number, string, `None` or array nor a list, tuple or dict of such.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if type(value) is float:
        return value if np.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (np.ndarray, np.generic)) and _tensor_dtype(value.dtype) not in (None, tf.string):
        tensors[key] = np.asarray(value)
        return {"array": key, "scalar": isinstance(value, np.generic)}
    if isinstance(value, (list, tuple)):
        items = [encode(item, tensors, f"{key}/{index}") for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {"dict": [[k, encode(v, tensors, f"{key}/{index}")] for index, (k, v) in enumerate(value.items())]}
    raise TypeError(f"{type(value).__name__} can't be saved")


def _tensor_dtype(dtype: np.dtype) -> tf.DType | None:
    try:
        return tf.as_dtype(dtype)  # knows bfloat16 and its like too
    except TypeError:
        return None


def decode(value: Any, tensors: dict[str, Any]) -> Any:
    """Turns back what `encode` made."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "array" in value:
        array = np.array(tensors[value["array"]])
        return array[()] if value["scalar"] else array
    if "tuple" in value:
        return tuple(decode(item, tensors) for item in value["tuple"])
    return {k: decode(v, tensors) for k, v in value["dict"]}


# Variables and their keys -----------------------------------------------------------------------------------------


def plain(variable: Any) -> Any:
    """Returns the TensorFlow variable behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _variables(model: keras.Model) -> Iterator[tuple[str, str, Any]]:
    """Yields group, name and variable, in an order that is the same in every process that runs the same code."""
    for variable in model.variables:  # holds the seed generators, which tf.train.Checkpoint doesn't reach
        yield "model", variable.path, variable
    for optimizer in optimizers_of(model):
        for variable in optimizer.variables:
            yield "optimizer", variable.path, variable
    for metric in model.metrics:
        for variable in metric.variables:
            yield "metrics", variable.path, variable
    for node in tf.train.TrackableView(model).descendants():
        if isinstance(node, (keras.Variable, tf.Variable)):
            yield "tracked", (node.path if isinstance(node, keras.Variable) else node.name), node
    seeds = keras_internals.global_seed_generator()
    if seeds is not None:
        yield "random", "global_seed_generator", seeds.state
    generator = keras_internals.global_generator()
    if generator is not None:
        yield "random", "global_generator", generator.state


def _entries(model: keras.Model, counters: Iterable[Counter]) -> Iterator[_Entry]:
    seen: set[int] = set()
    counted = [("counters", counter.name, counter.variable) for counter in counters]
    for group, name, keras_variable in counted + list(_variables(model)):
        variable = plain(keras_variable)
        if id(variable) in seen:
            continue
        seen.add(id(variable))
        if getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ:
            # Each replica has a sum of its own, which one number could not bring back.
            for index, component in enumerate(model.distribute_strategy.experimental_local_results(variable)):
                yield _Entry(group, f"{name}:replica{index}", component, component.read_value)
        else:
            yield _Entry(group, name, variable, variable.read_value)


def _layout(model: keras.Model, counters: Iterable[Counter], entries: list[_Entry]) -> tuple[list[str], tf.Tensor]:
    """Finds the checkpoint key of every entry, and the object graph that leads plain TensorFlow to them.

    A shadow of the model's object graph, with the index of each variable for its value, is written and read back: so
    TensorFlow chooses the keys, and the large values are written later, from copies, in the background.
    """
    index_of = {id(entry.variable): index for index, entry in enumerate(entries)}
    shadows: dict[int, Any] = {}
    placed: set[int] = set()
    view = tf.train.TrackableView(model)

    def shadow(node: Any) -> Any:
        if id(node) in shadows:
            return shadows[id(node)]
        if isinstance(node, (keras.Variable, tf.Variable)):
            index = index_of.get(id(plain(node)), -1)
            if index in placed:  # a Keras variable and the TensorFlow variable behind it are two nodes
                return next(s for s in shadows.values() if isinstance(s, tf.Variable) and int(s) == index)
            placed.add(index)
            copy = tf.Variable(index, dtype=tf.int64)
            shadows[id(node)] = copy
            return copy
        copy = shadows[id(node)] = tf.train.Checkpoint()
        for name, child in view.children(node).items():
            setattr(copy, name, shadow(child))
        return copy

    with tf.device("CPU"):
        root = tf.train.Checkpoint(model=shadow(model))
        for counter in counters:
            setattr(root, counter.name, shadow(counter.variable))
        root.others = [shadow(entry.variable) for index, entry in enumerate(entries) if index not in placed]
        with tempfile.TemporaryDirectory() as directory:
            reader = tf.train.load_checkpoint(root.write(f"{directory}/layout"))
            graph = tf.constant(reader.get_tensor(GRAPH_KEY))
            found = {int(reader.get_tensor(key)): key for key in reader.get_variable_to_shape_map() if key != GRAPH_KEY}
    return [found[index] for index in range(len(entries))], graph
