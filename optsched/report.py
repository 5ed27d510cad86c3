"""What a schedule is worth, in numbers: shares of every resource, bound and critical path."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from optsched.critical_path import critical_path, tight_links
from optsched.errors import InputError
from optsched.graph import describe
from optsched.occupancy import horizon, peak_memory, setup_time
from optsched.result import relative_gap

if TYPE_CHECKING:
    from optsched.schedule import Schedule


@dataclass(frozen=True)
class ResourceReport:
    """Load of one resource; times in the schedule's unit, bytes, ``memory`` 0 = unlimited.

    ``busy + setup + bubble`` is the span of the report. The bubble is negative only where
    operations overlap, that is, in a schedule that `optsched.verify` refuses.
    """

    name: str
    operations: int
    busy: int
    setup: int
    bubble: int
    peak_memory: int
    memory: int
    busy_share: float
    setup_share: float
    bubble_share: float


@dataclass(frozen=True)
class CriticalStep:
    """One operation of the critical path: what it is, when it runs, why not earlier."""

    operation: int
    words: str
    resources: tuple[str, ...]
    start: int
    end: int
    reason: str


@dataclass(frozen=True)
class Report:
    """Summary of a schedule.

    ``span`` is what the shares relate to: the makespan, or the period. ``objective``,
    ``lower_bound`` and ``status`` are what the document claims (the value falls back to the span);
    ``gap`` is ``objective / lower_bound - 1``, None without a positive bound.
    ``path_is_complete`` says that the critical path reaches from time 0 or a release to the end,
    or all the way round a period.
    """

    name: str
    time_unit: str
    operations: int
    jobs: int
    period: int | None
    span: int
    objective_name: str
    objective: int
    lower_bound: int | None
    gap: float | None
    status: str
    resources: tuple[ResourceReport, ...]
    critical_path: tuple[CriticalStep, ...]
    path_is_complete: bool

    @property
    def path_operations(self) -> list[int]:
        """Operation ids on the critical path."""
        return [step.operation for step in self.critical_path]


def report(schedule: Schedule) -> Report:
    """Summarise a schedule, one-shot or periodic.

    Parameters
    ----------
    schedule
        A scheduled graph; it is not verified here (`optsched.verify`).

    Raises
    ------
    InputError
        The graph is not scheduled.
    """
    if not schedule.is_scheduled:
        raise InputError("this graph is not scheduled: there is nothing to report; solve it first")
    span = horizon(schedule)
    claim = schedule.objective
    value = span if claim is None or claim.value is None else claim.value
    bound = None if claim is None else claim.lower_bound
    path = critical_path(schedule)
    return Report(
        name=schedule.name,
        time_unit=schedule.time_unit,
        operations=schedule.n_operations,
        jobs=len(np.unique(schedule.job)),
        period=schedule.period,
        span=span,
        objective_name=claim.name if claim else "makespan" if schedule.period is None else "period",
        objective=value,
        lower_bound=bound,
        gap=relative_gap(value, bound),
        status=claim.status if claim else "unknown",
        resources=tuple(_resource(schedule, r, span) for r in range(schedule.n_resources)),
        critical_path=_steps(schedule, path),
        path_is_complete=_is_complete(schedule, path),
    )


def _resource(schedule: Schedule, r: int, span: int) -> ResourceReport:
    users = schedule.users[r]
    busy, setup = int(schedule.duration[users].sum()), setup_time(schedule, r)
    bubble = span - busy - setup
    shares = [float(Fraction(part, span)) if span else 0.0 for part in (busy, setup, bubble)]
    return ResourceReport(
        schedule.resources[r].name,
        len(users),
        busy,
        setup,
        bubble,
        peak_memory(schedule, r),
        schedule.resources[r].memory,
        *shares,
    )


def _steps(schedule: Schedule, path: list[int]) -> tuple[CriticalStep, ...]:
    assert schedule.start is not None  # as `report` has made sure
    links = tight_links(schedule)
    on_path = np.isin(links.head, np.array(path, np.int64))
    why: dict[tuple[int, int], tuple[int, int]] = {}
    for i, j, *link in zip(*(column[on_path].tolist() for column in links), strict=True):
        why.setdefault((i, j), (link[0], link[1]))
    steps = []
    for k, i in enumerate(path):
        if k == 0 and schedule.period is None:
            reason = _beginning(int(schedule.start[i]), int(schedule.release[i]))
        else:
            reason = _reason(schedule, *why[path[k - 1], i])
        begin, end = int(schedule.start[i]), int(schedule.end[i])
        held = tuple(schedule.resources[r].name for r in schedule.op_resources[i].tolist())
        steps.append(CriticalStep(i, describe(schedule, i), held, begin, end, reason))
    return tuple(steps)


def _is_complete(schedule: Schedule, path: list[int]) -> bool:
    assert schedule.start is not None  # as `report` has made sure
    if not path or schedule.period is not None:
        return bool(path)
    return int(schedule.start[path[0]]) in (0, int(schedule.release[path[0]]))


def _beginning(start: int, release: int) -> str:
    if start == 0:
        return "at time 0"
    if start == release:
        return f"at its release, {release}"
    return f"gap: nothing in the document explains why it starts only at {start}"


def _reason(schedule: Schedule, resource: int, wait: int) -> str:
    if resource >= 0:
        return f"after {schedule.resources[resource].name}" + (f" + setup {wait}" if wait else "")
    return "after its predecessor" + (f" + lag {wait}" if wait else "")
