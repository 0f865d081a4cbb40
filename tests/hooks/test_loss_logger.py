import logging

import keras
import pytest

import keras_monitored as km
from tests.clocks import FakeClock
from tests.models import TableModel, fit, table


def lines_of(hook: km.LossLogger, losses: list[float], capsys: pytest.CaptureFixture[str], **options: int) -> list[str]:
    fit(TableModel(), table(losses), [hook], **options)
    return capsys.readouterr().out.splitlines()


def test_it_prints_the_loss_of_the_step_and_not_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()  # stands still
    hook = km.LossLogger(km.StepHookTrigger(1, clock=clock))
    expected = ["step 1: loss = 8 (0.0 s)", "step 2: loss = 2 (0.0 s)", "step 3: loss = 0.123457 (0.0 s)"]
    assert lines_of(hook, [8.0, 2.0, 0.123456789], capsys) == expected


@pytest.mark.parametrize("loop", [1, "auto"])
def test_when_due_and_at_the_end(loop: int, capsys: pytest.CaptureFixture[str]) -> None:
    hook = km.LossLogger(km.StepHookTrigger(3), formatter=lambda step, loss, elapsed: f"{step} {loss}")
    assert lines_of(hook, [1.0, 2.0, 3.0, 4.0], capsys, epochs=2, steps_per_loop=loop) == ["3 3.0", "6 2.0", "8 4.0"]


def test_not_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    hook = km.LossLogger(km.StepHookTrigger(3), formatter=lambda *args: str(args[0]), trigger_at_end=False)
    assert lines_of(hook, [1.0] * 4, capsys) == ["3"]


def test_the_formatter_is_told_of_time_and_steps(capsys: pytest.CaptureFixture[str]) -> None:
    hook = km.LossLogger(km.StepHookTrigger(2), formatter=lambda step, loss, elapsed: f"{step} +{elapsed.steps}")
    assert lines_of(hook, [1.0] * 5, capsys) == ["2 +2", "4 +2", "5 +1"]


def test_lines_are_logged_where_keras_logs(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "keras_monitored")
    keras.config.disable_interactive_logging()
    try:
        assert lines_of(km.LossLogger(), [1.0], capsys) == []
    finally:
        keras.config.enable_interactive_logging()
    assert "step 1: loss = 1" in caplog.text


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="`formatter` must be a function"):
        km.LossLogger(formatter="{step}")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`trigger` must be a HookTrigger"):
        km.LossLogger(10)  # type: ignore[arg-type]
