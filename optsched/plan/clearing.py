"""The cheapest evictions and moves that make space for a gang, and moves against fragmentation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import Infeasible, InputError
from optsched.io.values import integer, number
from optsched.plan.counts import Counts
from optsched.plan.snapshot import MOST_COST, ClusterSnapshot, PlanJob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.bandwidth import BandwidthModel, ClusterState

TIME_LIMIT: Final = 10.0


@dataclass(frozen=True, eq=False, kw_only=True)
class MovePlan:
    """Evictions and moves, all at once, and what they achieve.

    `status` is ``"optimal"`` if it is proved that no plan is cheaper (or, of `defragment`, frees
    more domains), else ``"feasible"``.

    Examples
    --------
    >>> from optsched.bandwidth import Cluster, ClusterState, HostType
    >>> from optsched import plan
    >>> state = ClusterState.idle(Cluster.uniform(HostType("h100", 8), 2))
    >>> state = state.take("n01:0-3", "a").take("n02:0-3", "b")
    >>> jobs = [plan.PlanJob(name="a", gpus=4, move=5), plan.PlanJob(name="c", gpus=8, pod=8)]
    >>> best = plan.clear(plan.ClusterSnapshot(state, jobs), "c")
    >>> best.cost, best.status, dict(best.move)
    (5, 'optimal', {'a': (12, 13, 14, 15)})
    """

    snapshot: ClusterSnapshot
    evict: tuple[str, ...] = ()
    """Names of the jobs that are stopped."""
    move: Mapping[str, tuple[int, ...]]
    """New GPUs of the moved jobs, by name."""
    cost: int
    bound: int
    """No plan has a lower cost; of `defragment`: no moves free more domains."""
    status: str
    request: PlanJob | None = None
    gpus: tuple[int, ...] = ()
    """GPUs of the request."""
    level: str = ""
    free: tuple[str, ...] = ()
    """Names of the domains of the level without any job, of `defragment`."""
    before: int = 0  # better plans of the request, of `alternatives`

    def __repr__(self) -> str:
        return f"<MovePlan {self.status}: {len([*self.evict, *self.move])} jobs, cost {self.cost}>"

    def after(self) -> ClusterState:
        """Return the state after all changes, in which the request runs."""
        state = self.snapshot.state
        for name in (*self.evict, *self.move):
            state = state.give(name)
        for name, gpus in self.move.items():
            state = state.take(gpus, name, self.snapshot.state.job(name).demand)
        return state if self.request is None else state.take(self.gpus, self.request.name)

    def explain(self) -> list[str]:
        """Describe the changes, what they achieve and the proof, a sentence each."""
        written, found = self.snapshot.state.written, []
        facts = {job.name: (job, written(at.gpus)) for job, at in self.snapshot.running}
        for name in self.evict:
            job, held = facts[name]
            found.append(f"Evict {name} ({held}, priority {job.priority}): cost {job.evict}.")
        for name, gpus in self.move.items():
            job, held = facts[name]
            found.append(f"Move {name} from {held} to {written(gpus)}: cost {job.move}.")
        found = found or ["No job needs to stop or to move."]
        if self.request is None:
            better = "moves free more"
            found.append(f"Free domains of the level {self.level}: {len(self.free)}.")
        else:
            better = f"plan{' without the changes of those before' * bool(self.before)} is cheaper"
            name, level = self.request.name, self.request.level
            size = f"{self.request.gpus} GPUs{f' within one {level}' if level else ''}"
            found.append(f"{name} gets {size}: {written(self.gpus)}.")
        proof = " (proved)" if self.status == "optimal" else f" than {self.bound}"
        return [*found, f"Total cost {self.cost}; no {better}{proof}."]


def clear(
    snapshot: ClusterSnapshot, request: PlanJob | str, *, model: BandwidthModel | None = None,
    time_limit: float = TIME_LIMIT,
) -> MovePlan | None:  # fmt: skip
    """Find the cheapest evictions and moves after which a request can start.

    A moved job gets as many GPUs on hosts of its type, within its level, with its pods together
    and its least bandwidth. More urgent jobs than the request are not evicted, and the quota of
    its group holds afterwards. Bandwidths are those without contention.

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
    MovePlan or None
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
    return next(iter(alternatives(snapshot, request, 1, model=model, time_limit=time_limit)), None)


