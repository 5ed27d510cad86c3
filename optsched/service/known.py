"""Clusters in memory: who holds which GPUs, and the facts of running and waiting jobs."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from optsched.bandwidth import BottleneckBandwidth, Dispatcher
from optsched.bandwidth.placement.document import policy_from_tree
from optsched.plan.snapshot import ClusterSnapshot, PlanJob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.bandwidth import BandwidthModel, ClusterState, Policy


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

    @property
    def running(self) -> dict[str, int]:
        """Numbers of GPUs of the jobs that have some."""
        return {job.name: len(job.gpus) for job in self.state.jobs}

    def used(self, group: str) -> int:
        """Count the GPUs that running jobs of a group hold; jobs without facts are of none."""
        jobs = self.jobs
        return sum(n for name, n in self.running.items()
                   if group == (jobs[name][0].group if name in jobs else ""))  # fmt: skip

    def snapshot(self, name: str = "") -> ClusterSnapshot:
        """Return the cluster at this moment."""
        now, running, jobs = int(time.time()), self.running, []
        for job, at in self.jobs.values():
            past = max(0, now - at) if job.name in running else 0
            elapsed, left = job.elapsed + past, max(1, job.time_left - past)
            jobs.append(msgspec.structs.replace(job, elapsed=elapsed, time_left=left))
        return ClusterSnapshot(self.state, tuple(jobs), self.quotas, now, name)

    def after(self, steps: Sequence[Sequence[Any]]) -> Status:
        """Return the cluster after the steps of one change, at the next version."""
        found = self
        for verb, *given in steps:
            found = found.step(verb, *given)
        return found._replace(version=self.version + 1)

    def step(self, verb: str, *given: Any) -> Status:
        """Return the cluster after one step of a change."""
        state, jobs = self.state, dict(self.jobs)
        if verb == "facts":
            job = msgspec.convert(given[0], PlanJob)
            jobs[job.name] = job, given[1]
        elif verb == "withdraw":
            del jobs[given[0]]
        else:
            state = getattr(state, verb)(*given)  # take, give, fail, repair
        if verb == "give":
            jobs.pop(given[0], None)
        elif verb == "fail":
            held = {job.name: len(job.gpus) for job in state.jobs}
            for name in jobs.keys() & self.state.jobs_on(given[0]):
                job, at = jobs.pop(name)
                if n := held.get(name, 0):
                    pod = 1 if n % job.pod else job.pod
                    jobs[name] = msgspec.structs.replace(job, gpus=n, pod=pod), at
        return self._replace(state=state, jobs=jobs)


class Known:
    """A cluster in memory that requests are about.

    The snapshot is right at the Unix time `now`, by default at this moment; the default model is
    that of links and network cards.
    """

    def __init__(
        self, snapshot: ClusterSnapshot, model: BandwidthModel | None = None, version: int = 0,
        now: int | None = None, name: str = "",
    ) -> None:  # fmt: skip
        self.name, self.model = name, model or BottleneckBandwidth(snapshot.cluster)
        state = replace(snapshot.state, cluster=self.model.cluster)
        self.status = Status.of(
            replace(snapshot, state=state), version, int(time.time()) if now is None else now
        )
        self.dispatchers: dict[Policy, Dispatcher] = {}
        self._of = lru_cache(maxsize=256)(
            lambda rules, traffic: Dispatcher(
                self.model.cluster, self.model, policy=rules, traffic=traffic
            )
        )

    def dispatcher(self, rules: dict[str, Any] | None, traffic: str) -> Dispatcher:
        """Return the dispatcher for the rules of a request."""
        return self._of(None if rules is None else policy_from_tree(rules, "policy"), traffic)
