import types

import pytest
import tensorflow as tf

import keras_monitored as km
from keras_monitored.journal import Journal, read_journal
from keras_monitored.session.recoverable import MAX_ATTEMPTS, RecoverableSession
from keras_monitored.session.session import RunRecord

UNAVAILABLE = tf.errors.UnavailableError(None, None, "Socket closed\nmore of it")
ABORTED = tf.errors.AbortedError(None, None, "Connection reset")


class FakeSession:
    def __init__(self, step, record):
        self.step, self.epoch, self.batch, self.run_record = step, 0, step, record
        self.closed = 0
        self.close_error = None

    def close(self):
        self.closed += 1
        if self.close_error is not None:
            raise self.close_error


class World:
    """Makes sessions whose runs and creations go wrong as listed: errors, or `None` for what goes well."""

    def __init__(self, runs=(), creations=(), directory=None, **options):
        self.runs, self.creations = list(runs), list(creations)
        self.waits, self.sessions = [], []
        self.restorable = True
        self.saved_step = 0
        self.record = RunRecord(journal=Journal(directory))
        self.recoverable = RecoverableSession(
            self.create, can_restore=lambda: self.restorable, sleep=self.waits.append, **options
        )

    def create(self):
        if self.sessions:  # the first one is made without trouble
            error = self.creations.pop(0) if self.creations else None
            if error is not None:
                raise error
        session = FakeSession(self.saved_step, self.record)
        self.sessions.append(session)
        return types.SimpleNamespace(session=session, steps_ahead=lambda limit: limit, run=self.run)

    def run(self, steps, **arguments):
        error = self.runs.pop(0) if self.runs else None
        if error is not None:
            raise error
        self.sessions[-1].step += steps
        return arguments


def test_a_run_goes_through():
    world = World()
    assert world.recoverable.run(3, fetches="loss") == {"fetches": "loss"}
    assert world.recoverable.session.step == 3 and world.waits == [] and len(world.sessions) == 1


@pytest.mark.parametrize("error", [UNAVAILABLE, ABORTED], ids=["unavailable", "aborted"])
def test_a_lost_session_is_closed_and_made_again(error, tmp_path, caplog):
    world = World([None, error, None], directory=tmp_path)
    world.recoverable.run(5)
    world.saved_step = 3
    assert world.recoverable.run(2, feeds=[]) == {"feeds": []}
    first, second = world.sessions
    assert first.closed == 1 and world.recoverable.session is second and second.step == 5
    (event,) = read_journal(tmp_path)
    assert (event["event"], event["step"], event["lost_step"], event["attempt"]) == ("recovered", 3, 5, 1)
    assert type(error).__name__ in event["error"]
    assert "Step 6 failed" in caplog.text and "Attempt 1 of 10" in caplog.text and "more of it" not in caplog.text


def test_the_waits_grow_up_to_a_minute_and_vary():
    world = World([UNAVAILABLE] * 10)
    world.recoverable.run()
    assert len(world.waits) == 10
    for attempt, seconds in enumerate(world.waits):
        longest = min(60, 2**attempt)
        assert longest / 2 <= seconds <= longest
    assert len({seconds / min(60, 2**i) for i, seconds in enumerate(world.waits)}) == 10


@pytest.mark.parametrize("fails", ["run", "creation"])
@pytest.mark.parametrize("most", [1, 3, MAX_ATTEMPTS])
def test_it_gives_up_in_the_end_and_names_the_cause(fails, most):
    last = tf.errors.AbortedError(None, None, "the last one")
    errors = [UNAVAILABLE] * (most if fails == "run" else most - 1) + [last]
    runs, creations = (errors, []) if fails == "run" else ([UNAVAILABLE], errors)
    world = World(runs, creations, max_attempts=most)
    with pytest.raises(
        km.RecoveryError, match=f"Gave up after {most} attempts to get past step 0.*the last one"
    ) as caught:
        world.recoverable.run()
    assert caught.value.__cause__ is last and caught.value.step == 0
    assert len(world.waits) == most


def test_the_attempts_count_anew_once_the_step_is_past():
    world = World([UNAVAILABLE] * 3 + [None] + [UNAVAILABLE] * 3, max_attempts=3)
    world.recoverable.run()
    world.saved_step = 1
    world.recoverable.run()
    assert len(world.waits) == 6 and world.waits[3] <= 1.0


def test_going_back_to_the_checkpoint_is_no_progress():
    # It is lost at step 4 each time; what lies between the checkpoint and that step is run again and again.
    world = World(max_attempts=3)
    world.saved_step = 2
    world.recoverable.run(4)
    world.runs = [UNAVAILABLE, None, None] * 9
    with pytest.raises(km.RecoveryError, match="to get past step 4"):
        for _ in range(50):
            world.recoverable.run()
    assert len(world.waits) == 3


def test_without_a_checkpoint_it_raises_at_once():
    world = World([UNAVAILABLE])
    world.restorable = False
    with pytest.raises(tf.errors.UnavailableError) as caught:
        world.recoverable.run()
    assert any("no checkpoint to go on from" in note for note in caught.value.__notes__)
    assert world.waits == [] and len(world.sessions) == 1


@pytest.mark.parametrize("where", ["run", "creation"])
def test_an_error_of_a_hook_is_not_retried(where):
    error = tf.errors.UnavailableError(None, None, "of a hook")
    error._raised_by_hook = True
    world = World([error]) if where == "run" else World([ABORTED], [error])
    with pytest.raises(tf.errors.UnavailableError, match="of a hook"):
        world.recoverable.run()
    assert len(world.waits) == (0 if where == "run" else 1)


@pytest.mark.parametrize("error", [ValueError("no"), tf.errors.OutOfRangeError(None, None, "end"), KeyboardInterrupt()])
def test_other_errors_are_not_retried(error):
    world = World([error])
    with pytest.raises(type(error)):
        world.recoverable.run()
    assert world.waits == []


def test_closing_never_raises_what_it_recovers_from(caplog):
    world = World([UNAVAILABLE])
    for error in (UNAVAILABLE, ABORTED):
        world.sessions[0].close_error = error
        world.recoverable.close()
        assert f"Closing the session raised {type(error).__name__}" in caplog.text
    world.recoverable.run()  # closing the lost one fails as well, and that is no obstacle
    assert len(world.sessions) == 2
    world.sessions[1].close_error = ValueError("another")
    with pytest.raises(ValueError, match="another"):
        world.recoverable.close()


def test_the_global_random_state_is_left_alone():
    import random

    world = World([UNAVAILABLE] * 3)
    random.seed(3)
    before = random.getstate()
    world.recoverable.run()
    assert random.getstate() == before
