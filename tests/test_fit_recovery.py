"""Steps that are lost with the connection to what they run on, inside `fit`: the row of recovery in the life cycle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import keras_monitored as km
from keras_monitored.journal import read_journal
from keras_monitored.step_function import StepFunction, StepOutcome
from tests.models import Recorder, assert_same_weights, dataset, dense_model, fit

Fail = Callable[[int, int], None]


def lost(message: str = "connection reset") -> tf.errors.UnavailableError:
    return tf.errors.UnavailableError(None, None, message)


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Makes a step of a run fail so many times, once it has taken its batch and changed the variables."""
    to_come: dict[int, int] = {}
    original = StepFunction.__call__

    def run(function: StepFunction, iterator: Any, steps: int = 1) -> StepOutcome:
        outcome = original(function, iterator, steps)
        for step in range(int(function.counter) - outcome.steps + 1, int(function.counter) + 1):
            if to_come.get(step, 0) > 0:
                to_come[step] -= 1
                raise lost(f"lost step {step}\nand more")
        return outcome

    monkeypatch.setattr(StepFunction, "__call__", run)
    return to_come.__setitem__


def saving_every(steps: int) -> km.CheckpointSaver:
    return km.CheckpointSaver(trigger=km.StepHookTrigger(steps))


@pytest.mark.parametrize("options", [{}, {"steps_per_loop": "auto"}], ids=["plain", "auto"])
def test_the_life_cycle_of_a_recovered_run(fail_at: Fail, tmp_path: Path, options: Any) -> None:
    fail_at(4, 1)
    hook, model = Recorder(), dense_model("adam")
    fit(model, dataset(6).shuffle(24, seed=5), [hook, saving_every(3)], working_dir=tmp_path, epochs=2, **options)
    assert hook.calls[:8] == ["begin", "created 0", "before 0", "after 1", "before 1", "after 2", "before 2", "after 3"]
    # Lost, and made again from the checkpoint of step 3.
    assert hook.calls[8:12] == ["before 3", "created 3", "before 3", "after 4"]
    assert [call for call in hook.calls if call.startswith("after")] == [f"after {step}" for step in range(1, 13)]
    assert hook.calls.count("begin") == 1
    assert hook.calls[-1] == "end 12"


@pytest.mark.parametrize("every", [1, 2, 4])
def test_weights_and_history_are_those_of_an_undisturbed_run(fail_at: Fail, tmp_path: Path, every: int) -> None:
    def trained(directory: Path) -> tuple[keras.Model, keras.callbacks.History]:
        keras.utils.set_random_seed(1)
        model = dense_model("adam", metrics=["mae"])
        data = dataset(6).shuffle(24, seed=5)
        return model, fit(model, data, [saving_every(every), Recorder()], working_dir=directory, epochs=2)

    undisturbed, expected = trained(tmp_path / "undisturbed")
    for step in (5, 6, 11):
        fail_at(step, 1 if step < 11 else 3)
    disturbed, found = trained(tmp_path / "disturbed")
    assert_same_weights(undisturbed, disturbed)
    assert found.history == expected.history
    recovered = [entry for entry in read_journal(tmp_path / "disturbed") if entry["event"] == "recovered"]
    assert [entry["lost_step"] for entry in recovered] == [4, 5, 10, 10, 10]
    assert [entry["attempt"] for entry in recovered] == [1, 1, 1, 2, 3]


def test_without_a_checkpoint_it_raises_at_once(fail_at: Fail) -> None:
    fail_at(2, 1)
    hook = Recorder()
    with pytest.raises(tf.errors.UnavailableError, match="lost step 2") as caught:
        fit(dense_model(), dataset(4), [hook])
    assert "there is no checkpoint to go on from" in caught.value.__notes__[0]
    assert hook.calls == ["begin", "created 0", "before 0", "after 1", "before 1"]


def test_before_the_first_checkpoint_it_raises_at_once(fail_at: Fail, tmp_path: Path) -> None:
    fail_at(2, 1)
    with pytest.raises(tf.errors.UnavailableError, match="lost step 2"):
        fit(dense_model(), dataset(4), [saving_every(3)], working_dir=tmp_path)


def test_it_gives_up_after_ten_attempts_and_waits_longer_each_time(
    fail_at: Fail, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fail_at(3, 100)
    waits: list[float] = []
    callback = km.HookCallback([saving_every(1)], working_dir=tmp_path)
    callback._sleep = waits.append
    model = dense_model()
    with pytest.raises(km.RecoveryError, match=r"after 10 attempts to get past step 2\b.*UnavailableError") as caught:
        model.fit(dataset(4), shuffle=False, verbose=0, callbacks=[callback])
    # The cause; `fit` raises errors again `from None`, which leaves the context.
    assert isinstance(caught.value.__context__, tf.errors.UnavailableError)
    assert caught.value.step == 2
    assert len(waits) == 10
    longest = [min(60, 2**attempt) for attempt in range(10)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))
    assert "Step 3 failed with UnavailableError: lost step 3 Attempt 1 of 10" in caplog.text


def test_the_attempts_count_anew_once_the_step_is_past(fail_at: Fail, tmp_path: Path) -> None:
    fail_at(2, 9)
    fail_at(4, 9)
    model = dense_model()
    fit(model, dataset(5), [saving_every(1)], working_dir=tmp_path)
    assert int(model.optimizer.iterations) == 5


@pytest.mark.parametrize("call", ["before_run", "after_run", "after_session_creation"])
def test_an_error_of_a_hook_is_never_retried(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, calls = Recorder(), []

    def fail(*args: Any) -> None:
        calls.append(call)
        raise lost("from a hook")

    monkeypatch.setattr(hook, call, fail)
    with pytest.raises(tf.errors.UnavailableError, match="from a hook"):
        fit(dense_model(), dataset(4), [hook, saving_every(1)], working_dir=tmp_path)
    assert calls == [call]


def test_other_errors_are_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise tf.errors.InternalError(None, None, "broken")

    monkeypatch.setattr(StepFunction, "__call__", fail)
    hook = Recorder()
    with pytest.raises(tf.errors.InternalError, match="broken"):
        fit(dense_model(), dataset(4), [hook, saving_every(1)], working_dir=tmp_path)
    assert hook.calls == ["begin", "created 0", "before 0"]


def test_counts_of_stop_criteria_do_not_start_again(fail_at: Fail, tmp_path: Path) -> None:
    fail_at(4, 2)
    model = dense_model()
    hooks = [km.StopAtStep(num_steps=5), km.Stopper(km.StopCriteria.steps(5)), saving_every(3)]
    fit(model, dataset(8), hooks, working_dir=tmp_path)
    assert int(model.optimizer.iterations) == 5


def test_data_that_cannot_be_taken_back_is_told_of(fail_at: Fail, tmp_path: Path) -> None:
    fail_at(3, 1)
    data = dataset(4).map(lambda x, y: (tf.py_function(lambda v: v, [x], tf.float32), y))
    data = data.map(lambda x, y: (tf.ensure_shape(x, (4, 2)), y))
    with pytest.raises(km.RecoveryError, match="can't be taken back to an earlier batch within this process"):
        fit(dense_model(), data, [saving_every(1)], working_dir=tmp_path)


def test_a_checkpoint_of_an_earlier_epoch_is_told_of(fail_at: Fail, tmp_path: Path) -> None:
    fail_at(5, 1)
    with pytest.raises(km.RecoveryError, match="of epoch 0, and Keras is in epoch 1"):
        fit(dense_model(), dataset(4), [saving_every(3)], working_dir=tmp_path, epochs=2)
