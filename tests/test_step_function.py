import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from keras_monitored.step_function import StepFunction
from tests.models import Recorder, TableModel, arrays, dataset, fit, table

WAYS = {
    "one at a time": ([1] * 6, {}),
    "one loop": ([6], {}),
    "several loops": ([2, 1, 3], {}),
    "eagerly": ([1, 2, 3], {"run_eagerly": True}),
    "jit": ([1, 2, 3], {"jit_compile": True}),
}


def dropout_model(**options):
    """Has weights, slots, moving averages, seeds and metrics; the same ones each time."""
    layers = keras.layers
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(4, use_bias=False),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=9),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"], **{"jit_compile": False, **options})
    return model


def function_of(model, checks=(), **options):
    return StepFunction(model, model.train_step, counter=km.Counter("global_step"), checks=checks, **options)


def run(function, iterator, parts):
    return [function(iterator, steps) for steps in parts]


def values_of(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables, *model.metrics_variables]]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_as_plain_keras_does(way):
    parts, options = WAYS[way]
    plain = dropout_model(**options)
    history = plain.fit(dataset(6), verbose=0, shuffle=False).history
    model = dropout_model(**options)
    function = function_of(model)
    outcomes = run(function, iter(dataset(6)), parts)
    assert [outcome.steps for outcome in outcomes] == parts and int(function.counter) == 6
    for ours, theirs in zip(values_of(model), values_of(plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert {name: [float(log)] for name, log in outcomes[-1].logs.items()} == history


@pytest.mark.parametrize("known_length", [True, False])
@pytest.mark.parametrize("way", ["one at a time", "eagerly", "jit"])
def test_the_end_of_data_touches_no_variable(way, known_length):
    model = dropout_model(**WAYS[way][1])
    function = function_of(model)
    iterator = iter(dataset(3, known_length=known_length))
    assert [outcome.steps for outcome in run(function, iterator, [1, 5])] == [1, 2]
    before = values_of(model)
    assert int(model.optimizer.iterations) == int(function.counter) == 3
    for steps in (1, 4):
        outcome = function(iterator, steps)
        assert outcome.steps == 0 and outcome.failed_check is None
    for now, then in zip(values_of(model), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_building_runs_nothing():
    model = dropout_model()
    function = function_of(model)
    before = [v.numpy() for v in model.variables]
    function.build(dataset(1).element_spec)
    assert int(model.optimizer.iterations) == int(function.counter) == 0
    for now, then in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(now, then)
    for slot in model.optimizer.variables:
        assert "learning_rate" in slot.path or not np.any(slot)


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eagerly"])
class TestChecks:
    def outcome_of(self, losses, eagerly, parts, checks):
        model = TableModel()
        model.run_eagerly = eagerly
        function = function_of(model, checks)
        outcomes = run(function, iter(table(losses)), parts)
        assert int(function.counter) == int(model.steps.numpy())
        return outcomes

    def test_the_failing_step_is_the_last_of_its_loop(self, eagerly):
        def too_large(observed):
            return observed["loss"] > 5

        outcomes = self.outcome_of([1, 2, 9, 1, 9, 1, 1], eagerly, [6, 6, 6], [too_large])
        assert [(o.steps, o.failed_check) for o in outcomes] == [(3, 0), (2, 0), (2, None)]
        assert [float(o.observed["loss"]) for o in outcomes] == [9, 9, 1]
        np.testing.assert_allclose([float(o.logs["loss"]) for o in outcomes], [4, 22 / 5, 24 / 7])

    def test_the_first_of_several_checks_is_named(self, eagerly):
        checks = [lambda o: o["loss"] > 8, lambda o: o["loss"] > 5, lambda o: tf.reduce_any(o["loss"] > 6)]
        outcomes = self.outcome_of([1, 6, 7, 9, 1], eagerly, [1, 1, 1, 1, 1], checks)
        assert [o.failed_check for o in outcomes] == [None, 1, 1, 0, None]


def test_the_step_is_traced_from_the_spec_and_once():
    shapes = []

    class Traced(keras.Model):
        def train_step(self, data):
            shapes.append(tuple(data[0].shape))
            return super().train_step(data)

    inputs = keras.Input((2,))
    model = Traced(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", jit_compile=False)
    function = function_of(model)
    data = tf.data.Dataset.from_tensor_slices(arrays(4)).batch(5)  # the last batch is a short one
    for parts in ([1, 1, 2], [4], [3, 1]):
        assert sum(outcome.steps for outcome in run(function, iter(data), parts)) == 4
    assert shapes == [(None, 2)]


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eagerly"])
def test_parts_that_are_not_there(eagerly):
    """Keras's adapters hand out an empty `Optional` where a batch holds `None`."""
    seen = []

    class Parts(keras.Model):
        def train_step(self, data):
            seen.append(data)
            return {"sum": tf.reduce_sum(data[0]["a"])}

    model = Parts()
    model.compile(run_eagerly=eagerly, jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(np.ones((12, 2), np.float32)).batch(4)
    data = data.map(
        lambda a: (
            {"a": a, "b": tf.experimental.Optional.empty(tf.TensorSpec(()))},
            a,
            tf.experimental.Optional.empty(None),
        )
    )
    function = function_of(model)
    iterator = iter(data)
    assert [float(o.logs["sum"]) for o in run(function, iterator, [1, 1])] == [8, 8]
    batch = iterator.get_next()
    assert function.on_batch(batch, data.element_spec).steps == 1 and int(function.counter) == 3
    for batch in seen:
        assert batch[0]["b"] is None and batch[2] is None and tf.is_tensor(batch[1])


def test_a_batch_handed_in_trains_as_one_that_was_read():
    ours, theirs = dropout_model(), dropout_model()
    data = dataset(2)
    batches = iter(data)
    function = function_of(ours)
    for _ in range(2):
        outcome = function.on_batch(next(batches), data.element_spec)
    expected = function_of(theirs)(iter(data), 2)
    assert float(outcome.logs["loss"]) == float(expected.logs["loss"]) and int(function.counter) == 2
    for a, b in zip(values_of(ours), values_of(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("parts", [[1, 1, 1], [3]])
def test_observed_values_of_all_kinds(parts):
    class Kinds(keras.Model):
        def train_step(self, data):
            km.observe("ragged", tf.RaggedTensor.from_tensor(data, padding=0))
            km.observe("text", tf.strings.as_string(data))
            km.observe("flag", tf.reduce_any(data > 2))
            km.observe("half", tf.cast(data, tf.bfloat16))
            return {"loss": tf.reduce_sum(data), "n": 3}

    model = Kinds()
    model.compile(jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices([[1, 0], [2, 0], [3, 4]]).batch(1)
    outcome = run(function_of(model), iter(data), parts)[-1]
    assert outcome.observed["ragged"].to_list() == [[3, 4]]
    assert outcome.observed["text"].numpy().tolist() == [[b"3", b"4"]]
    assert bool(outcome.observed["flag"]) and outcome.observed["half"].dtype == tf.bfloat16
    assert int(outcome.logs["loss"]) == 7 and int(outcome.logs["n"]) == 3


def test_gradients_are_handed_out_when_required():
    model = dropout_model()
    function = function_of(model)
    iterator = iter(dataset(3))
    name = f"gradients/{model.trainable_variables[0].path}"
    assert not any(key.startswith("gradients/") for key in function(iterator).observed)
    function.require({name, "loss"})
    outcome = function(iterator, 2)
    assert outcome.observed[name].shape == (2, 4) and np.any(outcome.observed[name])
    assert [key for key in outcome.observed if key.startswith("gradients/")] == [name]


@pytest.mark.parametrize("loop", [1, "auto"])
def test_under_replicas_a_step_counts_once(loop):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        model = dropout_model()
    hook = Recorder(every=2)
    fit(model, dataset(3), [hook], steps_per_loop=loop, epochs=2)
    assert int(model.optimizer.iterations.numpy()) == 6 and hook.calls[-2:] == ["after 6", "end 6"]
