import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_monitored.hooks.triggers import (
    Elapsed,
    EpochHookTrigger,
    HookTrigger,
    NoHookTrigger,
    StepHookTrigger,
    TimeHookTrigger,
)
from tests.clocks import FakeClock

STEPS = st.integers(1, 12)
START_STEPS = st.integers(0, 30)
# How a run may go on: steps in one loop, seconds they take, whether an epoch ends with them.
ADVANCES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9), st.booleans()), max_size=40)
MAKERS = st.one_of(
    st.builds(lambda steps, at: lambda clock: StepHookTrigger(steps, at, clock=clock), STEPS, START_STEPS),
    st.builds(lambda seconds, at: lambda clock: TimeHookTrigger(seconds, at, clock=clock), STEPS, START_STEPS),
    st.builds(lambda epochs: lambda clock: EpochHookTrigger(epochs, clock=clock), st.integers(1, 4)),
    st.just(lambda clock: NoHookTrigger(clock=clock)),
)


class Run:
    """A run that fires its trigger whenever it is due."""

    def __init__(self, make_trigger, step=0, epoch=0):
        self.clock = FakeClock()
        self.make_trigger = make_trigger
        self.trigger = make_trigger(self.clock)
        self.step, self.epoch = step, epoch
        self.trigger.start(step, epoch)
        self.fired = []
        self.elapsed = []

    def advance(self, steps, seconds=0, epoch_end=False):
        self.step += steps
        self.epoch += epoch_end
        self.clock.now += seconds
        if self.trigger.is_due(self.step, self.epoch, epoch_end):
            self.elapsed.append(self.trigger.fired(self.step, self.epoch))
            self.fired.append(self.step)

    def resume(self):
        """Goes on with a new trigger, as a new process does."""
        state = json.loads(json.dumps(self.trigger.state_dict()))
        self.clock.now += 10_000
        self.trigger = self.make_trigger(self.clock)
        self.trigger.load_state_dict(state)
        self.trigger.start(self.step, self.epoch)


@given(STEPS, START_STEPS, st.integers(0, 30))
def test_steps_fire_first_at_a_multiple_and_then_at_every_one(steps, start_step, begin):
    run = Run(lambda clock: StepHookTrigger(steps, start_step, clock=clock), step=begin)
    for _ in range(100):
        run.advance(1)
    multiples = [step for step in range(begin + 1, begin + 101) if step % steps == 0 and step >= start_step]
    assert run.fired == multiples


@given(STEPS, START_STEPS, st.integers(0, 30), ADVANCES)
def test_steps_that_overshoot_fire_at_once_and_never_too_soon(steps, start_step, begin, advances):
    run = Run(lambda clock: StepHookTrigger(steps, start_step, clock=clock), step=begin)
    previous = None
    for advance in advances:
        run.advance(*advance)
        if run.fired and run.fired[-1] == run.step:
            assert run.step >= start_step
            assert previous is None or run.step - previous >= steps
            previous = run.step
        elif previous is not None:
            assert run.step - previous < steps


@given(STEPS, START_STEPS, START_STEPS, st.none() | st.integers(0, 60), st.integers(0, 60))
def test_next_step_is_the_first_later_step_that_is_due(steps, start_step, begin, last, step):
    trigger = StepHookTrigger(steps, start_step)
    trigger.start(begin, 0)
    if last is not None:
        trigger.fired(last, 0)
    assert trigger.next_step(step) == next(later for later in range(step + 1, 200) if trigger.is_due(later, 0))


@given(MAKERS, ADVANCES, ADVANCES, START_STEPS)
def test_a_resumed_run_fires_where_an_unbroken_one_does(make_trigger, before, after, begin):
    unbroken, resumed = Run(make_trigger, begin), Run(make_trigger, begin)
    for advance in before:
        unbroken.advance(*advance)
        resumed.advance(*advance)
    resumed.resume()
    for advance in after:
        unbroken.advance(*advance)
        resumed.advance(*advance)
    assert resumed.fired == unbroken.fired
    assert resumed.elapsed == unbroken.elapsed
    assert resumed.trigger.last_step == unbroken.trigger.last_step


@given(MAKERS, ADVANCES, ADVANCES)
def test_a_second_start_changes_nothing(make_trigger, before, after):
    once, twice = Run(make_trigger), Run(make_trigger)
    for advance in before:
        once.advance(*advance)
        twice.advance(*advance)
    twice.trigger.start(twice.step, twice.epoch)
    for advance in after:
        once.advance(*advance)
        twice.advance(*advance)
    assert (twice.fired, twice.elapsed) == (once.fired, once.elapsed)


@given(MAKERS, ADVANCES, ADVANCES, START_STEPS)
def test_a_reset_trigger_is_as_good_as_new(make_trigger, before, after, begin):
    used = Run(make_trigger)
    for advance in before:
        used.advance(*advance)
    used.trigger.reset()
    assert used.trigger.last_step is None
    used.trigger.start(begin, 0)
    used.step, used.epoch, used.fired, used.elapsed = begin, 0, [], []
    new = Run(make_trigger, begin)
    for advance in after:
        used.advance(*advance)
        new.advance(*advance)
    assert (used.fired, used.elapsed) == (new.fired, new.elapsed)


@given(MAKERS, ADVANCES, START_STEPS)
def test_elapsed_adds_up_to_the_whole_run(make_trigger, advances, begin):
    run = Run(make_trigger, begin)
    for advance in advances:
        run.advance(*advance)
    run.elapsed.append(run.trigger.fired(run.step, run.epoch))
    assert sum(elapsed.steps for elapsed in run.elapsed) == run.step - begin
    assert sum(elapsed.seconds for elapsed in run.elapsed) == run.clock.now - 1000.0


