"""Expected starts of waiting jobs: the simulator, from the present state of the cluster."""

from __future__ import annotations

from statistics import mode
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from optsched.bandwidth.topology.state import host_counts
from optsched.cluster import WORK, Group, Job, Nodes, Start, Stay, Table, Workload, expected_starts
from optsched.cluster import policies as registry
from optsched.cluster.results.metrics import nearest_rank
from optsched.errors import InputError
from optsched.plan.snapshot import PlanJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.plan.counts import Counts
    from optsched.plan.snapshot import ClusterSnapshot

POLICY: Final = "fifo:backfill=first_fit"

PERCENTILES: Final = (10, 50, 90)

_LEAST_PRIORITY: Final = 99
"""Of the simulator, which has priorities from 1."""

LISTS, MOST_LATER = 10, 1_000
"""Lists of later arrivals that a history gives, and jobs in each of them."""


class PastJobs(NamedTuple):
    """What past jobs say about durations, and about the jobs that arrive from now on.

    Examples
    --------
    >>> from optsched.plan import PastJobs
    >>> PastJobs(factors=[0.5, 1.0, 2.0], arrivals=[]).factors
    [0.5, 1.0, 2.0]
    """

    factors: list[float]
    """Durations over their mean."""
    arrivals: list[list[PlanJob]]
    """Equally likely arrivals, as `plan` takes them."""


def past_jobs(trace: Workload, snapshot: ClusterSnapshot) -> PastJobs:
    """Take durations, and arrivals after ten moments of the first half, from a trace of past jobs.

    Later jobs have the most frequent priority of the waiting jobs, and the mean duration of the
    trace as their expectation.

    Examples
    --------
    >>> from optsched.bandwidth import Cluster, ClusterState, HostType
    >>> from optsched import cluster, plan
    >>> state = ClusterState.idle(Cluster.uniform(HostType("h100", 8), 2))
    >>> jobs = [cluster.Job(name=f"{k}", sizes=(8,), work=10**9) for k in range(4)]
    >>> trace = cluster.Workload.of(jobs, time_unit="s")
    >>> past = plan.past_jobs(trace, plan.ClusterSnapshot(state))
    >>> past.factors, len(past.arrivals)
    ([1.0, 1.0, 1.0, 1.0], 10)
    """
    if trace.time_unit != "s":
        raise InputError(f"history: expected jobs with times in s, got {trace!r:.80}")
    gpus = trace.size[trace.size_ptr[1:] - 1]  # the largest size of every job
    rate = trace.rate[trace.size_ptr[1:] - 1]
    known = np.flatnonzero((rate > 0) & (gpus > 0))
    if not len(known):
        raise InputError("history: expected jobs with GPUs")
    seconds = trace.work[known] / rate[known]
    mean, submit = float(seconds.mean()), trace.submit[known]
    order = np.argsort(submit, kind="stable")
    priority = mode([job.priority for job in snapshot.waiting] or [50])  # the default
    names, arrivals = {job.name for job in snapshot.jobs}, []
    for k in range(LISTS):
        first = int(submit.min()) + k * int(submit.max() - submit.min()) // (2 * LISTS)
        rows = [i for i in order.tolist() if submit[i] > first][:MOST_LATER]
        arrivals.append([
            PlanJob(
                name=name, gpus=int(gpus[known[i]]), priority=priority,
                submit=snapshot.now + int(submit[i]) - first, time_left=max(1, round(mean)),
            )
            for i in rows if (name := f"later-{i}") not in names
        ])  # fmt: skip
    return PastJobs((seconds / mean).tolist(), arrivals)


