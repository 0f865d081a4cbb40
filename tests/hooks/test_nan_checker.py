import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from keras_monitored.journal import read_journal
from tests.models import Recorder, TableModel, fit, table

NAN, INF = float("nan"), float("inf")


class FiniteLoss(keras.losses.Loss):
    """|prediction| where the target is 1. Where it is 0 the loss is 0 and its gradient NaN."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return tf.sqrt(y_true * y_pred**2)


def model_with_bad_gradient(**options: Any) -> keras.Sequential:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile("sgd", FiniteLoss(), **options)
    return model


def data_with_bad_gradient(bad_step: int, steps: int = 8) -> tf.data.Dataset:
    y = np.ones((steps, 1), np.float32)
    y[bad_step - 1] = 0
    return tf.data.Dataset.from_tensor_slices((np.ones_like(y), y)).batch(1)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("loop", [1, 4, "auto"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_the_bad_step_is_the_last_one(bad: float, loop: Any, eager: bool) -> None:
    model = TableModel()
    model.compile("sgd", run_eagerly=eager)
    losses = [1.0] * 9
    losses[6] = bad
    hook = Recorder(every=3)
    with pytest.raises(km.NaNLossError, match=rf"Not finite at step 7: loss = {bad}") as caught:
        fit(model, table(losses), [km.NaNChecker(), hook], steps_per_loop=loop)
    assert (caught.value.step, caught.value.names) == (7, ("loss",))
    assert float(model.steps) == 7
    assert hook.calls[-1] != "end 7"


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 5}])
@pytest.mark.parametrize("loop", [1, "auto"])
def test_stop_ends_the_run_normally(loop: Any, options: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = TableModel()
    model.compile("sgd", **options)
    hook = Recorder()
    hooks = [km.NaNChecker(on_nan="stop"), hook]
    fit(model, table([1.0, 1.0, NAN, 1.0, 1.0, 1.0]), hooks, epochs=2, steps_per_loop=loop)
    assert float(model.steps) == 3
    assert hook.calls[-2:] == ["after 3", "end 3"]
    assert "Not finite at step 3: loss = nan" in caplog.text


def test_the_loss_of_the_step_counts_and_not_the_mean_that_stays_nan() -> None:
    class Late(TableModel):
        def train_step(self, data: Any) -> dict[str, Any]:
            logs = super().train_step(data)
            return {**logs, "loss": logs["loss"] * NAN}

    model = Late()
    fit(model, table([1.0] * 3), [km.NaNChecker()])
    assert float(model.steps) == 3


class TestGradients:
    @pytest.mark.parametrize("loop", [1, "auto"])
    def test_a_bad_gradient_with_a_finite_loss(self, loop: Any) -> None:
        model = model_with_bad_gradient()
        with pytest.raises(km.NaNLossError, match=r"Not finite at step 5: gradients/.*kernel") as caught:
            fit(model, data_with_bad_gradient(5), [km.NaNChecker(("loss", "gradients"))], steps_per_loop=loop)
        assert caught.value.names == (f"gradients/{model.trainable_variables[0].path}",)
        assert int(model.optimizer.iterations) == 5

    def test_eagerly(self) -> None:
        with pytest.raises(km.NaNLossError, match="Not finite at step 2: gradients/"):
            fit(model_with_bad_gradient(run_eagerly=True), data_with_bad_gradient(2), [km.NaNChecker("gradients")])

    def test_unasked_they_are_not_looked_at(self) -> None:
        model = model_with_bad_gradient()
        with pytest.raises(km.NaNLossError, match="Not finite at step 4: loss = nan"):
            fit(model, data_with_bad_gradient(3), [km.NaNChecker()])  # a step later the loss is NaN too

    def test_keras_does_not_see_the_bad_step(self) -> None:
        # F27: with a NaN gradient on the last batch TerminateOnNaN never notices.
        model = model_with_bad_gradient()
        model.fit(data_with_bad_gradient(3, 3), verbose=0, shuffle=False, callbacks=[keras.callbacks.TerminateOnNaN()])
        assert not np.isfinite(model.get_weights()[0]).all()
        with pytest.raises(km.NaNLossError):
            fit(model_with_bad_gradient(), data_with_bad_gradient(3, 3), [km.NaNChecker("gradients")])


class TestNames:
    def test_any_observed_value(self) -> None:
        class Observes(TableModel):
            def train_step(self, data: Any) -> dict[str, Any]:
                km.observe("parts", tf.stack([1.0, 1.0 / (3.0 - self.steps), 1.0]))
                km.observe("count", tf.constant(3))
                return super().train_step(data)

        checker = km.NaNChecker(("loss", "parts", "count"))
        with pytest.raises(km.NaNLossError, match="Not finite at step 4: parts") as caught:
            fit(Observes(), table([1.0] * 8), [checker])
        assert caught.value.names == ("parts",)

    def test_an_unknown_one_is_told_of_before_training(self) -> None:
        model = TableModel()
        with pytest.raises(ValueError, match=r"asks for 'los', .*Known are: .*loss.*'gradients'"):
            fit(model, table([1.0, 1.0]), [km.NaNChecker("los")])
        assert float(model.steps) == 0

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"names": ()}, ValueError, "`names` must name at least one"),
            ({"names": (1,)}, TypeError, "`names` must hold strings"),
            ({"on_nan": "skipp"}, ValueError, "`on_nan` must be one of"),
        ],
    )
    def test_bad_arguments(self, arguments: dict[str, Any], error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            km.NaNChecker(**arguments)


class TestCheckpoints:
    def test_non_finite_variables_are_never_written(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.ERROR)
        saver = km.CheckpointSaver(trigger=km.StepHookTrigger(1))
        fit(model_with_bad_gradient(), data_with_bad_gradient(3, 5), [saver], working_dir=tmp_path)
        assert [info.step for info in km.list_checkpoints(tmp_path)] == [1, 2]
        assert not list(tmp_path.glob("model.ckpt-[345]*"))
        refused = [entry for entry in read_journal(tmp_path) if entry["event"] == "refused"]
        assert [entry["step"] for entry in refused] == [3, 4, 5, 5]  # once more at the end of the epoch
        assert "not finite" in refused[0]["reason"]
        assert "Checkpoint of step 3 not saved" in caplog.text

    @pytest.mark.parametrize("on_nan", ["raise", "stop"])
    def test_the_newest_one_is_from_before_the_bad_step(self, tmp_path: Path, on_nan: Any) -> None:
        hooks = [km.NaNChecker("gradients", on_nan=on_nan), km.CheckpointSaver(trigger=km.StepHookTrigger(2))]
        model = model_with_bad_gradient()
        if on_nan == "stop":
            fit(model, data_with_bad_gradient(5), hooks, working_dir=tmp_path)
        else:
            with pytest.raises(km.NaNLossError):
                fit(model, data_with_bad_gradient(5), hooks, working_dir=tmp_path)
        assert [info.step for info in km.list_checkpoints(tmp_path)] == [2, 4]
