import json

import keras
import numpy as np
import pytest

import keras_monitored as km
from keras_monitored.stateful import CallbackState, HistoryState, HookStates
from tests.models import dataset, dense_model, fit


def through_a_file(part):
    record, tensors = part.save()
    return json.loads(json.dumps(record, allow_nan=False)), {key: np.array(value) for key, value in tensors.items()}


def with_model(callback, model=None):
    callback.set_model(dense_model() if model is None else model)
    callback.set_params({"epochs": 9})
    callback.on_train_begin()
    return callback


# Keras callbacks --------------------------------------------------------------------------------------------------


def test_early_stopping_goes_on_counting():
    def make(patience=3):
        return with_model(keras.callbacks.EarlyStopping("loss", patience=patience, restore_best_weights=True))

    ours = make()
    for epoch, loss in enumerate([3.0, 1.0, 2.0, 2.0]):
        ours.model.layers[0].bias.assign([loss])
        ours.on_epoch_end(epoch, {"loss": loss})
    later = make()
    CallbackState([later]).load(*through_a_file(CallbackState([ours])))
    assert (later.best, later.wait, later.best_epoch) == (ours.best, ours.wait, ours.best_epoch) == (1.0, 2, 1)
    for one, other in zip(ours.best_weights, later.best_weights, strict=True):
        np.testing.assert_array_equal(one, other)
    later.on_epoch_end(4, {"loss": 2.0})
    assert later.model.stop_training
    later.on_train_end()
    assert later.model.layers[0].bias.numpy() == 1.0


def test_what_a_callback_was_constructed_with_may_change():
    ours = with_model(keras.callbacks.EarlyStopping("loss", patience=3))
    ours.on_epoch_end(0, {"loss": 1.0})
    later = with_model(keras.callbacks.EarlyStopping("loss", patience=7))
    CallbackState([later]).load(*through_a_file(CallbackState([ours])))
    assert later.patience == 7 and later.best == 1.0


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras with NumPy 2
def test_reduce_lr_and_best_checkpoint(tmp_path):
    def make():
        reduce = keras.callbacks.ReduceLROnPlateau("loss", patience=3, cooldown=2)
        best = keras.callbacks.ModelCheckpoint(
            tmp_path / "best.weights.h5", "loss", save_best_only=True, save_weights_only=True
        )
        return [with_model(reduce), with_model(best)]

    ours, later = make(), make()
    for callback in ours:
        for epoch, loss in enumerate([2.0, 1.0, 1.5]):
            callback.on_epoch_end(epoch, {"loss": loss})
    CallbackState(later).load(*through_a_file(CallbackState(ours)))
    assert later[0].best == later[1].best == 1.0 and later[0].wait == 1
    written = (tmp_path / "best.weights.h5").stat().st_mtime_ns
    later[1].on_epoch_end(3, {"loss": 1.2})  # not the best
    assert (tmp_path / "best.weights.h5").stat().st_mtime_ns == written


class Own(keras.callbacks.Callback):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale
        self.seen = {"losses": [0.5, float("inf")], 3: (np.float32(2), None), "array": np.eye(2, dtype=np.int8)}
        self.handle = open  # can't be saved, and stays as it is


def test_attributes_of_any_nesting():
    ours, later = Own(), Own(scale=2.0)
    later.seen, later.handle = None, print
    CallbackState([later]).load(*through_a_file(CallbackState([ours])))
    assert later.seen["losses"] == ours.seen["losses"] and later.seen[3] == ours.seen[3]
    assert type(later.seen[3][0]) is np.float32
    np.testing.assert_array_equal(later.seen["array"], np.eye(2))
    assert later.handle is print and later.scale == 2.0


class OwnState(keras.callbacks.Callback):
    def __init__(self, value=0):
        super().__init__()
        self.value = value
        self.other = 5

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_a_callback_with_methods_of_its_own_is_asked():
    ours, later = OwnState(np.arange(3)), OwnState()
    ours.other = 6
    CallbackState([later]).load(*through_a_file(CallbackState([ours])))
    np.testing.assert_array_equal(later.value, np.arange(3))
    assert later.other == 5


def test_its_state_must_be_one_that_can_be_saved():
    with pytest.raises(TypeError, match="object can't be saved"):
        CallbackState([OwnState(object())]).save()


def test_other_callbacks_than_before():
    record, tensors = through_a_file(CallbackState([OwnState(1), Own()]))
    later = [Own(), OwnState(9), OwnState(8)]
    later[0].seen = None
    CallbackState(later).load(record, tensors)
    assert later[0].seen is None and [c.value for c in later[1:]] == [9, 8]
    CallbackState([]).load(record, tensors)


# History ----------------------------------------------------------------------------------------------------------


def test_history_comes_back_in_order_and_type():
    ours, later = dense_model(), dense_model()
    ours.history, later.history = keras.callbacks.History(), keras.callbacks.History()
    ours.history.epoch = [0, 1]
    ours.history.history = {"loss": [0.1, float("nan")], "learning_rate": [np.float32(0.1)] * 2, "a": [1, 2]}
    later.history.history = {"left over": [1]}
    same = later.history.history
    HistoryState(later).load(*through_a_file(HistoryState(ours)))
    assert later.history.epoch == [0, 1] and later.history.history is same
    assert list(same) == ["loss", "learning_rate", "a"]
    assert same["loss"][0] == 0.1 and np.isnan(same["loss"][1]) and same["a"] == [1, 2]
    assert same["learning_rate"] == [np.float32(0.1)] * 2 and type(same["learning_rate"][0]) is np.float32


# Hooks ------------------------------------------------------------------------------------------------------------


class Counting(km.Hook):
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Other(Counting):
    pass


def test_hooks_find_their_state_by_class_and_order():
    record, tensors = through_a_file(HookStates([Counting(1), km.Hook(), Counting(2), Other(3)]))
    later = [Other(), Counting(), Counting(), Counting(7), km.Hook()]
    HookStates(later).load(record, tensors)
    assert [hook.count for hook in later[:4]] == [3, 1, 2, 7]


def test_a_hook_of_the_run_goes_on_counting(tmp_path):
    class PerRun(Counting):
        def after_run(self, run_context, run_values):
            self.count += 1

    hook = PerRun()
    fit(dense_model(), dataset(9), [hook, km.StopAtStep(last_step=4)], working_dir=tmp_path)
    later = PerRun()
    fit(dense_model(), dataset(9), [later], working_dir=tmp_path)
    assert (hook.count, later.count) == (4, 9)
