from typing import Any

import pytest

import keras_monitored as km
from keras_monitored.hooks.triggers import Elapsed
from tests.clocks import FakeClock
from tests.models import TableModel, fit, table


class Fires(km.TriggeredHook):
    """Remembers the steps at which it acts, and what it sees there."""

    def __init__(self, trigger: km.HookTrigger, *, stop_at: int | None = None, **options: Any) -> None:
        super().__init__(trigger, **options)
        self.fired: list[tuple[int, float]] = []
        self.elapsed: list[Elapsed | None] = []
        self.stop_at = stop_at

    def fetches(self) -> Any:
        return "loss"

    def on_trigger(self, session: km.Session, results: Any, elapsed: Elapsed | None) -> str | None:
        self.fired.append((session.step, float(results)))
        self.elapsed.append(elapsed)
        return "seen enough" if session.step == self.stop_at else None


def losses(steps: int) -> list[float]:
    """Step n has loss n."""
    return [float(step) for step in range(1, steps + 1)]


def seen(*steps: int) -> list[tuple[int, float]]:
    return [(step, float(step)) for step in steps]


@pytest.mark.parametrize("loop", [1, 5, "auto"])
class TestTriggers:
    def test_steps(self, loop: Any) -> None:
        hook = Fires(km.StepHookTrigger(3))
        fit(TableModel(), table(losses(10)), [hook], steps_per_loop=loop)
        assert hook.fired == seen(3, 6, 9, 10)
        assert [elapsed.steps for elapsed in hook.elapsed if elapsed is not None] == [3, 3, 3, 1]

    def test_epochs_fire_after_the_last_step_with_its_values(self, loop: Any) -> None:
        hook = Fires(km.EpochHookTrigger(2))
        fit(TableModel(), table(losses(4)), [hook], epochs=5, steps_per_loop=loop)
        assert hook.fired == [(8, 4.0), (16, 4.0), (20, 4.0)]

    def test_time(self, loop: Any) -> None:
        clock = FakeClock()

        class Ticks(km.Hook):
            def after_run(self, run_context: Any, run_values: Any) -> None:
                clock.now += run_values.steps

        hook = Fires(km.TimeHookTrigger(2.5, clock=clock))
        fit(TableModel(), table(losses(9)), [hook, Ticks()], steps_per_loop=loop)
        # The clock is read before a run, which is then the one that it acts after.
        assert hook.fired == seen(4, 7, 9)

    def test_none(self, loop: Any) -> None:
        hook = Fires(km.NoHookTrigger())
        fit(TableModel(), table(losses(9)), [hook], epochs=1, steps_per_loop=loop)
        assert hook.fired == seen(9)


class TestAtEnd:
    def test_not_twice_at_one_step(self) -> None:
        hooks = [Fires(km.StepHookTrigger(3)), Fires(km.EpochHookTrigger(1))]
        fit(TableModel(), table(losses(6)), hooks)
        assert [hook.fired for hook in hooks] == [seen(3, 6), seen(6)]

    def test_never_when_told_so(self) -> None:
        hooks = [Fires(km.StepHookTrigger(4), trigger_at_end=False), Fires(km.NoHookTrigger(), trigger_at_end=False)]
        fit(TableModel(), table(losses(6)), hooks)
        assert [hook.fired for hook in hooks] == [seen(4), []]

    def test_not_when_no_step_was_run(self, tmp_path: Any) -> None:
        fit(TableModel(), table(losses(3)), working_dir=tmp_path)
        hook = Fires(km.NoHookTrigger())
        fit(TableModel(), table(losses(3)), [hook], working_dir=tmp_path)
        assert hook.fired == []

    def test_at_the_step_of_a_stop(self) -> None:
        hooks = [Fires(km.StepHookTrigger(4)), km.StopAtStep(5)]
        fit(TableModel(), table(losses(9)), hooks)
        assert hooks[0].fired == seen(4, 5)

    def test_not_after_an_error(self) -> None:
        hook = Fires(km.NoHookTrigger())
        with pytest.raises(km.NaNLossError):
            fit(TableModel(), table([1.0, float("nan"), 3.0]), [hook, km.NaNChecker()])
        assert hook.fired == []


class TestStop:
    @pytest.mark.parametrize("loop", [1, "auto"])
    def test_a_reason_returned_stops_the_run(self, loop: Any) -> None:
        hook, model = Fires(km.StepHookTrigger(2), stop_at=4), TableModel()
        fit(model, table(losses(9)), [hook], steps_per_loop=loop)
        assert hook.fired == seen(2, 4)
        assert float(model.steps) == 4

    def test_at_the_end_of_an_epoch(self) -> None:
        hook, model = Fires(km.EpochHookTrigger(1), stop_at=6), TableModel()
        history = fit(model, table(losses(3)), [hook], epochs=5)
        assert float(model.steps) == 6
        assert history.epoch == [0, 1]


class TestArguments:
    def test_a_trigger_that_is_none(self) -> None:
        with pytest.raises(TypeError, match=r"`trigger` must be a HookTrigger. Received: trigger=5 \(of type int\)"):
            Fires(5)  # type: ignore[arg-type]

    def test_trigger_at_end(self) -> None:
        with pytest.raises(TypeError, match="`trigger_at_end` must be True or False"):
            Fires(km.NoHookTrigger(), trigger_at_end=1)

    def test_an_unknown_fetch_is_told_of_before_training(self) -> None:
        class Asks(Fires):
            def fetches(self) -> Any:
                return {"a": "loss", "b": ["nothing/known"]}

        model = TableModel()
        with pytest.raises(ValueError, match=r"asks for 'nothing/known', which is unknown. Known are: global_step, .*"):
            fit(model, table(losses(3)), [Asks(km.StepHookTrigger(2))])
        assert float(model.steps) == 0


def test_a_hook_that_is_not_due_is_not_asked() -> None:
    class Counts(Fires):
        asked = 0

        def before_run(self, run_context: km.SessionRunContext) -> km.SessionRunArgs | None:
            self.asked += 1
            return super().before_run(run_context)

    hook = Counts(km.StepHookTrigger(4), trigger_at_end=False)
    fit(TableModel(), table(losses(10)), [hook])
    assert hook.asked == 2


def test_a_model_dependent_hook_finds_model_mode_and_configuration(tmp_path: Any) -> None:
    class Looks(km.ModelDependentHook):
        def begin(self) -> None:
            self.seen = self.model_instance

    hook, model = Looks(), TableModel()
    fit(model, table(losses(2)), [hook], working_dir=tmp_path)
    assert hook.seen.model is model
    assert hook.seen.mode is km.Mode.TRAINING
    assert hook.seen.configuration.working_dir == str(tmp_path)
