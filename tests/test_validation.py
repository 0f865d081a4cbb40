import decimal
import fractions
import math

import numpy as np
import pytest

from keras_monitored.validation import check_flag, check_integer, check_number

HINT = "Do this instead."


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint8(3)])
def test_integers_come_back_as_plain_ones(value):
    checked = check_integer("steps", value, minimum=3, hint=HINT)
    assert checked == 3
    assert type(checked) is int


@pytest.mark.parametrize("value", [True, np.True_, 3.0, "3", None, [3]])
def test_other_things_are_no_integers(value):
    with pytest.raises(TypeError, match=r"`steps` must be an integer of at least 1\. Received: .*\. Do this instead\."):
        check_integer("steps", value, minimum=1, hint=HINT)


def test_small_integers_are_refused():
    with pytest.raises(ValueError, match=r"`steps` must be an integer of at least 1\. Received: 0\. Do this instead\."):
        check_integer("steps", 0, minimum=1, hint=HINT)


@pytest.mark.parametrize("value", [2, 2.5, np.float32(2.5), np.int64(2), fractions.Fraction(5, 2)])
def test_numbers_come_back_as_plain_ones(value):
    checked = check_number("seconds", value, above=0, hint=HINT)
    assert checked == value
    assert type(checked) is (int if int(value) == value else float)


@pytest.mark.parametrize("value", [True, "2", None, 2j, decimal.Decimal(2)])
def test_other_things_are_no_numbers(value):
    with pytest.raises(TypeError, match=r"`seconds` must be a finite number above 0\. Received: "):
        check_number("seconds", value, above=0, hint=HINT)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, -math.inf, 10**400])
def test_numbers_that_are_not_finite_or_too_small_are_refused(value):
    with pytest.raises(ValueError, match=r"`seconds` must be a finite number above 0\. Received: .*Do this instead\."):
        check_number("seconds", value, above=0, hint=HINT)


def test_a_minimum_may_be_equalled():
    assert check_number("tol", 0, minimum=0, hint=HINT) == 0
    with pytest.raises(ValueError, match=r"`tol` must be a finite number of at least 0\. Received: -1e-09\."):
        check_number("tol", -1e-9, minimum=0, hint=HINT)


def test_flags_are_true_or_false_and_nothing_else():
    assert check_flag("blocking", False, hint=HINT) is False
    with pytest.raises(TypeError, match=r"`blocking` must be True or False\. Received: 1\. Do this instead\."):
        check_flag("blocking", 1, hint=HINT)
    with pytest.raises(TypeError, match=r"Received: 'yes' \(of type str\)\."):
        check_flag("blocking", "yes", hint=HINT)
