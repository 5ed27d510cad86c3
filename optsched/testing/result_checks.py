"""Checks of what a solver returns: interface, values, bounds, statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optsched
from optsched.errors import UnsupportedProblem
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.solving.solver import support
from optsched.testing.check_common import (
    SHORT,
    against_optimum,
    consistent,
    optimum,
    supported,
)
from optsched.testing.problems import (
    degenerate_problems,
    infeasible_problems,
    random_problems,
    small_problems,
    tiny_problems,
)
from optsched.testing.rolling_problems import equal_jobs, random_rolling
from optsched.testing.variants import variants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.solving.solver import Solver

RANDOM = 12
"""Random graphs that brute force judges."""


def check_interface(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """`name`, `options`, a pure `supports`, and a reason for every refusal."""
    assert isinstance(engine.name, str) and engine.name, "name: expected a non-empty string"
    options = getattr(engine, "options", {})
    assert hasattr(options, "keys"), "options: expected a mapping of names to help"
    for problem in [*tiny_problems(), *degenerate_problems(), *problems]:
        first, second = support(engine, problem), support(engine, problem)
        assert bool(first) == bool(second), f"{problem.name}: supports() changes its mind"
        if first:
            continue
        assert getattr(first, "reason", "?"), f"{problem.name}: refused without a reason"
        try:
            optsched.solve(problem, engine, time_limit=0)
        except UnsupportedProblem:
            continue
        raise AssertionError(f"{problem.name}: refused by supports(), but solve() takes it")


def check_feasible_and_bounded(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """On tiny problems brute force knows the optimum; elsewhere the verifier and bounds must do."""
    found_any = False
    for problem in supported(engine, tiny_problems()):
        result = optsched.solve(problem, engine, time_limit=min(time_limit, 2 * SHORT))
        against_optimum(problem, result)
        found_any = found_any or result.schedule is not None
    assert found_any, "found nothing on any tiny problem"
    for problem in supported(engine, [*small_problems(), *problems]):
        consistent(problem, optsched.solve(problem, engine, time_limit=time_limit))


def check_degenerate(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """One job, one machine, nothing but zeros, numbers near 2^53, no operation at all."""
    for problem in supported(engine, degenerate_problems()):
        result = optsched.solve(problem, engine, time_limit=min(time_limit, SHORT))
        against_optimum(problem, result)


def check_random(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Random graphs with every feature mixed, against brute force."""
    for problem in supported(engine, [*random_problems(RANDOM), *random_rolling(RANDOM)]):
        result = optsched.solve(problem, engine, time_limit=min(time_limit, SHORT))
        against_optimum(problem, result)


