import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_monitored.criteria import StopCriteria, StopTracker
from tests.clocks import FakeClock

LIMITS = st.integers(1, 50)
STARTS = st.integers(0, 50)
LOSSES = st.lists(st.sampled_from([0.0, 1.0, 1.001, 1.5, -2.0, math.nan, math.inf]), max_size=40)
CRITERIA = st.builds(
    StopCriteria,
    max_steps=st.none() | LIMITS,
    max_epochs=st.none() | LIMITS,
    max_seconds=st.none() | LIMITS,
    restart_counting=st.booleans(),
    abs_loss_change_tol=st.none() | st.sampled_from([0.0, 0.01, 1.0]),
    rel_loss_change_tol=st.none() | st.sampled_from([0.0, 0.01, 1.0]),
    max_steps_below_tol=st.integers(0, 5),
)


def started(criteria, step=0, epoch=0):
    clock = FakeClock()
    tracker = StopTracker(criteria, clock=clock)
    tracker.start(step, epoch)
    return tracker, clock


def stop_index(losses, **tolerances):
    """Returns how many losses it took to stop, `None` when the run went on."""
    tracker, _ = started(dataclasses.replace(StopCriteria.none(), **tolerances))
    reasons = [tracker.update(step, 0, loss) for step, loss in enumerate(losses, start=1)]
    return next((count for count, reason in enumerate(reasons, start=1) if reason), None)


def test_defaults():
    criteria = StopCriteria()
    assert dataclasses.astuple(criteria) == (10_000, 100, None, True, None, None, 10)


def test_without_limits_nothing_stops():
    tracker, clock = started(StopCriteria.none())
    clock.now += 1e9
    assert tracker.update(10**9, 10**6) is None
    assert tracker.next_step(5) is None
    assert tracker.seconds_left() is None
    assert not tracker.needs_loss


def test_steps_alone():
    assert StopCriteria.steps(7) == StopCriteria(max_steps=7, max_epochs=None)


@given(LIMITS, STARTS)
def test_steps_count_from_the_start(limit, begin):
    tracker, _ = started(StopCriteria.steps(limit), step=begin)
    reasons = [tracker.update(step, 0) for step in range(begin + 1, begin + limit + 1)]
    assert reasons[:-1] == [None] * (limit - 1)
    assert reasons[-1] == f"{limit} steps were run since step {begin} (max_steps={limit})"


@given(LIMITS, STARTS)
def test_steps_can_be_absolute(limit, begin):
    tracker, _ = started(StopCriteria(max_steps=limit, max_epochs=None, restart_counting=False), step=begin)
    assert (tracker.reason(begin, 0) is not None) == (begin >= limit)
    assert (tracker.reason(begin + 1, 0) is not None) == (begin + 1 >= limit)


@given(LIMITS, STARTS, st.integers(0, 100), st.booleans())
def test_next_step_is_the_first_later_step_that_stops(limit, begin, step, restart_counting):
    criteria = StopCriteria(max_steps=limit, max_epochs=None, restart_counting=restart_counting)
    tracker, _ = started(criteria, step=begin)
    assert tracker.next_step(step) == next(later for later in range(step + 1, 300) if tracker.reason(later, 0))


@given(LIMITS, STARTS, st.booleans())
def test_epochs_count_when_they_are_completed(limit, begin, restart_counting):
    criteria = StopCriteria(max_steps=None, max_epochs=limit, restart_counting=restart_counting)
    tracker, _ = started(criteria, step=100, epoch=begin)
    last = begin + limit if restart_counting else max(limit, begin)
    assert tracker.update(101, last) == (
        f"{last - (begin if restart_counting else 0)} epochs were run "
        f"since epoch {begin if restart_counting else 0} (max_epochs={limit})"
    )
    if last > begin:
        assert tracker.update(101, last - 1) is None


def test_seconds_are_seconds():
    tracker, clock = started(StopCriteria(max_seconds=90.0))
    clock.now += 89.5
    assert tracker.update(1, 0) is None
    assert tracker.seconds_left() == 0.5
    clock.now += 0.5
    assert tracker.update(2, 0) == "90.0 seconds have passed (max_seconds=90.0)"
    clock.now += 100
    assert tracker.seconds_left() == 0.0


