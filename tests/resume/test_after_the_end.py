"""A run that came to its end is started again: it trains nothing, or as much as it is now asked for."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from tests.resume.runs import ROOT, Runs, assert_same


def test_finished_run_trains_nothing(runs: Runs):
    """One line says so; hooks are told of begin, session and end; weights and History are those of the first run."""
    first = runs.train("validation", "finished")
    second = runs.train("validation", "finished")
    assert first.result["has_run"] and not second.result["has_run"]
    assert second.log.count("\n") == 1
    assert "there is nothing left to train" in second.log
    assert list(second.result["calls"]) == ["begin", "after_session_creation", "end"]
    assert_same(second.result, first.result, "The finished run was changed.")


def test_finished_by_early_stopping_trains_nothing(runs: Runs):
    """The best weights are put back again too."""
    first = runs.train("keras_callbacks", "stopped_early")
    second = runs.train("keras_callbacks", "stopped_early")
    assert not second.result["has_run"]
    assert "there is nothing left to train" in second.log
    assert_same(second.result, first.result, "The finished run was changed.")


def test_more_epochs(runs: Runs):
    """Two epochs, then four: the same as four."""
    four = runs.train("validation", "four_epochs", epochs=4)
    runs.train("validation", "two_and_two", epochs=2)
    more = runs.train("validation", "two_and_two", epochs=4)
    assert_same(more.result, four.result, "Two epochs and two more differ from four.")


def test_stopped_in_mid_epoch_and_given_a_later_step(runs: Runs):
    """Stopped at step 10: the same script trains nothing more. With step 17, and with none, it goes on."""
    first = runs.train("validation", "stopped", last_step=10)
    again = runs.train("validation", "stopped", last_step=10)
    assert tuple(first.result["place"]) == tuple(again.result["place"]) == (10, 1)
    assert not again.result["has_run"]

    later = runs.train("validation", "stopped", last_step=17)
    expected = runs.train("validation", "stopped_at_17", last_step=17)
    assert_same(later.result, expected.result, "Stopped at 10 and at 17 differs from stopped at 17.")

    whole = runs.train("validation", "stopped")
    unbroken = runs.train("validation", "never_stopped")
    assert_same(whole.result, unbroken.result, "A run that was stopped twice differs from one that never was.")


def test_stopped_and_killed(runs: Runs):
    """A run killed on its way to a step stops at that step all the same."""
    runs.train("validation", "killed_before_stop", last_step=17, death="step:12", status=-9)
    last = runs.train("validation", "killed_before_stop", last_step=17)
    expected = runs.train("validation", "unbroken_to_17", last_step=17)
    assert_same(last.result, expected.result, "The killed run stopped elsewhere.")


def test_plain_processes(runs: Runs, tmp_path: pathlib.Path):
    """The script as a user runs it: started from the shell, killed, started from the shell again."""

    def start(**options: str) -> subprocess.CompletedProcess[bytes]:
        job = {"scenario": "seeded_shuffle", "directory": str(tmp_path), "result": str(tmp_path / "end.npz"), **options}
        command = [sys.executable, "-m", "tests.resume.train", json.dumps(job)]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=120, capture_output=True, check=False)

    assert start(death="step:17").returncode == -9
    ended = start()
    assert ended.returncode == 0, ended.stderr.decode(errors="replace")
    expected = runs.train("seeded_shuffle", "unbroken_beside_plain")
    with np.load(tmp_path / "end.npz") as ours:
        assert_same(dict(ours), expected.result, "The killed run differs from the unbroken one.")
