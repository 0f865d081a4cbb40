"""A run may be killed at any moment. Seven steps an epoch, four epochs, validation after each."""

import pytest

from tests.resume.runs import Case, Runs

BY_STEPS = [
    Case("validation", "step:1"),
    Case("validation", "step:6"),  # the first epoch; the checkpoint of step 5 comes when the shuffle is read to its end
    Case("validation", "step:14"),  # an epoch's last batch, without a checkpoint there
    Case("validation", "step:14", save_every=7),  # and with one
    Case("unknown_length", "step:14", save_every=7),  # where nobody knows yet that it is the last
    Case("validation", "step:16", "step:18", "step:18", "step:24"),  # several times in one epoch, and in the last
]

BETWEEN_EPOCHS = [
    Case("validation", "epoch_end_before:1", save_every=7),
    Case("validation", "epoch_end_after:1"),
    Case("validation", "epoch_end_after:0", save_every="epoch"),
    Case("validation", "epoch_begin:1", save_every="epoch"),
    Case("validation", "validation:1", save_every=7),
    Case("validation", "validation:3", save_every=3),
    Case("shared_shuffle", "validation:1", save_every=5),
    Case("shared_shuffle", "epoch_end_before:2", save_every=2),
    Case("validation", "validation:1", "epoch_end_after:2", steps_per_loop="auto"),
    Case("validation", "train_end:0"),
]

DURING_A_SAVE = [
    Case("validation", "half_saved:10"),
    Case("validation", "half_saved:5"),  # the first: there is none to go on from
    Case("validation", "saved:10"),
    Case("validation", "half_saved:14", save_every="epoch"),
    Case("validation", "half_saved:28"),  # the finished state
    Case("validation", "being_saved:10", blocking=False),
    Case("validation", "being_saved:20", "step:22", blocking=False, save_every=2),
    Case("validation", "step:15", blocking=False),  # while the save goes on in the background, or is done
]


@pytest.mark.parametrize("case", BY_STEPS, ids=str)
def test_killed_after_a_step(runs: Runs, case: Case):
    """In the first epoch and the last, at its last batch, before the first checkpoint, several times."""
    runs.check(case)


@pytest.mark.parametrize("case", BETWEEN_EPOCHS, ids=str)
def test_killed_between_two_epochs(runs: Runs, case: Case):
    """After the last batch, in the validation, in another callback's end of the epoch, at the end of all."""
    runs.check(case)


@pytest.mark.parametrize("case", DURING_A_SAVE, ids=str)
def test_killed_during_a_save(runs: Runs, case: Case):
    """What is half written does not count, and is in nobody's way."""
    runs.check(case)
