"""What hooks add to a run inside `fit`: fetches, feeds, targets and options."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from tests.models import Recorder, TableModel, dataset, dense_model, fit, table


class Adds(km.Hook):
    """Adds the same to every run after the first, and remembers what it fetched."""

    def __init__(self, name: str = "adds", **arguments: Any) -> None:
        self.name = name
        self.arguments = arguments
        self.values: list[Any] = []

    def before_run(self, run_context: km.SessionRunContext) -> km.SessionRunArgs | None:
        return km.SessionRunArgs(**self.arguments) if run_context.step == 1 else None

    def after_run(self, run_context: km.SessionRunContext, run_values: km.SessionRunValues) -> None:
        self.values.append(run_values.results)

    def __repr__(self) -> str:
        return f"Adds({self.name!r})"


class Scaled(TableModel):
    """Its loss is the number of the batch times an input times a variable."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.scale = tf.Variable(1.0, trainable=False)
        self.compile("sgd", **options)

    def train_step(self, data: Any) -> dict[str, Any]:
        factor = km.feed("factor", 1.0)
        km.observe("both", {"factor": factor}["factor"] * self.scale)
        return super().train_step(data * factor * self.scale)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}])
class TestFeeds:
    def losses(self, options: Any, **arguments: Any) -> list[float]:
        model, hook = Scaled(**options), Recorder(fetches="loss")
        if "variable" in arguments:
            arguments = {"feeds": {model.scale.ref(): arguments["variable"]}}
        fit(model, table([1.0, 2.0, 3.0]), [hook, Adds(**arguments)])
        assert float(model.scale.numpy()) == 1.0  # the variable's value is back
        return [float(loss) for loss in hook.values]

    def test_an_input_by_its_name_for_one_run(self, options: Any) -> None:
        assert self.losses(options, feeds={"factor": 10.0}) == [1.0, 20.0, 3.0]

    def test_a_variable(self, options: Any) -> None:
        assert self.losses(options, variable=100.0) == [1.0, 200.0, 3.0]

    def test_the_batch(self, options: Any) -> None:
        assert self.losses(options, feeds={"x": np.array([7.0])}) == [1.0, 7.0, 3.0]


def test_targets_of_the_batch() -> None:
    hook = Recorder(fetches="loss")
    model = dense_model()
    model.optimizer.learning_rate = 0.0
    x, y = next(iter(dataset(2).skip(1)))
    prediction = model(x)
    fit(model, dataset(3), [hook, Adds(feeds={"y": prediction})])
    assert float(hook.values[1]) < 1e-12 < float(hook.values[0])
    hook.values.clear()
    fit(model, dataset(3), [hook, Adds(feeds={"x": x, "y": y})])
    assert float(hook.values[1]) == pytest.approx(float(tf.reduce_mean((prediction - y) ** 2)), rel=1e-5)


class TestConflicts:
    @pytest.mark.parametrize("name", ["factor", "x"])
    def test_two_hooks_feed_one_thing(self, name: str) -> None:
        hooks = [Adds("one", feeds={name: [1.0]}), Adds("two", feeds={name: [2.0]})]
        with pytest.raises(RuntimeError, match=r"is fed twice in one run, by Adds\('one'\) and by Adds\('two'\)"):
            fit(Scaled(), table([1.0, 2.0, 3.0]), hooks)

    def test_two_hooks_feed_one_variable(self) -> None:
        model = Scaled()
        hooks = [Adds("one", feeds={model.scale.ref(): 2.0}), Adds("two", feeds=[(model.scale, 3.0)])]
        with pytest.raises(RuntimeError, match=r"is fed twice in one run, by Adds\('one'\) and by Adds\('two'\)"):
            fit(model, table([1.0, 2.0, 3.0]), hooks)

    def test_an_unknown_input(self) -> None:
        with pytest.raises(ValueError, match=r"unknown input 'factr'. Known are: factor, and 'x' and 'y'"):
            fit(Scaled(), table([1.0, 2.0, 3.0]), [Adds(feeds={"factr": 2.0})])


class TestFetches:
    def test_any_structure_of_names_variables_and_functions(self) -> None:
        model = dense_model("adam", metrics=["mae"])
        kernel = model.layers[0].kernel
        fetches = {
            "names": ("loss", ["learning_rate", "global_step", "global_epoch"]),
            "metric": "metrics/mae",
            "by path": f"variables/{kernel.path}",
            "variable": kernel,
            "function": lambda: tf.constant(42),
            "gradient": f"gradients/{kernel.path}",
        }
        hook = Adds(fetches=fetches)
        fit(model, dataset(2), [hook], epochs=1)
        assert hook.values[0] is None
        found = hook.values[1]
        assert found["names"][1] == [np.float32(0.001), 2, 0]
        assert isinstance(found["names"][0], np.float32)
        np.testing.assert_array_equal(found["variable"], kernel.numpy())
        np.testing.assert_array_equal(found["by path"], kernel.numpy())
        assert found["function"] == 42
        assert found["gradient"].shape == (2, 1) and np.any(found["gradient"])

    def test_an_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"asks for 'both/of', which is unknown. Known are: global_step, .*both, "):
            fit(Scaled(), table([1.0, 2.0]), [Adds(fetches=["both/of"])])

    def test_a_value_observed_in_the_step(self) -> None:
        hook = Recorder(fetches="both")
        fit(Scaled(), table([1.0, 2.0]), [hook, Adds(feeds={"factor": 5.0})])
        assert hook.values == [1.0, 5.0]


def test_targets_are_run_after_the_step() -> None:
    model = Scaled()
    seen: list[float] = []
    fit(model, table([1.0, 2.0, 3.0]), [Adds(targets=[lambda: seen.append(float(model.steps.numpy()))])])
    assert seen == [2.0]


class TestOptions:
    def test_a_trace_is_written_under_the_directory(self, tmp_path: Path) -> None:
        options = km.RunOptions(trace=True, trace_directory=str(tmp_path / "traces"))
        fit(Scaled(), table([1.0, 2.0, 3.0]), [Adds(options=options)])
        assert list((tmp_path / "traces").rglob("*.xplane.pb"))

    def test_by_default_under_the_runs(self, tmp_path: Path) -> None:
        hooks = [Adds(options=km.RunOptions(trace=True))]
        fit(Scaled(), table([1.0, 2.0, 3.0]), hooks, working_dir=tmp_path)
        assert list(tmp_path.rglob("*.xplane.pb"))

    def test_without_any_directory(self) -> None:
        with pytest.raises(ValueError, match="asks for a trace, and there is no directory"):
            fit(Scaled(), table([1.0, 2.0, 3.0]), [Adds(options=km.RunOptions(trace=True))])
