import concurrent.futures
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keras_monitored as km
from keras_monitored.journal import read_journal
from tests.models import Recorder, dataset, dense_model, fit


class ReplaceByFile(km.Hook):
    """Puts a file in the place of a directory after a step, so that nothing can be written there."""

    def __init__(self, directory: Path, step: int) -> None:
        self.directory = directory
        self.step = step

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_values.step == self.step:
            shutil.rmtree(self.directory)
            self.directory.write_text("in the way")


class WaitForSave(km.Hook):
    """Lets each save in the background come to its end before the next step."""

    priority = -1

    def __init__(self, saver: km.CheckpointSaver) -> None:
        self.saver = saver

    def after_run(self, run_context: Any, run_values: Any) -> None:
        store = self.saver.store
        if store is not None and store._pending is not None:
            concurrent.futures.wait([store._pending])


def failing_hooks(directory: Path, **options: Any) -> list[km.Hook]:
    saver = km.CheckpointSaver(directory, trigger=km.StepHookTrigger(2), **options)
    return [saver, WaitForSave(saver), ReplaceByFile(directory, 3)]


class TestFailure:
    def test_in_the_background_it_is_raised_at_the_next_step(self, tmp_path: Path) -> None:
        hook = Recorder()
        with pytest.raises(km.CheckpointError, match=r"model\.ckpt-4 could not be written") as caught:
            fit(dense_model(), dataset(8), [*failing_hooks(tmp_path / "saves"), hook])
        assert caught.value.step == 4
        assert hook.calls[-1] == "after 4"

    def test_a_blocking_save_raises_it_itself(self, tmp_path: Path) -> None:
        hook = Recorder()
        with pytest.raises(km.CheckpointError, match=r"model\.ckpt-4 could not be written"):
            fit(dense_model(), dataset(8), [*failing_hooks(tmp_path / "saves", blocking=True), hook])
        assert hook.calls[-1] == "before 3"

    @pytest.mark.parametrize("blocking", [True, False])
    def test_warn_trains_on(self, tmp_path: Path, blocking: bool, caplog: pytest.LogCaptureFixture) -> None:
        model = dense_model()
        hooks = failing_hooks(tmp_path / "saves", blocking=blocking, on_error="warn")
        fit(model, dataset(8), hooks, working_dir=tmp_path / "run")
        assert int(model.optimizer.iterations) == 8
        assert "model.ckpt-4 could not be written" in caplog.text and "Training goes on." in caplog.text
        failed = [entry for entry in read_journal(tmp_path / "run") if entry["event"] == "save_failed"]
        assert {entry["step"] for entry in failed} == {4, 6, 8}

    def test_of_the_last_save_reaches_the_caller(self, tmp_path: Path) -> None:
        hooks = [km.CheckpointSaver(tmp_path / "saves"), ReplaceByFile(tmp_path / "saves", 3)]
        with pytest.raises(km.CheckpointError, match=r"model\.ckpt-4 could not be written"):
            fit(dense_model(), dataset(4), hooks)

    def test_where_the_journal_lies_in_the_same_directory(self, tmp_path: Path) -> None:
        saver = km.CheckpointSaver(trigger=km.StepHookTrigger(2))
        hooks = [saver, WaitForSave(saver), ReplaceByFile(tmp_path / "run", 3)]
        with pytest.raises(km.CheckpointError, match=r"model\.ckpt-4 could not be written"):
            fit(dense_model(), dataset(8), hooks, working_dir=tmp_path / "run")


