"""Hooks inside `evaluate` and `predict`, and in validations within `fit`."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from tests.models import Recorder, assert_same_weights, dataset, dense_model, evaluate, fit, life, predict

EVALUATION, INFERENCE = km.Mode.EVALUATION, km.Mode.INFERENCE


@pytest.mark.parametrize("known_length", [True, False])
@pytest.mark.parametrize("compiled", [{}, {"steps_per_execution": 2}, {"run_eagerly": True}])
def test_the_life_cycle_in_evaluate(known_length: bool, compiled: Any) -> None:
    hook, idle = Recorder(modes=[EVALUATION], fetches=["loss", "global_step"]), Recorder()
    model = dense_model(metrics=["mae"], **compiled)
    # Where Keras looks for the end of the data by a step, part of it enters the metrics.
    expected = dense_model(metrics=["mae"]).evaluate(dataset(3), verbose=0)
    assert evaluate(model, dataset(3, known_length=known_length), [hook, idle]) == pytest.approx(expected, rel=1e-6)
    if not known_length or "steps_per_execution" in compiled:
        assert hook.calls.pop(-2) == "before 3"  # finds no batch
    assert hook.calls == life(1, 2, 3)
    assert idle.calls == []
    assert [step for _, step in hook.values] == [1, 2, 3]
    assert np.mean([loss for loss, _ in hook.values]) == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("known_length", [True, False])
@pytest.mark.parametrize("compiled", [{}, {"run_eagerly": True}])
def test_the_life_cycle_in_predict(known_length: bool, compiled: Any) -> None:
    hook = Recorder(modes=[INFERENCE], fetches="outputs")
    model = dense_model(**compiled)
    data = dataset(3, known_length=known_length)
    expected = model.predict(data, verbose=0)
    np.testing.assert_array_equal(predict(model, data, [hook]), expected)
    assert hook.calls == life(1, 2, 3)
    np.testing.assert_array_equal(np.concatenate(hook.values), expected)


def test_a_stop_in_evaluate() -> None:
    hook = Recorder(modes=[EVALUATION], stop_at=2, fetches="metrics/loss")
    result = evaluate(dense_model(), dataset(5), [hook])
    assert hook.calls == life(1, 2)
    assert result == pytest.approx(float(hook.values[-1]))


def test_a_stop_in_predict() -> None:
    hook = Recorder(modes=[INFERENCE], stop_at=2)
    assert predict(dense_model(), dataset(5), [hook]).shape == (8, 1)
    assert hook.calls == life(1, 2)


def test_an_evaluation_without_an_optimizer() -> None:
    model = dense_model()
    model.compile(loss="mse", optimizer=None)
    hook = Recorder(modes=[EVALUATION], fetches="loss")
    assert evaluate(model, dataset(2), [hook]) == pytest.approx(np.mean(hook.values), rel=1e-5)


def test_a_nan_in_an_evaluation() -> None:
    checker = km.NaNChecker()
    checker.modes = frozenset({EVALUATION})
    bad = dataset(1).map(lambda x, y: (x / tf.zeros_like(x), y))
    with pytest.raises(km.NaNLossError, match="Not finite at step 3: loss = "):
        evaluate(dense_model(), dataset(2).concatenate(bad).concatenate(dataset(2)), [checker])


class TestWithinFit:
    def test_each_validation_is_a_life_of_its_own(self) -> None:
        calls: list[str] = []
        hooks = [Recorder(calls, "train", every=100), Recorder(calls, "test", modes=[EVALUATION])]
        fit(dense_model(), dataset(3), hooks, epochs=2, validation_data=dataset(2))
        one = [f"test {call}" for call in life(1, 2)]
        assert calls == ["train begin", "train created 0", *one, *one, "train end 6"]

    def test_a_hook_of_all_modes(self) -> None:
        hook = Recorder(modes=list(km.Mode), every=100)
        model = dense_model()
        fit(model, dataset(3), [hook], validation_data=dataset(2))
        assert hook.calls == ["begin", "created 0", "begin", "created 0", "end 2", "end 3"]

    def test_training_and_history_are_plain(self) -> None:
        plain, model = dense_model("adam"), dense_model("adam")
        arguments: dict[str, Any] = {"epochs": 2, "validation_data": dataset(2), "verbose": 0, "shuffle": False}
        expected = plain.fit(dataset(3), **arguments)
        found = fit(model, dataset(3), [Recorder(modes=[EVALUATION], fetches="loss")], **arguments)
        assert_same_weights(model, plain)
        assert found.history == expected.history

    def test_a_stop_ends_the_validation_alone(self) -> None:
        hook = Recorder(modes=[EVALUATION], stop_at=1)
        history = fit(dense_model(), dataset(3), [hook], epochs=2, validation_data=dataset(4))
        assert hook.calls == life(1) * 2
        assert history.epoch == [0, 1]


class TestModelInstance:
    @pytest.mark.parametrize(("run", "mode"), [(evaluate, EVALUATION), (predict, INFERENCE)])
    def test_it_tells_the_mode(self, run: Any, mode: km.Mode) -> None:
        class Looks(km.ModelDependentHook):
            modes = frozenset({mode})

            def begin(self) -> None:
                self.seen = self.model_instance.mode

        hook = Looks()
        run(dense_model(), dataset(1), [hook])
        assert hook.seen is mode
