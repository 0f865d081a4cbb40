import json
import math
import pathlib
import time

import numpy as np
import pytest
import tensorflow as tf

from keras_monitored.journal import FILE_NAME, Journal, read_journal


@pytest.fixture(params=["local", "ram"])
def directory(request, tmp_path):
    return str(tmp_path / "new" / "run") if request.param == "local" else f"ram://{tmp_path}/new/run"


def append(directory, text):
    with tf.io.gfile.GFile(f"{directory}/{FILE_NAME}", "a") as file:
        file.write(text)


def test_each_event_is_a_line(directory):
    journal = Journal(directory)
    before = time.time()
    journal.write("created", step=0, epoch=0, batch=0)
    journal.write("saved", step=10, seconds=0.5, path="model.ckpt-10", variables=["a", "b"])
    created, saved = read_journal(directory)
    assert before <= created.pop("time") <= saved.pop("time") <= time.time()
    assert created == {"event": "created", "step": 0, "epoch": 0, "batch": 0}
    assert saved == {
        "event": "saved",
        "step": 10,
        "seconds": 0.5,
        "path": "model.ckpt-10",
        "variables": ["a", "b"],
    }


def test_a_later_run_goes_on_in_the_same_file(directory):
    Journal(directory).write("created")
    Journal(directory).write("restored")
    assert [entry["event"] for entry in read_journal(directory)] == ["created", "restored"]


@pytest.mark.parametrize("half", ['{"time": 12.5, "ev', "{", '{"time": 1, "event": "saved"'])
def test_half_a_line_is_skipped_and_ended_by_the_next_writer(directory, half):
    Journal(directory).write("created")
    append(directory, half)
    assert [entry["event"] for entry in read_journal(directory)] == ["created"]
    journal = Journal(directory)
    journal.write("restored")
    journal.write("ended")
    assert [entry["event"] for entry in read_journal(directory)] == ["created", "restored", "ended"]


def test_a_whole_line_whose_newline_was_lost_counts(directory):
    Journal(directory)
    append(directory, '{"event": "saved"}')
    Journal(directory).write("ended")
    assert [entry["event"] for entry in read_journal(directory)] == ["saved", "ended"]


def test_bytes_that_are_no_text_are_skipped(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b'\xff\xfe\x00\n{"event": "ended"}\n')
    assert read_journal(tmp_path) == [{"event": "ended"}]


def test_lines_stay_valid_json_whatever_the_details(tmp_path):
    journal = Journal(tmp_path)
    journal.write(
        "stopped",
        step=np.int64(3),
        loss=math.nan,
        limits=(1, np.float32(0.5), {"x": -math.inf}),
        counts=np.arange(2),
        path=pathlib.PurePosixPath("a/b"),
        reason="two\nlines",
        flag=True,
        nothing=None,
    )
    (line,) = (tmp_path / FILE_NAME).read_text().splitlines()
    entry = json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    del entry["time"]
    assert entry == {
        "event": "stopped",
        "step": 3,
        "loss": "nan",
        "limits": [1, 0.5, {"x": "-inf"}],
        "counts": [0, 1],
        "path": "a/b",
        "reason": "two\nlines",
        "flag": True,
        "nothing": None,
    }


def test_a_journal_without_a_directory_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Journal(None).write("created", step=0)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_a_journal_is_empty(tmp_path):
    assert read_journal(tmp_path / "not there") == []


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"`directory` must be a directory that can be written\. Received: .*file/run"):
        Journal(tmp_path / "file" / "run")


def test_a_line_that_cannot_be_written_is_logged(tmp_path, caplog):
    journal = Journal(tmp_path / "run")
    (tmp_path / "run").rmdir()
    (tmp_path / "run").write_text("in the way")
    journal.write("saved", step=3)
    assert "Could not note 'saved'" in caplog.text
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    journal.write("ended", step=4)
    assert [entry["event"] for entry in read_journal(tmp_path / "run")] == ["ended"]


def test_time_belongs_to_the_journal(tmp_path):
    with pytest.raises(ValueError, match="`time` can't be a detail"):
        Journal(tmp_path).write("created", time=3)
