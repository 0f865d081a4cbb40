"""A `fit` under hooks that do not interfere is plain Keras, but for the faults of Keras that it does not share."""

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from tests.models import Recorder, TableModel, arrays, assert_same_weights, dataset, dense_model, fit, table


class Batches(keras.callbacks.Callback):
    """Remembers the numbers and logs of batches that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.logs: list[dict[str, float]] = []
        self.epochs: list[tuple[int, dict[str, float]]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begun.append(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended.append(batch)
        self.logs.append(dict(logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append((epoch, dict(logs)))


INPUTS = {
    "dataset": lambda: {"x": dataset(6)},
    "steps_per_epoch": lambda: {"x": dataset(4).repeat(), "steps_per_epoch": 5},
    "arrays": lambda: {"x": arrays(6)[0], "y": arrays(6)[1], "batch_size": 4, "shuffle": True},
    "a last batch that is smaller": lambda: {"x": arrays(6)[0], "y": arrays(6)[1], "batch_size": 10},
    "validation_data": lambda: {"x": dataset(6), "validation_data": dataset(3)},
    "validation_split": lambda: {"x": arrays(6)[0], "y": arrays(6)[1], "validation_split": 0.25, "shuffle": True},
    "initial_epoch": lambda: {"x": dataset(6), "initial_epoch": 1},
    "validation_freq": lambda: {"x": dataset(6), "validation_data": dataset(3), "validation_freq": 2},
}


class TestLikePlainKeras:
    """Weights, `History`, and what other callbacks see are the same bit by bit."""

    @staticmethod
    def run(hooks: bool, options: dict[str, Any], watched: bool, **compiled: Any) -> tuple[keras.Model, Any, Batches]:
        keras.utils.set_random_seed(5)
        seen = Batches()
        model = dense_model("adam", metrics=["mae"], **compiled)
        data = options.pop("x")
        arguments = {"shuffle": False, "verbose": 0, "epochs": 3, **options}
        callbacks = [seen] if watched else []
        if not hooks:
            return model, model.fit(data, callbacks=callbacks, **arguments), seen
        loop = arguments.pop("steps_per_loop", 1)
        idle = [km.NaNChecker(("loss", "gradients")), Recorder(fetches="loss")]
        return model, fit(model, data, idle, callbacks=callbacks, steps_per_loop=loop, **arguments), seen

    @pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
    def test_one_step_a_batch(self, inputs: Any) -> None:
        model, history, seen = self.run(False, inputs(), True)
        ours, our_history, we_saw = self.run(True, inputs(), True)
        assert_same_weights(ours, model)
        assert our_history.history == history.history
        assert our_history.epoch == history.epoch
        assert (we_saw.begun, we_saw.ended) == (seen.begun, seen.ended)
        assert (we_saw.logs, we_saw.epochs) == (seen.logs, seen.epochs)

    @pytest.mark.parametrize("compiled", [{"steps_per_execution": 3}, {"run_eagerly": True}, {"jit_compile": True}])
    def test_other_ways_to_run(self, compiled: Any) -> None:
        model, history, seen = self.run(False, {"x": dataset(6)}, True, **compiled)
        ours, our_history, we_saw = self.run(True, {"x": dataset(6)}, True, **compiled)
        assert_same_weights(ours, model)
        assert our_history.history == history.history
        assert (we_saw.ended, we_saw.logs) == (seen.ended, seen.logs)

    @pytest.mark.parametrize("loop", [1, 4, "auto"])
    def test_loops_and_logs_that_nobody_reads(self, loop: Any) -> None:
        model, history, _ = self.run(False, {"x": dataset(6), "validation_data": dataset(2)}, False)
        options = {"x": dataset(6), "validation_data": dataset(2), "steps_per_loop": loop}
        ours, our_history, _ = self.run(True, options, False)
        assert_same_weights(ours, model)
        assert our_history.history == history.history

    @pytest.mark.parametrize("loop", [1, "auto"])
    def test_the_progress_bar(self, loop: Any, capsys: pytest.CaptureFixture[str]) -> None:
        def shown(text: str) -> list[str]:
            lines = re.sub(r"\d+[mu]?s(/step)?|\x1b\[[0-9;]*m", "", text).replace("\x08", "").replace("\r", "\n")
            return [line.strip() for line in lines.splitlines() if re.match(r"\s*(Epoch|6/6)", line)]

        self.run(False, {"x": dataset(6), "verbose": 1}, False)
        plain = shown(capsys.readouterr().out)
        self.run(True, {"x": dataset(6), "verbose": 1, "steps_per_loop": loop}, False)
        ours = shown(capsys.readouterr().out)
        assert [line for line in ours if "Epoch" in line] == ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]
        assert ours[-1] == plain[-1] and "mae" in ours[-1]

    def test_a_loop_is_not_used_where_a_callback_works_at_every_batch(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, _, seen = self.run(False, {"x": dataset(6)}, True)
        _, _, we_saw = self.run(True, {"x": dataset(6), "steps_per_loop": "auto"}, True)
        assert (
            "steps_per_loop='auto' has no effect in this fit: Batches works at every batch" in capsys.readouterr().out
        )
        assert we_saw.logs == seen.logs


class TestKerasFaults:
    """Each of `findings.md`: ours is right, and a peer's mend shows itself here."""

    def test_f3_the_end_of_data_does_not_run_part_of_a_step(self) -> None:
        data = dataset(12, known_length=False)
        plain, model = dense_model("adam"), dense_model("adam")
        plain.fit(data, epochs=4, verbose=0, shuffle=False)
        fit(model, data, epochs=4)
        assert int(plain.optimizer.iterations) == 52
        assert int(model.optimizer.iterations) == 48

    def test_f8_a_stop_before_the_first_step(self) -> None:
        class StopsAtOnce(keras.callbacks.Callback):
            def on_train_begin(self, logs: Any = None) -> None:
                self.model.stop_training = True

        plain, model = dense_model(), dense_model()
        plain.fit(dataset(4), verbose=0, shuffle=False, callbacks=[StopsAtOnce()])
        fit(model, dataset(4), [Recorder(stop_at=0)])
        assert int(plain.optimizer.iterations) == 1
        assert int(model.optimizer.iterations) == 0

    def test_f10_steps_are_counted_where_they_run(self) -> None:
        seen, hook = Batches(), Recorder(fetches="global_step")
        model = dense_model(steps_per_execution=4)
        fit(model, dataset(10), [hook], callbacks=[seen])
        assert seen.ended == [3, 7, 11]  # Keras's batch numbers
        assert hook.values == list(range(1, 11))
        assert int(model.optimizer.iterations) == 10

    def test_f11_the_loss_of_the_step_and_not_the_mean_of_the_epoch(self) -> None:
        hook, seen = Recorder(fetches=["loss", "metrics/loss"]), Batches()
        losses = [5.0, 37.0, 102.0]
        fit(TableModel(), table(losses), [hook], callbacks=[seen])
        assert [float(loss) for loss, _ in hook.values] == losses
        assert [float(mean) for _, mean in hook.values] == [5.0, 21.0, 48.0] == [log["loss"] for log in seen.logs]

    def test_f12_steps_that_a_loss_scale_skips_are_steps(self) -> None:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = dense_model(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0))
        finally:
            keras.config.set_dtype_policy("float32")
        x, y = arrays(4)
        x[8:12] = 6e4  # overflows in the third step
        hook = Recorder(fetches="global_step")
        fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(4), [hook])
        assert hook.values == [1, 2, 3, 4]
        assert int(model.optimizer.inner_optimizer.iterations) == 3
        assert np.isfinite(model.get_weights()[0]).all()

    def test_f28_no_step_runs_past_the_end_of_an_epoch(self) -> None:
        def fitted(hooks: bool) -> int:
            model = dense_model(steps_per_execution=4)
            arguments = {"epochs": 2, "steps_per_epoch": 10, "verbose": 0, "shuffle": False}
            fit(model, dataset(3).repeat(), **arguments) if hooks else model.fit(dataset(3).repeat(), **arguments)
            return int(model.optimizer.iterations)

        assert fitted(hooks=False) == 24
        assert fitted(hooks=True) == 20
