from typing import Any

import pytest

import keras_monitored as km
from tests.clocks import FakeClock
from tests.models import TableModel, fit, table


class HalfSeconds(km.Hook):
    """Lets every step take half a second, by a clock."""

    priority = 1

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.clock.now += run_values.steps / 2


@pytest.mark.parametrize("loop", [1, "auto"])
def test_it_prints_the_steps_of_a_second(loop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    hook = km.StepRateLogger(km.StepHookTrigger(4, clock=clock))
    fit(TableModel(), table([1.0] * 10), [hook, HalfSeconds(clock)], steps_per_loop=loop)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["step 4: Steps/Sec = 2", "step 8: Steps/Sec = 2", "step 10: Steps/Sec = 2"]
    assert hook.rate == 2


def test_time_between_epochs_counts_and_the_tag_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()

    class SlowEpochs(km.Hook):
        def after_epoch(self, session: km.Session) -> None:
            clock.now += 8

    hook = km.StepRateLogger(km.StepHookTrigger(4, clock=clock), tag="rate", trigger_at_end=False)
    fit(TableModel(), table([1.0] * 4), [hook, HalfSeconds(clock), SlowEpochs()], epochs=2)
    assert capsys.readouterr().out.splitlines() == ["step 4: rate = 2", "step 8: rate = 0.4"]


def test_every_ten_steps_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    fit(TableModel(), table([1.0] * 25), [km.StepRateLogger()])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 10", "step 20", "step 25"]


def test_nothing_is_printed_while_the_clock_stands_still(capsys: pytest.CaptureFixture[str]) -> None:
    hook = km.StepRateLogger(km.StepHookTrigger(2, clock=FakeClock()))
    fit(TableModel(), table([1.0] * 4), [hook])
    assert capsys.readouterr().out == ""
    assert hook.rate is None


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="`tag` must be a non-empty string"):
        km.StepRateLogger(tag="")
    with pytest.raises(TypeError, match="`trigger` must be a HookTrigger"):
        km.StepRateLogger(10)  # type: ignore[arg-type]
