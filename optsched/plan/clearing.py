"""The cheapest evictions and moves that make space for a gang, and moves against fragmentation."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from optsched.bandwidth import ClusterState, Job
from optsched.errors import Infeasible, InputError
from optsched.io.values import integer, number
from optsched.plan.gpu_ids import Assigned, GpuIds
from optsched.plan.moves import WHOLE, Chosen, Counts, Cut, MoveModel
from optsched.plan.snapshot import MOST_COST, ClusterSnapshot, PlanJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from optsched.bandwidth import BandwidthModel

TIME_LIMIT: Final = 10.0

MOST_ALTERNATIVES: Final = 100

MOST_NEAR: Final = 4
"""Domains for which plans by changes of their jobs only are made: they limit the last model."""


@dataclass(frozen=True, eq=False)
class _Moves:
    """Moves of running jobs on a cluster."""

    snapshot: ClusterSnapshot
    move: Mapping[str, tuple[int, ...]]
    """New GPUs of the moved jobs, by name."""
    cost: int
    bound: int

    def _sentences(self) -> list[str]:
        """Describe every move."""
        state = self.snapshot.state
        facts = {job.name: job for job, _ in self.snapshot.running}
        return [
            f"Move {name} from {state.written(state.job(name).gpus)} to {state.written(gpus)}: "
            f"cost {facts[name].move}."
            for name, gpus in self.move.items()
        ]

    def _state(self, evict: Iterable[str] = (), start: Iterable[Job] = ()) -> ClusterState:
        """Return the state after all changes at once."""
        old, gone = self.snapshot.state, set(evict)
        jobs = [
            Job(job.name, self.move.get(job.name, job.gpus), job.demand)
            for job in old.jobs
            if job.name not in gone
        ] + [*start]
        used = set(old.down).union(*(job.gpus for job in jobs))
        free = tuple(gpu for gpu in range(old.cluster.n_gpus) if gpu not in used)
        return ClusterState(old.cluster, free, tuple(jobs), old.down, old.unknown)


@dataclass(frozen=True, eq=False)
class Clearing(_Moves):
    """Evictions and moves after which a request has its GPUs."""

    request: PlanJob
    evict: tuple[str, ...]
    """Names of the jobs that are stopped."""
    gpus: tuple[int, ...]
    """GPUs of the request."""

    @property
    def status(self) -> str:
        """``"optimal"``: no plan is cheaper, proved; else ``"feasible"``."""
        return "optimal" if self.cost == self.bound else "feasible"

    def after(self) -> ClusterState:
        """Return the state in which the request runs."""
        return self._state(self.evict, [Job(self.request.name, self.gpus)])

    def explain(self) -> list[str]:
        """Describe evictions, moves, the GPUs of the request and the proof, a sentence each."""
        state, name = self.snapshot.state, self.request.name
        facts = {job.name: job for job, _ in self.snapshot.running}
        found = [
            f"Evict {one} ({facts[one].gpus} GPUs on {state.written(state.job(one).gpus)}, "
            f"priority {facts[one].priority}): cost {facts[one].evict}."
            for one in self.evict
        ]
        found += self._sentences()
        if not found:
            found = ["No job needs to stop or to move."]
        level = f" within one {self.request.level}" if self.request.level else ""
        found.append(f"{name} gets {self.request.gpus} GPUs{level}: {state.written(self.gpus)}.")
        proof = "no plan is cheaper (proved)"
        if self.status != "optimal":
            proof = f"no plan is cheaper than {self.bound}"
        return [*found, f"Total cost {self.cost}; {proof}."]


@dataclass(frozen=True, eq=False)
class Defragmented(_Moves):
    """Moves that leave most domains without any job; `bound`: no moves leave more."""

    level: str
    domains: tuple[str, ...]
    """Names of the free domains."""
    free_before: int
    """Number of free domains without moves."""

    @property
    def status(self) -> str:
        """``"optimal"``: no moves within the budget free more domains; else ``"feasible"``."""
        return "optimal" if len(self.domains) == self.bound else "feasible"

    def after(self) -> ClusterState:
        """Return the state after the moves."""
        return self._state()

    def explain(self) -> list[str]:
        """Describe the moves and what they free, a sentence each."""
        proof = "no moves within the budget free more (proved)"
        if self.status != "optimal":
            proof = f"at most {self.bound} can be free within the budget"
        return [
            *self._sentences(),
            f"{len(self.domains)} {self.level}s are free, {self.free_before} before; {proof}.",
            f"Total cost {self.cost}.",
        ]


class _Search:
    """Solves models until the GPUs of a solution have the bandwidths that jobs need."""

    def __init__(
        self, counts: Counts, request: PlanJob | None, model: BandwidthModel | None, seconds: float
    ) -> None:
        self.counts, self.request = counts, request
        self.ids = GpuIds(counts, model)
        self.end = time.monotonic() + number("time_limit", seconds, above=True, what="seconds")
        self.cuts: list[Cut] = []

    def run(self, build: Callable[[Sequence[Cut]], MoveModel]) -> tuple[Any, float, float]:
        """Return the assigned solution (None: none), its cost, and a lower bound."""
        heuristic: list[Cut] = []
        bound = -math.inf
        while True:
            model = build((*self.cuts, *heuristic))
            values, low = model.solve(self.end - time.monotonic())
            if not heuristic:
                bound = low
            if values is None or not model.place:
                return None, math.inf, bound
            chosen = model.chosen(values)
            assigned = self.ids.assign(chosen, self.request)
            if not assigned.cuts:
                cost = sum(a * x for a, x in zip(model.cost, values, strict=True))
                return (chosen, assigned, model, values), cost, bound
            for cut, exact in assigned.cuts:
                (self.cuts if exact else heuristic).append(cut)
            if time.monotonic() > self.end:
                return None, math.inf, bound


def clear(
    snapshot: ClusterSnapshot,
    request: PlanJob | str,
    *,
    model: BandwidthModel | None = None,
    time_limit: float = TIME_LIMIT,
) -> Clearing | None:
    """Find the cheapest evictions and moves after which a request can start.

    A moved job gets as many GPUs on hosts of its type, within its level, with its pods together
    and its least bandwidth. More urgent jobs than the request are not evicted, and the quota of
    its group holds afterwards. Bandwidths are those without contention.

    First each domain that may hold the request gets a lower bound, by a model without GPUs for
    moved jobs; then, from the lowest bound, a plan by changes of the domain's jobs only; last,
    one model of the whole cluster covers the domains with a bound below the best plan.

    Parameters
    ----------
    snapshot
        The cluster.
    request
        A waiting job, or its name.
    model
        Bandwidths, needed only for jobs with a least one [default: `BottleneckBandwidth`].
    time_limit
        Seconds.

    Returns
    -------
    Clearing or None
        None if the time was too short to find any plan.

    Raises
    ------
    Infeasible
        Proved: no allowed evictions and moves make space for it.

    Examples
    --------
    >>> from optsched import bandwidth, plan
    >>> cluster = bandwidth.synthetic.cluster("nvswitch", 2)
    >>> state = bandwidth.ClusterState.parse(cluster, "n01:4-7 n02:4-7",
    ...                                      {"a": "n01:0-3", "b": "n02:0-3"})
    >>> jobs = [plan.PlanJob(name="a", gpus=4, move=5), plan.PlanJob(name="b", gpus=4, move=3),
    ...         plan.PlanJob(name="c", gpus=8, level="host")]
    >>> found = plan.clear(plan.ClusterSnapshot(state, jobs), "c")
    >>> found.cost, found.status, list(found.move)
    (3, 'optimal', ['b'])
    """
    found = alternatives(snapshot, request, 1, model=model, time_limit=time_limit)
    return found[0] if found else None


def alternatives(
    snapshot: ClusterSnapshot,
    request: PlanJob | str,
    k: int,
    *,
    model: BandwidthModel | None = None,
    time_limit: float = TIME_LIMIT,
) -> list[Clearing]:
    """Find the k cheapest plans of which none contains the changes of a cheaper one.

    Arguments are those of `clear`; `time_limit` is for each plan. There may be fewer than k.
    """
    integer("k", k, 1, MOST_ALTERNATIVES)
    if not isinstance(snapshot, ClusterSnapshot):
        raise InputError(f"snapshot: expected a ClusterSnapshot, got {snapshot!r:.60}")
    if snapshot.cluster.rails:
        raise InputError("cluster.rails: moves do not keep local ids equal, as rails need them")
    job = snapshot.request(request) if isinstance(request, str) else request
    if job.name in {one.name for one, _ in snapshot.running}:
        raise InputError(f"request: {job.name!r:.60} runs already")
    counts = Counts(ClusterSnapshot(snapshot.state, (*_others(snapshot, job), job),
                                    snapshot.quotas, snapshot.now))  # fmt: skip
    plans: list[Clearing] = []
    earlier: list[Chosen] = []
    while len(plans) < k:
        search = _Search(counts, job, model, time_limit)
        chosen, assigned, cost, bound = _cheapest(search, job, earlier)
        if bound == math.inf:
            if not plans:
                raise Infeasible(f"no allowed evictions and moves make space for {job.name}")
            break
        if chosen is None or assigned is None:
            break
        names = [one.name for one in counts.jobs]
        plans.append(Clearing(
            snapshot, {names[j]: gpus for j, gpus in assigned.move.items()}, int(cost), int(bound),
            job, tuple(names[j] for j in chosen.evict), assigned.gang,
        ))  # fmt: skip
        earlier.append(chosen)
        if not chosen.evict and not chosen.move:
            break
    return plans


def _others(snapshot: ClusterSnapshot, job: PlanJob) -> list[PlanJob]:
    return [one for one in snapshot.jobs if one.name != job.name]


def _cheapest(
    search: _Search, job: PlanJob, earlier: Sequence[Chosen]
) -> tuple[Chosen | None, Assigned | None, float, float]:
    """Return the best plan that contains none of the earlier ones, its cost, and a bound."""
    counts = search.counts
    evictable = [one.priority >= job.priority for one in counts.jobs]
    units, size, level = job.gpus // job.pod, job.pod, counts.level(job)
    if job.level == "host":
        units, size, level = 1, job.gpus, WHOLE
    cells = counts.cells(level)

    best: tuple[Any, float] = (None, math.inf)

    def run(domains: list[int], jobs: set[int] | None, place: bool) -> tuple[Any, float, float]:
        def build(cuts: Sequence[Cut]) -> MoveModel:
            model = MoveModel(counts, jobs, evictable, place)
            model.add_gang(units, size, cells, domains)
            _add_quota(model, job)
            if place:
                model.add_moved()
            model.add_hosts()
            for plan in earlier:
                model.add_forbidden(plan.evict, plan.move)
            for cut in cuts:
                model.add_cut(cut)
            model.add_limit(best[1] - 1)
            return model

        found, cost, bound = search.run(build)
        return found, cost, max(0, bound)

    near = _near(counts, cells, job)
    group = {j for j, one in enumerate(counts.jobs) if job.group in search.counts.snapshot.quotas
             and one.group == job.group}  # fmt: skip
    low = {d: run([d], jobs, False)[2] for d, jobs in near.items()}
    for d in sorted(near, key=low.__getitem__)[:MOST_NEAR]:
        if low[d] >= best[1]:
            break
        found, cost, bound = run([d], near[d] | group, True)
        if cost < best[1]:
            best = found, cost
        if len(near[d] | group) == len(counts.jobs):
            low[d] = max(low[d], bound)
    bound = min(low.values(), default=math.inf)
    left = [d for d in near if low[d] < best[1]]
    if left:
        found, cost, bound = run(left, None, True)
        bound = max(bound, min(low[d] for d in left))
        if cost < best[1]:
            best = found, cost
    if best[0] is None:
        return None, None, math.inf, bound
    return best[0][0], best[0][1], best[1], min(bound, best[1])


def _near(counts: Counts, cells: Sequence[int], job: PlanJob) -> dict[int, set[int]]:
    """By domain that may hold a request, the jobs that run in it."""
    cluster = counts.snapshot.cluster
    near: dict[int, set[int]] = {
        c: set() for h, c in enumerate(cells) if job.type in (None, cluster.hosts[h].type)
    }
    for j, hosts in enumerate(counts.at):
        for c in {cells[h] for h, _ in hosts} & near.keys():
            near[c].add(j)
    return near


def _add_quota(model: MoveModel, job: PlanJob) -> None:
    """Keep the group of a request within its quota, if need be by evictions."""
    snapshot = model.counts.snapshot
    if job.group not in snapshot.quotas:
        return
    mine = [(v, model.counts.jobs[j].gpus) for j, v in model.evicted.items()
            if model.counts.jobs[j].group == job.group]  # fmt: skip
    excess = snapshot.used(job.group) + job.gpus - snapshot.quotas[job.group]
    if excess > 0:
        model.row(mine or [(model.variable(0), 1)], least=excess)


def defragment(
    snapshot: ClusterSnapshot,
    budget: int,
    *,
    level: str = "host",
    model: BandwidthModel | None = None,
    time_limit: float = TIME_LIMIT,
) -> Defragmented:
    """Find the moves of limited cost that leave most hosts, or domains, without any job.

    Of several such sets of moves one of the least cost is chosen. Jobs keep type, level, pods and
    least bandwidth as in `clear`.

    Parameters
    ----------
    snapshot
        The cluster.
    budget
        Most cost of the moves together.
    level
        ``"host"``, or the level of the domains to free; those with a GPU that is down count
        without it.
    model, time_limit
        As in `clear`.
    """
    integer("budget", budget, 0, MOST_COST)
    counts, cluster = Counts(snapshot), snapshot.cluster
    search = _Search(counts, None, model, time_limit)
    most = min(budget, sum(job.move or 0 for job in counts.jobs))
    domains = cluster.domains(cluster.level(level))
    inside = {name: [h for h in hosts if counts.capacity[h]] for name, hosts in domains.items()}
    free_before = [
        name for name, hosts in inside.items()
        if hosts and all(counts.free[h] == counts.capacity[h] for h in hosts)
    ]  # fmt: skip
    cleared: dict[str, int] = {}

    def build(cuts: Sequence[Cut]) -> MoveModel:
        moves = MoveModel(counts, None, [False] * len(counts.jobs), True)
        moves.row([(v, moves.cost[v]) for v in moves.moved.values()], most=most)
        cleared.clear()
        for name, hosts in inside.items():
            if hosts and all(moves.most_free[h] == counts.capacity[h] for h in hosts):
                cleared[name] = v = moves.variable(1, -most - 1)
                moves.gang.update({h: (v, counts.capacity[h]) for h in hosts})
        # GPUs are conserved: without this row the bound is too weak for a proof
        moves.row(list(moves.gang.values()), most=sum(counts.free))
        moves.add_moved()
        moves.add_hosts()
        for cut in cuts:
            moves.add_cut(cut)
        return moves

    found, cost, bound = search.run(build)
    limit = len(inside) if bound == -math.inf else int((most - bound) // (most + 1))
    if found is None:
        return Defragmented(snapshot, {}, 0, limit, level, tuple(free_before), len(free_before))
    _, assigned, _, values = found
    free = tuple(name for name, v in cleared.items() if values[v])
    names = [one.name for one in counts.jobs]
    return Defragmented(
        snapshot, {names[j]: gpus for j, gpus in assigned.move.items()},
        int(cost + (most + 1) * len(free)), limit, level, free, len(free_before),
    )  # fmt: skip
