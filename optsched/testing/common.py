"""Shared parts of the solver checks: supported problems, optima, the check of one result."""

from __future__ import annotations

import contextlib
import time
from functools import wraps
from typing import TYPE_CHECKING, Any

from optsched.model.graph import evaluate
from optsched.model.verify import verify
from optsched.solving.solve import solve
from optsched.solving.solver import kinds, support
from optsched.testing.brute_force import best_makespan, best_period
from optsched.testing.gpu_placements import best_placement
from optsched.testing.problems import small_problems
from optsched.testing.quota_plans import best_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optsched.solving.result import Result
    from optsched.solving.solver import Solver

    Check = Callable[[Solver, Sequence[Any], float], None]

SHORT = 0.1
"""Seconds for a problem of a few operations: a solver that cannot prove uses all of them."""

PATIENCE = 30
"""Seconds after which a run of few iterations is ended: the solver ignores their limit."""

_ORACLES: dict[str, Callable[[Any], int | None]] = {
    "quota": best_plan,
    "gpus": best_placement,
    "periodic": lambda problem: best_period(problem.graph()),
}

_optima: dict[str, int | None] = {}

_warm: set[int] = set()


class Skipped(Exception):
    """A check has no problem that the solver supports; the message gives the solver's reasons."""


def warm_up(engine: Solver) -> None:
    """Compile what the solver needs, outside the clocks of the checks.

    One iteration may take 60 s, a hundred 1 s: solvers in plain Python have nothing to compile.
    """
    if id(engine) in _warm:
        return
    _warm.add(id(engine))
    for problem in small_problems():
        with contextlib.suppress(Exception):  # the checks report errors
            if support(engine, problem):
                for iterations, seconds in ((1, 60), (100, 1)):
                    solve(problem, engine, time_limit=seconds, iterations=iterations)


def counted(problem: Any, engine: Solver, iterations: int, **others: Any) -> Result:
    """Solve with an iteration limit, and do not wait for ever for a solver that ignores it."""
    result = solve(
        problem, engine, iterations=iterations,
        on_progress=lambda progress: progress.elapsed > PATIENCE, **others,
    )  # fmt: skip
    assert result.seconds <= PATIENCE, (
        f"{problem.name}: did not end within {PATIENCE} s with iterations={iterations}"
    )
    return result


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
    """Return the problems that the engine supports; raise `Skipped` if there are none."""
    of_kind = [problem for problem in problems if problem.problem_kind in kinds(engine)]
    if not of_kind:
        raise Skipped(
            f"none of the problems of this check is of its kinds: {', '.join(kinds(engine))}"
        )
    answers = [(problem, support(engine, problem)) for problem in of_kind]
    taken = [problem for problem, answer in answers if answer]
    if not taken:
        reasons = sorted({answer.reason or "refused without a reason" for _, answer in answers})
        raise Skipped(f"takes none of the problems of this check: {'; '.join(reasons[:4])}")
    return taken


@contextlib.contextmanager
def named(problem: Any) -> Iterator[None]:
    """Put the problem's name before the message of an error, which becomes an `AssertionError`."""
    try:
        yield
    except Exception as error:
        raised = "" if isinstance(error, AssertionError) else f"raised {type(error).__name__}: "
        name = "" if str(error).startswith(problem.name) else f"{problem.name}: "
        raise AssertionError(f"{name}{raised}{error}") from error


def each(*sets: Callable[[], list[Any]]) -> Callable[[Any], Check]:
    """Turn a check of one problem into a check of all supported problems of the sets.

    The problem's name is put before the message of an error.
    """

    def decorate(check: Callable[[Solver, Any, float], None]) -> Check:
        @wraps(check)
        def checked(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
            for problem in supported(engine, [one for make in sets for one in make()]):
                with named(problem):
                    check(engine, problem, time_limit)

        return checked

    return decorate


def consistent(problem: Any, result: Result) -> None:
    """Check one result: verified schedule, true objective, semi-active starts, status of proof."""
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
    """Check that bound <= optimum <= objective; no schedule of an infeasible problem."""
    against(problem, result, optimum(problem))


def against(problem: Any, result: Result, best: int | None) -> None:
    """Check a result against a known optimum; None: the problem is infeasible."""
    consistent(problem, result)
    if best is None:
        assert result.schedule is None, (
            f"{problem.name}: returned a schedule of an infeasible problem"
        )
        return
    assert result.status != "infeasible", f"{problem.name}: called infeasible, but it is feasible"
    bound = result.lower_bound
    assert bound is None or bound <= best, f"{problem.name}: bound {bound} > {best}"
    assert result.objective is None or result.objective >= best, (
        f"{problem.name}: objective {result.objective} below the optimum {best}"
    )


def quicker_of_two(
    problem: Any, engine: Solver, most: float, **settings: Any
) -> tuple[float, Result]:
    """Return seconds and result; run again if the first run took more than `most` seconds."""
    tries: list[tuple[float, Result]] = []
    while not tries or (len(tries) < 2 and tries[0][0] > most):
        begin = time.perf_counter()
        result = solve(problem, engine, **settings)
        tries.append((time.perf_counter() - begin, result))
        consistent(problem, result)
    return min(tries, key=lambda one: one[0])
