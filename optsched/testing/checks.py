"""The checks of `check_solver`: values, bounds, proofs, limits and warm starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched.errors import InputError, OptschedError
from optsched.problems.jobshop.problem import JobShop
from optsched.solving.solve import solve
from optsched.testing.common import (
    SHORT,
    against_optimum,
    by_graph,
    consistent,
    counted,
    each,
    named,
    optimum,
    quicker_of_two,
    supported,
)
from optsched.testing.problems import (
    degenerate_problems,
    infeasible_problems,
    random_problems,
    small_problems,
    tiny_problems,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import Schedule
    from optsched.solving.result import Result
    from optsched.solving.solver import Solver

OVERRUN = 0.5
"""Seconds by which a warm solver may exceed its time limit, in the better of two tries."""

HOSTILE: tuple[dict[str, Any], ...] = (
    {"time_limit": -1}, {"time_limit": float("nan")}, {"time_limit": "1"}, {"time_limit": True},
    {"iterations": -1}, {"iterations": 1.5}, {"target": 1.5}, {"workers": 0}, {"workers": -2},
    {"workers": 1.5}, {"seed": -1}, {"seed": 2**64}, {"seed": "0"},
    {"options": {"no such option": 1}}, {"options": 3},
)  # fmt: skip


@each(tiny_problems, degenerate_problems, random_problems)
def check_brute_force(engine: Solver, problem: Any, time_limit: float) -> None:
    """Tiny, degenerate and random problems: bound <= optimum of brute force <= objective."""
    against_optimum(problem, solve(problem, engine, time_limit=min(time_limit, SHORT)))


def check_feasible_and_bounded(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Small problems: verified schedules, bounds below them; some tiny problem is solved."""
    found = False
    for problem in supported(engine, tiny_problems()):
        with named(problem):
            found |= solve(problem, engine, time_limit=2 * SHORT).schedule is not None
    assert found, "found nothing on any tiny problem"
    for problem in supported(engine, [*small_problems(), *problems]):
        with named(problem):
            consistent(problem, solve(problem, engine, time_limit=time_limit))


@each(tiny_problems, degenerate_problems, random_problems)
def check_proofs(engine: Solver, problem: Any, time_limit: float) -> None:
    """Every tiny problem, feasible or not, is closed within the limit."""
    expected = "infeasible" if optimum(problem) is None else "optimal"
    for limit in (time_limit, 40 * time_limit):  # a second try: the machine may be busy
        result = solve(problem, engine, time_limit=limit)
        if result.status == expected:
            break
    assert result.status == expected, (
        f"{result.status} after {result.seconds:.2f} s, expected {expected}"
    )
    against_optimum(problem, result)


@each(infeasible_problems)
def check_infeasible(engine: Solver, problem: Any, time_limit: float) -> None:
    """Status ``infeasible`` with a reason, or ``unknown``."""
    result = solve(problem, engine, time_limit=time_limit)
    assert result.schedule is None, "returned a schedule of an infeasible problem"
    assert result.status in ("infeasible", "unknown"), f"status {result.status}"
    assert result.status == "unknown" or result.reason, "infeasible without a reason"


@each(small_problems)
def check_limits(engine: Solver, problem: Any, time_limit: float) -> None:
    """Time limits and targets are kept; the result at every limit is consistent."""
    solve(problem, engine, time_limit=0.2)  # compiles and imports outside the clock
    for limit in (0, 0.05, min(time_limit, 1.0)):
        spent, best = quicker_of_two(problem, engine, limit + OVERRUN, time_limit=limit)
        assert spent <= limit + OVERRUN, f"{spent:.2f} s with limit {limit} s"
    for iterations in (0, 1):
        consistent(problem, counted(problem, engine, iterations))
    if best.objective is not None:
        _stops_at_target(problem, engine, best, time_limit)


def _stops_at_target(problem: Any, engine: Solver, before: Result, time_limit: float) -> None:
    """Check that a target far above the first incumbent ends a run as soon as it is met."""
    first = next(event.objective for event in before.history if event.objective is not None)
    target, soon = first + abs(first), time_limit + 2 * OVERRUN
    spent, result = quicker_of_two(
        problem, engine, soon, target=target, time_limit=2 * soon, seed=0
    )
    assert result.objective is not None, f"nothing found with target {target}"
    assert spent <= soon, f"{spent:.2f} s with target {target}, met easily: target ignored"


def check_hostile_limits(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Every invalid limit is refused with an `InputError` that names its field."""
    problem = supported(engine, tiny_problems())[0]
    for given in HOSTILE:
        field = next(iter(given))
        try:
            solve(problem, engine, **{"time_limit": 0.1, **given})
        except InputError as error:
            assert field in str(error), f"{given}: the message does not name {field}: {error}"
            continue
        raise AssertionError(f"{given}: accepted")


@each(small_problems)
def check_warm_start(engine: Solver, problem: Any, time_limit: float) -> None:
    """A warm start is never lost; one of a different problem or an invalid one is refused."""
    first = solve(problem, engine, time_limit=time_limit / 2)
    if first.schedule is None or first.objective is None:
        return
    for seconds in (None, 0, 0.1):
        if seconds is None:
            again = counted(problem, engine, 0, warm_start=first.schedule)
        else:
            again = solve(problem, engine, warm_start=first.schedule, time_limit=seconds)
        consistent(problem, again)
        assert again.objective is not None and again.objective <= first.objective, (
            f"warm start {first.objective}, returned {again.objective}"
        )
    _check_refused(problem, engine, JobShop([[(0, 1)]]).graph())
    found = first.schedule
    if by_graph(problem) and found.sequences is not None and found.start is not None:
        _check_refused(problem, engine, found.with_orders(found.sequences, found.start * 0))


def _check_refused(problem: Any, engine: Solver, start: Schedule) -> None:
    try:
        solve(problem, engine, time_limit=0.1, warm_start=start)
    except OptschedError:
        return
    raise AssertionError("accepted an invalid warm start")
