import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from keras_monitored.observe import collecting, observing_model, optimizers_of
from tests.models import Recorder, arrays, assert_same_weights, dataset, dense_model, fit


class Observing(keras.Model):
    """Observes in its train step, its layer and its loss."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1, kernel_initializer="ones")
        self.compile(keras.optimizers.SGD(0.1), self.own_loss)

    def call(self, x):
        y = self.layer(x)
        km.observe("layer", tf.reduce_max(y))
        return y

    def own_loss(self, y, predicted):
        return tf.square(km.observe("error", y - predicted)) * km.feed("scale", 1.0)

    def train_step(self, data):
        logs = super().train_step(data)
        km.observe("twice", 2.0 * data[0])
        km.observe("integer", 7)
        return logs


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eagerly"])
@pytest.mark.parametrize("loop", [1, "auto"])
def test_values_from_anywhere_in_the_step(eagerly, loop):
    hook = Recorder(fetches={"l": "loss", "a": ["layer", "error"], "x": "twice", "n": "integer"}, every=3)
    model = Observing()
    model.run_eagerly = eagerly
    fit(model, dataset(3), [hook], steps_per_loop=loop)
    x, y = (part[8:12] for part in arrays(3))
    (values,) = hook.values
    np.testing.assert_array_equal(values["x"], 2 * x)
    assert values["n"] == 7 and values["a"][1].shape == (4, 1)
    np.testing.assert_allclose(values["l"], np.mean(values["a"][1] ** 2), rtol=1e-6)
    np.testing.assert_allclose(values["a"][0], np.max(y - values["a"][1]), rtol=1e-5)


def test_the_loss_is_the_steps_own_and_not_the_mean():
    hook = Recorder(fetches=("loss", "metrics/loss"))
    fit(dense_model(), dataset(4), [hook])
    steps = [float(loss) for loss, _ in hook.values]
    np.testing.assert_allclose([mean for _, mean in hook.values], np.cumsum(steps) / np.arange(1, 5), rtol=1e-5)
    assert len(set(steps)) == 4


def test_a_model_that_observes_trains_the_same_without_us():
    keras.utils.set_random_seed(3)
    plain = Observing()
    plain.fit(dataset(4), verbose=0, shuffle=False)
    keras.utils.set_random_seed(3)
    ours = Observing()
    fit(ours, dataset(4))
    assert_same_weights(ours, plain)


@pytest.mark.parametrize("reduction", ["mean", "sum", "first", "concat"])
def test_values_of_replicas_become_one(reduction):
    class Replicated(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            km.observe("x", data[0], reduction=reduction)
            return logs

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        inputs = keras.Input((2,))
        model = Replicated(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
    hook = Recorder(fetches=["x", "loss"])
    before = [v.numpy() for v in model.weights]
    fit(model, dataset(1), [hook])
    x, y = arrays(1)
    expected = {"mean": (x[:2] + x[2:]) / 2, "sum": x[:2] + x[2:], "first": x[:2], "concat": x}[reduction]
    np.testing.assert_allclose(hook.values[0][0], expected, rtol=1e-6)
    # The loss is that of the whole batch, whatever Keras divides it by.
    np.testing.assert_allclose(hook.values[0][1], np.mean((x @ before[0] + before[1] - y) ** 2), rtol=1e-5)


@pytest.mark.parametrize("nest", ["function", "branch"])
def test_a_value_that_can_not_be_handed_out_is_told_of(nest):
    class Nested(keras.Model):
        def train_step(self, data):
            x = tf.reduce_sum(data[0])
            if nest == "function":
                tf.function(lambda: km.observe("inner", x * 2))()
            else:
                tf.cond(x > 0, lambda: km.observe("inner", x * 2), lambda: x)
            return {"loss": x}

    model = Nested()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"observe\('inner', \.\.\.\) was called inside"):
        fit(model, dataset(1), [Recorder(fetches="inner")])


def test_the_second_value_of_a_name_replaces_the_first():
    with collecting() as collector:
        km.observe("a", 1.0)
        km.observe("a", [2.0], reduction="sum")
    assert collector.values["a"].numpy() == [2.0] and collector.reductions == {"a": "sum"}


def test_collectors_nest_and_end():
    with collecting() as outer:
        with pytest.raises(KeyError), collecting() as inner:
            km.observe("inner", 1)
            raise KeyError
        km.observe("outer", 2)
    km.observe("nobody", 3)
    assert list(inner.values) == ["inner"] and list(outer.values) == ["outer"]


def test_sparse_and_ragged_values_stay_what_they_are():
    with collecting() as collector:
        km.observe("ragged", tf.ragged.constant([[1], [2, 3]]))
    assert isinstance(collector.values["ragged"], tf.RaggedTensor)


@pytest.mark.parametrize("name", ["", None, 3, "global_step", "global_epoch"])
def test_names_that_are_not_allowed(name):
    with pytest.raises(ValueError, match="`name`"):
        km.observe(name, 1.0)
    if name in ("", None, 3):
        with pytest.raises(ValueError, match="`name`"):
            km.feed(name, 1.0)


@pytest.mark.parametrize("name", ["x", "y"])
def test_names_of_the_batch_are_no_feeds(name):
    with pytest.raises(ValueError, match="other than 'x' and 'y'"):
        km.feed(name, 1.0)


def test_a_reduction_that_does_not_exist():
    with pytest.raises(ValueError, match=r"`reduction` must be one of .*'max'"):
        km.observe("a", 1.0, reduction="max")


def test_what_wraps_the_model_goes_again():
    model = dense_model()
    before = dict(vars(model)), dict(vars(model.optimizer))
    with pytest.raises(KeyError), observing_model(model, gradients=True):
        assert "compute_loss" in vars(model) and "apply" in vars(model.optimizer)
        raise KeyError
    assert "compute_loss" not in vars(model) and "apply" not in vars(model.optimizer)
    assert vars(model).keys() == before[0].keys() and vars(model.optimizer).keys() == before[1].keys()


def test_optimizers_are_found_once_and_the_compiled_one_first():
    model = dense_model("adam")
    model.first = keras.optimizers.SGD()
    model.several = {"a": model.optimizer, "b": keras.optimizers.Adam(name="b")}
    model.listed = [keras.optimizers.Adam(name="c"), 3]
    names = [optimizer.name for optimizer in optimizers_of(model)]
    assert names[0] == "adam" and sorted(names[1:]) == ["b", "c", "sgd"]
