import dataclasses
import pathlib

import pytest

from keras_monitored.configuration import Configuration, NoCheckpoints, StepBasedCheckpoints, TimeBasedCheckpoints


def test_defaults():
    config = Configuration()
    assert config.working_dir is None
    assert config.checkpoint_config == TimeBasedCheckpoints(600, 5, 10_000)
    assert config.random_seed is None
    assert StepBasedCheckpoints() == StepBasedCheckpoints(1000, 5, 10_000)


@pytest.mark.parametrize("working_dir", ["runs/1", pathlib.PurePosixPath("runs/1")])
def test_the_working_directory_is_kept_as_text(working_dir):
    assert Configuration(working_dir).working_dir == "runs/1"


def test_urls_stay_as_they_are():
    assert Configuration("ram://runs/1").working_dir == "ram://runs/1"


def test_configurations_are_values():
    config = Configuration("run", checkpoint_config=StepBasedCheckpoints(10), random_seed=3)
    assert config == Configuration("run", checkpoint_config=StepBasedCheckpoints(10), random_seed=3)
    assert config != Configuration("run", checkpoint_config=StepBasedCheckpoints(20), random_seed=3)
    assert hash(config) == hash(dataclasses.replace(config))
    assert dataclasses.replace(config, random_seed=4).random_seed == 4
    assert eval(repr(config)) == config


@pytest.mark.parametrize("config", [Configuration(), NoCheckpoints(), StepBasedCheckpoints(), TimeBasedCheckpoints()])
def test_configurations_are_immutable(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3


@pytest.mark.parametrize("working_dir", [5, b"run", True])
def test_a_working_directory_of_the_wrong_type(working_dir):
    with pytest.raises(TypeError, match=r"`working_dir` must be a string, a path or None\. Received: "):
        Configuration(working_dir)


def test_an_empty_working_directory():
    with pytest.raises(ValueError, match="`working_dir` must not be empty"):
        Configuration("")


def test_a_checkpoint_config_of_the_wrong_type():
    with pytest.raises(TypeError, match=r"`checkpoint_config` must be .*Received: 600 \(of type int\).*pass Step"):
        Configuration(checkpoint_config=600)
    with pytest.raises(TypeError, match="`checkpoint_config`"):
        Configuration(checkpoint_config=StepBasedCheckpoints)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range(seed):
    with pytest.raises(ValueError, match="`random_seed` must be"):
        Configuration(random_seed=seed)


def test_seeds_at_the_ends_of_the_range():
    assert Configuration(random_seed=0).random_seed == 0
    assert Configuration(random_seed=2**32 - 1).random_seed == 2**32 - 1


@pytest.mark.parametrize(
    ("config_class", "arguments", "name"),
    [
        (StepBasedCheckpoints, {"steps": 0}, "steps"),
        (StepBasedCheckpoints, {"max_checkpoints_to_keep": 0}, "max_checkpoints_to_keep"),
        (StepBasedCheckpoints, {"keep_checkpoint_every_n_hours": 0}, "keep_checkpoint_every_n_hours"),
        (TimeBasedCheckpoints, {"seconds": 0}, "seconds"),
        (TimeBasedCheckpoints, {"seconds": float("nan")}, "seconds"),
        (TimeBasedCheckpoints, {"max_checkpoints_to_keep": -1}, "max_checkpoints_to_keep"),
        (TimeBasedCheckpoints, {"keep_checkpoint_every_n_hours": float("inf")}, "keep_checkpoint_every_n_hours"),
    ],
)
def test_numbers_out_of_range(config_class, arguments, name):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        config_class(**arguments)


def test_numbers_of_the_wrong_type():
    with pytest.raises(TypeError, match="`steps` must be an integer"):
        StepBasedCheckpoints(True)
    with pytest.raises(TypeError, match="`seconds` must be a finite number"):
        TimeBasedCheckpoints("600")
