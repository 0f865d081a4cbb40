"""A killed run sees every batch in the order of the unbroken one, of every kind of data."""

import pytest

from tests.resume.runs import Case, Runs

# Seven batches an epoch, a checkpoint every five steps: step 17 is in the third epoch.
SAVED_WITH_THE_ITERATOR = [
    Case("seeded_shuffle", "step:17"),
    Case("seeded_shuffle", "step:12", "step:13"),
    Case("repeated", "step:8"),
    Case("repeated", "step:16", save_every="epoch"),
    Case("repeated_within_epochs", "step:12", "step:27"),
    Case("repeated_within_epochs", "step:15", save_every="epoch"),
    Case("finite_with_steps", "step:6"),
    Case("finite_with_steps", "step:8", "step:16", save_every="epoch"),
    Case("finite_with_steps", "step:11", "step:17", save_every=3),
    Case("unknown_length", "step:16", "step:22"),
    Case("varying_length", "step:12", "step:22"),
    Case("arrays", "step:9"),
    Case("arrays", "step:18", "step:26"),
    Case("shared_shuffle", "step:7"),
    Case("shared_shuffle", "step:13", save_every="epoch"),
]

FOUND_BY_SKIPPING = [
    Case("generator", "step:17", save_every="epoch"),
    Case("py_dataset", "step:19", "step:23"),
    Case("from_generator", "step:12"),
    Case("py_function", "step:17"),  # in the third epoch; the log holds the order of the fourth too
    Case("py_function", "step:8", "step:18", save_every="epoch"),
    Case("shared_py_function", "step:17"),
    Case("interleave", "step:17", "step:24"),
]


@pytest.mark.parametrize("case", SAVED_WITH_THE_ITERATOR, ids=str)
def test_data_whose_iterator_can_be_saved(runs: Runs, case: Case):
    """The iterator's state is in the checkpoint: nothing is read twice, and nobody is warned."""
    outcome = runs.check(case)
    assert "can't be saved" not in outcome.log


@pytest.mark.parametrize("case", FOUND_BY_SKIPPING, ids=str)
def test_data_that_is_positioned_by_skipping(runs: Runs, case: Case):
    """The order depends on seeds alone, so skipping finds the same place; one warning says what it costs."""
    outcome = runs.check(case)
    assert outcome.log.count("can't be saved") == 1
