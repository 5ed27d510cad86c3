"""Which gangs to start: read from a quota plan, a schedule, or an answer of `optsched decide`."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.formats.kubernetes import Gang
from optsched.io.values import format_value

if TYPE_CHECKING:
    from optsched.formats.decide_json import Answer
    from optsched.model.schedule import Schedule
    from optsched.problems.quota.problem import QuotaPlan

# n1/g0 of quota plans, n1g0 and the halves n1g0/a of histories, n1:0 of choices of GPUs
_GPU: Final = re.compile(r"(?:(?P<plan>.+)/g\d+|(?P<run>.+)g\d+(?P<half>/[ab])?|(?P<host>.+):\d+)")


def of_plan(plan: QuotaPlan, schedule: Schedule) -> list[Gang]:
    """Jobs of a plan that run by its schedule, with the least number of GPUs each could run on."""
    quota, placement = plan.quota(schedule), plan.placement(schedule)
    found = []
    for job, span in zip(plan.jobs, plan.spans, strict=True):
        if gpus := quota[job.name]:
            least = min(low if listed is None else min(listed) for _, low, _, listed in span)
            nodes = placement[job.name] if plan.nodes else {}
            found.append(Gang(job.name, gpus, min(least, gpus), nodes))
    return found


def of_schedule(schedule: Schedule, at: int | None = None) -> list[Gang]:
    """Jobs that run at a time, by default the earliest start, on so many GPUs (resources).

    Names are those in ``provenance["jobs"]``, else ``job-`` and the number.

    Raises
    ------
    InputError
        Nothing is scheduled, nothing runs then, or a job has a share of a GPU.
    """
    if schedule.start is None:
        raise InputError("sequences, starts: missing, this graph is not scheduled: solve it first")
    begin, end = schedule.start, schedule.end
    time = int(begin.min(initial=0)) if at is None else at
    running = np.flatnonzero((begin <= time) & (time < end)).tolist()
    if not running:
        raise InputError(f"at: nothing runs at {time} {schedule.time_unit}")
    names = schedule.provenance.get("jobs")
    held: dict[int, Counter[str]] = {}
    for i in running:
        job = int(schedule.job[i])
        rows = held.setdefault(job, Counter())
        for r in schedule.op_resources[i].tolist():
            rows[_node_of(schedule.resources[r].name, _name(names, job))] += 1
    return [_gang(_name(names, job), rows) for job, rows in sorted(held.items())]


def of_answer(answer: Answer) -> list[Gang]:
    """Tasks that start by an answer of ``optsched decide``; an agent is a node."""
    return [
        Gang(start.task, start.slots, None, dict(start.agents), start.priority)
        for start in answer.start or []
    ]


def _gang(name: str, rows: Counter[str]) -> Gang:
    known = "" not in rows
    return Gang(name, rows.total(), None, dict(rows) if known else {})


def _name(names: Any, job: int) -> str:
    if isinstance(names, (list, tuple)) and job < len(names) and isinstance(names[job], str):
        return str(names[job])
    return f"job-{job}"


def _node_of(resource: str, job: str) -> str:
    """The node of a GPU; empty if its name does not say."""
    match = _GPU.fullmatch(resource)
    if match is None:
        return ""
    if match["half"]:
        raise InputError(
            f"job {format_value(job)}: shares GPU {format_value(resource)}; Kubernetes gives out "
            "whole ones"
        )
    return match["plan"] or match["run"] or match["host"] or ""
