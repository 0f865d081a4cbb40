"""A killed run's resume is exact for every kind of model, and however its steps are run."""

import pytest

from tests.resume.runs import Case, Runs

MODELS = [
    Case("two_optimizers", "step:9", "step:20"),
    Case("two_optimizers", "step:15", save_every=14),  # the restored step's logs go into the History
    Case("augmentation", "step:17"),
    Case("mixed_float16", "step:17"),
    Case("run_eagerly", "step:9"),
    Case("jit_compile", "step:8"),
    Case("clipped", "step:9", "step:20"),
]

LOOPS = [
    Case("steps_per_execution", "step:10", save_every=7, steps_per_loop="auto"),
    Case("steps_per_execution", "step:9", save_every=7),
    Case("seeded_shuffle", "step:17", steps_per_loop="auto"),
    Case("seeded_shuffle", "step:19", steps_per_loop="auto", last={"steps_per_loop": 1}),
    Case("seeded_shuffle", "step:9", last={"steps_per_loop": "auto"}),
    Case("unknown_length_many", "step:15", save_every=7),
    Case("unknown_length", "step:14", save_every="epoch", steps_per_loop="auto"),
    Case("varying_length", "step:15", steps_per_loop="auto"),
    Case("arrays", "step:12", steps_per_loop=3, save_every=4),
]


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_models(runs: Runs, case: Case):
    """Variables, slots of all optimizers, seeds of all layers, metrics and loss scales come back."""
    runs.check(case)


@pytest.mark.parametrize("case", LOOPS, ids=str)
def test_several_steps_at_once(runs: Runs, case: Case):
    """Where a loop ends changes nothing; one process may run loops, and the next one single steps."""
    runs.check(case)
