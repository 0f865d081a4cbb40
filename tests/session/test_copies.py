"""Hooks that are not due make no copy from the device to the host: counted, not timed."""

import pytest
import tensorflow as tf

import keras_monitored as km
from tests.models import Recorder, assert_same_weights, dataset, dense_model, fit


@pytest.fixture
def copies(monkeypatch):
    """Counts how often a tensor is turned into a NumPy array or a number."""
    (owner,) = [cls for cls in type(tf.constant(1)).__mro__ if "_numpy" in vars(cls)]
    original, counted = owner._numpy, []
    monkeypatch.setattr(owner, "_numpy", lambda self: counted.append(self) or original(self))
    assert (int(tf.constant(3)), float(tf.constant(0.5)), tf.constant([1]).numpy().tolist()) == (3, 0.5, [1])
    assert len(counted) == 3
    counted.clear()
    return counted


def idle_hooks():
    far = km.StepHookTrigger(10**6)
    return [
        km.CheckpointSaver("ram://idle", trigger=far, trigger_at_end=False),
        km.LossLogger(km.StepHookTrigger(10**6), trigger_at_end=False),
        km.StepRateLogger(km.StepHookTrigger(10**6), trigger_at_end=False),
        km.StopAtStep(last_step=10**6),
        km.Stopper(km.StopCriteria(max_steps=10**6)),
        Recorder(fetches="loss", every=10**6),
    ]


@pytest.mark.parametrize("loop", [1, "auto"])
def test_hooks_that_are_not_due_copy_nothing(copies, loop):
    def copies_in(hooks, batches):
        model = dense_model()
        copies.clear()
        fit(model, dataset(batches), hooks, steps_per_loop=loop)
        return len(copies)

    with_none = [copies_in([], batches) for batches in (10, 30)]
    with_six = [copies_in(idle_hooks(), batches) for batches in (10, 30)]
    if loop == 1:  # in the loops it is the clock that decides how many runs there are
        assert with_six[1] - with_six[0] == with_none[1] - with_none[0] == 20  # each run's number of steps
    assert with_six[0] - with_none[0] <= 4  # once a fit
    reading = copies_in([Recorder(fetches="loss")], 30)
    assert reading >= with_none[1] + 29  # a hook that reads at every step, for comparison


def test_a_check_in_the_graph_costs_no_copy_at_all(copies):
    def copied(hooks):
        model = dense_model()
        copies.clear()
        fit(model, dataset(30), hooks)
        return [tensor.device for tensor in copies]

    without, checked = copied([]), copied([km.NaNChecker()])
    assert len(checked) == len(without)
    assert all("CPU:0" in device for device in checked)


def test_fetches_of_several_hooks_are_read_once(copies, monkeypatch):
    fetched = []
    original = km.Session.fetch
    monkeypatch.setattr(km.Session, "fetch", lambda self, fetches: fetched.append(fetches) or original(self, fetches))
    hooks = [Recorder(fetches="loss"), Recorder(fetches=["loss", "global_step"]), Recorder()]
    fit(dense_model(), dataset(3), hooks)
    assert len(fetched) == 3
    assert [float(value) for value in hooks[0].values] == [float(loss) for loss, _ in hooks[1].values]


def test_idle_hooks_do_not_change_what_is_trained():
    plain, ours = dense_model("adam"), dense_model("adam")
    plain.fit(dataset(5), verbose=0, shuffle=False)
    fit(ours, dataset(5), idle_hooks())
    assert_same_weights(ours, plain)
