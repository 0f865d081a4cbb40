"""Checks of arguments, so that every message says what was received, what is allowed and what to do."""

import math
import numbers
from typing import Any


def check_integer(name: str, value: Any, *, minimum: int, hint: str) -> int:
    """Returns `value` as a plain `int` when it is a whole number of at least `minimum`.

    Args:
        name: Argument the value was given for.
        value: What was received. NumPy integers are welcome, `bool` is not: it is nearly always a misplaced argument.
        minimum: Smallest value allowed.
        hint: What to do instead, a sentence that ends the message.

    Returns:
        The value as an `int`.

    Raises:
        TypeError: The value is no integer.
        ValueError: The value is smaller than `minimum`.

    Example:
        >>> check_integer("steps", 0, minimum=1, hint="Pass the number of steps between two firings.")
        Traceback (most recent call last):
        ...
        ValueError: `steps` must be an integer of at least 1. Received: 0. Pass the number of steps between two firings.
    """
    allowed = f"an integer of at least {minimum}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(_message(name, value, allowed, hint))
    if value < minimum:
        raise ValueError(_message(name, value, allowed, hint))
    return int(value)


def check_number(
    name: str, value: Any, *, above: float | None = None, minimum: float | None = None, hint: str
) -> float:
    """Returns `value` as a plain number when it is finite and large enough.

    Args:
        name: Argument the value was given for.
        value: What was received. NumPy numbers are welcome, `bool` is not.
        above: Bound that the value must exceed.
        minimum: Bound that the value may equal. Without either bound any finite number is allowed.
        hint: What to do instead, a sentence that ends the message.

    Returns:
        The value as an `int` when it was given as one, otherwise as a `float`.

    Raises:
        TypeError: The value is no real number.
        ValueError: The value is NaN, infinite or too small.

    Example:
        >>> check_number("seconds", 2.5, above=0, hint="Pass a time in seconds.")
        2.5
    """
    allowed = "a finite number"
    if above is not None:
        allowed += f" above {above}"
    elif minimum is not None:
        allowed += f" of at least {minimum}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(_message(name, value, allowed, hint))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    fits = number > above if above is not None else minimum is None or number >= minimum
    if not (math.isfinite(number) and fits):
        raise ValueError(_message(name, value, allowed, hint))
    return int(value) if isinstance(value, numbers.Integral) else number


def check_flag(name: str, value: Any, *, hint: str) -> bool:
    """Returns `value` when it is `True` or `False`, and raises a `TypeError` otherwise.

    Example:
        >>> check_flag("blocking", True, hint="Pass True to wait for every save.")
        True
    """
    if not isinstance(value, bool):
        raise TypeError(_message(name, value, "True or False", hint))
    return value


def _message(name: str, value: Any, allowed: str, hint: str) -> str:
    received = repr(value) if isinstance(value, numbers.Number) else f"{value!r} (of type {type(value).__name__})"
    return f"`{name}` must be {allowed}. Received: {received}. {hint}"
