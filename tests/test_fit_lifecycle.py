"""Which call of a hook comes when, in `fit`: the table of the life cycle, row by row."""

import re
from typing import Any

import pytest
import tensorflow as tf

import keras_monitored as km
from keras_monitored.journal import read_journal
from tests.models import Recorder, TableModel, dataset, dense_model, fit, life, table

WAYS = {
    "plain": ({}, {}),
    "steps_per_execution": ({"steps_per_execution": 3}, {}),
    "loops": ({}, {"steps_per_loop": 4}),
    "auto": ({}, {"steps_per_loop": "auto"}),
    "eager": ({"run_eagerly": True}, {}),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `compile` and of `fit` for each way to run steps."""
    return WAYS[request.param]


class TestNormalEnd:
    def test_every_run_has_both_calls(self, way: Any) -> None:
        compiled, options = way
        hook = Recorder()
        model = dense_model(**compiled)
        fit(model, dataset(4), [hook], epochs=2, **options)
        assert hook.calls == life(1, 2, 3, 4, 5, 6, 7, 8)
        assert int(model.optimizer.iterations) == 8

    @pytest.mark.parametrize("loop", [4, "auto"])
    def test_a_loop_is_one_run_for_hooks_that_are_due_at_its_end(self, loop: Any) -> None:
        hook = Recorder(every=3)
        model = dense_model()
        fit(model, dataset(10), [hook], epochs=2, steps_per_loop=loop)
        # The first step stands alone: it tells how long a step takes. Step 10 ends the epoch, and with it the loop.
        seen = [int(call.split()[1]) for call in hook.calls if call.startswith("after")]
        assert seen == [3, 6, 9, 12, 15, 18]
        assert int(model.optimizer.iterations) == 20

    def test_steps_per_execution_runs_up_to_a_due_hook(self) -> None:
        hook = Recorder(every=2)
        fit(dense_model(steps_per_execution=3), dataset(7), [hook])
        assert [call for call in hook.calls if call.startswith("after")] == ["after 2", "after 4", "after 6"]

    def test_fewer_runs_are_begun_than_steps_are_run(self) -> None:
        class Counts(km.Hook):
            runs: tuple[int, ...] = ()

            def after_run(self, run_context: Any, run_values: Any) -> None:
                self.runs += (run_values.steps,)

            def next_step(self, step: int) -> int:
                return (step // 5 + 1) * 5

        hook = Counts()
        fit(dense_model(), dataset(20), [hook], steps_per_loop="auto")
        # The first step compiles and the second tells how long a step takes: both run alone.
        assert hook.runs == (3, 5, 5, 5)


class TestEndOfData:
    def test_after_run_is_not_called_for_the_run_that_finds_no_batch(self, way: Any) -> None:
        compiled, options = way
        hook = Recorder()
        model = dense_model(**compiled)
        fit(model, dataset(4, known_length=False), [hook], epochs=2, **options)
        first = ["begin", "created 0", *life(1, 2, 3, 4)[2:-1], "before 4"]
        assert hook.calls == [*first, *life(5, 6, 7, 8, start=4)[2:-1], "before 8", "end 8"]
        assert int(model.optimizer.iterations) == 8

    def test_endless_data_ends_with_steps_per_epoch(self) -> None:
        hook = Recorder()
        fit(dense_model(), dataset(3).repeat(), [hook], epochs=2, steps_per_epoch=2)
        assert hook.calls == life(1, 2, 3, 4)


class TestStop:
    def test_all_hooks_of_the_run_are_called_and_end(self, way: Any) -> None:
        compiled, options = way
        calls: list[str] = []
        model = dense_model(**compiled)
        fit(model, dataset(4), [Recorder(calls, "a", stop_at=2), Recorder(calls, "b")], epochs=3, **options)
        assert calls[-6:] == ["a before 1", "b before 1", "a after 2", "b after 2", "a end 2", "b end 2"]
        assert int(model.optimizer.iterations) == 2

    def test_before_the_first_step(self, way: Any) -> None:
        compiled, options = way
        hook = Recorder(stop_at=0)
        model = dense_model(**compiled)
        fit(model, dataset(4), [hook], epochs=2, **options)
        assert hook.calls == ["begin", "created 0", "end 0"]
        assert int(model.optimizer.iterations) == 0

    def test_at_the_last_step_of_an_epoch(self) -> None:
        hook = Recorder(stop_at=4)
        model = dense_model()
        history = fit(model, dataset(4), [hook], epochs=3)
        assert hook.calls == life(1, 2, 3, 4)
        assert history.epoch == [0]


class TestNothingToRun:
    def test_a_finished_run_started_again(self, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
        fit(dense_model(), dataset(4), working_dir=tmp_path)
        hook, model = Recorder(), dense_model()
        fit(model, dataset(4), [hook], working_dir=tmp_path)
        # The list of hooks has changed, and none of them can make the run longer than its epochs.
        assert hook.calls == ["begin", "created 4", "end 4"]
        assert int(model.optimizer.iterations) == 4

    def test_a_step_that_was_reached_before(self, tmp_path: Any) -> None:
        fit(dense_model(), dataset(4), [km.StopAtStep(last_step=3)], working_dir=tmp_path)
        hook, model = Recorder(), dense_model()
        fit(model, dataset(4), [km.StopAtStep(last_step=3), hook], working_dir=tmp_path)
        assert hook.calls == ["begin", "created 3", "end 3"]
        assert int(model.optimizer.iterations) == 3


class TestOtherErrors:
    def test_end_is_not_called(self, way: Any) -> None:
        compiled, options = way
        hook = Recorder()
        bad = dataset(4).map(lambda x, y: (tf.debugging.check_numerics(x / tf.zeros_like(x), "bad batch"), y))
        with pytest.raises(tf.errors.InvalidArgumentError, match="bad batch"):
            fit(dense_model(**compiled), dataset(2).concatenate(bad), [hook], **options)
        assert hook.calls == [*life(1, 2)[:-1], "before 2"]

    @pytest.mark.parametrize("call", ["begin", "after_session_creation", "before_run", "after_run"])
    def test_an_error_of_a_hook_ends_the_fit(self, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        bad = Recorder(calls, "bad")
        monkeypatch.setattr(bad, call, lambda *args: {}["no such key"])
        with pytest.raises(KeyError, match="no such key"):
            fit(dense_model(), dataset(3), [Recorder(calls, "good"), bad])
        assert not [entry for entry in calls if " end" in entry]

    def test_keyboard_interrupt_in_a_hook(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hook = Recorder()

        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(hook, "after_run", interrupt)
        model = dense_model()
        with pytest.raises(KeyboardInterrupt):
            fit(model, dataset(3), [hook])
        assert hook.calls == ["begin", "created 0", "before 0"]


class TestErrorsOfEnd:
    class BadEnd(Recorder):
        def end(self, session: km.Session) -> None:
            super().end(session)
            raise OSError(f"the end of {self.name}")

    def test_the_other_ends_still_run_and_the_first_error_is_raised(self) -> None:
        calls: list[str] = []
        hooks = [self.BadEnd(calls, "a"), Recorder(calls, "b"), self.BadEnd(calls, "c"), Recorder(calls, "d")]
        with pytest.raises(OSError, match="the end of a") as caught:
            fit(dense_model(), dataset(2), hooks)
        assert calls[-4:] == ["a end 2", "b end 2", "c end 2", "d end 2"]
        assert "OSError: the end of c" in caught.value.__notes__[0]


class TestOrder:
    def test_priority_first_then_the_order_given(self) -> None:
        calls: list[str] = []
        hooks = [
            Recorder(calls, "low", priority=-5),
            Recorder(calls, "first"),
            Recorder(calls, "second"),
            Recorder(calls, "high", priority=7),
        ]
        fit(dense_model(), dataset(1), hooks)
        names = ["high", "first", "second", "low"]
        calls_in_order = ["begin", "created 0", "before 0", "after 1", "end 1"]
        assert calls == [f"{name} {call}" for call in calls_in_order for name in names]

    def test_checkpoint_saver_comes_before_hooks_of_priority_0(self) -> None:
        assert km.CheckpointSaver.priority == 1000
        assert km.Hook.priority == km.NaNChecker.priority == km.Stopper.priority == 0


def test_the_journal_tells_the_life(tmp_path: Any) -> None:
    model = TableModel()
    fit(model, table([1.0, 2.0, 3.0, 4.0]), [km.StopAtStep(3)], working_dir=tmp_path)
    entries = read_journal(tmp_path)
    assert [entry["event"] for entry in entries] == ["created", "stopped", "saved", "ended"]
    assert [entry["step"] for entry in entries] == [0, 3, 3, 3]
    assert re.match(r"StopAtStep\(", entries[-1]["reason"])
    assert float(model.steps) == 3
