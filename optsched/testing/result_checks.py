"""Checks of what a solver returns: interface, values, bounds, statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched.errors import UnsupportedProblem
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.solving.solve import solve
from optsched.solving.solver import kinds, support
from optsched.testing.common import (
    SHORT,
    against_optimum,
    consistent,
    each,
    optimum,
    supported,
)
from optsched.testing.problems import (
    degenerate_problems,
    equal_jobs,
    infeasible_problems,
    random_problems,
    small_problems,
    tiny_problems,
)
from optsched.testing.variants import variants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.solving.result import Result
    from optsched.solving.solver import Solver


def check_interface(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """`name`, `options`, a pure `supports`, and a reason for every refusal."""
    assert isinstance(engine.name, str) and engine.name, "name: expected a non-empty string"
    options = getattr(engine, "options", {})
    assert hasattr(options, "keys"), "options: expected a mapping of names to help"
    for problem in [*tiny_problems(), *degenerate_problems(), *problems]:
        if problem.problem_kind not in kinds(engine):
            continue
        first, second = support(engine, problem), support(engine, problem)
        assert bool(first) == bool(second), f"{problem.name}: supports() changes its mind"
        if first:
            continue
        assert first.reason, f"{problem.name}: refused without a reason"
        try:
            solve(problem, engine, time_limit=0)
        except UnsupportedProblem:
            continue
        raise AssertionError(f"{problem.name}: refused by supports(), but solve() takes it")


def check_feasible_and_bounded(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """On tiny problems brute force knows the optimum; elsewhere the verifier and bounds must do."""
    found_any = False
    for problem in supported(engine, tiny_problems()):
        result = solve(problem, engine, time_limit=min(time_limit, 2 * SHORT))
        against_optimum(problem, result)
        found_any = found_any or result.schedule is not None
    assert found_any, "found nothing on any tiny problem"
    for problem in supported(engine, [*small_problems(), *problems]):
        consistent(problem, solve(problem, engine, time_limit=time_limit))


@each(degenerate_problems)
def check_degenerate(engine: Solver, problem: Any, time_limit: float) -> None:
    """One job, one machine, nothing but zeros, numbers near 2^53, no operation at all."""
    against_optimum(problem, solve(problem, engine, time_limit=min(time_limit, SHORT)))


@each(random_problems)
def check_random(engine: Solver, problem: Any, time_limit: float) -> None:
    """Random graphs and periodic arrays with every feature mixed, against brute force."""
    against_optimum(problem, solve(problem, engine, time_limit=min(time_limit, SHORT)))


def check_metamorphic(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Renaming, stretching, mirroring, splitting: what must not, or may only so, change a value."""
    limit = min(time_limit, SHORT)
    large = "8x6"  # no oracle: the results must fit each other
    bases = ["3x3", "a machine met again and again", "array with lags", "may idle", "room for one"]
    bases += [large, *(f"quota plan {k}" for k in range(20))]
    every = [*tiny_problems(), *small_problems()]
    for problem in supported(engine, [one for one in every if one.name in bases]):
        if problem.name == large:
            first = solve(problem, engine, time_limit=2 * limit)
            low, high = first.lower_bound, first.objective
        else:
            low = high = optimum(problem)
        if low is None:
            continue
        for what, variant, least, most in variants(problem):
            if support(engine, variant):
                result = solve(variant, engine, time_limit=2 * limit)
                consistent(variant, result)
                bounds = (least and least * low, most and high and most * high)
                _within(f"{problem.name}, {what}", result, *bounds)


def _within(what: str, result: Result, least: int | None, most: int | None) -> None:
    """The variant's optimum is in least .. most."""
    value, bound = result.objective, result.lower_bound
    assert None in (value, least) or value >= least, (  # type: ignore[operator]
        f"{what}: objective {value}, but the optimum is at least {least}"
    )
    assert None in (bound, most) or bound <= most, (  # type: ignore[operator]
        f"{what}: bound {bound}, but the optimum is at most {most}"
    )
    assert most is None or result.status != "infeasible", f"{what}: infeasible"


@each(tiny_problems, degenerate_problems, random_problems)
def check_exact(engine: Solver, problem: Any, time_limit: float) -> None:
    """Every tiny problem, feasible or not, is closed within the limit."""
    expected = "infeasible" if optimum(problem) is None else "optimal"
    for limit in (time_limit, 40 * time_limit):  # the machine may be busy: a second try
        result = solve(problem, engine, time_limit=limit)
        if result.status == expected:
            break
    assert result.status == expected, (
        f"{result.status} after {result.seconds:.2f} s, expected {expected}"
    )
    against_optimum(problem, result)


def check_status(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """The engine's own status and bounds, which `optsched.solve` puts right, claim what is so."""
    short, tiny = min(time_limit, SHORT), tiny_problems()
    cases = [(problem, short) for problem in supported(engine, [*tiny, *small_problems()])]
    cases += [(problem, 0) for problem, _ in cases if problem not in tiny]
    for problem, limit in cases:
        if problem.infeasibility():  # `optsched.solve` asks no engine then
            continue
        limits = Limits(time_limit=limit)
        monitor = Monitor(limits)
        monitor.bound(problem.lower_bound(), "bounds")
        returned = engine.solve(problem, limits, monitor)
        if returned is None:  # all is reported already: legal
            continue
        if returned.schedule is not None:
            monitor.incumbent(
                problem.answer(returned.schedule), problem.evaluate(returned.schedule)
            )
        if returned.lower_bound is not None:
            monitor.bound(returned.lower_bound)
        assert not monitor.contradiction, f"{problem.name}: {monitor.contradiction}"
        known = f"objective {monitor.objective}, lower bound {monitor.lower_bound}"
        best = optimum(problem) if problem in tiny else 0
        if None not in (best, monitor.lower_bound) and problem in tiny:
            assert monitor.lower_bound <= best, f"{problem.name}: {known}, the optimum is {best}"  # type: ignore[operator]
        lies = {
            "optimal": not monitor.proved,
            "feasible": monitor.objective is None,
            "infeasible": best is not None or not returned.reason,
        }
        assert not lies.get(returned.status), (
            f"{problem.name}: returned status {returned.status} with {known}"
        )


@each(infeasible_problems)
def check_infeasible(engine: Solver, problem: Any, time_limit: float) -> None:
    """Status ``infeasible`` with a reason, or at least ``unknown``."""
    result = solve(problem, engine, time_limit=time_limit)
    assert result.schedule is None, "solved the unsolvable"
    assert result.status in ("infeasible", "unknown"), f"{result.status}"
    if result.status == "infeasible":
        assert result.reason, "infeasible without a reason"


def check_equal_jobs(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Equal jobs repeat every ``max(K, S) (f + b)`` at best: no value below it, no bound above."""
    known = [equal_jobs(jobs, stages) for jobs, stages in ((2, 4), (3, 3), (6, 2))]
    taken = supported(engine, [problem for problem, _ in known])
    for problem, best in [case for case in known if case[0] in taken]:
        result = solve(problem, engine, time_limit=min(time_limit, 2 * SHORT))
        consistent(problem, result)
        _within(problem.name, result, best, best)
