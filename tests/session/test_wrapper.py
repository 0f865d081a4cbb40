import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import keras_monitored as km
from keras_monitored.session.wrapper import in_order, raised_by_hook
from keras_monitored.step_function import StepOutcome
from tests.clocks import FakeClock
from tests.models import Recorder


class FakeSession:
    """Steps that take a fixed time and compute nothing."""

    def __init__(self, clock=None, seconds_per_step=1e-9):
        self.step, self.epoch, self.stop_reason, self.function = 0, 0, None, None
        self.clock, self.seconds_per_step = clock, seconds_per_step
        self.runs, self.given = [], []
        self.known = {"a": 1.0, "b": 2.0}

    def run_steps(self, steps=1, *, feeds=None, options=None):
        self.step += steps
        self.runs.append(self.step)
        self.given.append((feeds, options))
        if self.clock is not None:
            self.clock.now += steps * self.seconds_per_step
        return StepOutcome(steps)

    def check_names(self, fetches):
        for name in tf.nest.flatten(fetches):
            if isinstance(name, str) and name not in self.known:
                raise ValueError(f"unknown {name}")

    def fetch(self, fetches):
        return tf.nest.map_structure(
            lambda name: self.known.get(name, name) if isinstance(name, str) else name, fetches
        )

    def request_stop(self, reason):
        self.stop_reason = reason


def wrapped(hooks, **options):
    wrapper = km.SessionWrapper(FakeSession(**options), hooks)
    wrapper.session_created()
    return wrapper


class Asking(Recorder):
    """Gives the same `SessionRunArgs` each time."""

    def __init__(self, **arguments):
        super().__init__()
        self.arguments = km.SessionRunArgs(**arguments)
        self.seen = []

    def before_run(self, run_context):
        return self.arguments

    def after_run(self, run_context, run_values):
        self.seen.append((run_values.results, run_values.options))


