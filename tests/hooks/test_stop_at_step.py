from typing import Any

import pytest

import keras_monitored as km
from tests.models import TableModel, fit, table

WAYS = [({}, 1), ({}, "auto"), ({}, 4), ({"steps_per_execution": 4}, 1)]


@pytest.mark.parametrize(("compiled", "loop"), WAYS)
@pytest.mark.parametrize(("hook", "steps"), [(km.StopAtStep(5), 5), (km.StopAtStep(last_step=7), 7)])
def test_exactly_so_many_steps_are_run(hook: km.StopAtStep, steps: int, compiled: Any, loop: Any) -> None:
    model = TableModel()
    model.compile("sgd", **compiled)
    fit(model, table([1.0] * 6), [hook], epochs=3, steps_per_loop=loop)
    assert float(model.steps) == steps


@pytest.mark.parametrize("limit", ["num_steps", "last_step"])
def test_a_finished_run_that_is_asked_for_more_goes_on(limit: str, tmp_path: Any) -> None:
    for steps in (3, 3, 6):
        model = TableModel()
        fit(model, table([1.0] * 9), [km.StopAtStep(**{limit: steps})], working_dir=tmp_path)
        assert float(model.steps) == steps


def test_a_run_that_was_broken_off_counts_on_where_it_was(tmp_path: Any) -> None:
    saver = km.CheckpointSaver(trigger=km.StepHookTrigger(2))
    with pytest.raises(km.NaNLossError):
        losses = [1.0, 1.0, float("nan"), 1.0]
        fit(TableModel(), table(losses), [km.StopAtStep(4), km.NaNChecker(), saver], working_dir=tmp_path)
    model = TableModel()
    fit(model, table([1.0] * 9), [km.StopAtStep(4)], working_dir=tmp_path)
    assert float(model.steps) == 4


def test_one_hook_serves_two_fits() -> None:
    hook, model = km.StopAtStep(2), TableModel()
    fit(model, table([1.0] * 5), [hook])
    fit(model, table([1.0] * 5), [hook])
    assert float(model.steps) == 4


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, ValueError, "Exactly one of"),
        ({"num_steps": 1, "last_step": 2}, ValueError, "Exactly one of"),
        ({"num_steps": 0}, ValueError, "`num_steps` must be.* at least 1"),
        ({"last_step": -3}, ValueError, "`last_step` must be.* at least 1"),
        ({"last_step": 2.5}, TypeError, "`last_step`"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        km.StopAtStep(**arguments)
