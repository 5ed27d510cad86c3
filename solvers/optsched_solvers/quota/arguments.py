"""Checks of the arguments of the functions on bare arrays: types, shapes, ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float64]

MOST_GPUS: Final = 2**30
"""Largest budget: products with scores of 32 bits fit into 63 bits."""
_NAMED: Final = 5


def gpus(budget: Any) -> int:
    """Check a budget: a whole number in 0..2**30."""
    return integer("budget", budget, 0, MOST_GPUS)


def integers(name: str, given: Any, size: int | None = None) -> IntArray:
    """Check a vector of whole numbers; a single number is repeated `size` times."""
    array: IntArray = _vector(name, given, size, "iu", "whole numbers", np.int64)
    return array


def reals(name: str, given: Any, size: int | None = None) -> FloatArray:
    """Check a vector of finite numbers >= 0."""
    array: FloatArray = _vector(name, given, size, "iuf", "numbers", np.float64)
    for j in np.flatnonzero(~((array >= 0) & np.isfinite(array)))[:1]:
        one = name.removesuffix("s")
        raise InputError(f"job {j}: {one} {array[j]} is not a finite number >= 0")
    return array


def row_pointers(given: Any, entries: int) -> IntArray:
    """Check the offsets of the rows of a CSR array: from 0 to `entries`, no row empty."""
    ptr = integers("ptr", given)
    if len(ptr) == 0 or ptr[0] != 0 or ptr[-1] != entries:
        raise InputError(
            f"ptr: expected offsets from 0 to {entries} (the number of entries), "
            f"got {ptr.tolist()[:2]}..{ptr.tolist()[-1:]}"
        )
    for j in np.flatnonzero(ptr[1:] <= ptr[:-1])[:1]:
        if ptr[j + 1] == ptr[j]:
            raise InputError(f"ptr: row {j} is empty; give it an entry (size 0 for none)")
        raise InputError(f"ptr: row {j} ends at {ptr[j + 1]}, before it begins ({ptr[j]})")
    return ptr


def spare(minimum: IntArray, budget: int) -> int:
    """Return the GPUs above all minima, which must be >= 0 and fit the budget together."""
    for j in np.flatnonzero(minimum < 0)[:1]:
        raise InputError(f"job {j}: minimum {minimum[j]} is negative")
    needed: int = sum(minimum.tolist())
    if needed <= budget:
        return budget - needed
    largest = np.argsort(-minimum, kind="stable")[:_NAMED]
    named = ", ".join(f"job {j}: {minimum[j]}" for j in largest if minimum[j] > 0)
    more = "" if np.count_nonzero(minimum) <= _NAMED else ", ..."
    raise InputError(
        f"minimum: all jobs together need {needed} GPUs of a budget of {budget} "
        f"({named}{more}); choose jobs first, as `admit` does"
    )


def _vector(name: str, given: Any, size: int | None, kinds: str, what: str, dtype: Any) -> Any:
    """Return a contiguous vector of a type; truth values and texts are refused."""
    if not (type(given) is np.ndarray and given.dtype == dtype):
        if isinstance(given, (list, tuple)) and any(isinstance(x, (bool, np.bool_)) for x in given):
            raise InputError(f"{name}: expected {what}, got a truth value")
        try:
            array = np.asarray(given)
        except (TypeError, ValueError, OverflowError):
            array = np.empty(0, object)
        if array.dtype.kind not in kinds and not (array.size == 0 and array.dtype.kind == "f"):
            text = f"{given!r:.60}" if array.dtype.kind in "OUSb" else str(array.dtype)
            raise InputError(f"{name}: expected {what} (at most 63 bits), got {text}")
        if array.ndim == 0 and size is not None:
            array = np.full(size, array)
        if array.dtype.kind == "u" and dtype is np.int64 and array.size and array.max() >= 2**63:
            raise InputError(f"{name}: expected whole numbers below 2**63, got {array.max()}")
        given = array.astype(dtype)
    if given.ndim != 1:
        raise InputError(f"{name}: expected one dimension, got shape {given.shape}")
    if size is not None and len(given) != size:
        raise InputError(f"{name}: expected {size} values, one a job, got {len(given)}")
    return np.ascontiguousarray(given)
