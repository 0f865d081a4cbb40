"""Lines for the person who trains."""

from __future__ import annotations

import logging

import keras

_log = logging.getLogger("keras_monitored")


def say(text: str) -> None:
    """Prints a line, or logs it where Keras is told to log: `keras.config.disable_interactive_logging()`."""
    if keras.config.is_interactive_logging_enabled():
        print(text, flush=True)
    else:
        _log.info(text)


def warn(text: str) -> None:
    """Logs a line about something that deserves attention, and goes on."""
    _log.warning(text)