@given(CRITERIA, STARTS)
def test_a_second_start_changes_nothing(criteria, step):
    tracker, clock = started(criteria, step, 2)
    clock.now += 3
    before = tracker.state_dict()
    tracker.start(step + 10, 5)
    assert tracker.state_dict() == before


def test_absolute_change_must_stay_below_for_more_than_the_steps_allowed():
    tolerances = {"abs_loss_change_tol": 0.1, "max_steps_below_tol": 2}
    assert stop_index([5.0, 5.05, 5.0, 5.05], **tolerances) == 4
    assert stop_index([5.0, 5.05, 5.0, 4.0, 4.05, 4.0, 4.05], **tolerances) == 7
    assert stop_index([5.0, 5.05, 5.0, 4.0, 4.05, 4.0], **tolerances) is None


def test_a_change_as_large_as_the_tolerance_is_not_below_it():
    assert stop_index([1.0, 1.5, 1.0, 1.5], abs_loss_change_tol=0.5, max_steps_below_tol=0) is None
    assert stop_index([2.0, 3.0], rel_loss_change_tol=0.5, max_steps_below_tol=0) is None


def test_the_change_is_between_neighbours_not_from_the_first_loss():
    assert stop_index([1.0, 1.4, 1.8, 2.2], abs_loss_change_tol=0.5, max_steps_below_tol=2) == 4
    assert stop_index([1.0, 9.0, 1.0, 9.0, 1.0], abs_loss_change_tol=0.5, max_steps_below_tol=0) is None


def test_relative_change():
    assert stop_index([100.0, 100.5, 100.0], rel_loss_change_tol=0.01, max_steps_below_tol=1) == 3
    assert stop_index([-100.0, -100.5, -100.0], rel_loss_change_tol=0.01, max_steps_below_tol=1) == 3
    assert stop_index([1.0, 1.5, 1.0], rel_loss_change_tol=0.01, max_steps_below_tol=1) is None


def test_a_previous_loss_of_zero_counts_only_when_nothing_changes():
    assert stop_index([0.0, 1e-300, 0.0, 1e-300], rel_loss_change_tol=0.5, max_steps_below_tol=0) is None
    assert stop_index([0.0, 0.0], rel_loss_change_tol=0.5, max_steps_below_tol=0) == 2


def test_either_tolerance_is_enough():
    both = {"abs_loss_change_tol": 1e-3, "rel_loss_change_tol": 0.01, "max_steps_below_tol": 1}
    assert stop_index([100.0, 100.5, 100.0], **both) == 3
    assert stop_index([0.001, 0.0015, 0.001], **both) == 3
    assert stop_index([100.0, 100.5, 1e-3, 1.5e-3, 1e-3], **both) == 5


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_never_below(odd):
    tolerances = {"abs_loss_change_tol": 10.0, "rel_loss_change_tol": 10.0, "max_steps_below_tol": 1}
    assert stop_index([odd] * 20, **tolerances) is None
    assert stop_index([1.0, 1.0, odd, 1.0, 1.0, odd], **tolerances) is None
    assert stop_index([odd, 1.0, 1.0, 1.0], **tolerances) == 4


def test_a_tolerance_of_zero_means_no_change_at_all():
    assert stop_index([1.0, 1.0 + 1e-15], abs_loss_change_tol=0.0, max_steps_below_tol=0) is None
    assert stop_index([1.0, 1.0], abs_loss_change_tol=0.0, max_steps_below_tol=0) == 2


@given(LOSSES, st.floats(0, 2), st.floats(0, 2), st.integers(0, 5))
def test_the_loss_stops_at_the_first_run_of_small_changes_that_is_too_long(losses, absolute, relative, allowed):
    def below(previous, loss):
        change = abs(loss - previous)
        return change == 0 or change < absolute or (previous != 0 and change / abs(previous) < relative)

    in_a_row, expected = 0, None
    for index in range(1, len(losses)):
        in_a_row = in_a_row + 1 if below(losses[index - 1], losses[index]) else 0
        if in_a_row > allowed:
            expected = index + 1
            break
    tolerances = {"abs_loss_change_tol": absolute, "rel_loss_change_tol": relative, "max_steps_below_tol": allowed}
    assert stop_index(losses, **tolerances) == expected


