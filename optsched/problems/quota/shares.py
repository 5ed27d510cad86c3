"""Exact shares q_j of the proportional rule: q = clip(mu S, lo, hi) with a given sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray

BITS: Final = 32
"""Of the highest score after quantisation."""


def quantised(scores: Sequence[float]) -> IntArray:
    """Scores as integers, divided by a power of two (ratios of small integers stay exact).

    All ones if all are zero.
    """
    given = np.asarray(scores, np.float64)
    most = float(given.max(initial=0.0))
    if most == 0.0:
        return np.ones(len(given), np.int64)
    exponent = int(np.frexp(most)[1])
    whole: IntArray = np.rint(np.ldexp(given, BITS - exponent)).astype(np.int64)
    return whole


def shares(scores: IntArray, low: IntArray, high: IntArray, total: int, unit: int) -> IntArray:
    """``floor(unit * q_j)`` of the shares q = clip(mu S, low, high) that add up to `total`.

    Jobs of score 0 share equally what is left when all others are at `high`.

    Parameters
    ----------
    scores
        Of `quantised`.
    low, high
        Bounds; ``sum(low) <= total <= sum(high)``.
    total
        GPUs to hand out.
    unit
        Parts of a GPU.
    """
    found = np.zeros(len(scores), np.int64)
    some = scores > 0
    first = min(total - int(low[~some].sum()), int(high[some].sum()))
    for chosen, weights, amount in (
        (some, scores[some], first),
        (~some, np.ones(int((~some).sum()), np.int64), total - first),
    ):
        if chosen.any():
            found[chosen] = _clipped(weights, low[chosen], high[chosen], amount, unit)
    return found


def _clipped(weights: IntArray, low: IntArray, high: IntArray, total: int, unit: int) -> IntArray:
    """Clip and recompute: fix the side that is farther off, until nothing is off."""
    n = len(weights)
    found = np.zeros(n, np.int64)
    free = np.arange(n)
    rest = total
    while len(free):
        weight: Any = weights[free]
        lo: Any = low[free]
        hi: Any = high[free]
        whole = int(weight.sum())
        if int(weight.max()) * max(rest, 1) * unit >= 2**62 or whole * int(hi.max()) >= 2**62:
            weight, lo, hi = (part.astype(object) for part in (weight, lo, hi))
        above = weight * rest - hi * whole
        below = lo * whole - weight * rest
        excess, lack = _positive(above), _positive(below)
        if excess == 0 and lack == 0:
            found[free] = weight * (unit * rest) // whole
            return found
        off, bound = (above > 0, high) if excess >= lack else (below > 0, low)
        fixed = free[off.astype(bool)]
        found[fixed] = unit * bound[fixed]
        rest -= int(bound[fixed].sum())
        free = free[~off.astype(bool)]
    return found


def _positive(amounts: Any) -> int:
    """Sum of the positive ones, without wrapping round."""
    return sum(value for value in amounts.tolist() if value > 0)


__all__ = ["BITS", "quantised", "shares"]
