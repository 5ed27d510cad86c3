"""Chooses which requests start now, and their GPUs; names the reasons of the others."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from msgspec.structs import replace

from optsched.bandwidth import ClusterState, Dispatcher, Policy
from optsched.bandwidth.topology.rates import KILOBYTES, kilobytes
from optsched.errors import Infeasible
from optsched.io.strict_json import shortened
from optsched.plan.counts import WHOLE, Counts
from optsched.problems.quota.problem import QuotaJob, QuotaPlan
from optsched.solving.solve import solve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.bandwidth import BandwidthModel
    from optsched.plan.snapshot import PlanJob

Why = Literal["", "quota", "space", "level", "order", "bandwidth", "never"]

DEADLINE: Final = 0.1
"""Seconds for the GPUs of one request."""

_CHOICE_TIME: Final = 2.0
"""Seconds for one choice of requests, or one quota plan of arrays."""


class Verdict(NamedTuple):
    """The answer to one waiting request.

    Examples
    --------
    >>> from optsched.bandwidth import Cluster, ClusterState, HostType
    >>> from optsched import plan
    >>> state = ClusterState.idle(Cluster.uniform(HostType("h100", 8), 2))
    >>> found = plan.plan(plan.ClusterSnapshot(state, [plan.PlanJob(name="a", gpus=20)]))
    >>> found.verdicts[0].why, found.verdicts[0].text
    ('never', 'needs 20 GPUs, the cluster has 16')
    """

    job: PlanJob
    gpus: tuple[int, ...] = ()
    """GPUs on which it starts now; empty if it does not start."""
    bandwidth: float | None = None
    """GB/s that these GPUs get next to the running jobs."""
    why: Why = ""
    """Kind of the reason for which it does not start; empty if it starts."""
    text: str = ""
    """The reason in a sentence."""
    expected: tuple[int, ...] | None = None
    """Percentiles 10, 50 and 90 of its start, seconds from now; None: not known."""


@dataclass
class Planner:
    """The state while requests are placed one after the other."""

    counts: Counts
    model: BandwidthModel
    former: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """GPUs on which requests start in a former plan."""
    dispatchers: dict[Policy, Dispatcher] = field(default_factory=dict)
    started: dict[str, Verdict] = field(default_factory=dict)
    chosen: list[PlanJob] = field(default_factory=list)
    """Requests that will start; their GPUs are not assigned so far."""
    bound: int = 0
    busy_bound: float = 0.0

    def __post_init__(self) -> None:
        snapshot = self.counts.snapshot
        self.state = snapshot.state
        self.left = {g: n - snapshot.used(g) for g, n in snapshot.quotas.items()}

    def choose(self, jobs: Sequence[PlanJob]) -> None:
        """Choose requests of one priority: most GPUs, then planned before, then submitted early."""
        able = [
            job for job in jobs if not self._obstacle(job) and self._has_bandwidth(job, self.state)
            and not self._off_rails(job, self.state)
        ]  # fmt: skip
        if not able:
            return
        every, n = [*self.chosen, *able], len(self.chosen)
        found = self._together(every, self.state, [job.gpus for job in able], (n, 0))
        if found.chosen is None:  # the time ended: the queue decides
            self.bound += sum(job.gpus for job in able)
            self.place()
            for job in able:
                self.start(job)
            return
        self.bound += int(-found.bound)
        worth = [len(able) - k + len(able) ** 2 * (job.name in self.former)
                 for k, job in enumerate(able)]  # fmt: skip
        equal = self._together(every, self.state, worth, (n, int(-found.cost)))
        starts = (equal.chosen or found.chosen).move
        self.chosen = [job for j, job in enumerate(every) if j in starts]

    def place(self) -> None:
        """Assign GPUs to the chosen requests, so that those behind can still start together."""
        while self.chosen:
            job, *self.chosen = self.chosen
            self.start(job)

    def start(self, job: PlanJob) -> None:
        """Start a request on its former GPUs unless others are faster."""
        if job.gpus > self.left.get(job.group, job.gpus):
            return
        options = self._fastest(job, self.state)
        for jobs in (self.chosen, self.counts.snapshot.waiting):  # those that start; all of them
            others = {
                gpu for one in jobs for gpu in self.former.get(one.name, ())
                if one.name != job.name and one.name not in self.started
            }  # fmt: skip
            if options and others.intersection(options[0][0]):
                options = self._fastest(job, self.state.without(others)) + options
        options = self._former(job) + options
        for gpus, value in sorted(options, key=lambda one: -one[1]):
            after = self.state.take(gpus, job.name)
            if not self.chosen or self._together(self.chosen, after).chosen is not None:
                self._take(job, gpus, value)
                return
        if self.state.cluster.rails:  # the model does not know local ids
            return
        found = self._together([job, *self.chosen], self.state)
        if found.assigned is not None:
            gpus = found.assigned.move[0]
            self._take(job, gpus, self._share(gpus)[0])

    def _together(
        self, jobs: Sequence[PlanJob], state: ClusterState, worth: Sequence[int] = (),
        least: tuple[int, int] | None = None, limits: Mapping[str, int] | None = None,
    ) -> Any:  # fmt: skip
        """Find requests of most worth that can start together; without `worth` all of them."""
        from optsched_solvers.moves.starts import most_started

        fixed, gpus = least or (len(jobs), 0)
        counts = self.counts.on(state, jobs)
        worth = [*[0] * fixed, *worth]
        limits = self.left if limits is None else limits
        return most_started(counts, self.model, worth, limits, (fixed, gpus), _CHOICE_TIME)

    def _take(self, job: PlanJob, gpus: tuple[int, ...], value: int) -> None:
        self.state = self.state.take(gpus, job.name)
        self.started[job.name] = Verdict(job, gpus, value / KILOBYTES if job.gpus > 1 else None)
        if job.group in self.left:
            self.left[job.group] -= job.gpus

    def _share(self, gpus: Sequence[int]) -> tuple[int, int]:
        """Return the bandwidth of free GPUs next to the running jobs, and without them."""
        found = self._dispatcher(Policy()).what_if(self.state, gpus, DEADLINE).share
        return found.value, found.standalone

    def _dispatcher(self, policy: Policy) -> Dispatcher:
        if policy not in self.dispatchers:
            self.dispatchers[policy] = Dispatcher(self.state.cluster, self.model, policy=policy)
        return self.dispatchers[policy]

    def _former(self, job: PlanJob) -> list[tuple[tuple[int, ...], int]]:
        """Return the GPUs of the former plan with their bandwidth, if the request may use them."""
        gpus, cluster = self.former.get(job.name, ()), self.state.cluster
        if len(gpus) != job.gpus or not set(gpus) <= set(self.state.free):
            return []
        if self._obstacle(job, ClusterState.with_free(cluster, gpus)):
            return []
        value, alone = self._share(gpus)
        return [(gpus, value)] if alone >= _least(job) else []

    def keep(self, job: PlanJob) -> None:
        """Start an array on the GPUs of a former plan, if it may use them."""
        request, gpus = job.array, self.former.get(job.name, ())
        assert request is not None
        same = job.sized(len(gpus)) if len(gpus) in request.periods else job
        if len(gpus) > job.gpus or len(gpus) > self.left.get(job.group, len(gpus)):
            return
        for kept, value in self._former(same):
            self._take(same, kept, value)
            self.busy_bound += request.weight * request.busy(len(gpus))

    def serve_arrays(self, jobs: Sequence[PlanJob]) -> None:
        """Start job arrays with the GPUs of quota plans, until no other one can start."""
        self.busy_bound += self._shares(jobs, self._free(), {job.name: job.gpus for job in jobs})[1]
        while jobs:
            most = {job.name: job.gpus for job in jobs}
            for group, left in self.left.items():
                same = [job for job in jobs if job.group == group]
                most |= self._shares(same, {"": left}, most)[0]
            chosen = self._shares(jobs, self._free(), most)[0]
            for job in jobs:
                if chosen[job.name]:
                    self.start(job.sized(chosen[job.name]))
            late = [job for job in jobs if job.name not in self.started]
            jobs = late if len(late) < len(jobs) else []

    def _shares(
        self, jobs: Sequence[PlanJob], budget: Mapping[str, int], most: Mapping[str, int]
    ) -> tuple[dict[str, int], float]:
        """Return the GPUs of arrays that keep most of them busy (0: none), and a bound on that."""
        queries = []
        for job in jobs:
            request, sizes = job.array, dict[str, list[int]]()
            assert request is not None
            for kind, free in budget.items():
                known = request.periods if job.type in (None, kind) or not kind else ()
                able = [n for n in known if n <= min(free, most[job.name]) and not
                        self._obstacle(replace(job, gpus=n, type=kind or job.type))]  # fmt: skip
                sizes |= {kind: able} if able else {}
            if sizes:
                utility = {kind: [*map(request.busy, able)] for kind, able in sizes.items()}
                queries.append(QuotaJob(job.name, sizes, utility=utility, weight=request.weight))
        quota = dict.fromkeys([job.name for job in jobs], 0)
        if not queries:
            return quota, 0.0
        problem = QuotaPlan(queries, budget={k: n for k, n in budget.items() if n > 0})
        found = solve(problem, time_limit=_CHOICE_TIME)
        if found.schedule is not None:
            quota |= problem.quota(found.schedule)
        return quota, -(found.lower_bound or problem.lower_bound()) / problem.resolution

    def _free(self) -> dict[str, int]:
        """Count the free GPUs by type."""
        cluster, free = self.state.cluster, defaultdict[str, int](int)
        for host, count in zip(cluster.hosts, self.state.room.tolist(), strict=True):
            free[host.type] += count
        return free

    def _fastest(self, job: PlanJob, state: ClusterState) -> list[tuple[tuple[int, ...], int]]:
        """Return the fastest free GPUs found and their bandwidth; none if they are too slow."""
        if self._obstacle(job, state):
            return []
        try:
            gpus, value, alone = self._best(job, state)
        except Infeasible:
            return []
        return [(gpus, value)] if alone >= _least(job) else []

    def _best(self, job: PlanJob, state: ClusterState) -> tuple[tuple[int, ...], int, int]:
        """Return the fastest free GPUs found, their bandwidth, and that without contention."""
        cluster = state.cluster
        others = [host.name for host in cluster.hosts if job.type not in (None, host.type)]
        dispatcher = self._dispatcher(Policy(
            required=job.level, same_type=job.type is None and len(cluster.types) > 1,
            exclude=tuple(others) or None,
        ))  # fmt: skip
        pod = 1 if job.level == "host" else job.pod
        by_host: list[list[int]] = [[] for _ in cluster.hosts]
        for gpu in state.free:
            by_host[cluster.host_of[gpu]].append(gpu)
        whole = [ids[: len(ids) // pod * pod] for ids in by_host]
        left_over = set(state.free).difference(*whole)
        found = dispatcher.answer(state.without(left_over), job.gpus, DEADLINE)
        if not (cluster.counts(found.gpus) % pod).any():
            return found.gpus, found.value, found.standalone
        if cluster.rails:
            raise Infeasible(f"jobs[{job.name!r:.60}].pod: no pods with equal local ids found")
        cells, choices = self.counts.cells(self.counts.level(job)), []
        for cell in {*cells}:
            fitting = [ids for h, ids in enumerate(whole) if cells[h] == cell
                       and job.type in (None, cluster.hosts[h].type)]  # fmt: skip
            ids = [gpu for one in sorted(fitting, key=len, reverse=True) for gpu in one]
            choices += [tuple(sorted(ids[: job.gpus]))] if len(ids) >= job.gpus else []
        gpus = max(choices, key=self.model.of)
        share = dispatcher.what_if(state, gpus, DEADLINE).share
        return gpus, share.value, share.standalone

    def _has_bandwidth(self, job: PlanJob, state: ClusterState) -> bool:
        """Check whether free GPUs that a request may use have the bandwidth that it needs."""
        return job.bandwidth is None or self._together([job], state, limits={}).chosen is not None

    def _obstacle(
        self, job: PlanJob, state: ClusterState | None = None, has: str = "free are"
    ) -> str:
        """Return why no free GPUs have the right type, pods and domain, or an empty text."""
        state = self.state if state is None else state
        cluster = state.cluster
        kind = f" of type {job.type}" if job.type else ""
        free = state.room.tolist()
        fitting = [h for h, host in enumerate(cluster.hosts) if job.type in (None, host.type)]
        alike = " of one type" if not job.type and len(cluster.types) > 1 else ""
        joined = f"{alike} in one {cluster.levels[0]}" if len(cluster.fabrics) > 1 else alike

        def most(level: int, size: int) -> int:
            cells, total = self.counts.cells(level), defaultdict[int, int](int)
            for h in fitting:
                total[cells[h]] += free[h] // size * size
            return max(total.values(), default=0)

        if (known := most(WHOLE, 1)) < job.gpus:
            return f"needs {job.gpus} GPUs{kind}, {has} {known}{joined}"
        if job.level != "host" and (pods := most(WHOLE, job.pod)) < job.gpus:
            size = f"{job.gpus // job.pod} x {job.pod} GPUs{kind}, each {job.pod} on one host"
            return f"needs {size}, {has} {pods // job.pod} x {job.pod}{joined}"
        if job.level is None:
            return ""
        inside = most(self.counts.level(job), 1 if job.level == "host" else job.pod)
        if inside >= job.gpus:
            return ""
        across = f"{job.gpus} GPUs{kind} fit only across several {job.level}s"
        return f"{across}, {has} {inside}{alike} in one"

    def reason(self, job: PlanJob) -> Verdict:
        """Return the reason for which a request does not start."""
        snapshot = self.counts.snapshot
        quota, used = snapshot.quotas.get(job.group), snapshot.used(job.group)
        if quota is not None and job.gpus > quota:
            return Verdict(job, why="never", text=f"needs {job.gpus} GPUs, the quota of group "
                           f"{job.group} is {quota}")  # fmt: skip
        usable = set(range(snapshot.cluster.n_gpus)) - set(snapshot.state.down)
        empty = ClusterState.with_free(snapshot.cluster, usable)
        has = f"{'without GPUs that are down ' * bool(snapshot.state.down)}the cluster has"
        if text := self._obstacle(job, empty, has) or self._slow(job, empty):
            return Verdict(job, why="never", text=text)
        if quota is not None and used + job.gpus > quota:
            held = f"group {job.group} holds {used} of its quota of {quota} GPUs"
            return Verdict(job, why="quota", text=f"{held}, {job.gpus} more exceed it")
        if text := self._obstacle(job, snapshot.state):
            return Verdict(job, why="level" if "only across" in text else "space", text=text)
        if self._off_rails(job, snapshot.state):
            text = "free GPUs of several hosts have different local ids, rails need equal ones"
            return Verdict(job, why="space", text=text)
        if text := self._slow(job, snapshot.state):
            return Verdict(job, why="bandwidth", text=text)
        limited = quota is not None and job.gpus > self.left[job.group]
        ahead = [
            name for name, one in self.started.items()
            if one.job.priority <= job.priority and (not limited or one.job.group == job.group)
        ]  # fmt: skip
        what = f"use the quota of group {job.group}" if limited else "get the GPUs"
        names = shortened(ahead) if ahead else "other requests"
        return Verdict(job, why="order", text=f"ahead of it {names} {what}")

    def _off_rails(self, job: PlanJob, state: ClusterState) -> bool:
        """Check whether a request finds no GPUs because hosts need equal local ids."""
        return state.cluster.rails and not self._fastest(job, state)

    def _slow(self, job: PlanJob, state: ClusterState) -> str:
        """Describe the bandwidth that a request lacks on all free GPUs, or return an empty text."""
        if self._has_bandwidth(job, state):
            return ""
        best = self._best(job, ClusterState.with_free(state.cluster, state.free))[2] / KILOBYTES
        return f"the best free GPUs found have {best:.1f} GB/s, it needs {job.bandwidth:g}"


def _least(job: PlanJob) -> int:
    """Return the bandwidth that a request needs, in kB/s."""
    return 0 if job.bandwidth is None else kilobytes("bandwidth", job.bandwidth)
