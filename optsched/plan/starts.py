"""What starts now on which GPUs, why the other requests do not, and when they will."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth import BottleneckBandwidth, ClusterState, Dispatcher, Policy
from optsched.errors import InputError
from optsched.model.schedule import Csr, Objective, Schedule
from optsched.plan.changes import Change, Former
from optsched.plan.counts import Counts
from optsched.plan.expected import POLICY, Forecast
from optsched.plan.planner import Planner, Verdict
from optsched.plan.snapshot import ClusterSnapshot, PlanJob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.bandwidth import BandwidthModel
    from optsched.solving.fan_out import Engine


@dataclass(frozen=True, eq=False)
class Plan:
    """Answers to all waiting requests, in the order of the queue.

    Examples
    --------
    >>> from optsched.bandwidth import Cluster, ClusterState, HostType
    >>> from optsched import plan
    >>> state = ClusterState.idle(Cluster.uniform(HostType("h100", 8), 2))
    >>> jobs = [plan.PlanJob(name="a", gpus=12), plan.PlanJob(name="b", gpus=8, submit=1)]
    >>> found = plan.plan(plan.ClusterSnapshot(state, jobs), sigma=0)
    >>> [*found.starts], found.gap
    (['a'], 0.0)
    >>> found.explain()[1]
    'b: ahead of it a get the GPUs. Expected start in 3,600 s (80 %: 3,600 to 3,600 s).'
    """

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
    changes: tuple[Change, ...] = ()
    """What differs from the former plan, and why."""

    def __repr__(self) -> str:
        return f"<Plan by {self.policy}: {len(self.starts)} of {len(self.verdicts)} requests start>"

    @cached_property
    def starts(self) -> Mapping[str, tuple[int, ...]]:
        """GPUs of the requests that start now."""
        return {one.job.name: one.gpus for one in self.verdicts if one.gpus}

    @cached_property
    def gap(self) -> float:
        """Share of the bound that does not start: by topology, bandwidth, or the choice."""
        used = sum(len(one.gpus) for one in self.verdicts if one.job.array is None)
        return max(0.0, 1 - used / self.bound) if self.bound else 0.0

    def explain(self) -> list[str]:
        """Describe every verdict in a sentence."""
        written, found = self.snapshot.state.written, []
        apart = len(self.snapshot.cluster.fabrics) > 1 or () in Counts(self.snapshot).kinds
        for one in self.verdicts:
            if one.gpus:
                rate = "" if one.bandwidth is None else f", {one.bandwidth:.1f} GB/s"
                found.append(f"{one.job.name} starts on {written(one.gpus)}{rate}.")
                continue
            when = "Its start cannot be predicted"
            if one.expected is not None:
                low, likely, high = one.expected
                when = f"Expected start in {likely:,} s (80 %: {low:,} to {high:,} s)"
                if apart or one.job.level is not None or one.job.pod > 1:
                    when += ", later if hosts and levels matter by then"
            found.append(f"{one.job.name}: {one.text}. {when}.")
        return found

    @cached_property
    def schedule(self) -> Schedule:
        """Return GPUs as resources, jobs as operations; the verifier accepts it.

        Running jobs and starts hold their GPUs from time 0 to their expected ends. Requests that
        wait hold no resource (their GPUs are not decided) and begin at the median expected start;
        those without an expected start are left out. ``provenance["plan"]`` has all verdicts.
        """
        state = self.snapshot.state
        rows = [(job, held.gpus, 0, "running") for job, held in self.snapshot.running]
        for one in self.verdicts:
            if one.gpus:
                rows.append((one.job, one.gpus, 0, "starts"))
            elif one.expected is not None:
                rows.append((one.job, (), one.expected[1], "waits"))
        held = Schedule(
            resources=self.snapshot.cluster.resources, name=self.snapshot.name, time_unit="s",
            op_resources=Csr.of([row[1] for row in rows]), job=np.arange(len(rows)),
            duration=np.array([row[0].time_left for row in rows], np.int64),
            kind=np.array([row[3] for row in rows], np.str_),
        )  # fmt: skip
        start = np.array([row[2] for row in rows], np.int64)
        end = int((start + held.duration).max(initial=0))
        return held.with_orders(held.users, start, Objective("makespan", end, None, "feasible"), {
            "jobs": [row[0].name for row in rows], "policy": self.policy,
            "now": self.snapshot.now, "gap": self.gap, "plan": [
                {**one._asdict(), "job": one.job.name, "gpus": state.written(one.gpus),
                 "expected": one.expected and [*one.expected]}
                for one in self.verdicts
            ],
            "running": {job.name: state.written(job.gpus) for job in state.jobs},
            "down": state.written(state.down),
            "changes": [one._asdict() for one in self.changes],
        })  # fmt: skip


def plan(
    snapshot: ClusterSnapshot, *, model: BandwidthModel | None = None, policy: str = POLICY,
    previous: Plan | Schedule | None = None, sigma: float = 0.5,
    factors: Sequence[float] | None = None, later: Sequence[Sequence[PlanJob]] = (),
    samples: int = 50, seed: int = 0, parallel: Engine | None = None,
) -> Plan:  # fmt: skip
    """Decide which waiting requests start now, and predict the starts of the others.

    Priorities are served in turn. Of each, the requests that start together with those chosen
    before have most GPUs: of equal sums, most requests of the former plan, then the earliest.
    An integer program proves it, with all types, levels, pods, quotas and least bandwidths.
    The dispatcher chooses GPUs in the order of the queue, so that all of them start. Job arrays
    of a priority share what is left: a quota plan chooses sizes that keep most GPUs busy. Arrays of
    the former plan that can keep their GPUs do, ahead of other requests of their priority.

    Parameters
    ----------
    snapshot
        The cluster.
    model
        Bandwidths; by default `BottleneckBandwidth`.
    policy
        Policy of the simulator under which expected starts are predicted.
    previous
        A former plan, or its document: requests keep its GPUs unless faster ones are found or
        others need them; `Plan.changes` explains every difference.
    sigma, factors, samples, seed, parallel
        As in `optsched.cluster.expected_starts`; sigma 0: durations are as expected; factors are
        samples of true over expected durations.
    later
        Equally likely lists of jobs that arrive, `submit` after now, such as those of past days:
        policies that fill gaps start some of them before requests that are waiting.

    Raises
    ------
    InputError
        An invalid argument, or a model of another cluster.

    Examples
    --------
    >>> from optsched.bandwidth import Cluster, ClusterState, HostType
    >>> from optsched import plan
    >>> state = ClusterState.idle(Cluster.uniform(HostType("h100", 8), 2))
    >>> jobs = [plan.PlanJob(name="a", gpus=12), plan.PlanJob(name="b", gpus=8, submit=1)]
    >>> found = plan.plan(plan.ClusterSnapshot(state, jobs), sigma=0)
    >>> [(one.job.name, one.why) for one in found.verdicts]
    [('a', ''), ('b', 'order')]
    """
    if not isinstance(snapshot, ClusterSnapshot):
        raise InputError(f"snapshot: expected a ClusterSnapshot, got {snapshot!r:.60}")
    known = BottleneckBandwidth(snapshot.cluster) if model is None else model
    before = None if previous is None else Former.of(previous, snapshot)
    counts = Counts(snapshot)
    draws = dict(sigma=sigma, factors=factors, samples=samples, seed=seed, parallel=parallel)
    forecast = Forecast(counts, policy, draws, later)  # refuses invalid arguments
    planner = Planner(counts, known, before.starts if before else {})
    for _, same in groupby(snapshot.waiting, key=lambda job: job.priority):
        jobs = list(same)
        arrays = [job for job in jobs if job.array is not None]
        if any(job.name in planner.former for job in arrays):
            planner.place()
            for job in arrays:
                planner.keep(job)
        planner.choose([job for job in jobs if job.array is None])
        if arrays:
            planner.place()
            planner.serve_arrays([job for job in arrays if job.name not in planner.started])
    planner.place()
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
        snapshot, verdicts, policy, planner.bound, planner.state, known.assumed,
        planner.busy_bound, before.changes(verdicts) if before else (),
    )  # fmt: skip


def start_one(
    snapshot: ClusterSnapshot, job: PlanJob, model: BandwidthModel,
    dispatchers: dict[Policy, Dispatcher],
) -> Verdict:  # fmt: skip
    """Decide whether one request starts now, by the rules of `plan`; `dispatchers` is a cache."""
    planner = Planner(Counts(snapshot), model, dispatchers=dispatchers)
    planner.start(job)
    return planner.started.get(job.name) or planner.reason(job)
