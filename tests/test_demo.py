import io
import shutil
import sys

import matplotlib.image
import numpy as np
import pytest

from keras_monitored import cli, demo, demo_training
from keras_monitored.journal import read_journal


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The files of a whole demo, and its exit status."""
    output = tmp_path_factory.mktemp("demo") / "output"
    return output, cli.main(["demo", "--output", str(output)])


def copy_of(finished, directory, monkeypatch):
    """Lets the next demo find the files of a finished one instead of training."""

    def train_both(unbroken, killed):
        for part in (unbroken, killed):
            shutil.copytree(finished[0] / part.name, part, dirs_exist_ok=True)
        for change in changes:
            change(killed)

    changes = []
    monkeypatch.setattr(demo, "_train_both", train_both)
    return changes


def test_a_killed_run_ends_where_the_unbroken_one_does(finished):
    output, status = finished
    assert status == 0
    events = [(e["event"], e["step"]) for e in read_journal(output / "killed") if e["event"] in ("restored", "ended")]
    assert events == [("restored", 150), ("ended", demo_training.LAST_STEP)]
    assert not [entry for entry in read_journal(output / "unbroken") if entry["event"] == "restored"]


def test_it_was_killed_in_the_middle_of_an_epoch_and_has_learned(finished):
    output, _ = finished
    before = demo._losses_of(output / "unbroken", output / "killed").before_kill
    assert list(before) == list(range(1, 156))
    assert 155 % demo_training.STEPS_PER_EPOCH not in (0, 1, demo_training.STEPS_PER_EPOCH - 1)
    accuracy = next(r for r in demo.compare(output / "unbroken", output / "killed") if r.what == "test accuracy")
    assert float(accuracy.resumed.rstrip("%")) > 95


def test_the_picture_can_be_read(finished):
    picture = matplotlib.image.imread(finished[0] / "losses.png")
    assert picture.shape[0] > 400 and picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.05


def test_the_report(finished, tmp_path, monkeypatch, capsys):
    copy_of(finished, tmp_path, monkeypatch)
    assert cli.main(["demo", "--output", str(tmp_path / "again")]) == 0
    out = capsys.readouterr().out
    for part in ("weights", "random state", "optimizer", "metrics", "History", "loss of each step", "test accuracy"):
        (line,) = [line for line in out.splitlines() if line.startswith(part)]
        assert line.endswith("✓")
    assert str(tmp_path / "again" / "losses.png") in out


@pytest.mark.parametrize(
    ("file", "part"),
    [(demo_training.VARIABLES, "weights"), (demo_training.RESULT, "History"), (demo_training.LOSSES, "loss of each")],
)
def test_one_bit_is_a_difference(finished, file, part, tmp_path, monkeypatch, capsys):
    def change(killed):
        path = killed / file
        if path.suffix != ".npz":
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace("3", "4", 1) if path.suffix == ".csv" else text.replace("0.9", "0.8", 1))
            return
        with np.load(path) as arrays:
            changed = dict(arrays)
        changed["weights/0"].view(np.uint8).flat[0] ^= 1
        np.savez(path, **changed)

    copy_of(finished, tmp_path, monkeypatch).append(change)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert next(line for line in out.splitlines() if line.startswith(part)).endswith("✗")
    assert "The two runs differ." in out


def test_a_terminal_without_ticks(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    table = "\n".join(demo._table([demo.Row("weights", "a", "b", equal=False)]))
    assert table.isascii() and "NO" in table


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib"])
def test_a_missing_package_is_told_of_before_training(missing, tmp_path, monkeypatch, capsys):
    find_spec = demo.importlib.util.find_spec
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    monkeypatch.setattr(demo, "_train_both", lambda *_: pytest.fail("trained"))
    assert cli.main(["demo", "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert demo._NEEDED[missing] in error and "pip install 'keras_monitored[demo]'" in error
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_never_deleted(tmp_path, monkeypatch, capsys):
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "thesis.tex").write_text("mine")
    monkeypatch.setattr(demo, "_train_both", lambda *_: pytest.fail("trained"))
    assert cli.main(["demo", "--output", str(tmp_path)]) == 2
    assert "is not from a demo" in capsys.readouterr().err
    assert (tmp_path / "killed" / "thesis.tex").read_text() == "mine"
