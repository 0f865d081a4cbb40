import json
import random
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorflow.python.ops import stateful_random_ops

import keras_monitored as km
from keras_monitored.state import (
    GRAPH_KEY,
    TrainingState,
    check_variables,
    decode,
    encode,
    read_random_state,
    write_random_state,
)
from tests.models import arrays, dense_model

# encode and decode ------------------------------------------------------------------------------------------------

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "float32", "float64", "complex64"]
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0)))
SCALARS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, ())).map(lambda array: array[()])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | ARRAYS | SCALARS
KEYS = st.text() | st.integers() | st.booleans() | st.none()
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v) | st.lists(v).map(tuple) | st.dictionaries(KEYS, v, max_size=4), max_leaves=12
)


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert_same(list(ours), list(theirs))
        assert_same(list(ours.values()), list(theirs.values()))
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, (np.ndarray, np.generic)):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    else:
        assert repr(ours) == repr(theirs)


@given(VALUES)
@example({"a": [float("nan"), float("inf"), (-float("inf"), -0.0)], 3: np.float32("nan"), None: np.array([np.inf])})
def test_values_come_back_through_json(value):
    tensors = {}
    record = json.loads(json.dumps(encode(value, tensors, "key"), allow_nan=False))
    assert all(key.startswith("key") for key in tensors)
    assert_same(decode(record, tensors), value)


@given(VALUES)
def test_tensors_can_be_written(value):
    tensors = {}
    encode(value, tensors, "key")
    for array in tensors.values():
        assert tf.convert_to_tensor(array).numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.dtypes.experimental.float8_e5m2])
def test_the_short_floats_of_tensorflow(dtype):
    array = tf.cast([0.5, -2.0, np.inf], dtype).numpy()
    tensors = {}
    assert_same(decode(encode([array, array[0]], tensors, "key"), tensors), [array, array[0]])


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, b"bytes", 1j, np.array(["a"]), np.array([None]), np.longdouble(1), [len]]
)
def test_other_values_are_refused(value):
    with pytest.raises(TypeError, match="can't be saved"):
        encode(value, {}, "key")


@pytest.mark.parametrize("value", [{"array": "x"}, {"float": "nan"}, {"tuple": [1]}, {"dict": []}, {"a": {"dict": {}}}])
def test_a_dict_that_looks_like_a_code_is_a_dict(value):
    tensors = {}
    assert decode(encode(value, tensors, "key"), tensors) == value


# Random states ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(0, 700), st.booleans())
def test_random_states_come_back(seed, drawn, half):
    def draw():
        return [random.random(), random.gauss(0, 1), np.random.normal(), *np.random.permutation(5)]

    random.seed(seed)
    np.random.seed(seed)
    for _ in range(drawn):
        np.random.bytes(4), random.random()
    if half:
        np.random.normal(), random.gauss(0, 1)  # each keeps a second value for the next call
    record, tensors = read_random_state()
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    write_random_state(json.loads(json.dumps(record, allow_nan=False)), tensors)
    assert draw() == expected


# Snapshots --------------------------------------------------------------------------------------------------------


def embedding_model():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(50, 3), keras.layers.Flatten()])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model, tf.constant([[1], [2]]), tf.ones((2, 3))


