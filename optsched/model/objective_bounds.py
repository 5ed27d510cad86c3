"""Lower bounds of the objective of any graph of one iteration, without a search."""

from __future__ import annotations

import heapq
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.model.bounds import makespan_bounds
from optsched.model.graph import Evaluation, evaluate
from optsched.model.objectives import TOTAL, as_makespan, job_ends, per_job

if TYPE_CHECKING:
    from optsched.model.schedule import Problem, Schedule


def objective_bounds(problem: Problem) -> dict[str, int]:
    """Lower bounds of the objective by name; see `makespan_bounds` and `completion_bounds`."""
    if problem.objective_name == TOTAL:
        return completion_bounds(problem.graph())
    reduced, shift = as_makespan(problem)
    return {name: bound - shift for name, bound in makespan_bounds(reduced.graph()).items()}


class _Load(NamedTuple):
    """All operations of one job on one machine, as one operation that may be interrupted."""

    head: int
    duration: int
    weight: int


def completion_bounds(graph: Schedule) -> dict[str, int]:
    """Lower bounds of the sum of w_j C_j of a graph, by name.

    ``chain``: every job ends as early as its arcs allow. ``one_machine``: on one machine each job
    is one operation with the least head of its operations there and all their durations, followed
    by the least tail; with preemption the sum is bounded by mean busy times (Goemans et al. 2002),
    and with equal weights solved by the shortest remaining time. Other jobs end as early as their
    arcs allow. The best machine counts.
    """
    paths = evaluate(graph)
    weight = per_job(graph)
    earliest = job_ends(graph, paths.head + graph.duration).tolist()
    chain = sum(w * max(0, end) for w, end in zip(weight, earliest, strict=True))
    behind = _tails(graph, paths)
    best = 0
    for r in range(graph.n_resources):
        loads, total = [], chain
        on = graph.users[r]
        for j in np.unique(graph.job[on]).tolist():
            mine = on[graph.job[on] == j]
            loads.append(
                _Load(int(paths.head[mine].min()), int(graph.duration[mine].sum()), weight[j])
            )
            total += weight[j] * (min(behind[i] for i in mine.tolist()) - earliest[j])
        best = max(best, total + preemptive_bound(loads))
    return {"chain": chain, "one_machine": best}


def _tails(graph: Schedule, paths: Evaluation) -> list[int]:
    """Least time from the end of every operation to the completion of its job, by its arcs."""
    after, tail = graph.successors, graph.duration.tolist()
    for i in paths.order[::-1].tolist():
        for e in range(after.indptr[i], after.indptr[i + 1]):
            k = int(after.other[e])
            if graph.job[k] == graph.job[i]:
                tail[i] = max(tail[i], int(after.weight[e]) + tail[k])
    return [far - p for far, p in zip(tail, graph.duration.tolist(), strict=True)]


def preemptive_bound(loads: list[_Load]) -> int:
    """A lower bound of the sum of w_j C_j on one machine with releases, even with preemption."""
    bound = _mean_busy_bound(loads)
    weights = {load.weight for load in loads}
    if len(weights) == 1:
        by_remaining = [end for _, end, _ in _preemptive(loads, shortest=True)]
        bound = max(bound, weights.pop() * sum(by_remaining))
    return bound


def _mean_busy_bound(loads: list[_Load]) -> int:
    """``sum w_j (M_j + p_j / 2)``, M_j the mean time at which j runs, by falling ratio w_j / p_j.

    That schedule minimises the sum of w_j M_j, and C_j >= M_j + p_j / 2 in every schedule. Terms
    are rounded down to 2^-32.
    """
    total = 0
    for k, end, area in _preemptive(loads, shortest=False):
        _, duration, weight = loads[k]
        if duration:  # `area` is twice the integral of time over the intervals in which k runs
            total += (weight * (area + duration * duration) << 31) // duration
        else:
            total += weight * end << 32
    return -(-total >> 32)


def _preemptive(loads: list[_Load], *, shortest: bool) -> list[tuple[int, int, int]]:
    """Index, end and twice the integral of time of every load, in the order of ends.

    At any time the released load of the largest weight per duration, or of the shortest remaining
    time, runs.
    """
    remaining = [load.duration for load in loads]
    area, found = [0] * len(loads), []
    order = sorted(range(len(loads)), key=lambda k: loads[k].head)
    ratios = [(not load.weight, Fraction(load.duration, load.weight or 1)) for load in loads]
    ranked = sorted(range(len(loads)), key=ratios.__getitem__)
    rank = {k: place for place, k in enumerate(ranked)}
    ready: list[tuple[int, int]] = []
    now = at = 0
    while at < len(order) or ready:
        if not ready:
            now = max(now, loads[order[at]].head)
        while at < len(order) and loads[order[at]].head <= now:
            k = order[at]
            heapq.heappush(ready, (remaining[k] if shortest else rank[k], k))
            at += 1
        k = heapq.heappop(ready)[1]
        run = remaining[k]
        if at < len(order):
            run = min(run, loads[order[at]].head - now)
        area[k] += (now + run) ** 2 - now**2
        now += run
        remaining[k] -= run
        if remaining[k]:
            heapq.heappush(ready, (remaining[k] if shortest else rank[k], k))
        else:
            found.append((k, now, area[k]))
    return found
