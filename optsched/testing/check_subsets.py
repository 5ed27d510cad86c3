"""Checks of solvers that choose GPUs (`SubsetChoice`), against all subsets of small clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optsched
from optsched.solving.solver import kinds
from optsched.testing.check_answers import (
    check_exact,
    check_runs,
    check_status,
    check_support,
    judge,
)
from optsched.testing.check_common import supported as taken_by
from optsched.testing.subset_problems import optimum, subset_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.problems.gpus.problem import SubsetChoice
    from optsched.solving.result import Result
    from optsched.solving.solver import Solver

CASES = 40


def chooses_gpus(engine: Solver) -> bool:
    """Whether the solver is for subset choice at all."""
    return "gpus" in kinds(engine)


def supported(engine: Solver) -> list[SubsetChoice]:
    """Those of the suite's problems that the engine takes."""
    return taken_by(engine, subset_problems(CASES))


def judged(problem: SubsetChoice, result: Result) -> None:
    """Allowed, verified, worth what it says, bounded from below by no more than the optimum."""
    judge(problem, result, optimum(problem))


def check_subset_choices(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Random clusters, tenants and policies against brute force; refusals have a reason."""
    check_support(engine, subset_problems(CASES), judged, time_limit)


def check_subset_runs(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Same seed and iterations, same choice; a warm start is never lost; a stop is obeyed."""

    def reference(problem: SubsetChoice, first: Result) -> Result:
        return first if first.schedule is None else optsched.solve(problem, "counts")

    check_runs(engine, supported(engine)[:8], judged, reference)


def check_subset_status(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """The engine's own bounds and reasons hold, without what `optsched.solve` would put right."""
    check_status(engine, supported(engine), optimum, time_limit)


def check_subset_exact(engine: Solver, problems: Sequence[Any], time_limit: float) -> None:
    """Every choice is proved within the limit."""
    check_exact(engine, supported(engine), optimum, (time_limit, 4 * time_limit))


SUBSET_CHECKS = (check_subset_choices, check_subset_runs, check_subset_status)
