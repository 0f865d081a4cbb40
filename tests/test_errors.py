import pickle

import pytest

from keras_monitored.errors import CheckpointError, NaNLossError, RecoveryError


@pytest.mark.parametrize("error_class", [NaNLossError, CheckpointError, RecoveryError])
def test_errors_are_runtime_errors_that_carry_the_step(error_class):
    error = error_class("What happened.", step=3)
    assert isinstance(error, RuntimeError)
    assert str(error) == "What happened."
    assert error.step == 3
    assert error_class("What happened.").step is None


def test_nan_loss_error_names_the_bad_values():
    assert NaNLossError("Bad.", names=["loss", "gradient_norm"]).names == ("loss", "gradient_norm")
    assert NaNLossError("Bad.").names == ()


def test_errors_survive_pickling_on_their_way_between_processes():
    error = pickle.loads(pickle.dumps(NaNLossError("Bad.", step=7, names=("loss",))))
    assert (str(error), error.step, error.names) == ("Bad.", 7, ("loss",))
