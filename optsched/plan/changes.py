"""What differs between two plans of one cluster, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec

from optsched.errors import InputError
from optsched.io.strict_json import decode, shortened
from optsched.model.schedule import Schedule
from optsched.plan.array_request import planned_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth import ClusterState
    from optsched.plan.planner import Verdict
    from optsched.plan.snapshot import ClusterSnapshot

_NOTABLE: Final = 0.1
"""Share by which an expected start changes at least, to be reported."""


class Change(NamedTuple):
    """One difference between a plan and the former one.

    Examples
    --------
    >>> from optsched.bandwidth import Cluster, ClusterState, HostType
    >>> from optsched import plan
    >>> state = ClusterState.idle(Cluster.uniform(HostType("h100", 8), 2))
    >>> jobs = [plan.PlanJob(name="a", gpus=8), plan.PlanJob(name="b", gpus=16, priority=1)]
    >>> former = plan.plan(plan.ClusterSnapshot(state, jobs[:1]))
    >>> again = plan.plan(plan.ClusterSnapshot(state, jobs), previous=former)
    >>> again.changes[1].text
    'a no longer starts: ahead of it b get the GPUs.'
    """

    job: str
    """Name of a job; empty: of GPUs."""
    kind: str
    """An event: ``ended``, ``failed``, ``runs``, ``gone``, ``new``; or what differs for a request:
    ``starts``, ``moves``, ``waits``, ``reason``, ``time``."""
    text: str
    """The change and its cause in a sentence."""


class _Entry(msgspec.Struct):
    """The verdict on a request, in the document of a plan."""

    job: str
    gpus: str = ""
    bandwidth: float | None = None
    why: str = ""
    text: str = ""
    expected: Annotated[list[int], msgspec.Meta(min_length=3, max_length=3)] | None = None


class _Document(msgspec.Struct):
    plan: list[_Entry]
    now: int = 0
    running: dict[str, str] = {}
    down: str = ""


@dataclass(frozen=True)
class Former:
    """A former plan, with the GPUs of the cluster as it is now."""

    snapshot: ClusterSnapshot
    starts: dict[str, tuple[int, ...]]
    """GPUs of its starts; none if one of them is no longer part of the cluster."""
    document: _Document

    @classmethod
    def of(cls, previous: object, snapshot: ClusterSnapshot) -> Former:
        """Read a plan or its document."""
        schedule = getattr(previous, "schedule", previous)
        if not isinstance(schedule, Schedule):
            raise InputError(f"previous: expected a Plan or its Schedule, got {previous!r:.60}")
        if "plan" not in schedule.provenance:
            raise InputError("previous: provenance.plan is missing: the schedule is no plan")
        document = decode(dict(schedule.provenance), _Document, "previous: provenance")
        named = {resource.name: gpu for gpu, resource in enumerate(snapshot.cluster.resources)}
        rows = zip(schedule.job.tolist(), schedule.op_resources.to_lists(), strict=True)
        held = {schedule.job_name(job): gpus for job, gpus in rows}
        held |= {one.name: one.gpus for one in planned_arrays(schedule)}
        starts = {}
        for one in document.plan:
            names = [schedule.resources[gpu].name for gpu in held.get(one.job, ())]
            if one.gpus and names and all(name in named for name in names):
                starts[one.job] = tuple(named[name] for name in names)
        return cls(snapshot, starts, document)

    def changes(self, verdicts: Sequence[Verdict]) -> tuple[Change, ...]:
        """Describe events since the former plan, then every request whose answer differs."""
        state, running = self.snapshot.state, {job.name for job in self.snapshot.state.jobs}
        entries = {one.job: one for one in self.document.plan}
        found, now = [], {one.job.name: one for one in verdicts}
        ended = [name for name in self.document.running if name not in running]
        for name in ended:
            back = " and is waiting again" if name in now else ""
            gpus = self.document.running[name]
            found.append(Change(name, "ended", f"{name} has left {gpus}{back}."))
        before = {gpu for text in self.document.down.split() for gpu in _gpus(text, state)}
        if failed := [gpu for gpu in state.down if gpu not in before]:
            found.append(Change("", "failed", f"{state.written(failed)} failed."))
        for name, one in entries.items():
            if name in running:
                gpus = state.written(state.job(name).gpus)
                planned = "as planned" if gpus == one.gpus else f"not on {one.gpus or 'no GPUs'}"
                found.append(Change(name, "runs", f"{name} runs on {gpus}, {planned}."))
            elif name not in now:
                found.append(Change(name, "gone", f"{name} is no longer waiting."))
        for name, verdict in now.items():
            found += self._change(verdict, entries.get(name), ended, verdicts)
        return tuple(found)

    def _change(
        self, now: Verdict, old: _Entry | None, ended: Sequence[str], verdicts: Sequence[Verdict]
    ) -> list[Change]:
        """Return how the answer to a request differs, if it does."""
        name, written = now.job.name, self.snapshot.state.written
        gpus = written(now.gpus)
        if old is None:
            text = f"starts on {gpus}" if now.gpus else f"does not start: {now.text}"
            return [Change(name, "new", f"{name} is new and {text}.")]
        if now.gpus and not old.gpus:
            cause = f"{shortened(ended)} left GPUs" if ended else f"before: {old.text}"
            return [Change(name, "starts", f"{name} starts now on {gpus}: {cause}.")]
        if now.gpus:
            if self.starts.get(name) == now.gpus or gpus == old.gpus:
                return []
            cause = self._cause(now, old, verdicts)
            return [Change(name, "moves", f"{name} starts on {gpus}, not on {old.gpus}: {cause}.")]
        if old.gpus:
            return [Change(name, "waits", f"{name} no longer starts: {now.text}.")]
        if now.why != old.why:
            return [Change(name, "reason", f"{name}: {now.text}; before: {old.text}.")]
        if now.expected and old.expected:
            was = old.expected[1] + self.document.now - self.snapshot.now
            if abs(now.expected[1] - was) > max(1, _NOTABLE * abs(was)):
                text = f"{name} is expected in {now.expected[1]:,} s, not {max(0, was):,} s."
                return [Change(name, "time", text)]
        return []

    def _cause(self, now: Verdict, old: _Entry, verdicts: Sequence[Verdict]) -> str:
        """Return why a request does not keep its GPUs."""
        state, former = self.snapshot.state, set(self.starts.get(now.job.name, ()))
        if down := former & set(state.down):
            return f"{state.written(down)} failed"
        if not former:
            return f"{old.gpus} are not in the cluster"
        if used := former - set(state.free):
            return f"{shortened([*state.jobs_on(used)])} holds {state.written(used)}"
        if len(former) != now.job.gpus:
            return f"it needs {now.job.gpus} GPUs"
        if now.bandwidth is not None and now.bandwidth > (old.bandwidth or 0):
            return f"they reach {now.bandwidth:.1f} GB/s"
        if taken := [one.job.name for one in verdicts
                     if former & set(one.gpus) and one.job.name != now.job.name]:  # fmt: skip
            return f"{shortened(taken)} gets GPUs of them"
        return "others that start could not start with it there"


def _gpus(text: str, state: ClusterState) -> Sequence[int]:
    """Return GPUs of a machine, none if it is not there; of a mere number those that are down."""
    name, _, ids = text.partition(":")
    try:
        machine = state.cluster.machine(name)
    except InputError:
        return ()
    if re.fullmatch(r"x\d{1,6}", ids):
        return sorted(machine, key=lambda gpu: gpu not in state.down)[: int(ids[1:])]
    return state.cluster.parse(text, "previous: down")