def check_metamorphic(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Renaming, stretching, mirroring, splitting: what must not, or may only so, change a value."""
    limit = min(time_limit, SHORT)
    named = {problem.name: problem for problem in [*tiny_problems(), *small_problems()]}
    large = "8x6"  # no oracle: the results must fit each other
    bases = ["3x3", "a machine met again and again", "array with lags", "may idle", "room for one"]
    taken = supported(engine, [named[name] for name in (*bases, large)])
    for problem in [problem for problem in taken if problem.name != large]:
        best = optimum(problem)
        assert best is not None
        for what, variant, least, most in variants(problem):
            if not support(engine, variant):
                continue
            result = optsched.solve(variant, engine, time_limit=limit)
            consistent(variant, result)
            _within(f"{problem.name}, {what}", result, least, most, best, best)
    for problem in [problem for problem in taken if problem.name == large]:
        first = optsched.solve(problem, engine, time_limit=2 * limit)
        for what, variant, least, most in variants(problem):
            if support(engine, variant):
                result = optsched.solve(variant, engine, time_limit=2 * limit)
                consistent(variant, result)
                bounds = first.lower_bound, first.objective
                _within(f"{problem.name}, {what}", result, least, most, *bounds)


def _within(
    what: str,
    result: optsched.Result,
    least: int | None,
    most: int | None,
    low: int | None,
    high: int | None,
) -> None:
    """The optimum before is in low..high, the variant's in least * low .. most * high."""
    if None not in (result.objective, least, low):
        assert result.objective >= least * low, (  # type: ignore[operator]
            f"{what}: objective {result.objective}, but the optimum is at least {least * low}"  # type: ignore[operator]
        )
    if None not in (result.lower_bound, most, high):
        assert result.lower_bound <= most * high, (  # type: ignore[operator]
            f"{what}: bound {result.lower_bound}, but the optimum is at most {most * high}"  # type: ignore[operator]
        )
    assert most is None or high is None or result.status != "infeasible", f"{what}: infeasible"


def check_exact(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Every tiny problem, feasible or not, is closed within the limit."""
    tiny = [
        *tiny_problems(),
        *degenerate_problems(),
        *random_problems(RANDOM),
        *random_rolling(RANDOM),
    ]
    for problem in supported(engine, tiny):
        expected = "infeasible" if optimum(problem) is None else "optimal"
        for limit in (time_limit, 40 * time_limit):  # the machine may be busy: a second try
            result = optsched.solve(problem, engine, time_limit=limit)
            if result.status == expected:
                break
        assert result.status == expected, (
            f"{problem.name}: {result.status} after {result.seconds:.2f} s, expected {expected}"
        )
        against_optimum(problem, result)


def check_status(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """The engine's own status, which `optsched.solve` would put right, claims only what is so."""
    short = min(time_limit, SHORT)
    cases = [(problem, short) for problem in tiny_problems()]
    cases += [(problem, limit) for problem in small_problems() for limit in (0, short)]
    taken = supported(engine, [problem for problem, _ in cases])
    for problem, limit in [case for case in cases if case[0] in taken]:
        limits = Limits(time_limit=limit)
        monitor = Monitor(limits)
        monitor.bound(problem.lower_bound(), "bounds")
        returned = engine.solve(problem, limits, monitor)
        if returned is None:  # all is reported already: legal
            continue
        if returned.schedule is not None and returned.schedule.sequences is not None:
            orders = returned.schedule.sequences
            monitor.incumbent(orders, problem.evaluate(returned.schedule))
        if returned.lower_bound is not None:
            monitor.bound(returned.lower_bound)
        assert not monitor.contradiction, f"{problem.name}: {monitor.contradiction}"
        known = f"objective {monitor.objective}, lower bound {monitor.lower_bound}"
        lies = {
            "optimal": not monitor.proved,
            "feasible": monitor.objective is None,
            "infeasible": True,
        }
        assert not lies.get(returned.status), (
            f"{problem.name}: returned status {returned.status} with {known}"
        )


def check_infeasible(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Status ``infeasible`` with a reason, or at least ``unknown``."""
    for problem in supported(engine, infeasible_problems()):
        result = optsched.solve(problem, engine, time_limit=time_limit)
        assert result.schedule is None, f"{problem.name}: solved the unsolvable"
        assert result.status in ("infeasible", "unknown"), f"{problem.name}: {result.status}"
        if result.status == "infeasible":
            assert result.reason, f"{problem.name}: infeasible without a reason"


def check_equal_jobs(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Equal jobs repeat every ``max(K, S) (f + b)`` at best: no value below it, no bound above."""
    known = [equal_jobs(jobs, stages) for jobs, stages in ((2, 4), (3, 3), (6, 2))]
    taken = supported(engine, [problem for problem, _ in known])
    for problem, best in [case for case in known if case[0] in taken]:
        result = optsched.solve(problem, engine, time_limit=min(time_limit, 2 * SHORT))
        consistent(problem, result)
        assert result.objective is None or result.objective >= best, f"{problem.name}: below {best}"
        bound = result.lower_bound
        assert bound is None or bound <= best, f"{problem.name}: bound {bound} > {best}"
