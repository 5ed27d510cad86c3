"""Reads the arguments of the elastic formulas: strict about types, shapes and ranges."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.limits import whole_number

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]


def finite(name: str, given: Any, *, least: int = 1) -> FloatArray:
    """A vector of at least so many finite numbers."""
    try:
        array = np.asarray(given)
        plain = array.astype(np.float64) if array.dtype.kind in "iuf" or not array.size else None
    except (TypeError, ValueError, OverflowError):
        plain = None
    if plain is None or plain.ndim != 1 or len(plain) < least or not np.isfinite(plain).all():
        raise InputError(f"{name}: expected a vector of finite numbers, got {given!r:.60}")
    return plain


def unit_values(name: str, given: Any) -> FloatArray:
    """A vector of numbers in [0, 1]."""
    values = finite(name, given)
    for r in np.flatnonzero((values < 0) | (values > 1 + 1e-9))[:1]:
        raise InputError(f"{name}: worker {r} has {values[r]}, expected a number in [0, 1]")
    return np.minimum(values, 1.0)


def unit_sum(name: str, given: Any) -> FloatArray:
    """A vector of numbers >= 0 that add up to 1."""
    values = finite(name, given)
    for r in np.flatnonzero(values < 0)[:1]:
        raise InputError(f"{name}: worker {r} has {values[r]}, expected a number >= 0")
    if abs(float(values.sum()) - 1.0) > 1e-9:
        raise InputError(f"{name}: expected numbers that add up to 1, got {float(values.sum()):g}")
    return values


def weight_bounds(bounds: Any) -> tuple[float, float]:
    """Bounds of weights with mean 1."""
    pair = finite("weight bounds", bounds)
    if len(pair) != 2 or not 0 < pair[0] <= 1 <= pair[1]:
        raise InputError(f"weight bounds: expected 0 < least <= 1 <= most, got {bounds!r:.60}")
    return float(pair[0]), float(pair[1])


def batch_bounds(bounds: Any) -> tuple[int, int]:
    """Bounds of a worker's batch."""
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise InputError(f"batch bounds: expected (least, most), got {bounds!r:.60}")
    least = whole_number("batch bounds", bounds[0], 1, 2**30)
    return least, whole_number("batch bounds", bounds[1], least, 2**30)


def rate_bounds(bounds: Any) -> tuple[float, float]:
    """Bounds of the learning rate."""
    pair = finite("rate bounds", bounds)
    if len(pair) != 2 or not 0 < pair[0] <= pair[1]:
        raise InputError(f"rate bounds: expected 0 < least <= most, got {bounds!r:.60}")
    return float(pair[0]), float(pair[1])


def number(name: str, value: Any) -> float:
    """A plain finite number, never a truth value or a text."""
    try:
        plain = None if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        plain = None
    if plain is None or not math.isfinite(plain):
        raise InputError(f"{name}: expected a finite number, got {value!r:.60}")
    return plain


def positive(name: str, value: Any) -> float:
    """A plain finite number >= 0."""
    plain = number(name, value)
    if plain < 0:
        raise InputError(f"{name}: expected a number >= 0, got {value!r:.60}")
    return plain


def fraction(name: str, value: Any) -> float:
    """A plain number in [0, 1]."""
    plain = number(name, value)
    if not 0 <= plain <= 1:
        raise InputError(f"{name}: expected a number in [0, 1], got {value!r:.60}")
    return plain
