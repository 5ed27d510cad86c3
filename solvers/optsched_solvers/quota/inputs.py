"""Reads the arguments of the kernels: strict about types, shapes and sizes, cheap when right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.kernels.compile import INT, INTS, READ, entry

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float64]

MOST_GPUS: Final = 2**30
"""Largest budget: products with scores of 32 bits then fit into 63 bits."""
MOST_JOBS: Final = 2**24
"""Largest number of jobs: sums of scores then stay below 2**56."""
NAMED: Final = 5
"""How many jobs a message names."""


def gpus(budget: Any) -> int:
    """The budget, a whole number in 0..2**30."""
    return integer("budget", budget, 0, MOST_GPUS)


def integers(name: str, given: Any, size: int | None = None) -> IntArray:
    """A contiguous int64 vector; one number stands for `size` equal ones if a size is known."""
    if type(given) is np.ndarray and given.dtype == np.int64 and given.ndim == 1:
        array = given
    else:
        array = _plain(name, given, "iu", "whole numbers")
        if array.ndim == 0 and size is not None:
            array = np.full(size, array)
        if array.dtype.kind == "u" and array.size and int(array.max()) >= 2**63:
            raise InputError(f"{name}: expected whole numbers below 2**63, got {array.max()}")
        array = array.astype(np.int64)
    return np.ascontiguousarray(_vector(name, array, size))


def reals(name: str, given: Any, size: int | None = None) -> FloatArray:
    """A contiguous float64 vector, not yet checked for signs and NaN."""
    if type(given) is np.ndarray and given.dtype == np.float64 and given.ndim == 1:
        array = given
    else:
        array = _plain(name, given, "iuf", "numbers")
        if array.ndim == 0 and size is not None:
            array = np.full(size, array)
        array = array.astype(np.float64)
    array = np.ascontiguousarray(_vector(name, array, size))
    if len(array) > MOST_JOBS:
        raise InputError(f"{name}: at most {MOST_JOBS} jobs, got {len(array)}")
    return array


def bounds(
    minimum: Any, maximum: Any, budget: int, size: int
) -> tuple[IntArray, IntArray, int, int]:
    """Copies of minimum and maximum, the latter cut at the budget, and the sums of both."""
    lo, hi = integers("minimum", minimum, size), integers("maximum", maximum, size)
    low, high, sums = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(2, np.int64)
    if _bounds(lo, hi, budget, low, high, sums) > 0:
        for wrong, rule in ((lo < 0, "minimum {lo} is negative"),
                            (lo > hi, "minimum {lo} is above maximum {hi}")):  # fmt: skip
            for j in np.flatnonzero(wrong)[:1]:
                raise InputError(f"job {j}: {rule.format(lo=lo[j], hi=hi[j])}")
    if sums[0] > budget:
        raise InputError(too_much(lo, budget))
    return low, high, int(sums[0]), int(sums[1])


def too_much(minimum: IntArray, budget: int) -> str:
    """Why a budget cannot serve the minima of all jobs, naming those that want most."""
    large = np.argsort(-minimum, kind="stable")[:NAMED]
    named = ", ".join(f"job {j} wants {minimum[j]}" for j in large if minimum[j] > 0)
    more = "" if np.count_nonzero(minimum) <= NAMED else ", ..."
    total = sum(minimum.tolist())
    return (
        f"minimum: all jobs together need {total} GPUs of a budget of {budget} "
        f"({named}{more}); choose jobs first, as `admit` does"
    )


def tables(
    ptr: Any, value: Any, minimum: Any, budget: int, *, name: str = "value"
) -> tuple[IntArray, IntArray, IntArray]:
    """The rows of a table, one a job: at least one entry each, minima within the budget."""
    rows, values = integers("ptr", ptr), integers(name, value)
    if len(rows) == 0 or rows[0] != 0 or rows[-1] != len(values):
        raise InputError(
            f"ptr: expected offsets from 0 to {len(values)} (the number of {name}s), "
            f"got {rows.tolist()[:2]}..{rows.tolist()[-1:]}"
        )
    size = len(rows) - 1
    lo = integers("minimum", minimum, size)
    if size > MOST_JOBS:
        raise InputError(f"ptr: at most {MOST_JOBS} jobs, got {size}")
    short = np.flatnonzero(np.diff(rows) < 1)
    for j in short[:1]:
        raise InputError(f"job {j}: its row has no {name} (ptr {rows[j]}..{rows[j + 1]})")
    if size and lo.min() < 0:
        j = int(np.argmin(lo))
        raise InputError(f"job {j}: minimum {lo[j]} is negative")
    # each at most the budget before they are added: the sum cannot overflow
    if size and (lo.max() > budget or lo.sum() > budget):
        raise InputError(too_much(lo, budget))
    return rows, values, lo


def _plain(name: str, given: Any, kinds: str, what: str) -> Any:
    """An array of one of the kinds; truth values and texts are not numbers."""
    if isinstance(given, (list, tuple)) and any(isinstance(x, (bool, np.bool_)) for x in given):
        raise InputError(f"{name}: expected {what}, got a truth value")
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0, object)
    if array.size == 0 and array.ndim == 1 and array.dtype.kind == "f":
        return array
    if array.dtype.kind not in kinds:
        shown = f"{given!r:.60}" if array.dtype.kind in "OUSb" else str(array.dtype)
        raise InputError(f"{name}: expected {what} (at most 63 bits), got {shown}")
    return array


def _vector(name: str, array: Any, size: int | None) -> Any:
    if array.ndim != 1:
        raise InputError(f"{name}: expected one dimension, got shape {array.shape}")
    if size is not None and len(array) != size:
        raise InputError(f"{name}: expected {size} values, one a job, got {len(array)}")
    return array


@entry(INT, READ, READ, INT, INTS, INTS, INTS)
def _bounds(lo, hi, budget, low, high, sums):  # type: ignore[no-untyped-def]
    """Fill low and high (cut just above and at the budget) and their sums; how many are wrong."""
    wrong = least = most = 0
    for j in range(len(lo)):
        wrong += (lo[j] < 0) | (lo[j] > hi[j])
        low[j] = min(lo[j], budget + 1)
        high[j] = min(hi[j], budget)
        least += low[j]
        most += high[j]
    sums[0], sums[1] = least, most
    return wrong
