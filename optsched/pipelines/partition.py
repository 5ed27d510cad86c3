"""Cut a chain of layers into stages: by equal counts, or with the smallest largest stage."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence


def naive(n_layers: int, stages: int) -> list[int]:
    """First layer of every stage and the end: layer counts that differ by at most one.

    Returns
    -------
    list of int, length stages + 1
        Stage v holds the layers ``cuts[v] .. cuts[v + 1] - 1``.
    """
    _check(n_layers, stages)
    return [v * n_layers // stages for v in range(stages + 1)]


def balanced(costs: Sequence[int], stages: int) -> list[int]:
    """Cuts that minimise the cost of the costliest stage; exact, by dynamic programming.

    ``best[v][i]`` = least largest cost of v stages over the first i layers
    = min over j of max(best[v-1][j], cost of j .. i-1); O(stages n^2). Of equal cuts the earliest.

    Parameters
    ----------
    costs
        Cost of every layer, >= 0, in any integer unit.
    stages
        Number of stages, at most the number of layers; each gets at least one layer.

    Returns
    -------
    list of int, length stages + 1
        As `naive`.
    """
    n = len(costs)
    _check(n, stages)
    total = [0, *accumulate(costs)]
    best = total[:]  # one stage
    choice: list[list[int]] = []
    for v in range(2, stages + 1):
        row, cut = [0] * (n + 1), [0] * (n + 1)
        for i in range(v, n + 1):
            row[i], cut[i] = min((max(best[j], total[i] - total[j]), j) for j in range(v - 1, i))
        best = row
        choice.append(cut)
    cuts = [n]
    for cut in reversed(choice):
        cuts.append(cut[cuts[-1]])
    return [0, *reversed(cuts)]


def _check(n_layers: int, stages: int) -> None:
    if not 1 <= stages <= n_layers:
        raise InputError(f"stages: expected 1..{n_layers}, the number of layers, got {stages}")
