import re

import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from keras_monitored.checkpoint_store import CheckpointStore
from keras_monitored.manifest import read_manifest
from keras_monitored.state import Snapshot
from tests.clocks import FakeClock
from tests.models import dataset, dense_model, fit

HOUR = 3600.0


class Saves:
    """Saves small states into a directory, as one process of a run does."""

    def __init__(self, directory, *, clock=None, run_id="ours", **options):
        self.clock = FakeClock() if clock is None else clock
        self.refused = []
        self.store = CheckpointStore(str(directory), run_id=run_id, started=self.clock.now, clock=self.clock, **options)

    def __call__(self, *steps, value=1.0):
        for step in steps:
            variable = {"group": "model", "name": "w", "key": "w", "shape": [], "dtype": "float32"}
            snapshot = Snapshot({"w": tf.constant(value)}, [variable], {})
            position = {"step": step, "epoch": 0, "batch": step, "finished": None}
            arguments = {"on_saved": lambda *_: None, "on_refused": self.refused.append}
            self.store.save(snapshot, position, blocking=True, **arguments)


def steps_in(directory):
    return [info.step for info in km.list_checkpoints(directory) if info.valid]


def files_in(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_newest_are_kept(tmp_path, number):
    Saves(tmp_path, max_to_keep=number)(*range(1, 9))
    assert steps_in(tmp_path) == list(range(9 - number, 9))
    names = {re.sub(r"-0.*", "", name) for name in files_in(tmp_path) if name != "checkpoint"}
    assert names == {f"model.ckpt-{step}.{end}" for step in range(9 - number, 9) for end in ("json", "index", "data")}
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-8")


def test_one_more_is_kept_every_n_hours(tmp_path):
    saves = Saves(tmp_path, max_to_keep=2, keep_every_n_hours=2)
    for step in range(1, 13):  # one each half hour: step 4 comes after two hours
        saves.clock.now += HOUR / 2
        saves(step)
    assert steps_in(tmp_path) == [4, 8, 11, 12]
    assert [step for step in (4, 8, 11, 12) if read_manifest(f"{tmp_path}/model.ckpt-{step}").get("kept")] == [4, 8]


def test_the_hours_go_on_in_a_later_process(tmp_path):
    first = Saves(tmp_path, max_to_keep=1, keep_every_n_hours=2)
    first.clock.now += 2 * HOUR
    first(1, 2)  # 1 is kept for good
    second = Saves(tmp_path, max_to_keep=1, keep_every_n_hours=2, clock=first.clock)
    second.store.started = first.store.started
    first.clock.now += HOUR
    second(3, 4)
    first.clock.now += HOUR
    second(5, 6)
    assert steps_in(tmp_path) == [1, 5, 6]


def test_what_another_run_wrote_stays(tmp_path):
    Saves(tmp_path, run_id="theirs")(1, 2, 3)
    Saves(tmp_path, max_to_keep=1)(4, 5, 6)
    assert steps_in(tmp_path) == [1, 2, 3, 6]


def test_what_nobody_of_us_wrote_stays(tmp_path):
    mine = {
        "model.ckpt-7.index": b"of a plain tf.train.Checkpoint",
        "model.ckpt-7.data-00000-of-00001": b"its data",
        "model.ckpt-best.keras": b"a model",
        "model.ckpt-1": b"a note",
        "notes.json": b"{}",
        "weights.h5": b"",
    }
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model.ckpt-2.d").mkdir()
    Saves(tmp_path, max_to_keep=1)(*range(10, 14))
    (tmp_path / "model.ckpt-2.d").rmdir()
    found = files_in(tmp_path)
    assert {name: found.get(name) for name in mine} == mine
    assert steps_in(tmp_path) == [13]


def test_a_file_of_a_user_beside_a_checkpoint_stays(tmp_path):
    saves = Saves(tmp_path, max_to_keep=1)
    saves(1)
    (tmp_path / "model.ckpt-1.notes.txt").write_text("the good one")
    saves(2, 3)
    assert steps_in(tmp_path) == [3]
    assert (tmp_path / "model.ckpt-1.notes.txt").read_text() == "the good one"


def test_damaged_ones_stay_for_who_wants_to_look(tmp_path):
    saves = Saves(tmp_path, max_to_keep=2)
    saves(1)
    (tmp_path / "model.ckpt-1.index").write_bytes(b"")
    saves(2, 3, 4)
    assert steps_in(tmp_path) == [3, 4]
    assert (tmp_path / "model.ckpt-1.json").exists()


def test_a_state_that_is_not_finite_is_refused(tmp_path):
    saves = Saves(tmp_path, max_to_keep=1)
    saves(1)
    for bad in (np.nan, np.inf):
        saves(2, value=bad)
    assert len(saves.refused) == 2 and "among them w" in saves.refused[0]
    assert steps_in(tmp_path) == [1]


def test_the_one_restored_from_stays_while_it_is_the_newest(tmp_path):
    saver = km.CheckpointSaver(trigger=km.StepHookTrigger(2), max_checkpoints_to_keep=1)
    fit(dense_model(), dataset(9), [saver, km.StopAtStep(last_step=4)], working_dir=tmp_path)
    assert steps_in(tmp_path) == [4]
    seen = []

    class Look(km.Hook):
        def after_run(self, run_context, run_values):
            saver.store.wait()
            seen.append((run_values.step, steps_in(tmp_path)))

    fit(dense_model(), dataset(9), [saver, Look()], working_dir=tmp_path)
    assert seen[:3] == [(5, [4]), (6, [6]), (7, [6])]


def test_a_save_that_is_cut_off_leaves_the_one_before(tmp_path, monkeypatch):
    saves = Saves(tmp_path, max_to_keep=1)
    saves(1)

    def full(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    monkeypatch.setattr("keras_monitored.checkpoint_store.write_manifest", full)
    with pytest.raises(km.CheckpointError, match=r"model\.ckpt-2 could not be written: .*No space left") as caught:
        saves(2)
    assert caught.value.step == 2
    assert steps_in(tmp_path) == [1]
    monkeypatch.undo()
    saves(2)
    assert steps_in(tmp_path) == [2]


def test_files_are_complete_before_the_manifest_is(tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointStore, "_write_files", lambda *_: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        Saves(tmp_path)(1)
    assert list(tmp_path.glob("*.json")) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    saves = Saves(tmp_path)
    saves(1)
    saves(1, value=2.0)
    reader = tf.train.load_checkpoint(str(tmp_path / "model.ckpt-1"))
    assert reader.get_tensor("w") == 2.0
    assert steps_in(tmp_path) == [1]