def test_the_reason_names_the_tolerance():
    tracker, _ = started(StopCriteria(abs_loss_change_tol=0.5, max_steps_below_tol=1))
    for step in (1, 2):
        assert tracker.update(step, 0, 3.0) is None
    expected = "the loss has hardly changed for 2 steps in a row (abs_loss_change_tol=0.5, max_steps_below_tol=1)"
    assert tracker.update(3, 0, 3.0) == expected
    assert tracker.reason(3, 0) == expected


def test_a_tolerance_needs_the_loss():
    tracker, _ = started(StopCriteria(rel_loss_change_tol=0.5))
    assert tracker.needs_loss
    with pytest.raises(ValueError, match=r"`loss` must be a number .*Received: None at step 4\."):
        tracker.update(4, 0)


def test_losses_may_come_as_numpy_scalars():
    tracker, _ = started(StopCriteria(abs_loss_change_tol=0.5))
    tracker.update(1, 0, np.float32(0.1))
    assert json.loads(json.dumps(tracker.state_dict()))["previous_loss"] == float(np.float32(0.1))


@given(CRITERIA, LOSSES, LOSSES, STARTS)
def test_a_resumed_run_stops_where_an_unbroken_one_does(criteria, before, after, begin):
    unbroken, clock = started(criteria, begin, 1)
    resumed, resumed_clock = started(criteria, begin, 1)

    def advance(step, loss):
        clock.now += 1
        resumed_clock.now += 1
        epoch = 1 + (step - begin) // 5
        assert resumed.update(step, epoch, loss) == unbroken.update(step, epoch, loss)

    for step, loss in enumerate(before, start=begin + 1):
        advance(step, loss)
    state = json.loads(json.dumps(resumed.state_dict(), allow_nan=False))
    resumed_clock.now += 10_000
    resumed = StopTracker(criteria, clock=resumed_clock)
    resumed.load_state_dict(state)
    resumed.start(begin + len(before), 3)
    step = begin + len(before)
    assert resumed.reason(step, 1) == unbroken.reason(step, 1)
    for step, loss in enumerate(after, start=begin + len(before) + 1):
        advance(step, loss)


@given(CRITERIA, LOSSES, STARTS)
def test_a_reset_tracker_is_as_good_as_new(criteria, losses, begin):
    used, clock = started(criteria)
    for step, loss in enumerate(losses, start=1):
        clock.now += 1
        used.update(step, step // 5, loss)
    used.reset()
    used.start(begin, 0)
    assert used.state_dict() == started(criteria, begin)[0].state_dict()


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["max_steps", "max_epochs", "max_seconds"])
def test_limits_must_be_positive(name, value):
    with pytest.raises(ValueError, match=rf"`{name}` must be .*Received: {value}\. Pass None for no limit\."):
        StopCriteria(**{name: value})


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["abs_loss_change_tol", "rel_loss_change_tol"])
def test_tolerances_must_not_be_negative(name, value):
    with pytest.raises(ValueError, match=rf"`{name}` must be a finite number of at least 0\. Received: {value}\."):
        StopCriteria(**{name: value})


@pytest.mark.parametrize("value", [True, "5"])
@pytest.mark.parametrize(
    "name",
    ["max_steps", "max_epochs", "max_seconds", "abs_loss_change_tol", "rel_loss_change_tol", "max_steps_below_tol"],
)
def test_limits_must_be_numbers(name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be"):
        StopCriteria(**{name: value})


def test_other_arguments_out_of_range():
    with pytest.raises(TypeError, match="`max_steps` must be an integer"):
        StopCriteria(max_steps=2.5)
    with pytest.raises(ValueError, match="`max_seconds`"):
        StopCriteria(max_seconds=math.inf)
    with pytest.raises(ValueError, match="`max_steps_below_tol` must be an integer of at least 0"):
        StopCriteria(max_steps_below_tol=-1)
    with pytest.raises(TypeError, match="`max_steps_below_tol`"):
        StopCriteria(max_steps_below_tol=None)
    with pytest.raises(TypeError, match="`restart_counting` must be True or False"):
        StopCriteria(restart_counting=1)


def test_criteria_are_immutable_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StopCriteria().max_steps = 3
    assert StopCriteria(max_steps=np.int64(3)) == StopCriteria(max_steps=3)
    assert type(StopCriteria(max_steps=np.int64(3)).max_steps) is int
