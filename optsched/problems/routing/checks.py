"""Reads the fields of a `Routing`: strict about types, shapes and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from optsched.errors import InputError
from optsched.io.values import label, number

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

A = TypeVar("A", bound="npt.NDArray[Any]")

MOST_TUPLES = 65_536
MOST_MS = 2**53 / 10**6
"""104 days: as ns every JSON reader represents it exactly."""
MOST = 1e12
"""Of any other number."""


def frozen(array: A) -> A:
    """The array, read-only from now on."""
    array.setflags(write=False)
    return array


def non_negative(place: str, given: Any) -> float:
    """A number from 0 to `MOST`."""
    return number(place, given, most=MOST)


def milliseconds(place: str, given: Any) -> float:
    """A duration that fits int64 ns."""
    found = non_negative(place, given)
    if found > MOST_MS:
        raise InputError(f"{place}: expected at most {MOST_MS:.0f} ms, got {given!r:.60}")
    return found


def table(place: str, given: Any, axes: int) -> npt.NDArray[np.float64]:
    """A frozen array of so many axes of numbers from 0 to `MOST`."""
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
    for at in np.argwhere(~((array >= 0) & (array <= MOST)))[:1]:
        where = "".join(f"[{i}]" for i in at)
        raise InputError(f"{place}{where}: expected 0 to {MOST:g}, got {array[tuple(at)]}")
    return frozen(array.astype(np.float64))


def times(place: str, given: Any) -> npt.NDArray[np.int64]:
    """Milliseconds as whole ns, rounded up unless only the last bit of the number is beyond one."""
    found = table(place, given, 1)
    for i in np.flatnonzero(found > MOST_MS)[:1]:
        raise InputError(f"{place}[{i}]: expected at most {MOST_MS:.0f} ms, got {found[i]:g}")
    exact = found * 1e6
    near = np.rint(exact)
    whole = np.abs(exact - near) <= np.maximum(1e-3, exact * 4e-16)
    rounded: npt.NDArray[np.float64] = np.where(whole, near, np.ceil(exact))
    return frozen(rounded.astype(np.int64))


def identifiers(place: str, given: Iterable[Any]) -> list[int | str]:
    """Distinct names, integers or texts."""
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


def accuracy_table(
    given: Mapping[str, float] | npt.ArrayLike,
    widths: npt.NDArray[np.float64],
    segments: int,
    prior: str | None,
) -> npt.NDArray[np.int64]:
    """Accuracies of all tuples in 1/10,000 of a percent."""
    n = len(widths)
    if prior not in (None, "additive", "nearest"):
        raise InputError(f"accuracy_prior: expected additive or nearest, got {prior!r:.60}")
    if isinstance(given, Mapping):
        percent = np.full((n,) * segments, np.nan)
        for key, value in given.items():
            percent[_tuple(key, n, segments)] = non_negative(f"accuracy[{key!r}]", value)
        missing = int(np.isnan(percent).sum())
        if missing:
            if prior is None:
                raise InputError(
                    f"accuracy: {missing} of {percent.size} tuples are missing; give "
                    'accuracy_prior "additive" or "nearest"'
                )
            from optsched.problems.routing.accuracy import completed

            percent = completed(percent, widths, prior)
    else:
        percent = np.asarray(given, np.float64)
        if percent.size != n**segments:
            raise InputError(f"accuracy: expected {n**segments} numbers, got {percent.size}")
    flat = percent.ravel()
    for at in np.flatnonzero(~((flat >= 0) & (flat <= 100)))[:1]:
        key = ",".join(map(str, np.unravel_index(at, (n,) * segments)))
        raise InputError(f'accuracy["{key}"]: expected a percentage in 0..100, got {flat[at]}')
    return frozen(np.rint(flat * 10_000).astype(np.int64))


def _tuple(key: Any, n: int, segments: int) -> tuple[int, ...]:
    parts = key.split(",") if isinstance(key, str) else []
    if len(parts) != segments or not {*parts} <= {*map(str, range(n))}:
        raise InputError(
            f"accuracy: expected {segments} indices of widths such as "
            f'"{",".join(["0"] * segments)}", got {key!r:.60}'
        )
    return tuple(int(part) for part in parts)
