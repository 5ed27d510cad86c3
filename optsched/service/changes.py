"""Requests that change a live cluster, and the changes of its state that a journal keeps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from optsched.bandwidth.topology.rates import kilobytes
from optsched.errors import Infeasible, InputError
from optsched.plan.snapshot import ClusterSnapshot, PlanJob
from optsched.plan.starts import start_one

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.bandwidth import BandwidthModel, ClusterState, Dispatcher, Policy


class Status(NamedTuple):
    """A cluster at one version."""

    version: int
    state: ClusterState
    jobs: Mapping[str, tuple[PlanJob, int]]
    """Facts of running and waiting jobs, and the Unix time at which they were right."""
    quotas: Mapping[str, int]

    @classmethod
    def of(cls, snapshot: ClusterSnapshot, version: int, now: int) -> Status:
        """Read a snapshot that is right at the Unix time `now`."""
        jobs = {}
        for job in snapshot.jobs:
            submit = max(0, job.submit + now - snapshot.now)
            jobs[job.name] = msgspec.structs.replace(job, submit=submit), now
        return cls(version, snapshot.state, jobs, snapshot.quotas)

    def snapshot(self, name: str) -> ClusterSnapshot:
        """Return the cluster at this moment."""
        now, running, jobs = int(time.time()), {job.name for job in self.state.jobs}, []
        for job, at in self.jobs.values():
            past = max(0, now - at) if job.name in running else 0
            elapsed, left = job.elapsed + past, max(1, job.time_left - past)
            jobs.append(msgspec.structs.replace(job, elapsed=elapsed, time_left=left))
        return ClusterSnapshot(self.state, tuple(jobs), self.quotas, now, name)

    def after(self, steps: list[Any]) -> Status:
        """Return the cluster after the steps of one request."""
        state, jobs = self.state, dict(self.jobs)
        for verb, *given in steps:
            if verb == "facts":
                job = msgspec.convert(given[0], PlanJob)
                jobs[job.name] = job, given[1]
            elif verb == "give":
                state = state.give(given[0]) if given[0] in self.running else state
                jobs.pop(given[0], None)
            else:
                hit = state.jobs_on(given[0]) if verb == "fail" else ()
                state = getattr(state, verb)(*given)
                held = {job.name: len(job.gpus) for job in state.jobs}
                for name in jobs.keys() & {*hit}:
                    job, at = jobs.pop(name)
                    if n := held.get(name, 0):
                        pod = 1 if n % job.pod else job.pod
                        jobs[name] = msgspec.structs.replace(job, gpus=n, pod=pod), at
        return self._replace(version=self.version + 1, state=state, jobs=jobs)

    @property
    def running(self) -> set[str]:
        """Names of the jobs that have GPUs."""
        return {job.name for job in self.state.jobs}

    def waiting(self, name: str) -> PlanJob:
        """Return a waiting job."""
        if name not in self.jobs or name in self.running:
            raise InputError(f"job: no job {name!r:.60} is waiting; submit it first")
        return self.jobs[name][0]


@dataclass
class Rules:
    """What decisions about a cluster need besides its status."""

    model: BandwidthModel
    dispatchers: dict[Policy, Dispatcher] = field(default_factory=dict)


class Change(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, frozen=True
):
    """A request that changes a cluster."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    """A repeated id gets the first answer again and changes nothing."""
    version: int | None = None
    """Refuse the request unless this is the version of the cluster."""

    def steps(self, status: Status, rules: Rules) -> tuple[list[Any], dict[str, Any]]:
        """Return the steps for `Status.after`, and the answer without the version."""
        raise NotImplementedError


class Create(Change):
    """Start a live cluster from a snapshot."""

    snapshot: dict[str, Any]
    """``optsched.snapshot/1``."""
    model: dict[str, Any] | None = None
    """``optsched.bandwidth/1``; by default links and network cards."""


class Submit(Change):
    """Add a waiting job, or replace the facts of a job."""

    job: PlanJob

    def steps(self, status: Status, rules: Rules) -> tuple[list[Any], dict[str, Any]]:
        """Check the facts."""
        held = tuple(job for job in status.state.jobs if job.name == self.job.name)
        ClusterSnapshot(status.state.with_jobs(held), (self.job,))
        return [_facts(self.job)], {}


class Take(Change):
    """Start a job on the fastest free GPUs that its facts and the quotas allow."""

    job: PlanJob | str
    """Its facts, or the name of a waiting job."""
    gpus: str | None = None
    """Start it on these free GPUs instead; only their number is checked."""
    demand: float | None = None
    """GB/s that it needs; by default as much as it can get."""

    def steps(self, status: Status, rules: Rules) -> tuple[list[Any], dict[str, Any]]:
        """Choose GPUs by the rule of `optsched.plan`."""
        job = status.waiting(self.job) if isinstance(self.job, str) else self.job
        demand = None if self.demand is None else kilobytes("demand", self.demand)
        state = status.state
        limited = [one for one, _ in status.jobs.values() if one.group in status.quotas]
        known = [one for one in limited if one.name in status.running and one.name != job.name]
        snapshot = ClusterSnapshot(state, (*known, job), status.quotas)
        rate = None
        if self.gpus is not None:
            gpus = _exactly(status, job.gpus, self.gpus, "gpus")
        else:
            verdict = start_one(snapshot, job, rules.model, rules.dispatchers)
            if not verdict.gpus:
                raise Infeasible(f"{job.name}: {verdict.text}")
            gpus, rate = state.cluster.written(verdict.gpus), verdict.bandwidth
        answer = {"gpus": gpus} | ({} if rate is None else {"bandwidth": rate})
        return [_facts(job), ["take", gpus, job.name, demand]], answer


class Give(Change):
    """End a running job, or withdraw a waiting one."""

    job: str

    def steps(self, status: Status, rules: Rules) -> tuple[list[Any], dict[str, Any]]:
        """Check that there is such a job."""
        if self.job not in status.jobs:
            status.state.job(self.job)
        return [["give", self.job]], {}


class Fail(Change):
    """Put GPUs down; their jobs keep the others, and end without any."""

    gpus: Annotated[str, msgspec.Meta(min_length=1)]

    def steps(self, status: Status, rules: Rules) -> tuple[list[Any], dict[str, Any]]:
        """Name the jobs that this hits."""
        return [["fail", self.gpus]], {"jobs": status.state.jobs_on(self.gpus)}


class Repair(Change):
    """Free GPUs that are down."""

    gpus: Annotated[str, msgspec.Meta(min_length=1)]

    def steps(self, status: Status, rules: Rules) -> tuple[list[Any], dict[str, Any]]:
        """Leave the check to the state."""
        return [["repair", self.gpus]], {}


class Apply(Change):
    """Evict and move running jobs and start waiting ones, all or none."""

    version: int
    evict: list[str] = []
    move: dict[str, str] = {}
    start: dict[str, str] = {}

    def steps(self, status: Status, rules: Rules) -> tuple[list[Any], dict[str, Any]]:
        """Free all GPUs before any is taken."""
        first: list[Any] = [["give", status.state.job(name).name] for name in self.evict]
        then: list[Any] = []
        for name, gpus in self.move.items():
            job = status.state.job(name)
            first.append(["give", name])
            if name in status.jobs:
                then.append(_facts(*status.jobs[name]))
            text = _exactly(status, len(job.gpus), gpus, f"move.{name}")
            then.append(["take", text, name, job.demand])
        for name, gpus in self.start.items():
            text = _exactly(status, status.waiting(name).gpus, gpus, f"start.{name}")
            then += [_facts(status.waiting(name)), ["take", text, name, None]]
        return first + then, {}


CHANGES: Final = {kind.__name__.lower(): kind for kind in (Submit, Take, Give, Fail, Repair, Apply)}
"""Requests by name."""


def _facts(job: PlanJob, at: int | None = None) -> list[Any]:
    """Return the step that sets the facts of a job, right at a Unix time [default: now]."""
    now = int(time.time())
    known = msgspec.structs.replace(job, submit=job.submit or now)
    return ["facts", msgspec.to_builtins(known), now if at is None else at]


def _exactly(status: Status, count: int, gpus: str, place: str) -> str:
    """Refuse a wrong number of GPUs."""
    found = status.state.cluster.parse(gpus, place)
    if len(found) != count:
        raise InputError(f"{place}: expected {count} GPUs, got {len(found)}")
    return gpus
