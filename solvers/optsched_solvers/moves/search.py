"""Search for the cheapest evictions and moves: bounds by domain first, then models."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.plan.counts import WHOLE
from optsched_solvers.moves.gpu_ids import Assigned, Chosen, GpuIds
from optsched_solvers.moves.model import MoveModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.bandwidth import BandwidthModel
    from optsched.plan.counts import Counts
    from optsched.plan.snapshot import PlanJob
    from optsched_solvers.moves.gpu_ids import Cut

MOST_NEAR: Final = 4
"""Domains for which plans by changes of their jobs only are made: they limit the last model."""


class Found(NamedTuple):
    """A plan, its cost, and a lower bound; without a plan the cost is infinite."""

    cost: float
    bound: float
    chosen: Chosen | None = None
    assigned: Assigned | None = None
    values: Sequence[int] = ()


NOTHING: Final = Found(math.inf, -math.inf)


def run(
    build: Callable[[Sequence[Cut]], MoveModel], ids: GpuIds, request: PlanJob | None,
    cuts: list[Cut], end: float,
) -> Found:  # fmt: skip
    """Solve a model until the GPUs of its solution have the bandwidths that jobs need.

    Parameters
    ----------
    build
        Makes the model with distributions that are excluded.
    ids, request
        Assign GPUs to numbers by host.
    cuts
        Distributions that are proved too slow; new ones are added.
    end
        Reading of the monotonic clock at which to stop.
    """
    heuristic: list[Cut] = []
    bound = -math.inf
    while True:
        model = build((*cuts, *heuristic))
        values, low = model.solve(end - time.monotonic())
        if not heuristic:
            bound = low  # other cuts may exclude distributions with faster GPUs
        if values is None or not model.place:
            return Found(math.inf, bound)
        chosen = model.chosen(values)
        assigned = ids.assign(chosen, request)
        if not assigned.cuts:
            cost = sum(a * x for a, x in zip(model.cost, values, strict=True))
            return Found(cost, bound, chosen, assigned, values)
        for cut in assigned.cuts:
            (cuts if cut.proved else heuristic).append(cut)
        if time.monotonic() > end:
            return Found(math.inf, bound)


def cheapest(
    counts: Counts, model: BandwidthModel | None, job: PlanJob, earlier: Sequence[Chosen],
    seconds: float,
) -> Found:  # fmt: skip
    """Find the cheapest plan for a gang that contains none of the earlier plans.

    First each domain that may hold the gang gets a lower bound, by a model without GPUs for moved
    jobs; then, from the lowest bound, a plan by changes of the domain's jobs only; last, one model
    of the whole cluster covers the domains with a bound below the best plan.
    """
    cuts: list[Cut] = []
    ids = GpuIds(counts, model)
    end, best = time.monotonic() + seconds, NOTHING
    evictable = [one.priority >= job.priority for one in counts.jobs]
    units, size, level = job.gpus // job.pod, job.pod, counts.level(job)
    if job.level == "host":
        units, size, level = 1, job.gpus, WHOLE
    cells = counts.cells(level)

    def solved(domains: list[int], jobs: set[int] | None, place: bool) -> Found:
        def build(excluded: Sequence[Cut]) -> MoveModel:
            model = MoveModel(counts, jobs, evictable, place)
            model.add_gang(units, size, cells, domains)
            add_quota(model, job)
            if place:
                model.add_moved()
            model.add_hosts()
            for plan in earlier:
                model.add_forbidden(plan.evict, plan.move)
            for cut in excluded:
                model.add_cut(cut)
            model.add_limit(best.cost - 1)
            return model

        return run(build, ids, job, cuts, end)

    near = jobs_by_domain(counts, cells, job)
    group = {j for j, one in enumerate(counts.jobs) if one.group == job.group}
    if job.group not in counts.snapshot.quotas:
        group = set()
    low = {d: max(0, solved([d], jobs, False).bound) for d, jobs in near.items()}
    for d in sorted(near, key=low.__getitem__)[:MOST_NEAR]:
        if low[d] >= best.cost:
            break
        found = solved([d], near[d] | group, True)
        best = min(best, found, key=lambda one: one.cost)
        if len(near[d] | group) == len(counts.jobs):
            low[d] = max(low[d], found.bound)
    bound = min(low.values(), default=math.inf)
    left = [d for d in near if low[d] < best.cost]
    if left:
        found = solved(left, None, True)
        bound = max(found.bound, min(low[d] for d in left))
        best = min(best, found, key=lambda one: one.cost)
    return best._replace(bound=min(bound, best.cost))


def jobs_by_domain(counts: Counts, cells: Sequence[int], job: PlanJob) -> dict[int, set[int]]:
    """By domain that may hold a request, the jobs that run in it."""
    hosts = counts.snapshot.cluster.hosts
    near: dict[int, set[int]] = {
        c: set() for h, c in enumerate(cells) if job.type in (None, hosts[h].type)
    }
    for j, at in enumerate(counts.at):
        for c in {cells[h] for h, _ in at} & near.keys():
            near[c].add(j)
    return near


def add_quota(model: MoveModel, job: PlanJob) -> None:
    """Keep the group of a request within its quota, if need be by evictions."""
    snapshot, jobs = model.counts.snapshot, model.counts.jobs
    if job.group in snapshot.quotas:
        terms = [(v, jobs[j].gpus) for j, v in model.evicted.items() if jobs[j].group == job.group]
        excess = snapshot.used(job.group) + job.gpus - snapshot.quotas[job.group]
        model.row(terms, least=excess)


def most_free(
    counts: Counts, model: BandwidthModel | None, level: str, budget: int, seconds: float
) -> tuple[Found, list[str], int]:
    """Find moves that leave most domains of a level free.

    Returns
    -------
    tuple
        The plan, with the cost of its moves; names of the free domains; and a bound on their
        number.
    """
    cluster = counts.snapshot.cluster
    most = min(budget, sum(job.move or 0 for job in counts.jobs))
    domains = cluster.domains(cluster.level(level))
    inside = {name: [h for h in hosts if counts.capacity[h]] for name, hosts in domains.items()}
    emptied: dict[str, int] = {}

    def build(excluded: Sequence[Cut]) -> MoveModel:
        model = MoveModel(counts, None, [False] * len(counts.jobs), True)
        model.row([(v, model.cost[v]) for v in model.moved.values()], most=most)
        emptied.clear()
        for name, hosts in inside.items():
            if hosts and all(model.most_free[h] == counts.capacity[h] for h in hosts):
                emptied[name] = v = model.variable(1, -most - 1)
                model.gang.update({h: (v, counts.capacity[h]) for h in hosts})
        # GPUs are conserved: without this row the bound is too weak for a proof
        model.row(list(model.gang.values()), most=sum(counts.free))
        model.add_moved()
        model.add_hosts()
        for cut in excluded:
            model.add_cut(cut)
        return model

    found = run(build, GpuIds(counts, model), None, [], time.monotonic() + seconds)
    limit = len(inside) if found.bound == -math.inf else int((most - found.bound) // (most + 1))
    if found.chosen is None:
        free = [name for name, hosts in inside.items()
                if hosts and all(counts.free[h] == counts.capacity[h] for h in hosts)]  # fmt: skip
        return Found(0, 0, Chosen([], {}, {}), Assigned((), {}, [])), free, limit
    free = [name for name, v in emptied.items() if found.values[v]]
    return found._replace(cost=found.cost + (most + 1) * len(free)), free, limit