class TestSaves:
    @pytest.mark.parametrize("blocking", [True, False])
    @pytest.mark.parametrize("loop", [1, "auto"])
    def test_when_the_trigger_fires_and_at_the_end(self, tmp_path: Path, blocking: bool, loop: Any) -> None:
        saver = km.CheckpointSaver(tmp_path, trigger=km.StepHookTrigger(3), blocking=blocking)
        fit(dense_model(), dataset(4), [saver], epochs=2, steps_per_loop=loop)
        found = [(info.step, info.epoch, info.batch, info.valid) for info in km.list_checkpoints(tmp_path)]
        assert found == [(3, 0, 3, True), (6, 1, 2, True), (8, 2, 0, True)]
        assert km.latest_checkpoint(tmp_path) == saver.last_saved == str(tmp_path / "model.ckpt-8")

    def test_not_at_the_end_when_told_so(self, tmp_path: Path) -> None:
        saver = km.CheckpointSaver(tmp_path, trigger=km.StepHookTrigger(3), trigger_at_end=False)
        fit(dense_model(), dataset(5), [saver])
        assert [info.step for info in km.list_checkpoints(tmp_path)] == [3]

    def test_at_the_end_of_epochs(self, tmp_path: Path) -> None:
        saver = km.CheckpointSaver(tmp_path, trigger=km.EpochHookTrigger(2))
        fit(dense_model(), dataset(3), [saver], epochs=5)
        assert [(info.step, info.epoch) for info in km.list_checkpoints(tmp_path)] == [(6, 2), (12, 4), (15, 5)]

    def test_the_newest_are_kept(self, tmp_path: Path) -> None:
        saver = km.CheckpointSaver(tmp_path, trigger=km.StepHookTrigger(1), max_checkpoints_to_keep=2)
        fit(dense_model(), dataset(6), [saver])
        assert [info.step for info in km.list_checkpoints(tmp_path)] == [5, 6]

    def test_two_savers_with_directories_of_their_own(self, tmp_path: Path) -> None:
        often = km.CheckpointSaver(tmp_path / "often", trigger=km.StepHookTrigger(2))
        seldom = km.CheckpointSaver(tmp_path / "seldom", trigger=km.StepHookTrigger(5))
        model = dense_model("adam")
        fit(model, dataset(6), [often, seldom])
        assert [info.step for info in km.list_checkpoints(tmp_path / "often")] == [2, 4, 6]
        assert [info.step for info in km.list_checkpoints(tmp_path / "seldom")] == [5, 6]
        for name in ("often", "seldom"):
            other = dense_model("adam")
            assert km.load_weights(other, tmp_path / name) == 6
            for ours, theirs in zip(other.get_weights(), model.get_weights(), strict=True):
                np.testing.assert_array_equal(ours, theirs)

    def test_a_run_with_a_directory_and_no_saver_gets_one(self, tmp_path: Path) -> None:
        config = km.Configuration(tmp_path, checkpoint_config=km.StepBasedCheckpoints(2, max_checkpoints_to_keep=2))
        model = dense_model()
        callback = km.HookCallback(configuration=config)
        model.fit(dataset(7), verbose=0, shuffle=False, callbacks=[callback])
        assert [info.step for info in km.list_checkpoints(tmp_path)] == [6, 7]
        assert callback.hooks == ()

    def test_a_run_may_be_told_not_to_save(self, tmp_path: Path) -> None:
        callback = km.HookCallback(configuration=km.Configuration(tmp_path, checkpoint_config=km.NoCheckpoints()))
        dense_model().fit(dataset(3), verbose=0, shuffle=False, callbacks=[callback])
        assert km.list_checkpoints(tmp_path) == []


class TestArguments:
    def test_no_directory(self) -> None:
        model = dense_model()
        with pytest.raises(ValueError, match="`directory` of CheckpointSaver is needed: the run has no `working_dir`"):
            fit(model, dataset(2), [km.CheckpointSaver()])
        assert int(model.optimizer.iterations) == 0

    def test_a_directory_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        model = dense_model()
        with pytest.raises(km.CheckpointError, match=r"can't be written: .* Choose another"):
            fit(model, dataset(2), [km.CheckpointSaver(tmp_path / "file" / "saves")])
        assert int(model.optimizer.iterations) == 0

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"trigger": 100}, TypeError, "`trigger` must be a HookTrigger. Received: trigger=100"),
            ({"blocking": "no"}, TypeError, "`blocking`"),
            ({"on_error": "ignore"}, ValueError, "`on_error` must be one of"),
            ({"max_checkpoints_to_keep": 0}, ValueError, "`max_checkpoints_to_keep` must be"),
            ({"keep_checkpoint_every_n_hours": -1}, ValueError, "`keep_checkpoint_every_n_hours` must be"),
        ],
    )
    def test_bad_ones(self, arguments: dict[str, Any], error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            km.CheckpointSaver("somewhere", **arguments)
