import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import keras_monitored as km
from keras_monitored.session.session import packed_copy, to_host
from keras_monitored.step_function import StepFunction
from tests.models import BATCH, TableModel, arrays, assert_same_weights, dataset, dense_model, table


class FeedModel(keras.Model):
    """A linear model whose loss can be scaled by a hook."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1, kernel_initializer="ones")
        self.layer.build((None, 2))
        self.built = True
        self.compile("sgd", "mse", jit_compile=False)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        scale = km.feed("scale", 1.0)
        km.observe("inputs", {"x": data[0]}["x"])
        logs = super().train_step(data)
        return {**logs, "scaled": scale * tf.reduce_sum(data[0]), "targets": tf.reduce_sum(data[1])}


def session_of(model, data, **options):
    step = km.Counter("global_step")
    function = StepFunction(model, model.train_step, counter=step)
    function.build(data.element_spec)
    session = km.Session(
        model,
        function,
        global_step=step,
        global_epoch=km.Counter("global_epoch", 2),
        configuration=km.Configuration(),
        **options,
    )
    session.iterator = iter(data)
    return session


@pytest.fixture
def session():
    return session_of(FeedModel(), dataset(6))


# Fetching ---------------------------------------------------------------------------------------------------------


def test_names_variables_and_functions_in_any_structure(session):
    session.run_steps(2)
    model, own = session.model, tf.Variable([1, 2])
    kernel = model.layer.kernel
    fetched = session.fetch(
        {
            "counts": ("global_step", "global_epoch"),
            "values": ["loss", "learning_rate", "inputs", "metrics/loss", "metrics/scaled"],
            "variables": [kernel, own, f"variables/{kernel.path}", "variables/sgd/iteration"],
            "functions": {"a": lambda: tf.constant(3.0), "b": lambda: kernel.value + 1, "c": lambda: 7},
            "nothing": [],
        }
    )
    assert fetched["counts"] == (2, 2) and fetched["nothing"] == []
    loss, rate, inputs, mean, scaled = fetched["values"]
    x = arrays(6)[0][BATCH : 2 * BATCH]
    np.testing.assert_array_equal(inputs, x)
    assert rate == np.float32(0.01) and loss != mean and scaled == pytest.approx(x.sum(), rel=1e-5)
    for value in fetched["variables"][::2]:
        np.testing.assert_array_equal(value, kernel.numpy())
    assert fetched["variables"][1].tolist() == [1, 2] and fetched["variables"][3] == 2
    assert fetched["functions"]["a"] == 3 and fetched["functions"]["c"] == 7
    np.testing.assert_array_equal(fetched["functions"]["b"], kernel.numpy() + 1)
    for value in tf.nest.flatten(fetched):
        assert not tf.is_tensor(value) and not isinstance(value, (tf.Variable, keras.Variable))
    assert session.fetch(None) is None


@pytest.mark.parametrize("name", ["los", "metrics/nothing", "variables/nothing", "Loss", ""])
def test_an_unknown_name_lists_the_known_ones(session, name):
    for look in (session.check_names, session.fetch):
        with pytest.raises(ValueError, match=r"`fetches` asks for .*, which is unknown") as caught:
            look(["loss", name] if look == session.check_names else name)
        for known in ("global_step", "loss", "inputs", "metrics/scaled", "variables/sgd/iteration"):
            assert known in str(caught.value)


def test_every_known_name_can_be_fetched(session):
    session.run_steps()
    values = session.fetch(session.known_names())
    assert len(values) == len(session.known_names()) >= 12


def test_before_the_first_step_there_are_no_values(session):
    session.check_names("loss")
    assert session.fetch("global_step") == 0
    with pytest.raises(ValueError, match="'loss', which has no value before the first step"):
        session.fetch("loss")


SHORT = st.sampled_from([tf.bfloat16, tf.float16])
DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0)))
TENSORS = ARRAYS.map(tf.constant) | st.tuples(
    hnp.arrays("float32", hnp.array_shapes(), elements=st.floats(-9, 9, width=32)), SHORT
).map(lambda pair: tf.cast(*pair))


@given(st.lists(TENSORS, min_size=1, max_size=6))
def test_a_packed_copy_is_what_numpy_gives(tensors):
    for tensor, copied in zip(tensors, packed_copy(tensors), strict=True):
        expected = tensor.numpy()
        assert copied.dtype == expected.dtype and copied.shape == expected.shape
        assert copied.tobytes() == expected.tobytes()


def test_values_on_another_device_are_copied_together(monkeypatch):
    class Remote:
        """Stands for tensors of a device that this machine lacks."""

        def __init__(self, tensor):
            self.tensor, self.device, self.dtype = tensor, "/device:GPU:0", tensor.dtype

        def numpy(self):
            raise AssertionError("copied by itself")

    packed = []
    monkeypatch.setattr("keras_monitored.session.session.tf.is_tensor", lambda v: isinstance(v, Remote))
    monkeypatch.setattr(
        "keras_monitored.session.session.packed_copy",
        lambda remote: packed.append(len(remote)) or [r.tensor.numpy() for r in remote],
    )
    values = {"a": Remote(tf.constant(1)), "b": [tf.constant(2.0), Remote(tf.constant([3]))], "c": 4}
    host = to_host(values)
    assert packed == [2] and host["a"] == 1 and host["b"] == [2.0, [3]] and host["c"] == 4


# Feeding ----------------------------------------------------------------------------------------------------------


def test_an_input_is_fed_for_one_run(session):
    sums = arrays(6)[0].reshape(6, -1).sum(1)
    scaled = []
    for feeds in (None, {"scale": 3.0}, [("scale", np.float64(-1))], None):
        session.run_steps(feeds=feeds)
        scaled.append(session.fetch("metrics/scaled"))
    np.testing.assert_allclose(scaled, sums[:4] * [1, 3, -1, 1], rtol=1e-4)


@pytest.mark.parametrize("key", ["keras", "tensorflow", "reference"])
def test_a_variable_is_fed_for_one_run(session, key):
    bias = session.model.layer.bias
    target = {"keras": bias, "tensorflow": bias.value, "reference": bias.value.ref()}[key]
    seen = []
    before = bias.numpy()
    session.run_steps(feeds=[(target, [5.0])])
    seen.append(float(session.outcome.observed["loss"]))
    np.testing.assert_array_equal(bias.numpy(), before)  # the step's own change of it is undone too
    x, y = (part[:BATCH] for part in arrays(6))
    assert seen[0] == pytest.approx(np.mean((x.sum(1, keepdims=True) + 5 - y) ** 2), rel=1e-5)


def test_the_batch_is_replaced(session):
    x, y = (part[-BATCH:] for part in arrays(6))
    session.run_steps(feeds={"x": x})
    np.testing.assert_array_equal(session.fetch("inputs"), x)
    session.run_steps(feeds={"y": y, "x": x.astype("float64")})
    assert session.fetch("metrics/targets") == pytest.approx(y.sum(), rel=1e-5)
    assert session.step == session.batch == 2
    session.run_steps()  # the batches that were replaced are used up
    np.testing.assert_array_equal(session.fetch("inputs"), arrays(6)[0][2 * BATCH : 3 * BATCH])


def test_bad_feeds_change_nothing(session):
    bias = session.model.layer.bias
    for feeds, match in [
        ({"scal": 1.0}, "unknown input 'scal'. Known are: scale, and 'x' and 'y'"),
        ([(bias, [9.0]), ("scale", [1.0, 2.0])], "shape"),
    ]:
        with pytest.raises(ValueError, match=match):
            session.run_steps(feeds=feeds)
        assert session.step == 0 and bias.numpy() == 0
    only_x = session_of(TableModel(), table([1.0, 2.0]))
    with pytest.raises(ValueError, match="the data has no targets"):
        only_x.run_steps(feeds={"y": 1.0})


def test_a_feed_at_the_end_of_data_is_the_end_of_data():
    session = session_of(FeedModel(), dataset(1))
    session.run_steps()
    with pytest.raises(tf.errors.OutOfRangeError):
        session.run_steps(feeds={"x": arrays(1)[0]})


# Running ----------------------------------------------------------------------------------------------------------


def test_it_counts_and_ends_with_the_data(session):
    assert session.run_steps(4).steps == 4 and session.run_steps(9).steps == 2
    assert (session.step, session.batch, session.epoch) == (6, 6, 2)
    with pytest.raises(tf.errors.OutOfRangeError):
        session.run_steps()
    session.begin_epoch(3)
    assert (session.step, session.batch, session.epoch) == (6, 0, 3)


def test_it_trains_as_plain_keras_does():
    model, plain = dense_model("adam"), dense_model("adam")
    session_of(model, dataset(6)).run_steps(6)
    plain.fit(dataset(6), verbose=0, shuffle=False)
    assert_same_weights(model, plain)


def test_a_closed_session_runs_no_more(session):
    session.close()
    session.close()
    with pytest.raises(RuntimeError, match="The session is closed"):
        session.run_steps()


def test_the_first_reason_to_stop_is_kept(session):
    session.request_stop("one")
    session.request_stop("two")
    assert session.stop_reason == "one"


def test_a_session_without_state_says_so(session):
    with pytest.raises(km.CheckpointError, match="mode TRAINING has no state"):
        session.require_state()
