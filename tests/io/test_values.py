"""Checks of single values: one sentence each, with the place, the rule and the value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from optsched import InputError
from optsched.io.values import boolean, format_value, integer, json_value, number, one_of

if TYPE_CHECKING:
    from collections.abc import Callable


def test_values_of_numpy_become_plain() -> None:
    """What is accepted is of Python's own type."""
    assert type(integer("x", np.int32(3))) is int
    assert type(number("x", np.float32(0.5))) is float
    assert number("x", math.inf, infinite=True) == math.inf
    assert json_value("x", {"a": (np.bool_(True), np.int8(1), None)}) == {"a": [True, 1, None]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: integer("x", True), "x: expected an integer in 0..2^53, got True"),
        (lambda: integer("x", 3.0), "x: expected an integer in 0..2^53, got 3.0"),
        (lambda: integer("x", "3"), 'x: expected an integer in 0..2^53, got "3"'),
        (lambda: integer("x", -1, 0, 7), "x: expected an integer in 0..7, got -1"),
        (lambda: integer("x", 1, -(2**53), 0), "x: expected an integer in -2^53..0, got 1"),
        (lambda: integer("x", 10**80), "got a number of more than 60 digits"),
        (lambda: number("x", math.nan), "x: expected a finite number >= 0, got nan"),
        (lambda: number("x", math.inf), "x: expected a finite number >= 0, got inf"),
        (lambda: number("x", math.nan, infinite=True), "x: expected a number >= 0, got nan"),
        (lambda: number("x", 0, most=1, above=True), "x: expected a number > 0 and <= 1, got 0"),
        (lambda: number("x", -1, what="seconds"), "x: expected seconds >= 0, got -1"),
        (lambda: number("x", np.bool_(True)), "x: expected a finite number >= 0, got True"),
        (lambda: boolean("x", 1), "x: expected True or False, got 1"),
        (lambda: one_of("x", "c", ("a", "b")), 'x: expected one of a, b, got "c"'),
        (lambda: one_of("x", ["a"], ("a", "b")), "x: expected one of a, b, got ['a']"),
        (lambda: json_value("x", {"a": {1}}), "x.a: expected plain JSON values, got a set"),
    ],
)
def test_refusals(call: Callable[[], object], message: str) -> None:
    """The message names the place, the rule and the value."""
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)


def test_a_shown_value_is_one_short_line() -> None:
    """Nothing long, broken or invisible in a message."""
    assert format_value("a\u202eb") == '"a\\u202eb"'
    assert format_value(np.arange(1000)).endswith("...")
    assert all(len(format_value(x)) <= 60 for x in ("a" * 900, list(range(900)), 10**900))
    assert "\n" not in format_value(np.zeros((3, 3)))