class Forecast:
    """Simulates the cluster from now on, with jobs that start now as running ones.

    Jobs arrive in the order of the queue. The simulator counts GPUs, hosts and types, no levels
    above hosts, pods or bandwidths. If the policy does not honor quotas, each is simulated as a
    cluster without hosts, and the later start counts. `later` are equally likely arrivals.
    """

    def __init__(
        self, counts: Counts, policy: str, draws: dict[str, Any],
        later: Sequence[Sequence[PlanJob]] = (),
    ) -> None:  # fmt: skip
        self.counts, self.policy, self.draws = counts, registry.get(policy), draws
        self.later = later or [()]
        self.quotas = counts.snapshot.quotas
        self.honours = getattr(self.policy, "honours_max_slots", False) is True

    def starts(
        self, started: Sequence[tuple[PlanJob, tuple[int, ...]]], waiting: Sequence[PlanJob]
    ) -> dict[str, tuple[int, ...]]:
        """Return percentiles of the start of `waiting` jobs, in seconds; `started` start now."""
        counts, cluster = self.counts, self.counts.snapshot.cluster
        held = [(job, where.gpus) for job, where in counts.snapshot.running]
        running = [(job, host_counts(cluster, gpus)[0]) for job, gpus in (*held, *started)]
        types = [cluster.types[t].name for t in cluster.type_of]
        nodes = Nodes.of(
            counts.capacity, names=[host.name for host in cluster.hosts],
            types=[""] * len(types) if () in counts.kinds else types,
        )  # fmt: skip
        found = self._simulated(running, waiting, nodes)
        for group, gpus in self.quotas.items():
            mine = [job for job in waiting if job.group == group and job.gpus <= gpus]
            have = [job for job, _ in running if job.group == group]
            if mine and not self.honours:
                now = [(job, {0: job.gpus}) for job in _within(have, gpus)]
                pool = Nodes.of([gpus])
                for name, times in self._simulated(now, mine, pool, group).items():
                    found[name] = tuple(map(max, found[name], times))
        first = min((job.time_left for job, _ in running), default=0)
        return {  # what starts at once lacks what is not simulated, such as levels
            name: times if times[1] else tuple(max(t, first) for t in times)
            for name, times in found.items()
        }

    def _simulated(
        self, running: Sequence[tuple[PlanJob, dict[int, int]]], waiting: Sequence[PlanJob],
        nodes: Nodes, group: str | None = None,
    ) -> dict[str, tuple[int, ...]]:  # fmt: skip
        """Return percentiles of starts on these nodes, with later arrivals of one group or all."""
        urgency = {p: k for k, p in enumerate(sorted({j.priority for j in self.counts.jobs} |
                                                     {j.priority for j in waiting}))}  # fmt: skip
        jobs = [self._job(job, 0, urgency, nodes) for job, _ in running]
        jobs += [self._job(job, 1 + k, urgency, nodes) for k, job in enumerate(waiting)]
        now = 1 + len(waiting)
        stays = [Stay(job=job.name, start=0, nodes=at, work=job.elapsed * WORK)
                 for job, at in running]  # fmt: skip
        limits = self.quotas if self.honours else {}
        groups = [Group(name, max_slots=gpus) for name, gpus in limits.items()]
        pooled: dict[str, list[int]] = {job.name: [] for job in waiting}
        samples = -(-self.draws["samples"] // len(self.later))
        for k, arrivals in enumerate(self.later):
            later = [
                self._job(job, now + max(1, job.submit - self.counts.snapshot.now), urgency, nodes)
                for job in arrivals if group in (None, job.group) and job.gpus <= sum(nodes.gpus)
            ]  # fmt: skip
            draws = self.draws | {"samples": samples, "seed": self.draws["seed"] + k}
            ranks = [100 * (i + 0.5) / samples for i in range(samples)]  # all samples
            found = expected_starts(
                Workload.of([*jobs, *later], groups=groups), self.policy, nodes,
                Start(now, tuple(stays)), percentiles=ranks, **draws,
            )  # fmt: skip
            for name, one in found.items():
                pooled[name] += [t - now for t in one.times]
        return {
            name: tuple(int(nearest_rank(np.array(times), p)) for p in PERCENTILES)
            for name, times in pooled.items()
        }

    def _job(self, job: PlanJob, submit: int, urgency: dict[int, int], nodes: Nodes) -> Job:
        """Return a job that lasts as long as expected, on its type only."""
        return Job(
            name=job.name, submit=submit, sizes=(job.gpus,), group=job.group,
            work=(job.estimate or job.elapsed + job.time_left) * WORK,
            speedup=Table({1: 1.0, job.gpus: 1.0}),
            priority=min(_LEAST_PRIORITY, 1 + urgency.get(job.priority, _LEAST_PRIORITY)),
            speeds={kind: float(kind == job.type) for kind in {*nodes.types}
                    if job.type is not None and kind},
        )  # fmt: skip


def _within(jobs: Sequence[PlanJob], quota: int) -> list[PlanJob]:
    """Drop GPUs beyond a quota, of jobs that end first: nothing starts when those get free."""
    sizes, excess = {job.name: job.gpus for job in jobs}, sum(job.gpus for job in jobs) - quota
    for job in sorted(jobs, key=lambda job: job.time_left):
        sizes[job.name] -= min(job.gpus, max(0, excess))
        excess -= job.gpus
    return [replace(job, gpus=sizes[job.name]) for job in jobs if sizes[job.name]]
