"""Checked numbers and tables of a scenario; accuracy of width tuples that were not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from optsched.errors import InputError
from optsched.io.values import frozen, label, number, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable

FloatArray = npt.NDArray[np.float64]

NS_PER_MS = 10**6
NEVER: Final = 2**62
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


# accuracy

WIDTHS: Final = (0.25, 0.5, 0.75, 1.0)

PUBLISHED: Final[Mapping[tuple[int, ...], float]] = {
    (0, 0, 0, 0): 70.30, (1, 1, 1, 1): 72.99, (2, 2, 2, 2): 74.93, (3, 3, 3, 3): 76.43,
    (3, 2, 1, 0): 71.35, (2, 3, 0, 1): 72.33, (1, 0, 3, 2): 74.53, (0, 1, 2, 3): 75.33,
}  # fmt: skip
"""Top-1 on CIFAR-100, percent, of four segments at `WIDTHS` (Slim Scheduler, Tables I and II)."""


def additive(known: Mapping[tuple[int, ...], float] = PUBLISHED, widths: int = 4) -> FloatArray:
    """Estimate all tuples: each segment adds its share of the gain of the uniform tuples.

    A = U(0) + sum_k c_k (U(w_k) - U(0)) with U the uniform tuples' accuracies and c >= 0, sum 1,
    by least squares over the mixed tuples; equal shares if none is known. Exact on uniform tuples;
    the published mixed tuples are estimated .26 to .29 points too high.

    Parameters
    ----------
    known
        Percent by tuple of width indices; all uniform tuples among them.
    widths
        W.

    Returns
    -------
    array
        Percent, one axis of length W per segment.

    Raises
    ------
    InputError
        A uniform tuple is missing.
    """
    segments = len(next(iter(known)))
    uniform = [(w,) * segments for w in range(widths)]
    for row in uniform:
        if row not in known:
            raise InputError(f"accuracy: the additive prior needs the uniform tuple {row}")
    gain = np.array([known[row] for row in uniform]) - known[uniform[0]]
    mixed = [row for row in known if len(set(row)) > 1]
    target = np.array([known[row] - known[uniform[0]] for row in mixed])
    share = _shares(gain[np.array(mixed, np.int64).reshape(-1, segments)], target)
    found = np.full((widths,) * segments, known[uniform[0]])
    for k in range(segments):
        found += np.expand_dims(share[k] * gain, [i for i in range(segments) if i != k])
    return found


def nearest(
    known: Mapping[tuple[int, ...], float] = PUBLISHED, widths: npt.ArrayLike = WIDTHS
) -> FloatArray:
    """Estimate every tuple by the nearest known one, as in the paper.

    The distance is L1 in widths, ties go to the lower accuracy. Of the published table this lowers
    the estimate for 90 of the 768 single widenings.
    """
    value = np.asarray(widths, np.float64)
    rows = sorted(known.items(), key=lambda item: (item[1], item[0]))
    points = value[np.array([row for row, _ in rows])]
    segments = points.shape[1]
    every = value[np.indices((len(value),) * segments).reshape(segments, -1).T]
    distance = np.round(np.abs(every[:, None, :] - points[None]).sum(axis=2), 9)
    percent: FloatArray = np.array([one for _, one in rows])[distance.argmin(axis=1)]
    return percent.reshape((len(value),) * segments)


def accuracy_table(
    given: Mapping[str, float] | npt.ArrayLike,
    widths: npt.ArrayLike,
    segments: int,
    prior: str | None = None,
) -> FloatArray:
    """Return the accuracy of all tuples in percent, the last segment's width counting fastest.

    `given` is percent by tuple, ``{"0,1,2,3": 74.5, ...}``, or an array of all; `prior` estimates
    missing tuples: ``"additive"`` or ``"nearest"``. `InputError` names the tuple and the value.
    """
    n = len(np.asarray(widths))
    if prior is not None:
        one_of("accuracy_prior", prior, ("additive", "nearest"))
    if isinstance(given, Mapping):
        percent = np.full((n,) * segments, np.nan)
        for key, value in given.items():
            percent[_indices(key, n, segments)] = non_negative(f"accuracy[{key!r}]", value)
        missing = int(np.isnan(percent).sum())
        if missing and prior is None:
            raise InputError(
                f"accuracy: {missing} of {percent.size} tuples are missing; give "
                'accuracy_prior "additive" or "nearest"'
            )
        if missing == percent.size:
            raise InputError("accuracy: no tuple is given")
        if missing:
            at = np.argwhere(~np.isnan(percent)).tolist()
            known = {tuple(one): float(percent[tuple(one)]) for one in at}
            guess = additive(known, n) if prior == "additive" else nearest(known, widths)
            percent = np.where(np.isnan(percent), guess, percent)
    else:
        percent = table("accuracy", given, max(1, np.ndim(given)))
        if percent.size != n**segments:
            raise InputError(f"accuracy: expected {n**segments} numbers, got {percent.size}")
    flat = percent.ravel()
    for at in np.flatnonzero(~((flat >= 0) & (flat <= 100)))[:1]:
        key = ",".join(map(str, np.unravel_index(at, (n,) * segments)))
        raise InputError(f'accuracy["{key}"]: expected a percentage in 0..100, got {flat[at]}')
    return frozen(np.rint(flat * POINTS) / POINTS)


def _indices(key: Any, n: int, segments: int) -> tuple[int, ...]:
    parts = key.split(",") if isinstance(key, str) else []
    if len(parts) != segments or not {*parts} <= {*map(str, range(n))}:
        raise InputError(
            f"accuracy: expected {segments} indices of widths such as "
            f'"{",".join(["0"] * segments)}", got {key!r:.60}'
        )
    return tuple(int(part) for part in parts)


def _shares(gain: FloatArray, target: FloatArray) -> FloatArray:
    """Least squares over c >= 0 with sum 1."""
    from scipy.optimize import nnls

    n = gain.shape[1]
    if not len(target):
        return np.full(n, 1 / n)
    weight = 1e6 * max(1.0, float(np.abs(gain).max()))  # of the equation that the sum is 1
    found = nnls(np.vstack([gain, np.full(n, weight)]), np.append(target, weight))[0]
    share: FloatArray = found / found.sum()
    return share
