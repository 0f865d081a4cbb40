import logging
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from keras_monitored.fit import FitDriver
from keras_monitored.journal import read_journal
from keras_monitored.manifest import read_manifest, write_manifest
from keras_monitored.restoring import open_newest
from tests.models import assert_same_weights, dataset, dense_model, fit, weights_of

ENDINGS = [".index", ".data-00000-of-00001", ".json"]


def train(directory, model=None, *, stop_at=None, epochs=2, **options):
    """Trains two epochs of five batches with a checkpoint every two steps."""
    model = dense_model("adam") if model is None else model
    saver = km.CheckpointSaver(trigger=km.StepHookTrigger(2), max_checkpoints_to_keep=10)
    hooks = [saver, *([] if stop_at is None else [km.StopAtStep(last_step=stop_at)])]
    fit(model, dataset(5), hooks, working_dir=directory, epochs=epochs, **options)
    return model


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The directory of a run that was stopped at step 7, in its second epoch."""
    directory = tmp_path_factory.mktemp("stopped")
    keras.utils.set_random_seed(1234)
    train(directory, stop_at=7)
    return directory


@pytest.fixture
def run(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return tmp_path


def damage(path, kind):
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])


def restored_step(directory):
    return [entry["step"] for entry in read_journal(directory) if entry["event"] == "restored"]


# Damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["missing", "empty", "cut", "flipped"])
def test_the_one_before_a_damaged_one_is_used(run, ending, kind, caplog):
    damage(run / f"model.ckpt-7{ending}", kind)
    with caplog.at_level(logging.WARNING, "keras_monitored"):
        opened = open_newest([str(run)])
    assert opened.prefix == str(run / "model.ckpt-6")
    if (ending, kind) == (".json", "missing"):
        return  # never existed
    assert (
        "The checkpoint of step 7 is not used" in caplog.text
        and f"model.ckpt-7{'' if kind == 'flipped' else ending}" in caplog.text
    )
    assert not (run / "model.ckpt-7.json").exists()
    assert (run / "model.ckpt-7.json.damaged").exists()
    left = sum(path.name.startswith("model.ckpt-7") for path in run.iterdir())
    assert left == (2 if kind == "missing" else 3)  # nothing was deleted


@pytest.mark.parametrize("ending", ENDINGS)
def test_any_flipped_bit_is_found(run, ending):
    path = run / f"model.ckpt-7{ending}"
    content = path.read_bytes()
    random = np.random.default_rng(0)
    harmless = 0
    for place in random.integers(len(content) * 8, size=40):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << (place % 8)
        path.write_bytes(bytes(flipped))
        opened = open_newest([str(run)])
        if opened.prefix.endswith("-7"):
            harmless += 1
            shutil.copy(path, run / "changed")
            path.write_bytes(content)
            expected = open_newest([str(run)])
            assert opened.manifest == expected.manifest
            assert opened.tensors.keys() == expected.tensors.keys()
            for key, value in expected.tensors.items():
                assert tf.is_tensor(value) or np.asarray(opened.tensors[key]).tobytes() == np.asarray(value).tobytes()
        else:
            (run / "model.ckpt-7.json.damaged").replace(run / "model.ckpt-7.json")
        path.write_bytes(content)
    assert harmless < 10  # in bytes that TensorFlow leaves unused


def test_a_run_goes_on_from_the_one_before_and_ends_the_same(run, tmp_path_factory):
    whole = train(tmp_path_factory.mktemp("whole"))
    keras.utils.set_random_seed(99)
    damage(run / "model.ckpt-7.data-00000-of-00001", "flipped")
    assert_same_weights(train(run, dense_model("adam")), whole)
    assert restored_step(run) == [6]
    # The run comes past step 7 again and further; what was damaged is not in the way.
    assert [info.step for info in km.list_checkpoints(run) if info.valid] == [2, 4, 6, 8, 10]
    assert (run / "model.ckpt-7.json.damaged").exists()


def test_with_none_left_it_says_so_and_trains_nothing(run):
    for step in (2, 4, 6, 7):
        damage(run / f"model.ckpt-{step}.index", "empty")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    model = dense_model("adam")
    weights = weights_of(model)
    with pytest.raises(km.CheckpointError, match=r"None of the 4 checkpoints in .* can be used:\n.*has 0 bytes"):
        train(run, model)
    for now, then in zip(weights_of(model), weights, strict=False):
        np.testing.assert_array_equal(now, then)
    assert {p.name: p.read_bytes() for p in run.iterdir() if p.suffix != ".jsonl"}.items() <= before.items()


def test_leftovers_without_a_manifest_are_no_run(tmp_path):
    (tmp_path / "model.ckpt-4.index").write_bytes(b"half")
    (tmp_path / "model.ckpt-4.json.0123.tmp").write_text("{")
    assert open_newest([str(tmp_path)]) is None
    train(tmp_path, epochs=1)
    assert restored_step(tmp_path) == []
    assert km.load_weights(dense_model(), tmp_path) == 5  # the leftover of step 4 was written over


def test_a_newer_format_is_no_damage(run):
    prefix = str(run / "model.ckpt-7")
    write_manifest(prefix, {**read_manifest(prefix), "format": 2})
    with pytest.raises(km.CheckpointError, match=r"has format 2, this version of keras_monitored reads up to 1"):
        open_newest([str(run)])
    assert (run / "model.ckpt-7.json").exists()


# Several directories ----------------------------------------------------------------------------------------------


def test_the_newest_of_several_directories(run, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for path in run.glob("model.ckpt-6*"):
        shutil.move(path, other / path.name)
    assert open_newest([str(run), str(other), str(run)]).prefix == str(run / "model.ckpt-7")
    damage(run / "model.ckpt-7.index", "cut")
    assert open_newest([str(run), str(other)]).prefix == str(other / "model.ckpt-6")


def test_nothing_anywhere(tmp_path):
    assert open_newest([]) is None
    assert open_newest([str(tmp_path), str(tmp_path / "not there")]) is None


# Checkpoints of another model -------------------------------------------------------------------------------------


def wider():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def half():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="float16")])
    model.compile("adam", "mse")
    return model


OTHERS = {
    "another layer": (wider, r"/kernel \(1, 1\)"),
    "another dtype": (half, "float16"),
    "SGD": (lambda: dense_model("sgd"), "sgd/iteration"),
    "Adamax": (lambda: dense_model("adamax"), "adamax/"),
    "a schedule": (
        lambda: dense_model(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.9))),
        "adam/learning_rate",
    ),
    "another metric": (lambda: dense_model("adam", metrics=["mae"]), "mean_absolute_error/total"),
}


@pytest.mark.parametrize("between_epochs", [False, True], ids=["in mid-epoch", "between epochs"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_model(run, other, between_epochs):
    if between_epochs:
        for step in (6, 7):
            for path in run.glob(f"model.ckpt-{step}.*"):
                path.unlink()
        for path in run.glob("model.ckpt-4.*"):
            path.unlink()
        train(run, epochs=1)  # ends at step 5
    make, name = OTHERS[other]
    model = make()
    model.optimizer.build(model.trainable_variables)
    weights = weights_of(model)
    files = {path.name: path.read_bytes() for path in run.iterdir() if path.name != "run.jsonl"}
    with pytest.raises(km.CheckpointError, match="belongs to another model") as caught:
        train(run, model)
    assert re.search(name, str(caught.value)) and "Nothing was overwritten" in str(caught.value)
    for now, then in zip(weights_of(model), weights, strict=True):
        np.testing.assert_array_equal(now, then)
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.name != "run.jsonl"} == files
    # Nothing stays behind on the model: the next fit is plain Keras, from its first epoch.
    assert not isinstance(model.train_function, FitDriver)
    history = model.fit(dataset(5), epochs=2, verbose=0, shuffle=False)
    assert history.epoch == [0, 1]


def test_automatic_names_of_a_later_model_fit(run):
    model = [dense_model("adam") for _ in range(3)][-1]
    assert model.layers[0].name != "dense"
    train(run, model)
    assert restored_step(run) == [7]
