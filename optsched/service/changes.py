"""Changes of clusters in memory: jobs start, move and end, GPUs fail and come back."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from optsched.bandwidth.topology.rates import kilobytes
from optsched.errors import Infeasible, InputError
from optsched.io.strict_json import MAX_INTEGER, shortened
from optsched.io.values import label
from optsched.plan.snapshot import ClusterSnapshot, PlanJob
from optsched.plan.starts import start_one
from optsched.service.answers import Refused
from optsched.service.requests import Answer, Choice, Id, schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.bandwidth import BandwidthModel, Dispatcher, Policy
    from optsched.service.known import Known, Status

Some = msgspec.Meta(max_length=1000)
Once = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
"""A repeated id gets the first answer again and changes nothing."""


class Parts(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, frozen=True
):
    """Changes that are made together or not at all, in the order of the fields."""

    id: Id = None
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)] | None = None
    """Refuse the request if the cluster has another version."""
    repair: str = ""
    """GPUs that are up again, such as ``"n01:0-3 n02"``."""
    fail: str = ""
    """GPUs that are down; their jobs keep the others, and end without any."""
    give: Annotated[list[str], Some] = []
    """Names of jobs that end, or that do not wait any longer."""
    submit: Annotated[list[PlanJob], Some] = []
    """Waiting jobs, or all facts about jobs anew: with `place` another number of GPUs too."""
    place: Annotated[dict[str, str], Some] = {}
    """GPUs on which jobs start, or to which they move; only their number is checked."""
    start: Annotated[list[PlanJob | str], Some] = []
    """Jobs that start on the fastest free GPUs that their facts and the quotas allow."""
    demand: Annotated[dict[str, float], Some] = {}
    """GB/s of jobs of `place` and `start` [default: as before, or what the GPUs reach alone]."""


class Change(Parts, kw_only=True, frozen=True):
    """Changes of a live cluster that are made once."""

    id: Once


class Changed(Answer, kw_only=True):
    """The version of the cluster after a change."""

    version: int
    free: int
    """Number of free GPUs."""
    hit: tuple[str, ...] = ()
    """Jobs that lost GPUs."""
    started: dict[str, Choice] = msgspec.field(default_factory=dict)
    """GPUs of the jobs to start, and their bandwidth."""


class Present(Answer, kw_only=True):
    """A cluster at this moment."""

    version: int
    free: int
    snapshot: Annotated[msgspec.Raw, schema_of("snapshot")]

    @classmethod
    def of(cls, known: Known) -> Present:
        """Write the snapshot."""
        status = known.status
        snapshot = msgspec.Raw(status.snapshot(known.name).to_json())
        return cls(version=status.version, free=len(status.state.free), snapshot=snapshot)


class Conflict(Refused):
    """A request for another version of the cluster, or an id or name that is used."""

    def __init__(self, message: str, value: Any) -> None:
        super().__init__(409, message, value)


class Decision:
    """Finds the steps of a change, the status after them, and the answer."""

    def __init__(
        self, status: Status, model: BandwidthModel, dispatchers: dict[Policy, Dispatcher]
    ) -> None:
        self.status, self.steps = status, list[list[Any]]()
        self.answer: Changed
        self._model, self._dispatchers = model, dispatchers

    def make(self, change: Parts) -> Decision:
        """Decide one change."""
        if change.version not in (None, self.status.version):
            text = f"expected {self.status.version}, got {change.version}"
            raise Conflict(f"version: {text}: the cluster has changed", self.status.version)
        hit: tuple[str, ...] = ()
        parse = self.status.state.cluster.parse
        if change.repair:
            parse(change.repair, "repair")
            self._do("repair", change.repair)
        if change.fail:
            parse(change.fail, "fail")
            hit = self.status.state.jobs_on(change.fail)
            self._do("fail", change.fail)
        for i, name in enumerate(change.give):
            if name in self.status.running:
                self._do("give", name)
            elif name in self.status.jobs:
                self._do("withdraw", name)
            else:
                known = shortened([*{**self.status.running, **self.status.jobs}]) or "none"
                raise InputError(
                    f"give[{i}]: expected a job, got {name!r:.60}; known: {known:.200}"
                )
        names = [job.name for job in change.submit]
        for i, job in enumerate(change.submit):
            if job.name in names[:i]:
                raise InputError(
                    f"submit[{i}].name: expected distinct names, {job.name!r:.60} appears twice"
                )
            self._submit(f"submit[{i}]", job, change.place)
        demands = {name: kilobytes(f"demand.{name}", rate) for name, rate in change.demand.items()}
        self._place(change.place, demands)
        started = dict[str, Choice]()
        for i, one in enumerate(change.start):
            name = one if isinstance(one, str) else one.name
            if name in started:
                raise InputError(f"start[{i}]: expected distinct names, {name!r:.60} appears twice")
            if isinstance(one, PlanJob):
                self._submit(f"start[{i}]", one)
            job = self._waiting(f"start[{i}]", name)
            started[name] = self._start(i, job, demands.pop(name, None))
        if demands:
            name = next(iter(demands))
            raise InputError(f"demand: expected jobs of place or start, got {name!r:.60}")
        if not self.steps:
            raise InputError("change: expected repair, fail, give, submit, place or start")
        version = self.status.version + 1
        self.status = self.status._replace(version=version)
        free = len(self.status.state.free)
        self.answer = Changed(version=version, free=free, hit=hit, started=started)
        return self

    def _do(self, *step: Any) -> None:
        self.status = self.status.step(*step)
        self.steps.append([*step])

    def _submit(
        self, field: str, job: PlanJob, place: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Take facts of a job; they agree with its GPUs if it runs and is not placed anew."""
        if not label(f"{field}.name", job.name):
            raise InputError(f"{field}.name: expected a name, got ''")
        held = job.gpus if job.name in place else self.status.running.get(job.name, job.gpus)
        if held != job.gpus:
            where = f"jobs[{job.name!r:.60}].gpus"
            raise InputError(f"{where}: expected {held} (it holds {held}), got {job.gpus}")
        try:
            ClusterSnapshot(self.status.state.with_jobs([]), (job,))  # checks the facts
        except InputError as error:
            text = str(error).removeprefix(f"jobs[{job.name!r:.60}]")
            raise InputError(f"{field}{text}") from None
        now = int(time.time())
        known = msgspec.structs.replace(job, submit=job.submit or now)
        self._do("facts", msgspec.to_builtins(known), now)

    def _waiting(self, field: str, name: str) -> PlanJob:
        for why, fails in (("it runs already", name in self.status.running),
                           ("submit it first", name not in self.status.jobs)):  # fmt: skip
            if fails:
                raise InputError(f"{field}: expected a waiting job, got {name!r:.60} ({why})")
        return self.status.jobs[name][0]

    def _place(self, given: Mapping[str, str], demands: dict[str, int]) -> None:
        """Free the GPUs of all jobs that move before any is taken."""
        before = self.status
        moved = {job.name: job for job in before.state.jobs if job.name in given}
        for name in moved:
            self._do("give", name)
        for name, gpus in given.items():
            facts = before.jobs.get(name)
            held = moved[name].gpus if name in moved else ()
            expected = facts[0].gpus if facts else len(held) or self._waiting("start", name).gpus
            if (n := len(before.state.cluster.parse(gpus, f"place.{name}"))) != expected:
                raise InputError(f"place.{name}: expected {expected} GPUs, got {n}")
            if held and facts:
                self._do("facts", msgspec.to_builtins(facts[0]), facts[1])
            demand = moved[name].demand if held else None
            try:
                self._do("take", gpus, name, demands.pop(name, demand))
            except InputError as error:
                raise InputError(f"place.{name}: {str(error).removeprefix('gpus: ')}") from None

    def _start(self, i: int, job: PlanJob, demand: int | None) -> Choice:
        status, group = self.status, job.group
        snapshot = ClusterSnapshot(status.state, (job,))
        quota = status.quotas.get(group)
        if quota is not None and status.used(group) + job.gpus > quota:  # for the reason
            facts = [one for one, _ in status.jobs.values() if one.name in status.running]
            snapshot = ClusterSnapshot(status.state, (*facts, job), {group: quota})
        found = start_one(snapshot, job, self._model, self._dispatchers)
        if not found.gpus:
            raise Infeasible(f"start[{i}]: {job.name!r:.60}: {found.text}")
        gpus = status.state.cluster.written(found.gpus)
        self._do("take", gpus, job.name, demand)
        return Choice(gpus, found.bandwidth)
