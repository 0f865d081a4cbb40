"""Keras callbacks go on where they were, those with counters of their own when they are listed as `stateful`."""

import pytest

from tests.resume.runs import Case, Runs

STATEFUL = [
    Case("keras_callbacks", "step:10"),
    Case("keras_callbacks", "epoch_end_before:1", "step:20"),
    Case("keras_callbacks", "epoch_end_after:2", save_every="epoch"),
    Case("keras_callbacks", "train_end:0"),
]

SCHEDULES = [
    Case("schedule_before", "step:17"),
    Case("schedule_before", "step:15", save_every="epoch"),
    Case("schedule_after", "step:17"),
    Case("schedule_after", "step:14", "epoch_begin:3", save_every="epoch"),
]


@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_patience_best_values_and_best_weights(runs: Runs, case: Case):
    """EarlyStopping, ReduceLROnPlateau and ModelCheckpoint: counters, best values and the best weights they keep."""
    outcome = runs.check(case)
    epochs = len(outcome.result["epochs of the History"])
    assert epochs < 12, "the run was meant to be stopped early"
    assert outcome.result["EarlyStopping.stopped_epoch 0"] == epochs - 1
    assert outcome.result["EarlyStopping.best_epoch 0"] == epochs - 3


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_schedule_that_depends_on_the_current_rate(runs: Runs, case: Case):
    """Each epoch multiplies the learning rate, so one time too many or too few would show."""
    runs.check(case)