# Planning ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 30), st.integers(1, 60))
def test_loops_end_exactly_where_a_hook_is_due(periods, limit, total):
    hooks = [Recorder(every=period) for period in periods]
    wrapper = wrapped(hooks)
    while wrapper.session.step < total:
        wrapper.run(wrapper.steps_ahead(min(limit, total - wrapper.session.step)))
    # The fewest runs there can be: each ends at the next step of some hook, at the limit, or at the end.
    expected, step = [], 0
    while step < total:
        step = min([step + limit, total, *((step // period + 1) * period for period in periods)])
        expected.append(step)
    assert wrapper.session.runs == expected
    for hook, period in zip(hooks, periods, strict=True):
        after = [int(call.split()[1]) for call in hook.calls if call.startswith("after")]
        assert after == list(range(period, total + 1, period))
        assert sum(call.startswith("before") for call in hook.calls) == len(after)


@given(st.sampled_from([0.01, 0.1, 0.3, 2.0]), st.sampled_from([0.5, 1.0, 7.0]), st.integers(1, 5))
def test_loops_end_where_the_clock_makes_a_hook_due(per_step, seconds, every):
    clock, fired = FakeClock(), []

    class Timely(km.TriggeredHook):
        def on_trigger(self, session, results, elapsed):
            fired.append(clock.now - 1000)

    hooks = [Timely(km.TimeHookTrigger(seconds, clock=clock)), Recorder(every=every * 100)]
    wrapper = wrapped(hooks, clock=clock, seconds_per_step=per_step)
    while clock.now < 1000 + 4 * max(seconds, 2 * per_step):
        before = clock.now
        wrapper.run(wrapper.steps_ahead(1_000_000))
        assert clock.now - before <= max(1.0, per_step) + 1e-6  # signals wait no longer than that
    assert len(fired) >= 2
    for previous, at in zip([0, *fired], fired, strict=False):
        assert seconds - 1e-6 <= at - previous <= seconds + 2 * per_step + 1e-6


def test_before_a_step_was_timed_runs_are_single_steps():
    wrapper = wrapped([], seconds_per_step=None)
    assert wrapper.steps_ahead(100) == 1
    wrapper.session.seconds_per_step = 0.01
    assert wrapper.steps_ahead(1000) == 100 and wrapper.steps_ahead(7) == 7


def test_a_hook_whose_step_has_passed_holds_nothing_up():
    class Late(km.Hook):
        def next_step(self, step):
            return 3

    wrapper = wrapped([Late()])
    wrapper.session.step = 5
    assert wrapper.steps_ahead(4) == 1


# Merging ----------------------------------------------------------------------------------------------------------


def test_each_gets_what_it_asked_for():
    first, second, third = Asking(fetches={"x": "a"}), Asking(fetches=["b", ("a",)]), Asking()
    wrapper = wrapped([first, second, third])
    assert wrapper.run(fetches=("b", "b")) == (2.0, 2.0)
    assert [hook.seen[0][0] for hook in (first, second, third)] == [{"x": 1.0}, [2.0, (1.0,)], None]
    assert wrapper.run() is None


def test_targets_run_after_the_steps():
    wrapper = wrapped([])
    steps = []
    wrapper.hooks[:] = [Asking(targets=[lambda: steps.append(("hook", wrapper.session.step))])]
    wrapper.plan()
    wrapper.run(2, targets=[lambda: steps.append(("own", wrapper.session.step))])
    assert steps == [("own", 2), ("hook", 2)]


def test_options_are_merged():
    hooks = [Asking(options=km.RunOptions()), Asking(), Asking(options=km.RunOptions(True, "there"))]
    wrapper = wrapped(hooks)
    wrapper.run(options=km.RunOptions(trace_directory="here"))
    merged = km.RunOptions(True, "here")
    assert wrapper.session.given[0][1] == merged
    assert all(hook.seen[0][1] == merged for hook in hooks)


VARIABLE = tf.Variable(1.0, name="rate")


@pytest.mark.parametrize(
    ("own", "asked", "name"),
    [
        (None, [{"scale": 1}, {"scale": 1}], "'scale' is fed twice in one run, by <.*Asking.*> and by <.*Asking"),
        ({"scale": 1}, [{"scale": 2}], "'scale' .* by the caller of the run and by <"),
        ({"x": 1}, [{}, {"x": 2}], "'x'"),
        ([(VARIABLE, 1.0)], [{VARIABLE.ref(): 2.0}], "'rate:0'"),
    ],
)
def test_the_same_thing_fed_twice(own, asked, name):
    wrapper = wrapped([Asking(feeds=feeds) for feeds in asked])
    with pytest.raises(RuntimeError, match=name):
        wrapper.run(feeds=own)
    assert wrapper.session.step == 0


def test_feeds_of_all_are_merged():
    wrapper = wrapped([Asking(feeds={"a": 1}), Asking(feeds=[(VARIABLE, 2.0)])])
    wrapper.run(feeds={"x": 3})
    (given_feeds, _), *_ = wrapper.session.given
    assert given_feeds[:2] == [("x", 3), ("a", 1)]
    assert given_feeds[2][0] is VARIABLE and given_feeds[2][1] == 2.0


def test_an_unknown_name_is_told_of_before_the_steps():
    wrapper = wrapped([Asking(fetches=["a", "nothing"])])
    with pytest.raises(ValueError, match="unknown nothing"):
        wrapper.run()
    assert wrapper.session.step == 0


# Calling ----------------------------------------------------------------------------------------------------------


def test_hooks_of_one_priority_keep_their_order():
    hooks = [Recorder(priority=priority) for priority in (0, 5, -1, 5, 0)]
    assert in_order(hooks) == [hooks[1], hooks[3], hooks[0], hooks[4], hooks[2]]


@pytest.mark.parametrize("method", ["after_session_creation", "next_step", "before_run", "after_run", "end"])
def test_errors_of_hooks_are_known_as_such(method):
    hook = Recorder()

    def fail(*_):
        raise tf.errors.UnavailableError(None, None, "of a hook")

    setattr(hook, method, fail)
    with pytest.raises(tf.errors.UnavailableError) as caught:
        wrapper = wrapped([hook])
        wrapper.run()
        wrapper.end()
    assert raised_by_hook(caught.value)


def test_errors_of_the_step_are_not_those_of_a_hook():
    wrapper = wrapped([Recorder()])
    wrapper.session.run_steps = lambda *_, **__: (_ for _ in ()).throw(tf.errors.AbortedError(None, None, "step"))
    with pytest.raises(tf.errors.AbortedError) as caught:
        wrapper.run()
    assert not raised_by_hook(caught.value)


def test_every_end_is_called_and_the_first_error_raised():
    calls = []

    def ending(name, error=None):
        hook = km.Hook()

        def end(session):
            calls.append(name)
            if error is not None:
                raise error

        hook.end = end
        return hook

    wrapper = wrapped([ending("a"), ending("b", ValueError("first")), ending("c", OSError("second")), ending("d")])
    with pytest.raises(ValueError, match="first") as caught:
        wrapper.end()
    assert calls == ["a", "b", "c", "d"] and any("OSError: second" in note for note in caught.value.__notes__)
