"""What `HookCallback` is given wrongly is told of before training starts."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from tests.models import Recorder, dataset, dense_model, fit

HOOK = Recorder()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"hooks": HOOK}, TypeError, r"`hooks` must be a list of hooks.*Pass \[hook\]"),
        ({"hooks": 3}, TypeError, "`hooks` must be a list of hooks"),
        ({"hooks": [HOOK, "hook"]}, TypeError, r"must hold Hook objects. Received: 'hook' \(of type str\)"),
        ({"hooks": [km.NaNChecker]}, TypeError, "pass an object, not the class"),
        ({"hooks": [HOOK, Recorder(), HOOK]}, ValueError, "lists the same hook twice"),
        ({"steps_per_loop": 0}, ValueError, "`steps_per_loop` must be 'auto' or an integer of at least 1"),
        ({"steps_per_loop": -4}, ValueError, "`steps_per_loop` must be"),
        ({"steps_per_loop": 2.0}, ValueError, "`steps_per_loop` must be"),
        ({"steps_per_loop": True}, ValueError, "`steps_per_loop` must be"),
        ({"steps_per_loop": "all"}, ValueError, "`steps_per_loop` must be"),
        ({"stateful": keras.callbacks.EarlyStopping()}, TypeError, "`stateful` must be a list of callbacks"),
        ({"stateful": ["EarlyStopping"]}, TypeError, "`stateful` must hold Keras callbacks"),
        ({"configuration": "run1"}, TypeError, "`configuration` must be a Configuration"),
        ({"working_dir": "a", "configuration": km.Configuration("b")}, ValueError, "'a' and .* 'b'. Leave one"),
        ({"working_dir": ""}, ValueError, "`working_dir` must not be empty"),
        ({"working_dir": 3}, TypeError, "`working_dir` must be a string"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        km.HookCallback(**arguments)


@pytest.mark.parametrize("trigger", [km.StepHookTrigger, km.TimeHookTrigger, km.EpochHookTrigger])
def test_a_trigger_of_zero(trigger: Any) -> None:
    with pytest.raises(ValueError, match=r"must be.*NoHookTrigger\(\)"):
        trigger(0)


def assert_refused(callbacks: list[keras.callbacks.Callback], error: type[Exception], match: str) -> None:
    model = dense_model()
    with pytest.raises(error, match=match):
        model.fit(dataset(2), verbose=0, shuffle=False, callbacks=callbacks)
    assert int(model.optimizer.iterations) == 0


def test_two_callbacks_in_one_fit() -> None:
    assert_refused([km.HookCallback(), km.HookCallback()], ValueError, "must hold one HookCallback")


def test_one_callback_twice() -> None:
    callback = km.HookCallback()
    assert_refused([callback, callback], ValueError, "must hold one HookCallback")


def test_a_stateful_callback_that_does_not_take_part() -> None:
    callback = km.HookCallback(stateful=[keras.callbacks.EarlyStopping("loss")])
    assert_refused([callback], ValueError, "`stateful` lists EarlyStopping, which is not among the `callbacks`")


@pytest.mark.parametrize("below", ["", "run"])
def test_a_directory_that_cannot_be_written(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("in the way")
    directory = tmp_path / "file" / below
    assert_refused([km.HookCallback(working_dir=directory)], (ValueError, km.CheckpointError), "can't be|must be a dir")


def test_outside_of_a_fit() -> None:
    callback = km.HookCallback()
    callback.set_model(dense_model())
    with pytest.raises(RuntimeError, match=r"works inside `model\.fit`, and none was found that calls it"):
        callback.on_train_begin()


def test_the_same_list_of_callbacks_as_an_object_of_keras() -> None:
    # Made by hand it need not know the number of epochs.
    hook, model = Recorder(), dense_model()
    callbacks = keras.callbacks.CallbackList([km.HookCallback([hook])], add_history=True, model=model)
    model.fit(dataset(2), epochs=2, shuffle=False, callbacks=callbacks)
    assert hook.calls[-1] == "end 4"


def test_the_seed_is_set_before_the_first_hook() -> None:
    class Draws(km.Hook):
        def begin(self) -> None:
            self.drawn = (np.random.rand(), float(tf.random.uniform(())))

    hooks = [Draws(), Draws()]
    for hook in hooks:
        callback = km.HookCallback([hook], configuration=km.Configuration(random_seed=3))
        dense_model().fit(dataset(1), verbose=0, shuffle=False, callbacks=[callback])
    assert hooks[0].drawn == hooks[1].drawn


def test_train_on_batch_from_another_callback() -> None:
    class Extra(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            x, y = next(iter(dataset(1)))
            self.model.train_on_batch(x, y)

    hook, model = Recorder(), dense_model()
    fit(model, dataset(3), [hook], callbacks=[Extra()], epochs=2)
    assert [call for call in hook.calls if call.startswith("after")] == [f"after {step}" for step in range(1, 7)]
    assert int(model.optimizer.iterations) == 8
