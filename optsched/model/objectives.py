"""What is minimised: the latest end of all jobs, or a function of the ends of single jobs.

The one definition of every objective of a single iteration: its value for given ends, its lower
bound, and its reduction to the makespan where there is one. The completion time C_j of a job is the
end of its last operation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import integer, listed, one_of
from optsched.model.schedule import NO_DEADLINE, Arcs, Csr, Goal

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Problem, Schedule

MAKESPAN: Final = "makespan"
PERIOD: Final = "period"
TOTAL: Final = "total_weighted_completion"
"""The sum of w_j C_j."""
LATENESS: Final = "maximum_lateness"
"""The largest C_j - d_j, negative if every job is early."""

OBJECTIVES: Final = (MAKESPAN, TOTAL, LATENESS)
"""Objectives of one iteration."""


def goal_of(
    n_jobs: int, objective: str = MAKESPAN, job_weight: Any = None, due: Any = None
) -> Goal:
    """A checked goal for a problem with so many jobs."""
    one_of("objective", objective, OBJECTIVES)
    weights = _per_job("job_weight", job_weight, n_jobs, 1)
    dates = _per_job("due", due, n_jobs, 0)
    if objective == LATENESS and not dates:
        raise InputError(
            f'due: objective="{LATENESS}" needs a due date per job, not all of them 0 '
            f'(that would be objective="{MAKESPAN}")'
        )
    return Goal(objective, weights, dates)


def _per_job(key: str, given: Any, n_jobs: int, default: int) -> tuple[int, ...]:
    if given is None or (isinstance(given, tuple) and not given):
        return ()
    rows = listed(key, given, "a list with one value per job", n_jobs)
    values = tuple(integer(f"{key}[{j}]", value) for j, value in enumerate(rows))
    return () if all(value == default for value in values) else values


def check_sums(goal: Goal, n_jobs: int, latest: int) -> None:
    """Refuse values beyond 2^53; no job ends after `latest` in a schedule without idle time."""
    total = sum(goal.job_weight or (n_jobs,)) * latest
    if goal.objective == TOTAL and total > MAX_INTEGER:
        raise InputError(f"job_weight: weights times durations may add up to {total}, above 2^53")
    if goal.objective == LATENESS and (total := latest + n_jobs * max(goal.due)) > MAX_INTEGER:
        raise InputError(f"due: times and due dates add up to {total}, above 2^53")


def graph_goal(goal: Goal) -> Goal | None:
    """The part of a goal that a graph holds: None for the makespan, else only what counts."""
    if goal.objective == MAKESPAN:
        return None
    return goal._replace(due=()) if goal.objective == TOTAL else goal._replace(job_weight=())


def objective_name(graph: Schedule) -> str:
    """The objective of a graph, or of its schedules."""
    if graph.period is not None:
        return PERIOD
    return MAKESPAN if graph.goal is None else graph.goal.objective


def job_ends(graph: Schedule, end: IntArray) -> IntArray:
    """Completion time of every job under these ends of operations; -1 without operations."""
    found = np.full(int(graph.job.max(initial=-1)) + 1, -1, np.int64)
    np.maximum.at(found, graph.job, end)
    return found


def objective_value(graph: Schedule, end: IntArray) -> int:
    """The objective value of one iteration with these ends of operations."""
    goal = graph.goal
    if goal is None:
        return int(end.max(initial=0))
    ends: list[int] = job_ends(graph, end).tolist()
    pairs = zip(ends, per_job(graph), strict=True)
    if goal.objective == TOTAL:  # Python integers: foreign starts may be late
        return sum(weight * last for last, weight in pairs if last >= 0)
    return max(last - due for last, due in pairs if last >= 0)


def decisive(graph: Schedule, end: IntArray) -> IntArray:
    """Operations that end last, or those with which the job of the maximum lateness ends."""
    if graph.goal is None or graph.goal.objective != LATENESS:
        return np.flatnonzero(end == end.max())
    late = end - np.array(graph.goal.due)[graph.job]
    return np.flatnonzero(late == late.max())


def per_job(graph: Schedule) -> tuple[int, ...]:
    """Of every job the weight, or the due date, that the goal of a graph counts."""
    goal = graph.goal
    assert goal is not None
    if goal.objective == LATENESS:
        return goal.due
    return goal.job_weight or (1,) * (int(graph.job.max(initial=-1)) + 1)


def as_makespan(problem: Problem) -> tuple[Problem, int]:
    """A problem of least makespan with the same solutions, and what its values are above ours.

    The maximum lateness is a makespan with tails: behind every job comes an operation of no length
    and without resource, by a lag of D - d_j with D the latest due date, so that the makespan is
    ``max(C_j - d_j) + D``. Machine orders mean the same in both. Other problems are returned as
    they are.
    """
    if problem.objective_name != LATENESS:
        return problem, 0
    graph = problem.graph()
    assert graph.goal is not None
    return _with_tails(graph), max(graph.goal.due)


def last_operations(graph: Schedule) -> IntArray:
    """Operations that may be the last of their job to end: at least one per job."""
    inside = graph.job[graph.arcs.tail] == graph.job[graph.arcs.head]
    never_earlier = graph.arcs.lag + graph.duration[graph.arcs.head] >= 0
    last = np.ones(graph.n_operations, bool)
    last[graph.arcs.tail[inside & never_earlier]] = False
    return np.flatnonzero(last)


def _with_tails(graph: Schedule) -> Schedule:
    """The graph with a final operation per job, after all of its operations without successor."""
    n, due = graph.n_operations, np.array(per_job(graph))
    tail = last_operations(graph)
    jobs, head = np.unique(graph.job[tail], return_inverse=True)
    first = tail[np.unique(head, return_index=True)[1]]
    columns: dict[str, Any] = {
        key: np.append(getattr(graph, key), np.zeros(len(jobs), np.int64))
        for key in ("duration", "stage", "microbatch", "iteration", "release", "setup_in",
                    "setup_out", "acquire", "free", "workspace", "offset")
    }  # fmt: skip
    columns["job"] = np.append(graph.job, jobs)
    columns["family"] = np.append(graph.family, graph.family[first])
    columns["kind"] = np.append(graph.kind, np.full(len(jobs), "end"))
    columns["deadline"] = np.append(graph.deadline, np.full(len(jobs), NO_DEADLINE))
    added = (tail, n + head, (due.max() - due)[graph.job[tail]], np.zeros(len(tail), np.int64))
    needs = graph.op_resources
    return replace(
        graph,
        goal=None,
        op_resources=Csr(np.append(needs.indptr, np.full(len(jobs), needs.indptr[-1])), needs.ids),
        arcs=Arcs(*(np.append(old, new) for old, new in zip(graph.arcs, added, strict=True))),
        **columns,
    )
