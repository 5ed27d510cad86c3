"""Scores and weights as integers of at most 2**32, so that fractions compare exactly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, entry
from optsched_solvers.quota.inputs import reals

if TYPE_CHECKING:
    from optsched_solvers.quota.inputs import IntArray

FLOAT = types.float64
REALS = types.Array(types.float64, 1, "C", readonly=True)

BITS = 32
"""Bits of the largest score."""
_MINUS_ZERO = np.int64(-(2**63))
"""The bits of -0.0."""
_INFINITE = np.int64(0x7FF0000000000000)


def quantised(name: str, given: Any, *, positive: bool) -> tuple[IntArray, int]:
    """Scores times one power of two, rounded, the largest in 2**31+1..2**32.

    A power of two, rather than 2**32 over the largest score, keeps the ratios of whole numbers
    exact: scores 1 and 3 stay 1 to 3, and their ties stay ties.

    Parameters
    ----------
    positive
        Zero is an error, and no weight becomes 0; else what is below 2**-33 of the largest does.

    Returns
    -------
    IntArray, shape (jobs,), and the exponent of the power of two

    Raises
    ------
    InputError
        A score is negative, NaN, infinite, or zero where it must not be.
    """
    scores = reals(name, given)
    out = np.empty(len(scores), np.int64)
    largest = _largest(scores, int(positive))
    if largest < 0:
        fine = (scores > 0 if positive else scores >= 0) & (scores < np.inf)
        j = int(np.argmin(fine))
        sign = "> 0" if positive else ">= 0"
        raise InputError(f"job {j}: {name[:-1]} {scores[j]} is not a finite number {sign}")
    if largest == 0:
        out[:] = 0
        return out, 0
    mantissa, exponent = math.frexp(largest)
    shift = BITS - exponent + (mantissa == 0.5)
    half = shift // 2  # in two steps: 2**shift itself may overflow
    _scale(scores, math.ldexp(1.0, half), math.ldexp(1.0, shift - half), int(positive), out)
    return out, shift


def natural(value: float, shift: int) -> float:
    """A number per quantised score as a number per given score; infinite if too large."""
    try:
        return math.ldexp(value, shift)
    except OverflowError:
        return math.inf


@entry(FLOAT, REALS, INT)
def _largest(scores, positive):  # type: ignore[no-untyped-def]
    """The largest score; -1 if one is no finite number of the right sign."""
    bits = scores.view(np.int64)  # non-negative floats are ordered like their bits
    top = np.int64(0)
    wrong = 0
    for j in range(len(bits)):
        wrong += (bits[j] < positive) & ((bits[j] != _MINUS_ZERO) | (positive == 1))
        top = max(top, bits[j])
    if wrong > 0 or top >= _INFINITE:
        return -1.0
    largest = 0.0
    for j in range(len(scores)):
        if bits[j] == top:
            largest = scores[j]
            break
    return largest


@entry(INT, REALS, FLOAT, FLOAT, INT, INTS)
def _scale(scores, first, second, least, out):  # type: ignore[no-untyped-def]
    """Write the rounded products, at least `least`."""
    for j in range(len(scores)):
        out[j] = max(np.int64(scores[j] * first * second + 0.5), least)
    return 0
