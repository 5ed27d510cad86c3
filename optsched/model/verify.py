"""The independent verifier of schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import shortened
from optsched.model.cycles import disjoint_cycles
from optsched.model.objectives import OBJECTIVES, PERIOD, objective_name, objective_value
from optsched.model.schedule import NO_DEADLINE, IntArray, Objective, Problem, Schedule
from optsched.model.verify_resources import (
    Pairs,
    Plan,
    balance,
    double_bookings,
    entries_of,
    memory,
    neighbour_gaps,
    neighbours,
)
from optsched.model.violation import KINDS, Kind, Names, Violation, count

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["KINDS", "Kind", "Violation", "verify"]

_HUGE = 1 << 61  # far above every sum of times in a schedule, far below the end of int64


def verify(schedule: Schedule, problem: Problem | None = None) -> list[Violation]:
    """List every rule that a schedule breaks; an empty list for a correct one.

    Independent of the evaluator and of all solvers: it compares starts, durations, arcs, sequences,
    setups, windows, memory and claims of the schedule. Without `problem` an empty list means that
    the schedule is consistent; with it, that it solves the problem.

    Parameters
    ----------
    schedule
        One-shot or periodic. Times in its `time_unit`, memory in bytes, compared exactly.
    problem
        The instance that it should solve: a `JobShop`, a `JobArray`, a bare graph, ...

    Returns
    -------
    list of Violation
        Of sequences, resources, arcs, windows, memory, deadlocks, claims and the problem, in this
        order. ``docs/orders/verifier.md`` lists the kinds and defines "every" for overlaps.

    Raises
    ------
    InputError
        The graph has no sequences and starts.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
    >>> optsched.verify(optsched.solve(shop).schedule, problem=shop)
    []
    """
    if not isinstance(schedule, Schedule):
        raise InputError(f"expected a Schedule, got {schedule!r:.60}")
    if problem is not None and not isinstance(problem, Problem):
        raise InputError(f"problem: expected a JobShop, a JobArray or a graph, got {problem!r:.60}")
    start, sequences = schedule.start, schedule.sequences
    if start is None or sequences is None:
        raise InputError("nothing to verify: the graph is not scheduled (no sequences, no starts)")
    names = Names(schedule)
    plan = Plan(schedule, start, start + schedule.duration, schedule.period or 0, names)
    entries, found = entries_of(plan, sequences)
    pairs = neighbours(entries, schedule.period)
    on_resources = list(neighbour_gaps(plan, pairs))
    found += on_resources
    found += double_bookings(plan, on_resources)
    found += _precedences(plan)
    found += _windows(plan)
    found += memory(plan, entries)
    if schedule.period is not None:
        found += balance(plan)
    found += _deadlocks(plan, pairs)
    found += _claims(plan, feasible=not found)
    if problem is not None:
        found += _of_instance(schedule, problem)
    return found


def _precedences(plan: Plan) -> Iterator[Violation]:
    s, names = plan.schedule, plan.names
    tail, head, lag, _ = s.arcs
    tokens = _tokens(s)
    most = _HUGE // max(plan.period, 1)  # clipping keeps the sign and avoids overflow
    ready = plan.end[tail] + lag - np.clip(tokens, -most, most) * plan.period
    for a in np.flatnonzero(plan.start[head] < ready).tolist():
        i, j, wait, h = int(tail[a]), int(head[a]), int(lag[a]), int(tokens[a])
        begins, ends = int(plan.start[j]), int(plan.end[i])
        amount = ends + wait - h * plan.period - begins
        cycles = f" {count(abs(h), 'cycle')} {'later' if h > 0 else 'earlier'}" if h else ""
        after = f" and the lag is {names.time(wait)}" if wait else ""
        message = (
            f"{names.operation(j)} starts at {names.time(begins)}{cycles}, but "
            f"{names.operation(i)} must precede it and ends at {names.time(ends)}{after}: "
            f"{names.time(amount)} missing (arc {a})"
        )
        yield Violation("precedence", (i, j), None, amount, message)


def _windows(plan: Plan) -> Iterator[Violation]:
    s, names = plan.schedule, plan.names
    for i in np.flatnonzero(plan.start < s.release).tolist():
        amount = int(s.release[i] - plan.start[i])
        release = names.time(int(s.release[i]))
        message = (
            f"{names.operation(i)} starts {names.time(amount)} before its release at {release}"
        )
        yield Violation("release", (i,), None, amount, message)
    for i in np.flatnonzero((s.deadline != NO_DEADLINE) & (plan.end > s.deadline)).tolist():
        amount = int(plan.end[i] - s.deadline[i])
        deadline = names.time(int(s.deadline[i]))
        message = f"{names.operation(i)} ends {names.time(amount)} after its deadline at {deadline}"
        yield Violation("deadline", (i,), None, amount, message)


def _deadlocks(plan: Plan, pairs: Pairs) -> Iterator[Violation]:
    """Deadlocks: cycles of arcs and orders without a token."""
    s, names = plan.schedule, plan.names
    arcs = np.flatnonzero(_tokens(s) <= 0)
    inside = pairs.shift == 0
    tail = np.concatenate((s.arcs.tail[arcs], pairs.before[inside]))
    head = np.concatenate((s.arcs.head[arcs], pairs.after[inside]))
    reason = np.concatenate((-1 - arcs, pairs.resource[inside]))
    step = plan.start[head] - plan.start[tail]
    if not (step < 0).any():  # starts never fall along edges, so they are equal on a cycle
        tail, head, reason = tail[step == 0], head[step == 0], reason[step == 0]
    for edges in disjoint_cycles(tail, head):
        steps = []
        for e in edges:
            why = int(reason[e])
            rule = f"the sequence of {names.resource(why)}" if why >= 0 else f"arc {-1 - why}"
            steps.append(f"before {names.operation(int(head[e]))} by {rule}")
        cycle = tuple(int(tail[e]) for e in edges)
        message = f"deadlock: {names.operation(cycle[0])} comes {shortened(steps)}"
        yield Violation("liveness", cycle, None, 0, message)


def _tokens(s: Schedule) -> IntArray:
    """Cycles between the two ends of every arc; 0 in a one-shot schedule."""
    return s.arcs.distance + s.offset[s.arcs.head] - s.offset[s.arcs.tail]


def _claims(plan: Plan, *, feasible: bool) -> Iterator[Violation]:
    names, objective = plan.names, plan.schedule.objective
    if objective is None or objective.name not in (*OBJECTIVES, PERIOD):
        return
    actual = plan.period or objective_value(plan.schedule, plan.end)
    name = objective_name(plan.schedule)
    if objective.name != name:
        message = f"the objective is called {objective.name}, but this schedule has a {name}"
        yield Violation("objective", (), None, 0, message)
        return
    claimed, bound = objective.value, objective.lower_bound
    if objective.status == "infeasible":
        message = "the claimed status is infeasible, but this is a schedule"
        yield Violation("objective", (), None, 0, message)
    if claimed is not None and claimed != actual:
        amount = abs(claimed - actual)
        message = f"the claimed {name} is {names.time(claimed)}, but it is {names.time(actual)}"
        yield Violation("objective", (), None, amount, message)
    # a schedule that breaks rules may well undercut a true bound
    if feasible and bound is not None and bound > actual:
        message = f"the claimed lower bound {names.time(bound)} is above the {name} {actual}"
        yield Violation("objective", (), None, bound - actual, message)


def _of_instance(schedule: Schedule, problem: Problem) -> Iterator[Violation]:
    """Differences to the problem, and claims that are wrong for it."""
    try:
        faults = problem.check(schedule)
        reached = None if faults else problem.evaluate(schedule)
    except InputError as error:
        text = str(error)
        faults = [text if text.startswith("the schedule ") else f"the schedule {text}"]
    for fault in faults:
        yield Violation("instance", (), None, 0, fault)
    claim = schedule.objective
    if faults or claim is None or reached is None:
        return
    for amount, message in _wrong_claims(problem, claim, reached):
        yield Violation("objective", (), None, amount, message)
    named = str(schedule.provenance.get("instance_sha256", problem.sha256))
    # equal graphs have equal bounds; other bounds depend on data outside of the graph
    of_graphs = problem.problem_kind in ("jobshop", "jobarray", "periodic")
    by_graph = of_graphs and not getattr(problem, "chooses", False)
    if claim.lower_bound is not None and not by_graph and named != problem.sha256:
        message = (
            f"the claimed lower bound {claim.lower_bound} was proved for another instance "
            f"({named[:12]}, not {problem.sha256[:12]})"
        )
        yield Violation("objective", (), None, 0, message)


def _wrong_claims(problem: Problem, claim: Objective, reached: int) -> Iterator[tuple[int, str]]:
    """Amounts and messages of claims that `_claims` cannot check without the problem."""
    name = problem.objective_name
    by_graph = (*OBJECTIVES, PERIOD)
    if claim.name != name and claim.name not in by_graph:
        yield 0, f"the objective is called {claim.name}, but the problem's is the {name}"
    if claim.name != name or name in by_graph:
        return
    if claim.value is not None and claim.value != reached:
        amount = abs(claim.value - reached)
        yield amount, f"the claimed {name} is {claim.value}, but it is {reached}"
    if claim.lower_bound is not None and claim.lower_bound > reached:
        message = f"the claimed lower bound {claim.lower_bound} is above the {name} {reached}"
        yield claim.lower_bound - reached, message
