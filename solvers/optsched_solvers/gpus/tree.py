"""Branch and bound over count vectors chooses GPUs: for one request, and for several at once."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.bandwidth.models.tables import BY_MASK, GPUS, INTRA, RECORD, RECORDS
from optsched.bandwidth.placement.problem import GpuSets
from optsched.bandwidth.search.ask import gpus_of
from optsched.bandwidth.topology.intra import subset_sizes
from optsched.bandwidth.topology.rates import NO_LIMIT
from optsched.bandwidth.topology.state import host_counts
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers.gpus.counts import nothing_found
from optsched_solvers.gpus.vectors import CountVectors, claim

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

MOST_VECTORS: Final = 200_000
"""Count vectors, which are all judged first."""

_STEP: Final = 32
"""Vectors between two bounds that are told."""


def supports(problem: Problem) -> Support:
    """Any joint allocations for one request; for several see `batch.supports`."""
    from optsched.bandwidth.placement.problem import GpuPlacement

    if not isinstance(problem, GpuPlacement):
        return Support(False, "it is no choice of GPUs")
    if not problem.model.intra_monotone:
        return Support(False, "the model may rate a choice lower that has faster hosts")
    if problem.tables is None:
        return Support(False, "the model has no tables by counts for this cluster")
    if len(problem.requests) > 1:
        from optsched_solvers.gpus import batch

        return batch.supports(problem)
    number = CountVectors(problem, problem.requests[0]).count()
    if number > MOST_VECTORS:
        return Support(False, f"it judges up to {MOST_VECTORS} count vectors, not {number}")
    return Support(True)


def solve(problem: Any, limits: Limits, monitor: Monitor) -> Result:
    """Count vectors by falling bound, in each the best subsets of its hosts; one iteration is one.

    The bound of a vector has the best subset of each host for the choice, and for its joint
    allocations; where these depend on counts only it is had.
    """
    if len(problem.requests) > 1:
        from optsched_solvers.gpus import batch

        return batch.solve(problem, limits, monitor)
    vectors = CountVectors(problem, problem.requests[0])
    left = 2**62 if limits.iterations is None else limits.iterations
    exact = problem.contention.fill == "exact"
    levels = vectors.levels()
    for level in levels:
        rows, bounds = _ranked(vectors, level)
        best = -1
        for i, (row, bound) in enumerate(zip(rows, bounds.tolist(), strict=True)):
            # at a preferred level there may be no choice, and a higher one at the next
            if (best >= 0 or level == levels[-1]) and (i % _STEP == 0 or bound <= best):
                claim(problem, monitor, max(bound, best), "branch_and_bound", best)
            if bound <= best:
                break
            if left <= 0 or monitor.should_stop():
                return Result("unknown")
            left -= 1
            monitor.advance(1)
            value, gpus = _best_subsets(vectors, row) if exact else (bound, vectors.gpus(row))
            if value > best:
                best = value
                monitor.incumbent(GpuSets.of([gpus]), -value, "branch_and_bound")
        else:
            if best >= 0:
                claim(problem, monitor, best, "branch_and_bound", best)
        if best >= 0:
            return Result("unknown")
    return nothing_found(problem)


def _ranked(vectors: CountVectors, level: int | None) -> tuple[IntArray, IntArray]:
    """Vectors that obey the policy, by falling bound."""
    rows, bounds = [], []
    for block in vectors.blocks():
        value = vectors.shares(block).value
        kept = (value >= 0) & (vectors.excess(block, level) == 0)
        rows.append(block[kept])
        bounds.append(value[kept])
    if not rows:
        return np.zeros((0, 0), np.int64), np.zeros(0, np.int64)
    every, most = np.concatenate(rows), np.concatenate(bounds)
    order = np.argsort(-most, kind="stable")
    return every[order], most[order]


def _best_subsets(vectors: CountVectors, row: IntArray) -> tuple[int, tuple[int, ...]]:
    """The best GPUs for a vector where joint allocations are those of the real GPUs.

    Host by host the bandwidths of the choice and of every joint allocation are followed; of
    combinations that no other beats in all of these (Pareto) one is kept.
    """
    problem = vectors.problem
    state, rule, cluster = problem.state, problem.contention, problem.cluster
    counts = np.zeros(cluster.n_hosts, np.int64)
    counts[vectors.hosts] = row
    crossing = np.count_nonzero(counts) >= 2 or not rule.cross_only
    jobs = [j for j in vectors.jobs if crossing and ((counts > 0) & (state.held[j] > 0)).any()]
    limits = [vectors.network(counts[None])[0]]  # own, then of every job's joint allocation
    for j in jobs:
        both, held = counts + state.held[j], state.held[j]
        sides = [both] if rule.sides == "one" else [both * (counts > 0), both * (held > 0)]
        limits.append(min(vectors.network(side[None])[0] for side in sides))
    theirs = {j: host_counts(cluster, state.jobs[j].gpus)[1] for j in jobs}
    fronts = np.array([limits], np.int64)
    chosen: list[tuple[tuple[int, int], ...]] = [()]
    for h in range(cluster.n_hosts):
        held = [theirs[j].get(h, 0) for j in jobs]
        if not counts[h] and not any(held):
            continue
        table, masks = _candidates(vectors, h, int(counts[h]), held)
        merged = np.minimum(fronts[:, None], table[None]).reshape(-1, table.shape[1])
        kept = pareto(merged)
        fronts = merged[kept]
        chosen = [
            (*chosen[i // len(masks)], (h, masks[i % len(masks)])) for i in np.flatnonzero(kept)
        ]
    own = fronts[:, 0] - fronts[:, 0] % rule.unit
    value = own.copy()
    if jobs:
        capacity = fronts[:, 1:].min(axis=1)
        capacity -= capacity % rule.unit
        total = own + sum(problem.demands[j] for j in jobs)
        tight = (total > capacity) & (total > 0)
        value[tight] = own[tight] * capacity[tight] // total[tight]
    at = int(value.argmax())
    return int(value[at]), gpus_of(vectors.state, [(h, mask) for h, mask in chosen[at] if mask])


def _candidates(
    vectors: CountVectors, h: int, count: int, held: list[int]
) -> tuple[IntArray, list[int]]:
    """Of a host own and joint bandwidths of every subset of `count` free GPUs that matters."""
    words = vectors.tables.words
    record = words[words[RECORDS] + h * RECORD :][:RECORD]
    free, n = int(vectors.state.masks[h]), int(record[GPUS])
    intra = words[int(record[INTRA]) :]
    alike = vectors.problem.tables.words[int(record[INTRA]) :]  # type: ignore[union-attr]
    if not record[BY_MASK]:
        masks = np.array([count])
        sums = [masks + theirs for theirs in held]
    else:
        every = np.arange(1 << n)
        masks = every[((every & ~free) == 0) & (subset_sizes(n) == count)]
        masks = masks[intra[masks] >= 0]  # a rule on parts of hosts forbids the others
        sums = [masks | theirs for theirs in held]
    own = intra[masks] if count else np.full(len(masks), NO_LIMIT)
    table = np.stack([own, *(alike[both] for both in sums)], axis=1)
    kept = pareto(table)
    return table[kept], masks[kept].tolist()


def pareto(rows: IntArray) -> npt.NDArray[np.bool_]:
    """Rows that none before them equals and none beats in all numbers."""
    kept = np.ones(len(rows), np.bool_)
    for i in np.lexsort(-rows.T[::-1]).tolist():
        if kept[i]:
            beaten = (rows <= rows[i]).all(axis=1)
            beaten[i] = False
            kept &= ~beaten
    return kept


class BranchAndBound:
    """Branch and bound over count vectors; one iteration is one of them."""

    name = "branch_and_bound"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    supports = staticmethod(supports)
    solve = staticmethod(solve)
