"""How good a choice of GPUs is, and how good predictions of bandwidth are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


def gbe(value: float, best: float) -> float:
    """GPU bandwidth efficiency: what a choice reaches of the exact optimum, 0..1.

    1 where nothing can be reached, as by a single GPU. `InputError` above the optimum: then that
    was none.
    """
    if value < 0 or best < 0:
        raise InputError(f"gbe: expected bandwidths >= 0, got {value} and {best}")
    if value > best:
        raise InputError(f"gbe: {value} is above {best}, which then is no optimum")
    return value / best if best else 1.0


def r_squared(true: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Share of the variance that is explained; of constant values 1 if all are hit, else -inf."""
    y, p = _both(true, predicted)
    rest, total = float(((y - p) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    if total == 0:
        return 1.0 if rest == 0 else -np.inf
    return 1.0 - rest / total


def mape(true: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Mean of the absolute errors relative to the true values, 0.05 = 5 %; true zeros count not."""
    y, p = _both(true, predicted)
    there = y != 0
    if not there.any():
        raise InputError("mape: expected a true value other than 0")
    return float(np.mean(np.abs(y - p)[there] / np.abs(y[there])))


def coverage(true: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike) -> float:
    """Share of the true values within their intervals."""
    y, a = _both(true, low)
    _, b = _both(true, high)
    return float(np.mean((a <= y) & (y <= b)))


def _both(true: npt.ArrayLike, predicted: npt.ArrayLike) -> tuple[Floats, Floats]:
    y, p = np.asarray(true, np.float64), np.asarray(predicted, np.float64)
    if y.ndim != 1 or y.shape != p.shape or not len(y):
        raise InputError(f"metrics: expected two lists of one length, got {y.shape} and {p.shape}")
    return y, p
