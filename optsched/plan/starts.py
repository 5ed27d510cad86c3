"""What starts now on which GPUs, why the other requests do not, and when they will."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from optsched.bandwidth import BottleneckBandwidth, ClusterState, Dispatcher, Policy
from optsched.bandwidth.topology.rates import KILOBYTES, kilobytes
from optsched.errors import Infeasible, InputError
from optsched.io.strict_json import shortened
from optsched.model.schedule import Csr, Objective, Schedule
from optsched.plan.counts import WHOLE, Counts
from optsched.plan.expected import POLICY, Forecast
from optsched.plan.snapshot import ClusterSnapshot, PlanJob
from optsched.problems.quota.problem import QuotaJob, QuotaPlan
from optsched.solving.solve import solve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.bandwidth import BandwidthModel

Why = Literal["", "quota", "space", "level", "order", "bandwidth", "never"]

DEADLINE: Final = 0.1
"""Seconds for the GPUs of one request."""

_QUOTA_TIME: Final = 0.5
"""Seconds for one quota plan."""


class Verdict(NamedTuple):
    """The answer to one waiting request."""

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


@dataclass(frozen=True, eq=False)
class Plan:
    """Answers to all waiting requests, in the order of the queue."""

    snapshot: ClusterSnapshot
    verdicts: tuple[Verdict, ...]
    policy: str
    bound: int
    """Most GPUs that could start: by class of priority, after the starts of the classes before."""
    state: ClusterState
    """The cluster after all starts."""
    assumed: tuple[str, ...] = ()
    """What the bandwidth model assumes, a sentence each."""
    busy_bound: float = 0.0
    """Most GPUs, each times the weight of its array, that arrays could keep busy."""

    @cached_property
    def starts(self) -> Mapping[str, tuple[int, ...]]:
        """GPUs of the requests that start now."""
        return {one.job.name: one.gpus for one in self.verdicts if one.gpus}

    @cached_property
    def gap(self) -> float:
        """Share of the bound that does not start: by topology, bandwidth, or the choice."""
        used = sum(len(gpus) for gpus in self.starts.values())
        return max(0.0, 1 - used / self.bound) if self.bound else 0.0

    def explain(self) -> list[str]:
        """Describe every verdict in a sentence."""
        written, found = self.snapshot.state.written, []
        for one in self.verdicts:
            if one.gpus:
                rate = "" if one.bandwidth is None else f", {one.bandwidth:.1f} GB/s"
                found.append(f"{one.job.name} starts on {written(one.gpus)}{rate}.")
                continue
            when = "Its start cannot be predicted."
            if one.expected is not None:
                low, likely, high = one.expected
                when = f"Expected start in {likely:,} s (80 %: {low:,} to {high:,} s)."
                if one.job.level is not None or one.job.pod > 1:
                    when = f"{when[:-1]}, later if hosts and levels matter by then."
            found.append(f"{one.job.name}: {one.text}. {when}")
        return found

    @cached_property
    def schedule(self) -> Schedule:
        """Return GPUs as resources, jobs as operations; the verifier accepts it.

        Running jobs and starts hold their GPUs from time 0 to their expected ends. Requests that
        wait hold no resource (their GPUs are not decided) and begin at the median expected start;
        those without an expected start are left out. ``provenance["plan"]`` has all verdicts.
        """
        rows = [(job, held.gpus, 0, "running") for job, held in self.snapshot.running]
        for one in self.verdicts:
            if one.gpus:
                rows.append((one.job, one.gpus, 0, "starts"))
            elif one.expected is not None:
                rows.append((one.job, (), one.expected[1], "waits"))
        by_gpu: list[list[int]] = [[] for _ in range(self.snapshot.cluster.n_gpus)]
        for i, (_, gpus, _, _) in enumerate(rows):
            for gpu in gpus:
                by_gpu[gpu].append(i)
        start = np.array([row[2] for row in rows], np.int64)
        duration = np.array([row[0].time_left for row in rows], np.int64)
        return Schedule(
            resources=self.snapshot.cluster.resources, name=self.snapshot.name, time_unit="s",
            op_resources=Csr.of([list(row[1]) for row in rows]), duration=duration,
            job=np.arange(len(rows)), kind=np.array([row[3] for row in rows], np.str_),
            start=start, sequences=Csr.of(by_gpu),
            objective=Objective(
                "makespan", int((start + duration).max(initial=0)), None, "feasible"
            ),
            provenance={
                "jobs": [row[0].name for row in rows], "policy": self.policy,
                "now": self.snapshot.now, "gap": self.gap, "plan": [
                    {"job": one.job.name, "gpus": self.snapshot.state.written(one.gpus),
                     "bandwidth": one.bandwidth, "why": one.why, "text": one.text,
                     "expected": None if one.expected is None else list(one.expected)}
                    for one in self.verdicts
                ],
            },
        )  # fmt: skip


def plan(
    snapshot: ClusterSnapshot,
    *,
    model: BandwidthModel | None = None,
    policy: str = POLICY,
    previous: Mapping[str, Sequence[int]] | None = None,
    sigma: float = 0.5,
    samples: int = 50,
    seed: int = 0,
) -> Plan:
    """Decide which waiting requests start now, and predict the starts of the others.

    Classes of priority are served in turn. Within one, quota plans choose the requests that use
    most GPUs within the quotas of groups and the free GPUs of every type; the dispatcher chooses
    their GPUs in the order of the queue. What still fits afterwards starts too. Job arrays of
    the class share what is left: a quota plan chooses sizes that keep most GPUs busy.

    Parameters
    ----------
    snapshot
        The cluster.
    model
        Bandwidths; by default `BottleneckBandwidth`.
    policy
        Policy of the simulator under which expected starts are predicted.
    previous
        `Plan.starts` of a former plan: requests that can keep these GPUs do.
    sigma, samples, seed
        As in `optsched.cluster.expected_starts`; sigma 0: durations are as expected.

    Raises
    ------
    InputError
        An invalid argument, or a model of another cluster.
    """
    if not isinstance(snapshot, ClusterSnapshot):
        raise InputError(f"snapshot: expected a ClusterSnapshot, got {snapshot!r:.60}")
    known = BottleneckBandwidth(snapshot.cluster) if model is None else model
    counts = Counts(snapshot)
    forecast = Forecast(counts, policy, sigma, samples, seed)  # refuses invalid arguments
    planner = _Planner(counts, known)
    for job in snapshot.waiting:
        planner.keep(job, (previous or {}).get(job.name, ()))
    for _, same in groupby(snapshot.waiting, key=lambda job: job.priority):
        left = [job for job in same if job.name not in planner.started]
        planner.serve([job for job in left if job.array is None])
        planner.serve_arrays([job for job in left if job.array is not None])
    late = [job.sized() for job in snapshot.waiting if job.name not in planner.started]
    reasons = {job.name: planner.reason(job) for job in late}
    possible = [job for job in late if reasons[job.name].why != "never"]
    found = [planner.started.get(job.name) for job in snapshot.waiting]
    starts = [(one.job, one.gpus) for one in found if one is not None]
    expected = forecast.starts(starts, possible) if possible else {}
    verdicts = tuple(
        planner.started.get(job.name) or reasons[job.name]._replace(expected=expected.get(job.name))
        for job in snapshot.waiting
    )
    return Plan(
        snapshot, verdicts, policy, planner.bound, planner.state, known.assumed, planner.busy_bound
    )


def start_one(
    snapshot: ClusterSnapshot,
    job: PlanJob,
    model: BandwidthModel,
    dispatchers: dict[Policy, Dispatcher] | None = None,
) -> Verdict:
    """Decide whether one request starts now, ahead of all that wait, by the rules of `plan`.

    A caller with many requests passes the same `dispatchers` each time.
    """
    planner = _Planner(Counts(snapshot), model)
    if dispatchers is not None:
        planner.dispatchers = dispatchers
    planner._start(job)
    return planner.started.get(job.name) or planner.reason(job)


@dataclass
class _Planner:
    """The state while requests are placed one after the other."""

    counts: Counts
    model: BandwidthModel
    started: dict[str, Verdict] = field(default_factory=dict)
    slow: dict[str, str] = field(default_factory=dict)
    """Sentences on requests whose GPUs would be too slow."""
    bound: int = 0
    busy_bound: float = 0.0
    dispatchers: dict[Policy, Dispatcher] = field(default_factory=dict)

    def __post_init__(self) -> None:
        snapshot = self.counts.snapshot
        self.state = snapshot.state
        self.left = {g: n - snapshot.used(g) for g, n in snapshot.quotas.items()}

    def serve(self, jobs: Sequence[PlanJob]) -> None:
        """Start requests of one priority: those of the quota plans, then all that still fit."""
        able = [job for job in jobs if not self._obstacle(job)]
        names = {job.name for job in able if job.group not in self.left}
        for group, left in self.left.items():
            same = [job for job in able if job.group == group]
            names |= {job.name for job in _knapsack(same, {"": left})}
        within = [job for job in able if job.name in names]
        free = self._free()
        chosen = _knapsack(within, free)
        most = sum(job.gpus for job in _knapsack(able, free))
        self.bound += min(most, sum(job.gpus for job in within))
        for job in (*chosen, *(job for job in jobs if job not in chosen)):
            self._start(job)

    def _start(self, job: PlanJob) -> None:
        """Start a request on the fastest free GPUs, if there are any that it may use."""
        if job.gpus > self.left.get(job.group, job.gpus) or self._obstacle(job):
            return
        try:
            gpus, value, alone = self._fastest(job)
        except Infeasible as error:
            self.slow[job.name] = str(error)
            return
        if job.bandwidth is not None and alone < kilobytes("bandwidth", job.bandwidth):
            self.slow[job.name] = (
                f"the best free GPUs found have {alone / KILOBYTES:.1f} GB/s, "
                f"it needs {job.bandwidth:g}"
            )
            return
        self._take(job, gpus, value)

    def _take(self, job: PlanJob, gpus: tuple[int, ...], value: int) -> None:
        self.state = self.state.take(gpus, job.name)
        self.started[job.name] = Verdict(job, gpus, value / KILOBYTES if job.gpus > 1 else None)
        if job.group in self.left:
            self.left[job.group] -= job.gpus

    def keep(self, job: PlanJob, gpus: Sequence[int]) -> None:
        """Start a request on GPUs of a former plan, if they are free and its fields allow them."""
        request = job.array
        sizes = [job.gpus] if request is None else [n for n in request.periods if n <= job.gpus]
        if len(gpus) not in sizes or not set(gpus) <= set(self.state.free):
            return
        same, only = job.sized(len(gpus)), ClusterState.with_free(self.state.cluster, gpus)
        if self._obstacle(same, only) or same.gpus > self.left.get(job.group, same.gpus):
            return
        share = Dispatcher(self.state.cluster, self.model).what_if(self.state, gpus).share
        if job.bandwidth is None or share.standalone >= kilobytes("bandwidth", job.bandwidth):
            self._take(same, tuple(sorted(gpus)), share.value)
            self.bound += len(gpus)
            self.busy_bound += 0.0 if request is None else request.weight * request.busy(len(gpus))

    def serve_arrays(self, jobs: Sequence[PlanJob]) -> None:
        """Start job arrays with the GPUs of quota plans, until no other one can start."""
        free = self._free()
        self.busy_bound += self._shares(jobs, free, {job.name: job.gpus for job in jobs})[1]
        while jobs:
            most = {job.name: job.gpus for job in jobs}
            for group, left in self.left.items():
                same = [job for job in jobs if job.group == group]
                most |= self._shares(same, {"": left}, most)[0]
            chosen = self._shares(jobs, self._free(), most)[0]
            for job in jobs:
                if chosen[job.name]:
                    self._start(job.sized(chosen[job.name]))
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
        found = solve(problem, time_limit=_QUOTA_TIME)
        if found.schedule is not None:
            quota |= problem.quota(found.schedule)
        return quota, -(found.lower_bound or problem.lower_bound()) / problem.resolution

    def _free(self) -> dict[str, int]:
        """Count the free GPUs by type."""
        free: dict[str, int] = defaultdict(int)
        for h, count in enumerate(self.state.room.tolist()):
            free[self.state.cluster.hosts[h].type] += count
        return free

    def _fastest(self, job: PlanJob) -> tuple[tuple[int, ...], int, int]:
        """Return the fastest free GPUs found, their bandwidth, and that without contention."""
        cluster = self.state.cluster
        others = [host.name for host in cluster.hosts if job.type not in (None, host.type)]
        policy = Policy(
            required=job.level, same_type=job.type is None and len(cluster.types) > 1,
            exclude=tuple(others) or None,
        )  # fmt: skip
        if policy not in self.dispatchers:
            self.dispatchers[policy] = Dispatcher(cluster, self.model, policy=policy)
        dispatcher, pod = self.dispatchers[policy], 1 if job.level == "host" else job.pod
        by_host: list[list[int]] = [[] for _ in cluster.hosts]
        for gpu in self.state.free:
            by_host[cluster.host_of[gpu]].append(gpu)
        whole = [ids[: len(ids) // pod * pod] for ids in by_host]
        left_over = set(self.state.free).difference(*whole)
        found = dispatcher.answer(self.state.without(left_over), job.gpus, DEADLINE)
        if not (cluster.counts(found.gpus) % pod).any():
            return found.gpus, found.value, found.standalone
        cells, choices = self.counts.cells(self.counts.level(job)), []
        for cell in {*cells}:
            fitting = [ids for h, ids in enumerate(whole) if cells[h] == cell
                       and job.type in (None, cluster.hosts[h].type)]  # fmt: skip
            ids = [gpu for one in sorted(fitting, key=len, reverse=True) for gpu in one]
            choices += [tuple(sorted(ids[: job.gpus]))] if len(ids) >= job.gpus else []
        gpus = max(choices, key=self.model.of)
        share = dispatcher.what_if(self.state, gpus, DEADLINE).share
        return gpus, share.value, share.standalone

    def _obstacle(
        self, job: PlanJob, state: ClusterState | None = None, all_free: bool = False
    ) -> str:
        """Return why no free GPUs have the right type, pods and domain, or an empty text."""
        state = self.state if state is None else state
        cluster = state.cluster
        kind = f" of type {job.type}" if job.type else ""
        free = self.counts.capacity if all_free else state.room.tolist()
        fitting = [h for h, host in enumerate(cluster.hosts) if job.type in (None, host.type)]

        def most(level: int, size: int) -> int:
            cells, total = self.counts.cells(level), defaultdict[int, int](int)
            for h in fitting:
                total[cells[h]] += free[h] // size * size
            return max(total.values(), default=0)

        has = "the cluster has" if all_free else "free are"
        if (known := most(WHOLE, 1)) < job.gpus:
            return f"needs {job.gpus} GPUs{kind}, {has} {known}"
        if job.level != "host" and (pods := most(WHOLE, job.pod)) < job.gpus:
            return (
                f"needs {job.gpus // job.pod} x {job.pod} GPUs{kind}, each {job.pod} on one host, "
                f"{has} {pods // job.pod} x {job.pod}"
            )
        if job.level is None:
            return ""
        inside = most(self.counts.level(job), 1 if job.level == "host" else job.pod)
        if inside < job.gpus:
            return (
                f"{job.gpus} GPUs{kind} fit only across several {job.level}s, {has} {inside} in one"
            )
        return ""

    def reason(self, job: PlanJob) -> Verdict:
        """Return the reason for which a request does not start."""
        snapshot = self.counts.snapshot
        quota = snapshot.quotas.get(job.group)
        if quota is not None and job.gpus > quota:
            return Verdict(job, why="never", text=f"needs {job.gpus} GPUs, the quota of group "
                           f"{job.group} is {quota}")  # fmt: skip
        if text := self._obstacle(job, snapshot.state, all_free=True):
            return Verdict(job, why="never", text=text)
        if quota is not None and snapshot.used(job.group) + job.gpus > quota:
            text = (
                f"group {job.group} holds {snapshot.used(job.group)} of its quota of {quota} GPUs, "
                f"{job.gpus} more exceed it"
            )
            return Verdict(job, why="quota", text=text)
        if text := self._obstacle(job, snapshot.state):
            return Verdict(job, why="level" if "only across" in text else "space", text=text)
        if job.name in self.slow:
            return Verdict(job, why="bandwidth", text=self.slow[job.name])
        limited = quota is not None and job.gpus > self.left[job.group]
        ahead = [name for name, one in self.started.items()
                 if not limited or one.job.group == job.group]  # fmt: skip
        what = f"use the quota of group {job.group}" if limited else "get the GPUs"
        return Verdict(job, why="order", text=f"ahead of it {shortened(ahead)} {what}")


def _knapsack(jobs: Sequence[PlanJob], budget: Mapping[str, int]) -> list[PlanJob]:
    """Choose the jobs that use most GPUs of the types; type "": any. The queue decides equals."""

    def kinds(job: PlanJob) -> list[str]:
        return [k for k, n in budget.items() if (not k or job.type in (None, k)) and job.gpus <= n]

    able = [job for job in jobs if kinds(job)]
    if len(budget) == 1 and sum(job.gpus for job in able) <= sum(budget.values()):
        return able
    scale = (1 + len(able)) ** 2
    queries = []
    for rank, job in enumerate(able):
        worth = [float(job.gpus * scale + len(able) - rank)]
        queries.append(QuotaJob(
            job.name, sizes={k: [job.gpus] for k in kinds(job)},
            utility=dict.fromkeys(kinds(job), worth),
        ))  # fmt: skip
    if not queries:
        return []
    problem = QuotaPlan(queries, budget={k: n for k, n in budget.items() if n > 0}, resolution=1)
    found = solve(problem, time_limit=_QUOTA_TIME).schedule
    quota = {} if found is None else problem.quota(found)
    return [job for job in able if quota.get(job.name)]