@given(STEPS, START_STEPS, ADVANCES)
def test_time_fires_once_the_seconds_have_passed(seconds, start_step, advances):
    run = Run(lambda clock: TimeHookTrigger(seconds, start_step, clock=clock))
    reference = run.clock.now
    for advance in advances:
        run.advance(*advance)
        overdue = run.clock.now - reference >= seconds
        if run.fired and run.fired[-1] == run.step:
            assert overdue
            assert run.step >= start_step
            reference = run.clock.now
        else:
            assert not overdue or run.step < start_step
        left = run.trigger.seconds_left()
        assert left == max(0.0, seconds - (run.clock.now - reference))
        expected = max(run.step + 1, start_step) if left == 0 else None
        assert run.trigger.next_step(run.step) == expected


def test_time_fires_only_once_at_a_step():
    clock = FakeClock()
    trigger = TimeHookTrigger(1, clock=clock)
    trigger.start(0, 0)
    clock.now += 2
    assert trigger.is_due(5, 0)
    trigger.fired(5, 0)
    clock.now += 2
    assert not trigger.is_due(5, 1, epoch_end=True)
    assert trigger.is_due(6, 1)


def test_time_counts_on_across_a_resume():
    clock = FakeClock()
    trigger = TimeHookTrigger(60, clock=clock)
    trigger.start(0, 0)
    clock.now += 45
    state = trigger.state_dict()
    clock.now += 3600
    resumed = TimeHookTrigger(60, clock=clock)
    resumed.load_state_dict(state)
    assert resumed.seconds_left() == 15


@given(st.integers(1, 4), st.integers(0, 10))
def test_epochs_fire_at_the_end_of_every_nth_epoch(epochs, begin):
    run = Run(lambda clock: EpochHookTrigger(epochs, clock=clock), step=10 * begin, epoch=begin)
    for _ in range(20):
        run.advance(5)
        run.advance(5, epoch_end=True)
    expected = [epoch for epoch in range(begin + 1, begin + 21) if epoch % epochs == 0]
    assert run.fired == [10 * epoch for epoch in expected]
    assert run.trigger.next_step(run.step) is None


@given(ADVANCES)
def test_no_trigger_never_fires(advances):
    run = Run(lambda clock: NoHookTrigger(clock=clock))
    for advance in advances:
        run.advance(*advance)
    assert run.fired == []
    assert run.trigger.next_step(run.step) is None
    assert run.trigger.seconds_left() is None


def test_only_time_knows_how_long_it_takes():
    assert StepHookTrigger(1).seconds_left() is None
    assert EpochHookTrigger(1).seconds_left() is None


def test_a_firing_at_the_end_counts_like_any_other():
    trigger = StepHookTrigger(10)
    trigger.start(0, 0)
    trigger.fired(25, 2)
    assert trigger.last_step == 25
    assert trigger.next_step(25) == 35


def test_a_firing_at_the_end_does_not_bring_the_first_step_forward():
    trigger = StepHookTrigger(10, start_step=100)
    trigger.start(0, 0)
    trigger.fired(25, 2)
    assert trigger.next_step(25) == 100


def test_going_back_behind_the_last_firing_is_no_negative_progress():
    trigger = StepHookTrigger(10, clock=FakeClock())
    trigger.start(0, 0)
    trigger.fired(30, 0)
    trigger.start(20, 0)
    assert trigger.next_step(20) == 40
    assert trigger.fired(25, 0) == Elapsed(seconds=0.0, steps=0)


def test_before_the_start_there_is_no_elapsed():
    trigger = StepHookTrigger(10)
    assert trigger.next_step(0) == 10
    assert trigger.fired(10, 0) is None
    assert trigger.fired(20, 0).steps == 10


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize(
    ("trigger_class", "name"), [(StepHookTrigger, "steps"), (TimeHookTrigger, "seconds"), (EpochHookTrigger, "epochs")]
)
def test_periods_must_be_positive(trigger_class, name, value):
    with pytest.raises(ValueError, match=rf"`{name}` must be .*Received: {value}\. .*NoHookTrigger\(\)"):
        trigger_class(value)


@pytest.mark.parametrize("value", [True, "10", None])
@pytest.mark.parametrize("trigger_class", [StepHookTrigger, TimeHookTrigger, EpochHookTrigger])
def test_periods_must_be_numbers(trigger_class, value):
    with pytest.raises(TypeError, match="must be"):
        trigger_class(value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_seconds_must_be_finite(value):
    with pytest.raises(ValueError, match="`seconds` must be a finite number above 0"):
        TimeHookTrigger(value)


@pytest.mark.parametrize("trigger_class", [StepHookTrigger, EpochHookTrigger])
def test_counts_must_be_whole(trigger_class):
    with pytest.raises(TypeError, match="must be an integer of at least 1"):
        trigger_class(2.5)


@pytest.mark.parametrize("trigger_class", [StepHookTrigger, TimeHookTrigger])
def test_the_first_step_must_not_be_negative(trigger_class):
    with pytest.raises(ValueError, match="`start_step` must be an integer of at least 0"):
        trigger_class(10, start_step=-1)
    with pytest.raises(TypeError, match="`start_step`"):
        trigger_class(10, start_step=1.5)


@pytest.mark.parametrize(
    "text",
    [
        "StepHookTrigger(steps=10)",
        "StepHookTrigger(steps=10, start_step=5)",
        "TimeHookTrigger(seconds=0.5)",
        "EpochHookTrigger(epochs=2)",
        "NoHookTrigger()",
    ],
)
def test_triggers_print_as_they_are_written(text):
    assert repr(eval(text)) == text


def test_a_trigger_must_say_when_it_is_due():
    with pytest.raises(TypeError, match="abstract"):
        HookTrigger()
