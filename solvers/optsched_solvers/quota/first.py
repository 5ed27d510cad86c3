"""An answer in plain Python, for limits that end before kernels are loaded or compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched_solvers.quota.marginal import greedy

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Rows
    from optsched.problems.quota.problem import QuotaPlan
    from optsched.solving.monitor import Monitor


MOST: Final = 20_000
"""Allowed sizes, or GPUs, up to which plain Python takes a fraction of a second."""


def first_answer(plan: QuotaPlan, monitor: Monitor) -> None:
    """Report greedy quotas, placed best-fit, when a limit came before kernels were loaded.

    Only then: it knows no ties and no lexicographic rest. Nothing if there is an answer already,
    where a locality stands in the way, or for large plans.
    """
    some = 0 if plan.is_plain else plan.n_options
    if monitor.solution is not None or max(some, plan.n_gpus) > MOST:
        return
    found = greedy(plan)
    if found is None:
        return
    sizes, kinds = found
    rows = placed(plan, sizes, kinds)
    if rows is not None:
        monitor.incumbent(rows, plan.worth(sizes, kinds), "first")


def placed(plan: QuotaPlan, sizes: IntArray, kinds: IntArray) -> Rows | None:
    """GPUs for quotas within the budgets, large jobs first; None if a locality cannot be kept."""
    kind, gpus, _ = plan.pools
    free = gpus.tolist()
    held: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for j in np.argsort(-sizes, kind="stable").tolist():
        missing = int(sizes[j])
        nodes = [n for n in range(len(free)) if kind[n] == kinds[j]]
        while missing:
            fitting = [n for n in nodes if free[n] >= missing]
            node = min(fitting or nodes, key=lambda n: (free[n] if fitting else -free[n], n))
            taken = min(missing, free[node])
            held[j].append((node, taken))
            free[node] -= taken
            missing -= taken
        held[j].sort()
    ptr = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum([len(row) for row in held], out=ptr[1:])
    flat = np.array([pair for row in held for pair in row], np.int64).reshape(-1, 2)
    rows = plan.numbered(ptr, np.ascontiguousarray(flat[:, 0]), np.ascontiguousarray(flat[:, 1]))
    return None if plan.faults(rows) else rows
