"""Summary of a schedule: use of resources, jobs, bound and critical path."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.analysis.critical_path import critical_path
from optsched.analysis.iterations import JobReport, job_reports, throughput
from optsched.analysis.links import links, tight_links
from optsched.analysis.occupancy import horizon, peak_memory, setup_times
from optsched.errors import InputError
from optsched.model.graph import describe
from optsched.model.objectives import job_ends, objective_name, objective_value, per_job
from optsched.solving.progress import relative_gap

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule


@dataclass(frozen=True)
class ResourceReport:
    """Load of one resource; times in the schedule's unit, bytes, ``memory`` 0 = unlimited.

    ``busy + setup + bubble`` is the span of the report. The bubble is negative only where
    operations overlap, which `optsched.verify` reports.
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
    """One operation of the critical path, with the reason why it does not start earlier."""

    operation: int
    name: str
    resources: tuple[str, ...]
    start: int
    end: int
    reason: str


class Completion(NamedTuple):
    """Completion time of one job, with the weight or the due date that the objective counts."""

    name: str
    end: int
    counted: int


@dataclass(frozen=True)
class Report:
    """Summary of a schedule.

    ``span`` is the makespan, or the period; shares relate to it. ``objective``, ``lower_bound`` and
    ``status`` are claims of the document (default of the value: that of the starts); ``gap`` is
    ``(objective - lower_bound) / |lower_bound|``, None for the bound 0 or without a bound;
    ``solver`` is "" if unknown. ``throughput`` is the iterations of all jobs per second, and
    ``iterations`` has one row per job; None and () unless it is a job array. ``completions`` has
    one row per job if the objective counts the ends of jobs, else (). ``path_is_complete``: the
    critical path leads from time 0 or a release to the end, or all the way round a period.
    ``least_period`` is the length of the critical cycle, rounded up: where it is below the period,
    the same orders could repeat faster.
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
    solver: str
    throughput: float | None
    resources: tuple[ResourceReport, ...]
    iterations: tuple[JobReport, ...]
    completions: tuple[Completion, ...]
    critical_path: tuple[CriticalStep, ...]
    path_is_complete: bool
    least_period: int | None

    def __repr__(self) -> str:
        return f"<Report {self.name!r:.60}: {self.objective_name} {self.objective}, {self.status}>"


def report(schedule: Schedule) -> Report:
    """Summarise a schedule, one-shot or periodic, without verifying it.

    Raises
    ------
    InputError
        The graph is not scheduled.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
    >>> from optsched.analysis.report import report
    >>> found = report(optsched.solve(shop).schedule)
    >>> found.objective, found.status, [resource.busy for resource in found.resources]
    (6, 'optimal', [4, 6])
    """
    if not schedule.is_scheduled:
        raise InputError("this graph is not scheduled: there is nothing to report; solve it first")
    span = horizon(schedule)
    claim = schedule.objective
    value = None if claim is None else claim.value
    if value is None:
        value = schedule.period or objective_value(schedule, schedule.end)
    bound = None if claim is None else claim.lower_bound
    path = critical_path(schedule)
    least = _least_period(schedule, path)
    chain = _chain(schedule, path, least or 0)
    solver = schedule.provenance.get("solver")
    iterations = job_reports(schedule)
    return Report(
        name=schedule.name,
        time_unit=schedule.time_unit,
        operations=schedule.n_operations,
        jobs=len(np.unique(schedule.job)),
        period=schedule.period,
        span=span,
        objective_name=claim.name if claim else objective_name(schedule),
        objective=value,
        lower_bound=bound,
        gap=relative_gap(value, bound),
        status=claim.status if claim else "unknown",
        solver=solver if isinstance(solver, str) else "",
        throughput=throughput(schedule, iterations, span),
        resources=tuple(
            _resource(schedule, r, span, setup)
            for r, setup in enumerate(setup_times(schedule).tolist())
        ),
        iterations=iterations,
        completions=_completions(schedule),
        critical_path=_steps(schedule, path, chain),
        path_is_complete=_is_complete(schedule, path),
        least_period=least,
    )


def _completions(schedule: Schedule) -> tuple[Completion, ...]:
    if schedule.goal is None:
        return ()
    ends, counted = job_ends(schedule, schedule.end).tolist(), per_job(schedule)
    return tuple(
        Completion(schedule.job_name(j), end, counted[j]) for j, end in enumerate(ends) if end >= 0
    )


def _resource(schedule: Schedule, r: int, span: int, setup: int) -> ResourceReport:
    users = schedule.users[r]
    busy = int(schedule.duration[users].sum())
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


class _Link(NamedTuple):
    """Why an operation of the critical path does not start earlier."""

    resource: int
    wait: int
    tokens: int


def _chain(schedule: Schedule, path: list[int], turn: int) -> list[_Link | None]:
    """The link into every operation of a critical path, None where it begins.

    Of parallel links it is the one that binds at a period of ``turn``.
    """
    found = links(schedule)
    on_path = np.isin(found.head, np.array(path, np.int64))
    best: dict[tuple[int, int], tuple[int, _Link]] = {}
    for i, j, *link in zip(*(c.tolist() for c in found.where(on_path)), strict=True):
        step = _Link(*link)
        needed = step.wait - step.tokens * turn
        if (i, j) not in best or needed > best[i, j][0]:
            best[i, j] = needed, step
    first = None if schedule.period is None or not path else best[path[-1], path[0]][1]
    return [first, *(best[pair][1] for pair in pairwise(path))][: len(path)]


def _least_period(schedule: Schedule, path: list[int]) -> int | None:
    """Time per cycle that the critical cycle needs, rounded up; None without one."""
    if schedule.period is None or not path:
        return None
    tight = {pair[:2] for pair in zip(*(c.tolist() for c in tight_links(schedule)), strict=True)}
    if tight.issuperset(pairwise([*path, path[0]])):
        return schedule.period
    from optsched.kernels.cycle_ratio import cycle_time  # compiled: only when needed

    return cycle_time(schedule, schedule.sequences, schedule.offset).period


def _steps(
    schedule: Schedule, path: list[int], chain: list[_Link | None]
) -> tuple[CriticalStep, ...]:
    assert schedule.start is not None  # checked by `report`
    steps = []
    for i, link in zip(path, chain, strict=True):
        if link is None:
            reason = _beginning(int(schedule.start[i]), int(schedule.release[i]))
        else:
            reason = _reason(schedule, link)
        begin, end = int(schedule.start[i]), int(schedule.end[i])
        held = tuple(schedule.resources[r].name for r in schedule.op_resources[i].tolist())
        steps.append(CriticalStep(i, describe(schedule, i), held, begin, end, reason))
    return tuple(steps)


def _is_complete(schedule: Schedule, path: list[int]) -> bool:
    assert schedule.start is not None  # checked by `report`
    if not path or schedule.period is not None:
        return bool(path)
    return int(schedule.start[path[0]]) in (0, int(schedule.release[path[0]]))


def _beginning(start: int, release: int) -> str:
    if start == 0:
        return "at time 0"
    if start == release:
        return f"at its release, {release}"
    return f"gap: nothing in the document explains why it starts only at {start}"


def _reason(schedule: Schedule, link: _Link) -> str:
    if link.resource >= 0:
        name = schedule.resources[link.resource].name
        reason = f"after {name}" + (f" + setup {link.wait}" if link.wait else "")
    else:
        reason = "after its predecessor" + (f" + lag {link.wait}" if link.wait else "")
    if link.tokens:
        reason += f", {link.tokens} cycle{'s' * (link.tokens != 1)} before"
    return reason
