"""A live cluster: topology, GPUs in use, waiting requests, quotas; ``optsched.snapshot/1``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from optsched.bandwidth import Cluster, ClusterState
from optsched.bandwidth.topology import documents
from optsched.bandwidth.topology.rates import kilobytes
from optsched.errors import InputError
from optsched.io import strict_json
from optsched.io.files import write_atomic
from optsched.io.strict_json import MAX_INTEGER, decode, placed
from optsched.io.values import format_value, integer, label, listed, one_of
from optsched.plan.array_request import ArrayRequest

if TYPE_CHECKING:
    import os

    from optsched.bandwidth import Job

FORMAT: Final = "optsched.snapshot/1"

MOST_COST: Final = 10**9
"""Cost of one eviction or move: sums of all jobs stay exact in floating point."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]

_Quota = Annotated[  # `ClusterSnapshot` checks it, with the group in its message
    Any, msgspec.Meta(extra_json_schema={"type": "integer", "minimum": 0, "maximum": MAX_INTEGER})
]


class PlanJob(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A job that runs or that is waiting for GPUs. `ClusterSnapshot` checks the fields.

    Parameters
    ----------
    name
        Distinct. A job that runs has the name of its `ClusterState.job`.
    gpus
        Number of GPUs, all at once.
    type
        Type of hosts; None: any, but only one.
    level
        Level of the cluster (or ``"host"``) of which one domain must hold all GPUs.
    pod
        GPUs that must lie together on one host; a divisor of `gpus`.
    bandwidth
        Least bandwidth of its GPUs without contention, GB/s.
    priority
        Lower numbers go first.
    group
        User, queue or project with a quota.
    submit
        Time of submission, seconds on the clock of `ClusterSnapshot.now`.
    elapsed, time_left
        Seconds that it has run, and expected seconds until its end.
    estimate
        Expected seconds of the whole run, made before its start: then the spread of durations
        and `elapsed` decide how long it still runs; None: `elapsed` and `time_left` together.
    evict, move
        Cost of stopping it, or of stopping and restarting it on other GPUs; None: not allowed.
    array
        Of a job array: its jobs. While it is waiting, `gpus` is the most that it gets.

    Examples
    --------
    >>> from optsched import plan
    >>> plan.PlanJob(name="a", gpus=16, pod=8, level="rack", evict=400).priority
    50
    """

    name: str
    gpus: Annotated[int, msgspec.Meta(ge=1, le=2**22)]
    type: str | None = None
    level: str | None = None
    pod: Annotated[int, msgspec.Meta(ge=1, le=2**22)] = 1
    bandwidth: float | None = None
    priority: _Count = 50
    group: str = ""
    submit: _Count = 0
    elapsed: _Count = 0
    time_left: Annotated[int, msgspec.Meta(ge=1, le=2**40)] = 3600
    estimate: Annotated[int, msgspec.Meta(ge=1, le=2**40)] | None = None
    evict: Annotated[int, msgspec.Meta(ge=0, le=MOST_COST)] | None = None
    move: Annotated[int, msgspec.Meta(ge=0, le=MOST_COST)] | None = None
    array: ArrayRequest | None = None

    def sized(self, gpus: int = 0) -> PlanJob:
        """Return the request of an array with a number of GPUs, by default its least."""
        if self.array is None:
            return self
        periods = self.array.periods
        size = gpus or min(periods)
        time_left = self.array.seconds(periods[size])
        return msgspec.structs.replace(self, gpus=size, time_left=time_left)


class _Snapshot(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    name: str = ""
    now: _Count = 0
    cluster: Any
    state: Any
    jobs: list[PlanJob] = []
    quotas: dict[str, _Quota] = {}


@dataclass(frozen=True, eq=False, repr=False)
class ClusterSnapshot:
    """The state of a cluster at one moment, and the jobs that run or wait.

    Parameters
    ----------
    state
        GPUs that are free, held by jobs, or down.
    jobs
        Facts about running jobs, and all waiting jobs. Running jobs without an entry are
        expected to run for another hour and can be neither evicted nor moved.
    quotas
        Most GPUs of the jobs of a group; groups without an entry have no limit.
    now
        Seconds on any clock.
    name
        Label.

    Raises
    ------
    InputError
        An invalid field, with its job.

    Examples
    --------
    >>> from optsched.bandwidth import Cluster, ClusterState, HostType
    >>> from optsched import plan
    >>> state = ClusterState.idle(Cluster.uniform(HostType("h100", 8), 2))
    >>> jobs = [plan.PlanJob(name="a", gpus=4, priority=20), plan.PlanJob(name="b", gpus=8)]
    >>> [job.name for job in plan.ClusterSnapshot(state, jobs, quotas={"team": 8}).waiting]
    ['a', 'b']
    """

    state: ClusterState
    jobs: tuple[PlanJob, ...] = ()
    quotas: Mapping[str, int] = field(default_factory=dict)
    now: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.state, ClusterState):
            raise InputError(f"state: expected a ClusterState, got {format_value(self.state)}")
        object.__setattr__(self, "jobs", tuple(listed("jobs", self.jobs, "jobs")))
        label("name", self.name)
        integer("now", self.now)
        if not isinstance(self.quotas, Mapping):
            raise InputError(f"quotas: expected GPUs by group, got {format_value(self.quotas)}")
        for group, gpus in self.quotas.items():
            integer(f"quotas[{label('quotas', group)!r:.60}]", gpus)
        held = {job.name: len(job.gpus) for job in self.state.jobs}
        seen = set[str]()
        for i, job in enumerate(self.jobs):
            if not isinstance(job, PlanJob):
                raise InputError(f"jobs[{i}]: expected a PlanJob, got {format_value(job)}")
            if not label(f"jobs[{i}].name", job.name) or job.name in seen:
                raise InputError(f"jobs: expected distinct names, got {job.name!r:.60}")
            seen.add(job.name)
            place = f"jobs[{job.name!r:.60}]"
            _check(job, self.cluster, place)
            if held.get(job.name, job.gpus) != job.gpus:
                raise InputError(f"{place}.gpus: {job.gpus}, but it holds {held[job.name]}")

    @property
    def cluster(self) -> Cluster:
        """Topology of the GPUs."""
        return self.state.cluster

    @cached_property
    def running(self) -> tuple[tuple[PlanJob, Job], ...]:
        """Facts and GPUs of the running jobs, in the order of the state."""
        facts = {job.name: job for job in self.jobs}
        return tuple(
            (facts.get(job.name) or PlanJob(name=job.name, gpus=len(job.gpus)), job)
            for job in self.state.jobs
        )

    @cached_property
    def waiting(self) -> tuple[PlanJob, ...]:
        """Jobs without GPUs, by priority, then by submission."""
        held = {job.name for job in self.state.jobs}
        found = [job for job in self.jobs if job.name not in held]
        return tuple(sorted(found, key=lambda job: (job.priority, job.submit)))

    def __repr__(self) -> str:
        running, waiting = len(self.state.jobs), len(self.waiting)
        return f"<ClusterSnapshot {self.name!r}: {running} jobs run, {waiting} wait>"

    def request(self, name: str) -> PlanJob:
        """Return the waiting job of a name, an array with its least GPUs; or an `InputError`."""
        for job in self.waiting:
            if job.name == name:
                return job.sized()
        known = ", ".join(job.name for job in self.waiting[:8]) or "none"
        raise InputError(f"request: no job {name!r:.60} is waiting; waiting: {known}")

    def used(self, group: str) -> int:
        """Count the GPUs that running jobs of a group hold."""
        return sum(job.gpus for job, _ in self.running if job.group == group)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ClusterSnapshot:
        """Read a document ``optsched.snapshot/1``; `InputError` names path, rule and value."""
        return strict_json.read_json(path, from_tree)

    def to_json(self) -> bytes:
        """Return the document ``optsched.snapshot/1``, one job a line."""
        members: dict[str, Any] = {"format": FORMAT, "name": self.name, "now": self.now}
        members["cluster"] = strict_json.nested(documents.cluster_json(self.cluster))
        members["state"] = strict_json.nested(documents.state_json(self.state))
        members["jobs"] = strict_json.rows(self.jobs)
        if self.quotas:
            members["quotas"] = dict(self.quotas)
        return strict_json.lines(members)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the document, all of it or nothing."""
        write_atomic(path, self.to_json())


def from_tree(tree: Any, name: str) -> ClusterSnapshot:
    """Read ``optsched.snapshot/1`` from parsed JSON; `name` is the file in messages."""
    found = strict_json.decode_document(tree, _Snapshot, FORMAT, name)
    cluster = documents.cluster_from_tree(found.cluster, f"{name}: cluster")
    state = documents.state_from_tree(found.state, cluster, f"{name}: state")
    with placed(f"{name}: "):
        return ClusterSnapshot(state, tuple(found.jobs), found.quotas, found.now, found.name)


def _check(job: PlanJob, cluster: Cluster, place: str) -> None:
    """Refuse fields out of range, and names that the cluster does not have."""
    decode(msgspec.structs.asdict(job), PlanJob, place)
    label(f"{place}.group", job.group)
    if job.array is not None and job.pod > 1:
        raise InputError(f"{place}.pod: expected 1 for an array, got {job.pod}; use level")
    if job.gpus % job.pod:
        raise InputError(f"{place}.pod: {job.gpus} GPUs are not a multiple of {job.pod}")
    if job.bandwidth is not None:
        kilobytes(f"{place}.bandwidth", job.bandwidth)
    if job.type is not None:
        one_of(f"{place}.type", job.type, [kind.name for kind in cluster.types])
    if job.level is not None:
        with placed(f"{place}."):
            cluster.level(job.level)
    if job.array is not None:
        if not isinstance(job.array, ArrayRequest):
            raise InputError(f"{place}.array: expected an ArrayRequest, got {job.array!r:.60}")
        decode(msgspec.structs.asdict(job.array), ArrayRequest, f"{place}.array")
        with placed(f"{place}.array."):
            least = min(job.array.periods)
        if least > job.gpus:
            raise InputError(f"{place}.gpus: {job.gpus}, but its array needs {least}")
