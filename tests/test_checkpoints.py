import json
import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_monitored as km
from keras_monitored.manifest import read_manifest, read_tensors, write_manifest
from tests.models import BATCH, arrays, assert_same_weights, dataset, dense_model, fit, weights_of


def saver(steps=2, **options):
    return km.CheckpointSaver(trigger=km.StepHookTrigger(steps), **options)


def rich_model(optimizer="adam"):
    """Has every kind of variable: weights, moving averages, slots, metrics, seeds."""
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((2,)), layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
    )
    model.compile(optimizer, "mse", metrics=["mae", keras.metrics.MeanSquaredError(name="second")])
    return model


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    model = rich_model()
    fit(model, dataset(5), [saver()], working_dir=directory)
    return model, directory


@pytest.fixture
def run(finished, tmp_path):
    """A finished run of a rich model, checkpoints of steps 2, 4, 5, in a copy that a test may damage."""
    model, directory = finished
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    return model, tmp_path


# What TensorFlow sees ---------------------------------------------------------------------------------------------


def test_plain_tensorflow_reads_weights_and_slots(run):
    model, directory = run
    other = rich_model()
    other.optimizer.build(other.trainable_variables)
    assert not np.array_equal(weights_of(other)[0], weights_of(model)[0])
    status = tf.train.Checkpoint(model=other).read(km.latest_checkpoint(directory))
    status.assert_existing_objects_matched()
    for ours, theirs in zip(model.weights, other.weights, strict=True):  # seeds are not reached by TensorFlow
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(model.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_tensorflow_agrees_on_the_latest(run):
    _, directory = run
    latest = tf.train.latest_checkpoint(str(directory))
    assert latest == km.latest_checkpoint(directory) == str(directory / "model.ckpt-5")
    state = tf.train.get_checkpoint_state(str(directory))
    names = [os.path.basename(path) for path in state.all_model_checkpoint_paths]
    assert names == ["model.ckpt-2", "model.ckpt-4", "model.ckpt-5"]


def test_every_variable_is_in_the_manifest_once(run):
    model, directory = run
    prefix = km.latest_checkpoint(directory)
    variables = read_manifest(prefix)["variables"]
    names = [v["name"] for v in variables]
    keys = [v["key"] for v in variables]
    assert len(set(keys)) == len(keys) and len(set(names)) == len(names)
    expected = {v.path for v in [*model.variables, *model.optimizer.variables, *model.metrics_variables]}
    assert expected | {"global_step", "global_epoch"} <= {name.removesuffix(":replica0") for name in names}
    assert any("seed" in name for name in names)
    tensors = read_tensors(prefix, keys)
    assert set(keys) <= set(read_tensors(prefix))
    for v in variables:
        assert list(tensors[v["key"]].shape) == v["shape"] and tensors[v["key"]].dtype.name == v["dtype"]
    by_name = {v["name"]: tensors[v["key"]] for v in variables}
    for variable in [*model.variables, *model.optimizer.variables]:
        np.testing.assert_array_equal(by_name[variable.path], variable.numpy())
    assert by_name["global_step"] == 5


def test_manifests_are_strict_json(run):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    _, directory = run
    for path in directory.glob("*.json"):
        manifest = json.loads(path.read_text("utf-8"), parse_constant=refuse)
        assert manifest["format"] == 1 and manifest["versions"]["keras"] == keras.__version__


def test_no_file_holds_a_pickle(run):
    _, directory = run
    names = {path.name.rpartition(".")[2].partition("-")[0] for path in directory.iterdir()}
    assert names == {"index", "data", "json", "jsonl", "checkpoint"}
    for path in directory.iterdir():
        assert b"cpickle" not in path.read_bytes().lower() and not path.read_bytes().startswith(b"\x80")


# Listing ----------------------------------------------------------------------------------------------------------


def test_the_list_tells_what_there_is(run):
    _, directory = run
    infos = km.list_checkpoints(directory)
    assert [(i.step, i.epoch, i.batch, i.valid) for i in infos] == [(2, 0, 2, True), (4, 0, 4, True), (5, 1, 0, True)]
    files = [path for path in directory.iterdir() if path.name.startswith("model.ckpt-5.")]
    assert infos[-1].size == sum(path.stat().st_size for path in files) and len(files) == 3
    assert infos[0].time <= infos[1].time <= infos[2].time


def test_files_without_a_manifest_do_not_exist(run):
    _, directory = run
    (directory / "model.ckpt-5.json").unlink()
    (directory / "model.ckpt-9.index").write_bytes(b"half a save")
    assert [info.step for info in km.list_checkpoints(directory)] == [2, 4]
    assert km.latest_checkpoint(directory).endswith("model.ckpt-4")


@pytest.mark.parametrize("ending", [".index", ".data-00000-of-00001", ".json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer"])
def test_the_list_shows_what_is_wrong(run, ending, damage):
    _, directory = run
    path = directory / f"model.ckpt-5{ending}"
    content = path.read_bytes()
    changed = {"missing": None, "empty": b"", "cut": content[:-7], "longer": content + b"\0"}[damage]
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    infos = km.list_checkpoints(directory)
    assert km.latest_checkpoint(directory) == str(directory / "model.ckpt-4")
    if ending == ".json" and damage == "missing":
        assert len(infos) == 2
    else:
        assert infos[-1].step == 5 and not infos[-1].valid
        assert f"model.ckpt-5{ending}" in infos[-1].problem


@pytest.mark.parametrize("text", ["", "[]", "3", '"checksum"', "null", "{}", '{"checksum": 3}', "\xff"])
def test_a_manifest_of_something_else(tmp_path, text):
    (tmp_path / "model.ckpt-3.json").write_bytes(text.encode("latin-1"))
    (info,) = km.list_checkpoints(tmp_path)
    assert info.step == 3 and "model.ckpt-3.json" in info.problem


def test_a_manifest_of_a_newer_format_names_the_version_that_reads_it(run):
    _, directory = run
    prefix = str(directory / "model.ckpt-5")
    manifest = read_manifest(prefix)
    write_manifest(prefix, {**manifest, "format": 2, "versions": {"keras_monitored": "9.0"}})
    assert "written by version 9.0" in km.list_checkpoints(directory)[-1].problem


# Loading weights --------------------------------------------------------------------------------------------------


def test_weights_of_a_directory_or_a_prefix(run):
    model, directory = run
    for path in (directory, str(directory), directory / "model.ckpt-5"):
        other = rich_model()
        assert km.load_weights(other, path) == 5
        for ours, theirs in zip(model.variables, other.variables, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert km.load_weights(other, directory / "model.ckpt-2") == 2
    assert not np.array_equal(other.variables[0], model.variables[0])


def test_weights_of_a_directory_skip_what_is_damaged(run):
    _, directory = run
    (directory / "model.ckpt-5.index").write_bytes(b"")
    assert km.load_weights(rich_model(), directory) == 4
    with pytest.raises(km.CheckpointError, match="has 0 bytes instead of"):
        km.load_weights(rich_model(), directory / "model.ckpt-5")


def test_weights_for_an_unbuilt_model(run):
    with pytest.raises(ValueError, match=r"`model` must be built .*model\.build"):
        km.load_weights(keras.Sequential([keras.layers.Dense(1)]), run[1])


@pytest.mark.parametrize("make", [dense_model, lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])])
def test_weights_for_another_model(run, make):
    other = make()
    before = [v.numpy() for v in other.variables]
    with pytest.raises(km.CheckpointError, match="belongs to another model"):
        km.load_weights(other, run[1])
    for now, then in zip(other.variables, before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_weights_of_nothing(tmp_path):
    with pytest.raises(km.CheckpointError, match="There is no checkpoint at"):
        km.load_weights(dense_model(), tmp_path)


def test_weights_that_replicas_trained(tmp_path):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        model = rich_model()
    fit(model, dataset(4), [saver()], working_dir=tmp_path)
    other = rich_model()
    assert km.load_weights(other, tmp_path) == 4
    for ours, theirs in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    x = arrays(1)[0]
    np.testing.assert_allclose(other(x), model.predict_on_batch(x)[: len(x)], rtol=1e-6)


# Paths that are not local -----------------------------------------------------------------------------------------


def test_a_whole_life_in_memory(tmp_path):
    def trained(directory, stop_at=None):
        keras.utils.set_random_seed(5)
        model = rich_model()
        hooks = [saver(), *([] if stop_at is None else [km.StopAtStep(last_step=stop_at)])]
        fit(model, dataset(5).shuffle(5 * BATCH, seed=3), hooks, working_dir=directory, epochs=2)
        return model

    whole = trained(f"ram://{tmp_path}/whole")
    directory = f"ram://{tmp_path}/stopped"
    trained(directory, stop_at=7)
    assert [info.step for info in km.list_checkpoints(directory)] == [2, 4, 6, 7]
    resumed = trained(directory)
    assert_same_weights(whole, resumed)
    assert km.latest_checkpoint(directory) == f"{directory}/model.ckpt-10"
    events = [entry["event"] for entry in km.journal.read_journal(directory)]
    assert events.count("restored") == 1 and events[-1] == "ended"
    assert km.load_weights(rich_model(), directory) == 10
