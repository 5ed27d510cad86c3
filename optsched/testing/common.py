"""What the checks of the conformance suite share: problems, optima, what every result keeps to."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import wraps
from typing import TYPE_CHECKING, Any

from optsched.model.graph import evaluate
from optsched.model.verify import verify
from optsched.solving.solve import solve
from optsched.solving.solver import kinds, support
from optsched.testing import best_quota
from optsched.testing.brute_force import best_makespan, best_period
from optsched.testing.gpu_placements import best_placement
from optsched.testing.problems import small_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optsched.solving.result import Result
    from optsched.solving.solver import Solver

    Check = Callable[[Solver, Sequence[Any], float], None]

SHORT = 0.1
"""Seconds for a problem of a few operations: a solver that cannot prove uses all of them."""

_ORACLES: dict[str, Callable[[Any], int | None]] = {
    "quota": best_quota.best_quota,
    "gpus": best_placement,
    "periodic": lambda problem: best_period(problem.graph()),
}

_optima: dict[str, int | None] = {}

_warm: set[int] = set()


class Skipped(Exception):
    """A check has nothing to check: the solver takes none of its problems, and says why."""


def warm_up(engine: Solver) -> None:
    """Solve something of each kind: compiling at the first call must not count below.

    One iteration may take long, a hundred only where they are quick: interpreted solvers have
    nothing to compile.
    """
    if id(engine) in _warm:
        return
    _warm.add(id(engine))
    for problem in small_problems():
        with contextlib.suppress(Exception):  # what is wrong here, the checks find and name
            if support(engine, problem):
                for iterations, seconds in ((1, 60), (100, 1)):
                    solve(problem, engine, time_limit=seconds, iterations=iterations)


def living_threads() -> int:
    """How many there are, but for those that load modules behind a search that ended early."""
    return sum(not thread.name.startswith("loading ") for thread in threading.enumerate())


def by_graph(problem: Any) -> bool:
    """Whether a solution is orders on the problem's graph."""
    return problem.problem_kind in ("jobshop", "jobarray", "periodic")


def optimum(problem: Any) -> int | None:
    """Optimal objective of a tiny problem, computed once; None if it has no solution."""
    key = problem.sha256
    if key not in _optima:
        oracle = _ORACLES.get(problem.problem_kind, lambda tiny: best_makespan(tiny.graph()))
        _optima[key] = oracle(problem)
    return _optima[key]


def supported(engine: Solver, problems: Iterable[Any]) -> list[Any]:
    """Those that the engine takes; `Skipped` with its reasons if there are none."""
    own = [problem for problem in problems if problem.problem_kind in kinds(engine)]
    if not own:
        raise Skipped(
            f"none of the problems of this check is of its kinds: {', '.join(kinds(engine))}"
        )
    said = [(problem, support(engine, problem)) for problem in own]
    taken = [problem for problem, one in said if one]
    if not taken:
        reasons = sorted({one.reason or "refused without a reason" for _, one in said})
        raise Skipped(f"takes none of the problems of this check: {'; '.join(reasons[:4])}")
    return taken


def each(*sets: Callable[[], list[Any]], every: int = 1) -> Callable[[Any], Check]:
    """Make a check of one problem a check of those in the sets that the solver takes.

    The problem's name stands before what is wrong; of the problems, each so-many-th is taken.
    """

    def decorate(check: Callable[[Solver, Any, float], None]) -> Check:
        @wraps(check)
        def checked(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
            there = [problem for make in sets for problem in make()]
            for problem in supported(engine, there)[::every]:
                try:
                    check(engine, problem, time_limit)
                except AssertionError as error:
                    name = "" if str(error).startswith(problem.name) else f"{problem.name}: "
                    raise AssertionError(f"{name}{error}") from error

        return checked

    return decorate


def consistent(problem: Any, result: Result) -> None:
    """Verified, no worse than its orders, worth what it says, honest about what is proved."""
    name = problem.name
    assert not result.contradiction, f"{name}: {result.contradiction}"
    if result.schedule is None:
        assert result.objective is None, f"{name}: an objective without a schedule"
        assert result.status in ("infeasible", "unknown"), f"{name}: {result.status}, no schedule"
        return
    faults = [fault.message for fault in verify(result.schedule)] + problem.check(result.schedule)
    assert not faults, f"{name}: {faults[0]}"
    assert problem.evaluate(result.schedule) == result.objective, f"{name}: objective is wrong"
    if by_graph(problem) and result.schedule.period is None:
        heads = evaluate(problem.graph(), result.schedule.sequences).head
        assert (heads == result.schedule.start).all(), f"{name}: starts are not semi-active"
    elif by_graph(problem):
        least = problem.evaluate_orders(result.schedule.sequences, result.schedule.offset)
        assert least == result.objective, f"{name}: its orders allow the period {least}"
    bound = result.lower_bound
    assert bound is None or bound <= result.objective, f"{name}: bound above the objective"  # type: ignore[operator]
    expected = "optimal" if bound == result.objective else "feasible"
    assert result.status == expected, f"{name}: status {result.status}, should be {expected}"


def against_optimum(problem: Any, result: Result) -> None:
    """Bound <= optimum <= objective; nothing for what nobody can solve."""
    against(problem, result, optimum(problem))


def against(problem: Any, result: Result, best: int | None) -> None:
    """The same, if the optimum is known; None: there is no schedule."""
    consistent(problem, result)
    if best is None:
        assert result.schedule is None, f"{problem.name}: solved the unsolvable"
        return
    assert result.status != "infeasible", f"{problem.name}: called infeasible, it is not"
    bound = result.lower_bound
    assert bound is None or bound <= best, f"{problem.name}: bound {bound} > {best}"
    assert result.objective is None or result.objective >= best, (
        f"{problem.name}: objective {result.objective} below the optimum {best}"
    )


def quicker_of_two(
    problem: Any, engine: Solver, most: float, **settings: Any
) -> tuple[float, Result]:
    """Seconds and result; a second try only after more than `most`: the machine may be busy."""
    tries: list[tuple[float, Result]] = []
    while not tries or (len(tries) < 2 and tries[0][0] > most):
        begin = time.perf_counter()
        result = solve(problem, engine, **settings)
        tries.append((time.perf_counter() - begin, result))
        consistent(problem, result)
    return min(tries, key=lambda one: one[0])
