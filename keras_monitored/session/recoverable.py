"""Makes a session again when the connection to what it runs on is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_monitored.errors import RecoveryError
from keras_monitored.messages import warn
from keras_monitored.session.session import Session
from keras_monitored.session.wrapper import SessionWrapper, raised_by_hook

RECOVERABLE = (tf.errors.AbortedError, tf.errors.UnavailableError)
MAX_ATTEMPTS = 10
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0


class RecoverableSession:
    """Delegates runs to a session, and makes a new one from the newest checkpoint on Aborted or Unavailable errors.

    It waits before each attempt, longer each time, and gives up after `max_attempts` for one step. An error that a
    hook raises is never retried.

    Args:
        create: Makes the session, restored from the newest checkpoint.
        can_restore: Says whether there is a checkpoint to go on from.
        max_attempts: Attempts for one step. Defaults to 10.
        sleep: Waits for some seconds. Defaults to `time.sleep`.
    """

    def __init__(
        self,
        create: Callable[[], SessionWrapper],
        *,
        can_restore: Callable[[], bool],
        max_attempts: int = MAX_ATTEMPTS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._create = create
        self._can_restore = can_restore
        self._max_attempts = max_attempts
        self._sleep = sleep
        self._jitter = random.Random()  # not the global one, whose state belongs to the run
        self._failed_step = -1
        self._attempts = 0
        self.wrapper = create()

    @property
    def session(self) -> Session:
        """The session that runs at present."""
        return self.wrapper.session

    def run(self, limit: int = 1, **arguments: Any) -> Any:
        """Makes one run of at most `limit` steps, up to the next hook that is due; again after a recovery.

        Args:
            limit: Most steps of the run. Defaults to 1.
            **arguments: As for `SessionWrapper.run`.

        Returns:
            What the run returns.

        Raises:
            RecoveryError: If the session could not be made again, with the last error as its cause.
        """
        while True:
            try:
                return self.wrapper.run(self.wrapper.steps_ahead(limit), **arguments)
            except RECOVERABLE as error:
                if raised_by_hook(error):
                    raise
                self._recover(error)

    def close(self) -> None:
        """Closes the session. The errors that it recovers from are not raised here."""
        try:
            self.session.close()
        except RECOVERABLE as error:
            warn(f"Closing the session raised {type(error).__name__}: {error}")

    def _recover(self, error: Exception) -> None:
        step = self.session.step
        if step > self._failed_step:
            self._failed_step, self._attempts = step, 0
        self.close()
        while True:
            self._attempts += 1
            if not self._can_restore():
                error.add_note(
                    "The session can't be made again: there is no checkpoint to go on from, and the training so far "
                    "would be lost. Give the run a `working_dir` and checkpoints that come more often."
                )
                raise error
            if self._attempts > self._max_attempts:
                raise RecoveryError(
                    f"Gave up after {self._max_attempts} attempts to get past step {self._failed_step}. "
                    f"The last error: {type(error).__name__}: {error}",
                    step=self._failed_step,
                ) from error
            longest = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2 ** (self._attempts - 1))
            seconds = longest * self._jitter.uniform(0.5, 1.0)
            warn(
                f"Step {step + 1} failed with {type(error).__name__}: {_first_line(error)} "
                f"Attempt {self._attempts} of {self._max_attempts} in {seconds:.1f} s, from the newest checkpoint."
            )
            self._sleep(seconds)
            try:
                start = time.perf_counter()
                self.wrapper = self._create()
            except RECOVERABLE as again:
                if raised_by_hook(again):
                    raise
                error = again
                continue
            self.session.run_record.journal.write(
                "recovered",
                step=self.session.step,
                epoch=self.session.epoch,
                batch=self.session.batch,
                seconds=time.perf_counter() - start,
                lost_step=step,
                error=f"{type(error).__name__}: {error}",
                attempt=self._attempts,
            )
            return


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else ""
