"""`sia` and `allocation` on GPUs of several types: a budget by type, speeds by job and type.

A configuration is a size on one type (a job never spans types), as in Sia (Jayaram Subramanya et
al., SOSP 2023); speeds by job and type are the matrix of Gavel (Narayanan et al., OSDI 2020).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.policies.allocation import best_options
from optsched.cluster.policies.elastic_rule import LAST, PINNED
from optsched.cluster.world.policy import Decision

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.world.policy import ClusterView
    from optsched.model.schedule import IntArray

_TURNS: Final = 20
"""So often each type is chosen for anew; the sum of values rises with every change."""


def several(view: ClusterView) -> bool:
    """Whether the cluster has GPUs of more than one type."""
    return len(np.unique(view.node_type)) > 1


def held_types(view: ClusterView) -> IntArray:
    """Type of the GPUs of every job; -1 for one that holds none."""
    held = np.full(len(view.job), -1, np.int64)
    rows = np.repeat(np.arange(len(view.job)), np.diff(view.held_ptr))
    held[rows] = view.node_type[view.held_node]
    held[view.gpus == 0] = -1
    return held


def on_type(view: ClusterView, jobs: IntArray, kind: int) -> Any:
    """Columns of these jobs, with the GPUs of one type and the speeds on it."""
    work = view.workload
    rates = work.rates_on(list(dict.fromkeys(view.nodes.types))[kind])  # type: ignore[union-attr]
    rows = [np.arange(*view.size_ptr[[i, i + 1]]) for i in jobs]
    speeds = [rates[slice(*work.size_ptr[[j, j + 1]])] for j in view.job[jobs]]
    speeds = [s[: len(r)] for s, r in zip(speeds, rows, strict=True)]
    runs = [s > 0 for s in speeds]
    mine = view.node_type == kind
    columns = (
        "job", "gpus", "at_pass_end", "passes", "preemptible", "remaining", "weight", "submit",
        "done", "starts", "restart_cost", "draining",
    )  # fmt: skip
    return SimpleNamespace(
        time=view.time, free=view.free[mine], capacity=view.capacity[mine],
        size_ptr=np.append(0, np.cumsum([r.sum() for r in runs])).astype(np.int64),
        size=_joined([view.size[row[r]] for row, r in zip(rows, runs, strict=True)]),
        rate=_joined([s[r] for s, r in zip(speeds, runs, strict=True)]),
        **{name: getattr(view, name)[jobs] for name in columns if len(getattr(view, name))},
        **({} if len(view.draining) else {"draining": view.draining}),
    )  # fmt: skip


def _joined(rows: list[Any]) -> IntArray:
    return np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int64)


def decision(view: ClusterView, quota: IntArray, kind: IntArray) -> Decision:
    """GPUs of these types: jobs that start, move or change their size, the largest first."""
    changes = (quota > 0) & ((quota != view.gpus) | (kind != held_types(view)))
    free, nodes = view.free.copy(), dict[int, dict[int, int]]()
    takes = view.capacity > 0
    for i in np.flatnonzero((view.gpus > 0) & ((quota == 0) | changes)).tolist():
        rows = slice(view.held_ptr[i], view.held_ptr[i + 1])
        np.add.at(free, view.held_node[rows], view.held_count[rows] * takes[view.held_node[rows]])
    for i in sorted(np.flatnonzero(changes).tolist(), key=lambda i: -quota[i]):
        need, on = int(quota[i]), dict[int, int]()
        vacant = np.where(view.node_type == kind[i], free, 0)
        while 0 < need <= vacant.sum():
            fits = np.flatnonzero(vacant >= need)
            node = int(fits[np.argmin(vacant[fits])] if len(fits) else np.argmax(vacant))
            on[node] = min(need, int(vacant[node]))
            need -= on[node]
            free[node] -= on[node]
            vacant[node] = 0
        if need == 0:
            nodes[i] = dict(sorted(on.items()))
    quota = np.where(np.diff(view.size_ptr) == 0, -1, quota)
    return Decision(quota, nodes=nodes, best_effort=True)


def allocate(view: ClusterView, fixed: IntArray, rule: Callable[[Any], IntArray]) -> Decision:
    """Jobs by arrival on the type where they are fastest of those with room; shares within it.

    A running job stays on its type. `rule` returns the GPUs of a view of one type.
    """
    kinds, held = range(int(view.node_type.max()) + 1), held_types(view)
    slots = np.diff(view.size_ptr) > 0
    every = np.flatnonzero(slots)
    left = np.array([view.free[view.node_type == kind].sum() for kind in kinds])
    views = [on_type(view, every, kind) for kind in kinds]
    chosen = held.copy()
    for i in every.tolist():
        if held[i] >= 0 and fixed[i] != PINNED:
            least = view.gpus[i] if fixed[i] == LAST else view.size[view.size_ptr[i]]
            left[held[i]] += view.gpus[i] - least
    for row, i in enumerate(every.tolist()):
        if held[i] >= 0:
            continue
        speed = [
            v.rate[v.size_ptr[row]] if v.size_ptr[row] < v.size_ptr[row + 1] else 0 for v in views
        ]
        gang = view.size[view.size_ptr[i]]
        for kind in sorted(kinds, key=lambda kind: -speed[kind]):
            if speed[kind] > 0 and gang <= left[kind]:
                chosen[i], left[kind] = kind, left[kind] - gang
                break
    quota = np.zeros(len(view.job), np.int64)
    for kind in kinds:
        jobs = np.flatnonzero(chosen == kind)
        if len(jobs):
            quota[jobs] = rule(on_type(view, jobs, kind))
    return decision(view, quota, chosen)


def choose(
    view: ClusterView, jobs: IntArray, tables: list[list[dict[int, int]]], left_out: int
) -> Decision:
    """Configurations of little cost: one type after the other, exactly, until nothing improves.

    Parameters
    ----------
    view
        The cluster.
    jobs
        Positions of those that are chosen for.
    tables
        By type and job: cost of every size that it may have there.
    left_out
        Cost of a job without GPUs; one that runs and is not preemptible stays on its type.
    """
    held = held_types(view)[jobs]
    kind, size, quota = held.copy(), view.gpus[jobs], np.zeros(len(view.job), np.int64)
    stays = (held >= 0) & ~view.preemptible[jobs]
    cost = [left_out if t < 0 else tables[t][r][int(g)]
            for r, (t, g) in enumerate(zip(held, size, strict=True))]  # fmt: skip
    budgets = [
        int(view.free[view.node_type == t].sum() + size[held == t].sum())
        for t in range(len(tables))
    ]
    for _ in range(_TURNS):
        before = sum(cost)
        for t, table in enumerate(tables):
            rows = []
            for r, options in enumerate(table):
                other = {0: cost[r] if kind[r] not in (t, -1) else left_out}
                if stays[r]:
                    other = {} if held[r] == t else {0: cost[r]}
                    options = options if held[r] == t else {}
                rows.append(other | options)
            flat = [np.array([x for row in rows for x in pick(row)], np.int64)
                    for pick in (dict.keys, dict.values)]  # fmt: skip
            ptr = np.append(0, np.cumsum([len(row) for row in rows]))
            given = best_options(ptr, flat[0], -flat[1], budgets[t])
            for r, g in enumerate(given.tolist()):
                if g > 0 or kind[r] == t:
                    kind[r], size[r], cost[r] = t if g else -1, g, rows[r][g]
        if sum(cost) == before:
            break
    quota[jobs] = size
    chosen = held_types(view)
    chosen[jobs] = kind
    return decision(view, np.where(np.isin(np.arange(len(quota)), jobs), quota, view.gpus), chosen)
