"""Accuracy of every tuple of widths from the few that somebody measured."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

FloatArray = npt.NDArray[np.float64]

WIDTHS: Final = (0.25, 0.5, 0.75, 1.0)

PUBLISHED: Final[Mapping[tuple[int, ...], float]] = {
    (0, 0, 0, 0): 70.30, (1, 1, 1, 1): 72.99, (2, 2, 2, 2): 74.93, (3, 3, 3, 3): 76.43,
    (3, 2, 1, 0): 71.35, (2, 3, 0, 1): 72.33, (1, 0, 3, 2): 74.53, (0, 1, 2, 3): 75.33,
}  # fmt: skip
"""Top-1 on CIFAR-100, percent, of four segments at `WIDTHS` (Slim Scheduler, Tables I and II)."""

_OFF_DIAGONAL = 0.275


def additive(known: Mapping[tuple[int, ...], float] = PUBLISHED, widths: int = 4) -> FloatArray:
    """Each segment moves the accuracy from that of the narrowest net by its share.

    A = U(0) + sum_k c_k (U(w_k) - U(0)) with U the uniform tuples' accuracies and c >= 0, sum 1,
    by least squares over the mixed tuples; equal shares if none is known. Exact on uniform tuples;
    of the published ones the mixed are estimated .26 to .29 points too high.

    Parameters
    ----------
    known
        Percent by tuple of width indices; all uniform tuples among them.
    widths
        W.

    Returns
    -------
    array
        Percent, one axis of W a segment.

    Raises
    ------
    InputError
        A uniform tuple is missing.
    """
    segments = len(next(iter(known)))
    uniform = [(w,) * segments for w in range(widths)]
    for row in uniform:
        if row not in known:
            raise InputError(f'accuracy: the additive prior needs the uniform tuple "{_key(row)}"')
    gain = np.array([known[row] for row in uniform]) - known[uniform[0]]
    mixed = [row for row in known if len(set(row)) > 1]
    wanted = np.array([known[row] - known[uniform[0]] for row in mixed])
    share = _shares(gain[np.array(mixed, np.int64).reshape(-1, segments)], wanted)
    found = np.full((widths,) * segments, known[uniform[0]])
    for k in range(segments):
        found += np.expand_dims(share[k] * gain, [i for i in range(segments) if i != k])
    return found


def calibrated() -> FloatArray:
    """`additive`, .275 points less off the diagonal: right in the mean of the published tuples."""
    found = additive() - _OFF_DIAGONAL
    for w in range(4):
        found[(w,) * 4] += _OFF_DIAGONAL
    return found


def nearest(
    known: Mapping[tuple[int, ...], float] = PUBLISHED, widths: npt.ArrayLike = WIDTHS
) -> FloatArray:
    """Every tuple as the nearest known one, as the paper has it.

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


def completed(percent: FloatArray, widths: npt.ArrayLike, prior: str) -> FloatArray:
    """A table whose missing tuples (NaN) are estimated; the known ones stay.

    Parameters
    ----------
    percent
        One axis a segment.
    widths
        Ascending.
    prior
        ``"additive"`` or ``"nearest"``.

    Raises
    ------
    InputError
        No tuple known, or for ``"additive"`` a uniform one missing.
    """
    known = {
        tuple(at): float(percent[tuple(at)]) for at in np.argwhere(~np.isnan(percent)).tolist()
    }
    if not known:
        raise InputError("accuracy: no tuple is given")
    guess = additive(known, len(percent)) if prior == "additive" else nearest(known, widths)
    return np.where(np.isnan(percent), guess, percent)


def _shares(gain: FloatArray, wanted: FloatArray) -> FloatArray:
    """Least squares over c >= 0 with sum 1: the best of all sets of positive shares."""
    n = gain.shape[1]
    best, least = np.full(n, 1 / n), np.inf
    if not len(wanted):
        return best
    for size in range(1, n + 1):
        for active in map(list, combinations(range(n), size)):
            base, rest = active[-1], active[:-1]
            part = gain[:, rest] - gain[:, [base]]
            free = np.linalg.lstsq(part, wanted - gain[:, base], rcond=None)[0]
            share = np.zeros(n)
            share[rest], share[base] = free, 1 - free.sum()
            error = float(((gain @ share - wanted) ** 2).sum())
            if (share >= -1e-12).all() and error < least - 1e-12:
                best, least = share, error
    return best


def _key(row: tuple[int, ...]) -> str:
    return ",".join(map(str, row))
