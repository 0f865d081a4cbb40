"""Whatever way a fit ends, nothing of ours stays behind: the next plain `fit` is plain Keras."""

import functools
import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest

import keras_monitored as km
from keras_monitored.fit import FitDriver
from keras_monitored.step_function import StepFunction
from tests.models import (
    Recorder,
    TableModel,
    arrays,
    assert_same_weights,
    dataset,
    dense_model,
    evaluate,
    fit,
    life,
    predict,
    table,
    weights_of,
)


def once(method: Any) -> Any:
    """Makes a method fail the first time that it is called."""
    calls: list[Any] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OSError("made by a test")
        return method(*args, **kwargs)

    return fail


def failing_callback(method: str) -> keras.callbacks.Callback:
    callback = keras.callbacks.Callback()
    setattr(callback, method, once(getattr(callback, method)))
    return callback


def failing_hook(method: str) -> Recorder:
    hook = Recorder()
    setattr(hook, method, once(getattr(hook, method)))
    return hook


CALLBACK_METHODS = ["on_train_begin", "on_epoch_begin", "on_train_batch_end", "on_epoch_end", "on_train_end"]
HOOK_METHODS = ["begin", "after_session_creation", "before_run", "after_run", "after_epoch", "end"]
ENDS: dict[str, tuple[type[BaseException] | None, Any]] = {
    "normal": (None, lambda: ([], [])),
    "stop": (None, lambda: ([], [Recorder(stop_at=2)])),
    "stop before the first step": (None, lambda: ([], [Recorder(stop_at=0)])),
    **{f"callback {name}": (OSError, lambda name=name: ([failing_callback(name)], [])) for name in CALLBACK_METHODS},
    **{f"hook {name}": (OSError, lambda name=name: ([], [failing_hook(name)])) for name in HOOK_METHODS},
}