def deep_model():
    model = dense_model("adam")
    model.optimizer.build(model.trainable_variables)
    return model, *(tf.constant(part) for part in arrays(1))


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eagerly"])
@pytest.mark.parametrize("make", [deep_model, embedding_model])
def test_later_steps_do_not_reach_a_snapshot(make, eagerly):
    model, *batch = make()
    model.run_eagerly = eagerly
    state = TrainingState(model, [km.Counter("global_step", 3)])
    state.counters[0].increment()
    before = [v.numpy().copy() for v in [*model.variables, *model.optimizer.variables]]
    snapshot = state.snapshot()
    for _ in range(3):
        model.train_on_batch(*batch)
        state.counters[0].increment()
    for variable in [*model.variables, *model.optimizer.variables]:
        variable.assign(keras.ops.ones_like(variable))
    by_name = {v["name"]: snapshot.tensors[v["key"]] for v in snapshot.variables}
    for variable, value in zip([*model.variables, *model.optimizer.variables], before, strict=True):
        np.testing.assert_array_equal(by_name[variable.path], value)
    assert by_name["global_step"] == 4
    # And back: everything is as it was, though it has gone on since.
    tensors = {key: value.numpy() for key, value in snapshot.tensors.items() if hasattr(value, "numpy")}
    tensors.update({key: value for key, value in snapshot.tensors.items() if not hasattr(value, "numpy")})
    state.restore(tensors, snapshot.record, snapshot.variables)
    for variable, value in zip([*model.variables, *model.optimizer.variables], before, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert int(state.counters[0]) == 4


class TwoOptimizers(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.helpers = [keras.optimizers.SGD(0.1, momentum=0.9, name="first")]
        self.named = {"other": keras.optimizers.Adam(name="second")}
        self.extra = tf.Variable(2.0, name="extra", trainable=False)
        self.layer.build((None, 2))
        self.built = True

    def call(self, x):
        return self.layer(x)


def test_variables_of_all_optimizers_and_loose_ones():
    model = TwoOptimizers()
    model.compile()
    for optimizer in (model.helpers[0], model.named["other"]):
        optimizer.build(model.trainable_variables)
    names = [v["name"] for v in TrainingState(model, []).variables]
    for part in ("first/.*momentum", "second/.*velocity", "second/iteration", "^extra"):
        assert any(re.search(part, name) for name in names), part
    assert len(set(names)) == len(names)


def test_global_seeds_are_saved_once_something_uses_them(monkeypatch):
    monkeypatch.setattr(stateful_random_ops, "global_generator", None)  # another test may have used it
    model = dense_model()
    assert not any(v["group"] == "random" for v in TrainingState(model, []).variables)
    keras.random.uniform((1,))
    tf.random.get_global_generator().normal((1,))
    state = TrainingState(model, [])
    names = [v["name"] for v in state.variables if v["group"] == "random"]
    assert names == ["global_seed_generator", "global_generator"]
    snapshot = state.snapshot()
    expected = [keras.random.uniform((3,)), tf.random.get_global_generator().normal((3,))]
    state.restore(snapshot.tensors, {}, snapshot.variables)
    again = [keras.random.uniform((3,)), tf.random.get_global_generator().normal((3,))]
    for one, other in zip(expected, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_parts_join_the_state():
    class Part:
        def save(self):
            return {"n": 3}, {"a": np.arange(2)}

        def load(self, record, tensors):
            self.loaded = record, tensors

    state = TrainingState(dense_model(), [])
    state.parts["mine"] = part = Part()
    snapshot = state.snapshot()
    assert snapshot.record["mine"] == {"n": 3} and "mine/a" in snapshot.tensors and GRAPH_KEY in snapshot.tensors
    state.restore(snapshot.tensors, snapshot.record, snapshot.variables)
    record, tensors = part.loaded
    assert record == {"n": 3} and list(tensors) == ["a"]
    del part.loaded
    state.restore(snapshot.tensors, {}, snapshot.variables)  # a checkpoint from before the part was there
    assert not hasattr(part, "loaded")


# Comparing --------------------------------------------------------------------------------------------------------


def variable(name, shape=(2,), dtype="float32"):
    return {"name": name, "shape": list(shape), "dtype": dtype, "group": "model", "key": name}


@pytest.mark.parametrize(
    ("ours", "saved"),
    [("dense_3/kernel", "dense/kernel"), ("a_2_b_1/x_4", "a_2_b/x"), ("m/count:replica0", "m_1/count:replica0")],
)
def test_numbers_of_automatic_names_do_not_count(ours, saved):
    check_variables([variable(ours)], [variable(saved)], "here")


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        ([variable("a"), variable("c")], r"model: b \(2,\) float32   checkpoint: c \(2,\) float32"),
        ([variable("a"), variable("b", (3,))], r"model: b \(2,\) float32   checkpoint: b \(3,\) float32"),
        ([variable("a"), variable("b", dtype="int8")], r"checkpoint: b \(2,\) int8"),
        ([variable("a")], "checkpoint: nothing"),
        ([variable("a"), variable("b"), variable("c")], r"model: nothing   checkpoint: c \(2,\) float32"),
        ([variable("b"), variable("a")], "2 of 2 variables differ"),
    ],
)
def test_differing_variables_are_listed(saved, line):
    with pytest.raises(km.CheckpointError, match=line):
        check_variables([variable("a"), variable("b")], saved, "here")


def test_a_long_list_is_cut():
    with pytest.raises(km.CheckpointError, match="and 10 more"):
        check_variables([variable(f"a{i}x") for i in range(30)], [], "here")