def alternatives(
    snapshot: ClusterSnapshot, request: PlanJob | str, k: int, *,
    model: BandwidthModel | None = None, time_limit: float = TIME_LIMIT,
) -> list[MovePlan]:  # fmt: skip
    """Find the k cheapest plans of which none contains the changes of a cheaper one.

    Arguments are those of `clear`; `time_limit` is for each plan. There may be fewer than k.

    Examples
    --------
    >>> from optsched.bandwidth import Cluster, ClusterState, HostType
    >>> from optsched import plan
    >>> state = ClusterState.idle(Cluster.uniform(HostType("h100", 8), 2))
    >>> state = state.take("n01:0-3", "a").take("n02:0-3", "b")
    >>> jobs = [plan.PlanJob(name="a", gpus=4, move=5), plan.PlanJob(name="b", gpus=4, evict=9),
    ...         plan.PlanJob(name="c", gpus=8, level="host")]
    >>> [one.cost for one in plan.alternatives(plan.ClusterSnapshot(state, jobs), "c", 3)]
    [5, 9]
    """
    from optsched_solvers.moves.search import cheapest

    integer("k", k, 1, 100)
    job = snapshot.request(request) if isinstance(request, str) else request
    if not isinstance(job, PlanJob):
        raise InputError(f"request: expected a PlanJob or its name, got {job!r:.60}")
    if job.name in {one.name for one, _ in snapshot.running}:
        raise InputError(f"request: {job.name!r:.60} runs already")
    others = [one for one in snapshot.jobs if one.name != job.name]
    given = ClusterSnapshot(snapshot.state, (*others, job), snapshot.quotas)
    counts, seconds = _checked(given, time_limit)
    plans: list[MovePlan] = []
    earlier: list[Any] = []
    while len(plans) < k:
        found = cheapest(counts, model, job, earlier, seconds)
        if found.bound == math.inf and not plans:
            what = "no evictions and moves of jobs with costs make space for"
            limit = f"; its group has the quota {snapshot.quotas.get(job.group)}"
            raise Infeasible(f"request: {what} {job.name}{limit * (job.group in snapshot.quotas)}")
        if found.chosen is None or found.assigned is None:
            break
        names = [one.name for one in counts.jobs]
        plans.append(MovePlan(
            snapshot=snapshot, evict=tuple(names[j] for j in found.chosen.evict),
            move={names[j]: gpus for j, gpus in found.assigned.move.items()},
            cost=int(found.cost), bound=int(found.bound), request=job, gpus=found.assigned.gang,
            status="optimal" if found.cost == found.bound else "feasible", before=len(plans),
        ))  # fmt: skip
        earlier.append(found.chosen)
        if found.cost == 0 and not found.chosen.evict and not found.chosen.move:
            break
    return plans


def defragment(
    snapshot: ClusterSnapshot, budget: int, *, level: str = "host",
    model: BandwidthModel | None = None, time_limit: float = TIME_LIMIT,
) -> MovePlan:  # fmt: skip
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
        ``"host"``, or the level of the domains to free; GPUs that are down do not matter.
    model, time_limit
        As in `clear`.

    Examples
    --------
    >>> from optsched.bandwidth import Cluster, ClusterState, HostType
    >>> from optsched import plan
    >>> state = ClusterState.idle(Cluster.uniform(HostType("h100", 8), 2))
    >>> state = state.take("n01:0-3", "a").take("n02:0-3", "b")
    >>> snapshot = plan.ClusterSnapshot(state, [plan.PlanJob(name="a", gpus=4, move=5)])
    >>> plan.defragment(snapshot, 10).free
    ('n01',)
    """
    from optsched_solvers.moves.search import most_free

    integer("budget", budget, 0, MOST_COST)
    counts, seconds = _checked(snapshot, time_limit)
    found, free, bound = most_free(counts, model, level, budget, seconds)
    assert found.assigned is not None
    return MovePlan(
        snapshot=snapshot, cost=int(found.cost), bound=bound, level=level, free=tuple(free),
        move={counts.jobs[j].name: gpus for j, gpus in found.assigned.move.items()},
        status="optimal" if len(free) == bound else "feasible",
    )  # fmt: skip


def _checked(snapshot: ClusterSnapshot, time_limit: float) -> tuple[Counts, float]:
    """Refuse invalid arguments; return what a search needs."""
    if snapshot.cluster.rails:
        raise InputError("cluster.rails: moves do not keep local ids equal, as rails need them")
    return Counts(snapshot), number("time_limit", time_limit, above=True, what="seconds")