def fit_plainly(model: keras.Model) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Fits without hooks, from the same variables each time; returns the history and the variables."""
    model.optimizer.build(model.trainable_variables)
    for index, variable in enumerate([*model.variables, *model.optimizer.variables]):
        variable.assign(np.full(variable.shape, 0.1 * index).astype(variable.dtype))
    history = model.fit(dataset(3), epochs=2, verbose=0, shuffle=False)
    return history.history, weights_of(model)


def attributes(model: keras.Model) -> tuple[set[str], set[str]]:
    """Those of the model and its optimizer, but for what plain Keras leaves after some methods."""
    known = {"_eval_epoch_iterator", "stop_evaluating", "stop_predicting"}
    return set(vars(model)) - known, set(vars(model.optimizer))


@functools.cache
def untouched() -> tuple[Any, ...]:
    """What a model yields that never had hooks, and the attributes that it has then."""
    model = dense_model("adam", metrics=["mae"])
    history, weights = fit_plainly(model)
    return history, weights, attributes(model)


def assert_plain(model: keras.Model) -> None:
    """Fits plainly; the outcome is that of a model that never had hooks, and nothing is found on the model."""
    history, weights = fit_plainly(model)
    expected, expected_weights, expected_attributes = untouched()
    assert history == expected
    for ours, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name in ("train_function", "test_function", "predict_function"):
        assert not type(getattr(model, name)).__module__.startswith("keras_monitored"), name
    assert model._initial_epoch is None
    assert attributes(model) == expected_attributes


@pytest.mark.parametrize(("error", "parts"), ENDS.values(), ids=ENDS)
def test_the_next_fit_is_plain(error: type[BaseException] | None, parts: Any) -> None:
    model = dense_model("adam", metrics=["mae"])
    callbacks, hooks = parts()
    # After ours too: an error there comes when all is set up.
    watching = Recorder()
    given = [km.HookCallback([km.NaNChecker(("loss", "gradients")), *hooks, watching]), *callbacks]
    own_list = keras.callbacks.CallbackList(given, add_history=True, model=model, epochs=2, steps=4, verbose=0)
    own = list(own_list.callbacks)
    arguments = {"epochs": 2, "validation_data": dataset(2), "verbose": 0, "shuffle": False, "callbacks": own_list}
    if error is None:
        model.fit(dataset(4), **arguments)
        assert own_list.callbacks == own
    else:
        with pytest.raises(error):
            model.fit(dataset(4), **arguments)
    assert model._initial_epoch is None
    assert_plain(model)
    # The list again: what an error has left in it changes nothing, and is gone afterwards.
    watching.calls.clear()
    model.fit(dataset(4), **arguments)
    assert own_list.callbacks == own
    if error is not None:
        assert watching.calls == life(*range(1, 9))


def test_a_name_that_is_unknown() -> None:
    model = dense_model("adam", metrics=["mae"])
    with pytest.raises(ValueError, match="nothing"):
        fit(model, dataset(4), [km.NaNChecker("nothing")])
    assert_plain(model)


def test_an_interrupt_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    model, hook = dense_model("adam", metrics=["mae"]), Recorder()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StepFunction, "__call__", interrupt)
        fit(model, dataset(3), [hook])
    assert hook.calls == ["begin", "created 0", "before 0"]
    assert not isinstance(model.train_function, FitDriver)  # at once, here
    assert_plain(model)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("fails", [None, "begin", "after_session_creation", "before_run", "after_run", "end"])
def test_after_evaluate_and_predict(method: str, fails: str | None) -> None:
    model = dense_model("adam", metrics=["mae"])
    run = evaluate if method == "evaluate" else predict
    mode = km.Mode.EVALUATION if method == "evaluate" else km.Mode.INFERENCE
    hook = Recorder() if fails is None else failing_hook(fails)
    hook.modes = frozenset({mode})
    expected = getattr(model, method)(dataset(3), verbose=0)
    if fails is None:
        run(model, dataset(3), [hook])
    else:
        with pytest.raises(OSError, match="made by a test"):
            run(model, dataset(3), [hook])
    np.testing.assert_array_equal(getattr(model, method)(dataset(3), verbose=0), expected)
    assert_plain(model)


class TestOneAfterTheOther:
    def test_several_fits_of_one_model_with_one_callback(self) -> None:
        hook = Recorder()
        callback = km.HookCallback([hook, km.NaNChecker()])
        model, plain = dense_model("adam"), dense_model("adam")
        for batches in (3, 5):
            model.fit(dataset(batches), verbose=0, shuffle=False, callbacks=[callback])
            plain.fit(dataset(batches), verbose=0, shuffle=False)
        assert_same_weights(model, plain)
        assert hook.calls.count("begin") == 2
        assert [call for call in hook.calls if call.startswith("end")] == ["end 3", "end 5"]

    def test_one_callback_for_several_models(self) -> None:
        hook = Recorder()
        callback = km.HookCallback([hook])
        for _ in range(2):
            model, plain = dense_model("adam"), dense_model("adam")
            model.fit(dataset(3), verbose=0, shuffle=False, callbacks=[callback])
            plain.fit(dataset(3), verbose=0, shuffle=False)
            assert_same_weights(model, plain)
        assert [call for call in hook.calls if call.startswith("end")] == ["end 3", "end 3"]

    def test_a_model_that_was_compiled_again_in_between(self) -> None:
        callback = km.HookCallback([Recorder()])
        model, plain = dense_model(), dense_model()
        for optimizer, loss in (("sgd", "mse"), ("adam", "mae")):
            for m, callbacks in ((model, [callback]), (plain, [])):
                m.compile(optimizer, loss)
                m.fit(dataset(3), verbose=0, shuffle=False, callbacks=callbacks)
        assert_same_weights(model, plain)

    def test_a_notebook_cell_run_again(self) -> None:
        model, plain, hook = dense_model("adam"), dense_model("adam"), Recorder()
        for _ in range(3):
            fit(model, dataset(3), [hook])
            plain.fit(dataset(3), verbose=0, shuffle=False)
        assert_same_weights(model, plain)

    def test_a_notebook_cell_run_again_with_a_directory(self, tmp_path: Any) -> None:
        model = TableModel()
        for _ in range(2):
            fit(model, table([1.0] * 4), working_dir=tmp_path, epochs=2)
        assert float(model.steps) == 8  # the run was finished
        fit(model, table([1.0] * 4), working_dir=tmp_path, epochs=3)
        assert float(model.steps) == 12

    def test_a_cell_run_again_after_an_error_in_it(self) -> None:
        model, hook = dense_model("adam"), Recorder()
        for _ in range(2):
            with pytest.raises(OSError, match="made by a test"):
                fit(model, dataset(3), [Recorder()], callbacks=[failing_callback("on_epoch_end")])
        fit(model, dataset(3), [hook])
        assert hook.calls[-1] == "end 3"
        assert int(model.optimizer.iterations) == 9


def test_the_data_is_let_go_of() -> None:
    x, y = arrays(2)
    callback, gone = km.HookCallback([Recorder()]), weakref.ref(x)
    dense_model().fit(x, y, verbose=0, callbacks=[callback])
    del x
    gc.collect()
    assert gone() is None
