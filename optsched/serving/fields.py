"""Checks of single values and arrays of a scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from optsched.errors import InputError
from optsched.io.values import frozen, label, number

if TYPE_CHECKING:
    from collections.abc import Iterable

FloatArray = npt.NDArray[np.float64]

NS_PER_MS = 10**6
POINTS = 10_000
"""Parts of a percentage point in which accuracies are counted."""

MAX_MS = 2**53 / 10**6
"""104 days: as ns every JSON reader represents it exactly."""
MAX_VALUE = 1e12
"""Upper limit of all other numbers."""


def non_negative(place: str, given: Any) -> float:
    """Return a number from 0 to `MAX_VALUE`."""
    return number(place, given, most=MAX_VALUE)


def milliseconds(place: str, given: Any) -> float:
    """Return a duration that fits int64 ns."""
    found = non_negative(place, given)
    if found > MAX_MS:
        raise InputError(f"{place}: expected at most {MAX_MS:.0f} ms, got {given!r:.60}")
    return found


def table(place: str, given: Any, axes: int) -> FloatArray:
    """Return a frozen array with this number of axes and values from 0 to `MAX_VALUE`."""
    try:
        array = np.asarray(given)
    except ValueError:
        raise InputError(f"{place}: expected rows of one length") from None
    if array.dtype.kind not in "iuf" or array.ndim != axes:
        if array.size:
            raise InputError(
                f"{place}: expected {'rows of ' * (axes - 1)}numbers, got {given!r:.60}"
            )
        array = np.zeros((0,) * axes)
    for at in np.argwhere(~((array >= 0) & (array <= MAX_VALUE)))[:1]:
        where = "".join(f"[{i}]" for i in at)
        raise InputError(f"{place}{where}: expected 0 to {MAX_VALUE:g}, got {array[tuple(at)]}")
    return frozen(array.astype(np.float64))


def work_table(place: str, given: Any, widths: int) -> FloatArray:
    """Return [segment][input width][width]; the rows of segment 0 are all its first one."""
    if not isinstance(given, (list, tuple, np.ndarray)) or not len(given):
        raise InputError(f"{place}: expected a table [segment][input width][width]")
    rows = []
    for k, part in enumerate(given):
        found = table(f"{place}[{k}]", part, 2)
        expected = (widths, widths) if k or found.shape == (widths, widths) else (1, widths)
        if found.shape != expected:
            raise InputError(f"{place}[{k}]: expected shape {expected}, got {found.shape}")
        rows.append(np.repeat(found[:1], widths, axis=0) if k == 0 else found)
    return frozen(np.array(rows))


def times(place: str, given: Any) -> npt.NDArray[np.int64]:
    """Return milliseconds as whole ns, rounded up beyond the last bit of the float."""
    found = table(place, given, 1)
    for i in np.flatnonzero(found > MAX_MS)[:1]:
        raise InputError(f"{place}[{i}]: expected at most {MAX_MS:.0f} ms, got {found[i]:g}")
    exact = found * 1e6
    near = np.rint(exact)
    whole = np.abs(exact - near) <= np.maximum(1e-3, exact * 4e-16)
    rounded: FloatArray = np.where(whole, near, np.ceil(exact))
    return frozen(rounded.astype(np.int64))


def identifiers(place: str, given: Iterable[Any]) -> list[int | str]:
    """Return distinct names, integers or strings."""
    seen: dict[int | str, int] = {}
    for i, name in enumerate(given):
        whole = isinstance(name, (int, np.integer)) and not isinstance(name, bool)
        found = int(name) if whole else label(f"{place}[{i}].id", name)
        if found in seen:
            raise InputError(
                f"{place}[{i}].id: {found!r:.60} is also the id of {place}[{seen[found]}]"
            )
        seen[found] = i
    return list(seen)
