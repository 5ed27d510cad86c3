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

FIRST_WIDTH: Final = 0.03
"""Most cost of a change outside a domain in its first model, as a share of the bound."""


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
    cuts: list[Cut], end: float, place: bool = True,
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
    place
        Whether moved jobs need GPUs; without, the result is a lower bound only.
    """
    heuristic: list[Cut] = []
    bound = -math.inf
    while True:
        model = build((*cuts, *heuristic))
        values, low = model.solve(end - time.monotonic())
        if not heuristic:
            bound = low  # other cuts may exclude distributions with faster GPUs
        if values is None or not place:
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

    Each domain that may hold the gang gets a lower bound, by a model without GPUs for moved jobs.
    Then the domain of the lowest bound gets the cheapest plan in which only jobs of the domain and
    cheap ones elsewhere change. Those left out cost at least the bound plus the cheapest of them,
    which is the new bound of the domain; more jobs take part when it is its turn again.
    """
    search = _Search(counts, model, job, earlier, time.monotonic() + seconds)
    best, closed = NOTHING, math.inf
    low = {d: max(0, search.bound(d)) for d in search.near}
    first, width = dict(low), dict.fromkeys(low, 0.0)
    while low and min(low.values()) < min(best.cost, closed) and time.monotonic() < search.end:
        d = min(low, key=low.__getitem__)
        width[d] = min(max(4 * width[d], FIRST_WIDTH * first[d], 1), best.cost - 1 - first[d])
        found, left_out = search.solved(d, width[d], best.cost)
        best = min(best, found, key=lambda one: one.cost)
        low[d] = max(low[d], min(found.bound, first[d] + left_out))
        if left_out == math.inf or low[d] >= best.cost:
            closed = min(closed, low.pop(d))
    bound = min(closed, best.cost, *low.values())
    return best._replace(cost=counts.total(best.cost), bound=counts.total(bound))


class _Search:
    """Models of one request; arguments are those of `cheapest`, and the clock at which to stop."""

    def __init__(
        self, counts: Counts, model: BandwidthModel | None, job: PlanJob,
        earlier: Sequence[Chosen], end: float,
    ) -> None:  # fmt: skip
        self.counts, self.job, self.earlier, self.end = counts, job, earlier, end
        self.ids = GpuIds(counts, model)
        self.cuts: list[Cut] = []
        whole = job.level == "host"
        self.size = job.gpus if whole else job.pod
        self.cells = counts.cells(WHOLE if whole else counts.level(job))
        self.near = jobs_by_domain(counts, self.cells, job)
        self.evict = {
            j for j, one in enumerate(counts.jobs)
            if one.evict is not None and one.priority >= job.priority
        }  # fmt: skip
        self.move = {
            j for j, one in enumerate(counts.jobs)
            if one.move is not None and counts.kinds[j]
        }  # fmt: skip
        limited = job.group in counts.snapshot.quotas
        scarce = sum(counts.free) < job.gpus
        self.distant = {  # evictions that may be necessary wherever the job runs
            j for j in self.evict if scarce or (limited and counts.jobs[j].group == job.group)
        }

    def bound(self, d: int) -> float:
        """Return a lower bound of the cost of a plan with the gang in a domain."""
        evict, move = self.evict & (self.near[d] | self.distant), self.move & self.near[d]
        return self._run(d, evict, move, place=False).bound

    def solved(self, d: int, width: float, cutoff: float) -> tuple[Found, float]:
        """Find a plan below a cost; changes elsewhere that cost more than `width` are left out.

        Also returns the least cost of a change that is left out.
        """
        jobs, near, priced = self.counts.jobs, self.near[d], self.counts.cost
        evict = {j: priced(jobs[j].evict) for j in self.evict - near - self.distant}
        move = {j: priced(jobs[j].move) for j in self.move - near}
        left_out = [cost for cost in (*evict.values(), *move.values()) if cost > width]
        found = self._run(
            d, self.evict - {j for j, cost in evict.items() if cost > width},
            self.move - {j for j, cost in move.items() if cost > width}, cutoff,
        )  # fmt: skip
        return found, min(left_out, default=math.inf)

    def _run(
        self, d: int, evict: set[int], move: set[int], cutoff: float = math.inf, place: bool = True
    ) -> Found:
        """Solve the model of one domain, in which these jobs may change."""

        def build(excluded: Sequence[Cut]) -> MoveModel:
            model = MoveModel(self.counts, evict, move)
            model.add_gang(self.job.gpus // self.size, self.size, self.cells, d)
            add_quota(model, self.job)
            if place:
                model.add_moved()
            model.add_hosts()
            for plan in self.earlier:
                model.add_forbidden(plan.evict, plan.move)
            for cut in excluded:
                model.add_cut(cut)
            model.add_limit(cutoff - 1)
            return model

        return run(build, self.ids, self.job, self.cuts, self.end, place)


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

    Returns the plan, with the cost of its moves; names of the free domains; and a bound on their
    number.
    """
    cluster = counts.snapshot.cluster
    most = counts.unit * (budget + 1) - 1
    most = min(most, sum(counts.cost(job.move) for job in counts.jobs))
    domains = cluster.domains(cluster.level(level))
    inside = {name: [h for h in hosts if counts.capacity[h]] for name, hosts in domains.items()}
    movable = [j for j, job in enumerate(counts.jobs)
               if job.move is not None and counts.kinds[j]]  # fmt: skip
    emptied: dict[str, int] = {}

    def build(excluded: Sequence[Cut]) -> MoveModel:
        model = MoveModel(counts, (), movable)
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
    cost = counts.total(found.cost + (most + 1) * len(free))
    return found._replace(cost=cost), free, limit
