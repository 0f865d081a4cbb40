from typing import Any

import pytest

import keras_monitored as km
from keras_monitored.criteria import StopTracker
from tests.clocks import FakeClock
from tests.models import Recorder, TableModel, fit, table


def criteria(**limits: Any) -> km.StopCriteria:
    return km.StopCriteria(**{"max_steps": None, "max_epochs": None, **limits})


def steps_until(stop: km.StopCriteria, losses: list[float], **options: Any) -> int:
    model = TableModel()
    fit(model, table(losses), [km.Stopper(stop)], **options)
    return int(model.steps.numpy())


class Ticks(km.Hook):
    """Lets every step take a second."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.clock.now += run_values.steps


@pytest.mark.parametrize("loop", [1, "auto"])
class TestLimits:
    def test_max_steps(self, loop: Any) -> None:
        assert steps_until(criteria(max_steps=5), [1.0] * 4, epochs=9, steps_per_loop=loop) == 5

    def test_max_epochs(self, loop: Any) -> None:
        assert steps_until(criteria(max_epochs=2), [1.0] * 4, epochs=9, steps_per_loop=loop) == 8

    def test_max_seconds(self, loop: Any) -> None:
        clock, model = FakeClock(), TableModel()
        stopper = km.Stopper(criteria(max_seconds=5.5))
        stopper.tracker = StopTracker(stopper.criteria, clock=clock)
        fit(model, table([1.0] * 4), [Ticks(clock), stopper], epochs=9, steps_per_loop=loop)
        # The clock is read before a run: the one that begins after the time is up is the last.
        assert float(model.steps) == 7

    def test_none(self, loop: Any) -> None:
        assert steps_until(km.StopCriteria.none(), [1.0] * 4, epochs=3, steps_per_loop=loop) == 12


class TestLossChange:
    def test_absolute(self) -> None:
        losses = [5.0, 4.0, 3.95, 3.0, 2.95, 2.9, 2.85, 2.8, 2.75]
        assert steps_until(criteria(abs_loss_change_tol=0.1, max_steps_below_tol=2), losses) == 7

    def test_relative(self) -> None:
        losses = [100.0, 90.0, 89.5, 89.4, 80.0, 79.9, 79.8, 79.7, 79.6]
        assert steps_until(criteria(rel_loss_change_tol=0.01, max_steps_below_tol=1), losses) == 4

    def test_relative_from_a_loss_of_zero(self) -> None:
        losses = [0.0, 1e-9, 0.0, 0.0, 0.0, 7.0]
        assert steps_until(criteria(rel_loss_change_tol=0.5, max_steps_below_tol=1), losses) == 5

    def test_it_is_the_loss_of_the_step_and_not_the_mean_of_the_epoch(self) -> None:
        # The mean over the epoch changes by less and less, the loss of the steps does not.
        losses = [10.0, 0.0] * 20
        assert steps_until(criteria(abs_loss_change_tol=1.0, max_steps_below_tol=3), losses) == 40

    def test_the_default_allows_ten_steps_in_a_row(self) -> None:
        assert steps_until(criteria(abs_loss_change_tol=1e-3), [1.0] * 30, steps_per_loop="auto") == 12

    def test_a_step_that_has_no_loss_is_told_of_before_training(self) -> None:
        class NoLoss(TableModel):
            def train_step(self, data: Any) -> dict[str, Any]:
                self.steps.assign_add(1.0)
                return {}

        model = NoLoss()
        with pytest.raises(ValueError, match=r"asks for 'loss', which is unknown. .* add observe\('loss', loss\)"):
            fit(model, table([1.0, 1.0]), [km.Stopper(criteria(abs_loss_change_tol=0.1))])
        assert float(model.steps) == 0


class TestRestartCounting:
    @pytest.mark.parametrize(("restart_counting", "steps"), [(True, 5), (False, 3)])
    def test_from_where_the_run_begins_or_from_the_very_first_step(
        self, tmp_path: Any, restart_counting: bool, steps: int
    ) -> None:
        fit(TableModel(), table([1.0] * 9), [km.StopAtStep(last_step=2)], working_dir=tmp_path)
        model = TableModel()
        stop = criteria(max_steps=3, restart_counting=restart_counting)
        fit(model, table([1.0] * 9), [km.Stopper(stop)], working_dir=tmp_path)
        assert float(model.steps) == steps


def test_the_other_hooks_of_the_last_run_are_called() -> None:
    hook = Recorder()
    model = TableModel()
    fit(model, table([1.0] * 9), [km.Stopper(km.StopCriteria.steps(2)), hook])
    assert hook.calls[-2:] == ["after 2", "end 2"]


def test_a_wrong_argument() -> None:
    with pytest.raises(TypeError, match=r"`criteria` must be a StopCriteria. Received: criteria=100"):
        km.Stopper(100)  # type: ignore[arg-type]
