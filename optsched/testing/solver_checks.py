"""The conformance suite: what every backend, ours or a third party's, must keep.

A bug found in one backend is added here as a check, so that all gain (the idea of
MathOptInterface's shared tests and of scikit-learn's ``check_estimator``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.solving.solver import KINDS, Solver, kinds, solvers
from optsched.solving.solver import solver as find_solver
from optsched.testing.check_common import Skipped, schedules, warm_up
from optsched.testing.check_quotas import (
    QUOTA_CHECKS,
    check_quota_exact,
    check_quota_order,
    check_quota_plans,
    check_quota_runs,
    check_quota_status,
    check_quota_traces,
    decides_quotas,
)
from optsched.testing.check_results import (
    check_degenerate,
    check_equal_jobs,
    check_exact,
    check_feasible_and_bounded,
    check_infeasible,
    check_interface,
    check_metamorphic,
    check_random,
    check_status,
)
from optsched.testing.check_runs import (
    check_hostile_limits,
    check_limits,
    check_reproducible,
    check_warm_start,
)
from optsched.testing.check_subsets import (
    SUBSET_CHECKS,
    check_subset_choices,
    check_subset_exact,
    check_subset_runs,
    check_subset_status,
    chooses_gpus,
)
from optsched.testing.check_traces import check_leaves_no_trace, check_silent
from optsched.testing.check_watching import (
    check_interrupt,
    check_monitor,
    check_progress,
    check_stopping,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from optsched.testing.check_common import Check

CHECKS: tuple[Check, ...] = (
    check_interface, check_feasible_and_bounded, check_degenerate, check_random,
    check_metamorphic, check_equal_jobs, check_status, check_infeasible, check_reproducible,
    check_limits, check_hostile_limits, check_warm_start, check_monitor, check_progress,
    check_stopping, check_interrupt, check_leaves_no_trace, check_silent,
)  # fmt: skip
ALL_CHECKS: tuple[Check, ...] = (
    *CHECKS, check_exact, *SUBSET_CHECKS, check_subset_exact, *QUOTA_CHECKS, check_quota_exact,
)  # fmt: skip


REFUSALS: tuple[Check, ...] = (check_interface, check_subset_choices, check_quota_plans)
"""Checks that a solver passes which takes nothing at all."""


def check_solver(
    solver: str | Solver,
    problems: Sequence[Any] | None = None,
    time_limit: float = 1.0,
    exact: bool = False,
    only: Collection[str] | None = None,
    exclude: Collection[str] = (),
) -> dict[str, str]:
    """Run every check; one error that lists all failures. Below two minutes, if nothing hangs.

    A check with problems that the solver takes none of is skipped.

    Parameters
    ----------
    solver
        A solver object, or the name of an installed one.
    problems
        Further problems for the checks that need no known optimum.
    time_limit
        Seconds for each solve; tiny problems get a fraction.
    exact
        Whether the solver must close every tiny problem within the limit.
    only, exclude
        Names of checks, such as ``"check_reproducible"``: run these alone, or all but these.

    Returns
    -------
    dict
        Why each skipped check was skipped, in the words of the solver's own `supports`.

    Raises
    ------
    AssertionError
        With one line per failure: check, problem, what went wrong; or every check was skipped.
    InputError
        There is no check of a name.
    """
    if isinstance(solver, str):
        found: dict[str, str] = {}
        for one in engines(solver):
            found |= check_solver(one, problems, time_limit, exact, only, exclude)
        return found
    engine, failures = solver, list[str]()
    skipped: dict[str, str] = {}
    checks = _chosen(checks_for(engine, exact), only, exclude)
    for check in checks:
        try:
            check(engine, problems or (), time_limit)
        except Skipped as reason:
            skipped[check.__name__] = str(reason)
        except AssertionError as error:
            failures.append(f"{check.__name__}: {error}")
        except Exception as error:
            failures.append(f"{check.__name__}: raised {type(error).__name__}: {error}")
    name = getattr(engine, "name", engine)
    if failures:
        raise AssertionError(f"{name} fails {len(failures)} checks:\n  " + "\n  ".join(failures))
    void = all(check in REFUSALS or check.__name__ in skipped for check in checks)
    if void and (skipped or not checks):
        told = [f"{check}: {reason}" for check, reason in skipped.items()]
        told = told or [f"no check is for what it finds: kinds = {kinds(engine)}"]
        raise AssertionError(f"nothing of {name} was checked:\n  " + "\n  ".join(told))
    return skipped


def engines(name: str) -> list[Solver]:
    """The solvers of this name, one for each kind of problem or several kinds."""
    found = [find_solver(name, kind) for kind in KINDS if name in solvers(kind)]
    return list({type(one): one for one in found}.values()) or [find_solver(name)]


def _chosen(
    checks: list[Check], only: Collection[str] | None, exclude: Collection[str]
) -> list[Check]:
    """The checks of these names, or without those; unknown names are refused."""
    known = {check.__name__ for check in ALL_CHECKS}
    for field, names in (("only", only or ()), ("exclude", exclude)):
        if isinstance(names, str):
            raise InputError(f"{field}: expected a list of names, got {names!r:.60}")
        for name in names:
            if name not in known:
                there = ", ".join(sorted(known))
                raise InputError(f"{field}: there is no check {name!r:.60}; there are {there}")
    chosen = [check for check in checks if only is None or check.__name__ in only]
    return [check for check in chosen if check.__name__ not in exclude]


def checks_for(engine: Solver, exact: bool = False) -> list[Check]:
    """The checks for what the engine takes: graphs, choices of GPUs, quota plans."""
    found: list[Check] = []
    gpus = chooses_gpus(engine)
    if schedules(engine):
        warm_up(engine)
        found += [*CHECKS, check_exact] if exact else CHECKS
    if gpus:
        found += [*SUBSET_CHECKS, check_subset_exact] if exact else SUBSET_CHECKS
    if decides_quotas(engine):
        found += [*QUOTA_CHECKS, check_quota_exact] if exact else QUOTA_CHECKS
    return found


class SolverTests:
    """Pytest class: subclass it, set `solver`, and every check becomes a test."""

    solver: Any = None
    problems: Sequence[Any] = ()
    time_limit: float = 1.0
    exact: bool = False

    def _run(self, check: Check) -> None:
        import pytest

        solver, told, checked = self.solver, list[str](), False
        for engine in engines(solver) if isinstance(solver, str) else [solver]:
            if check not in checks_for(engine, exact=True):
                told.append(f"{engine.name} takes other problems")
                continue
            try:
                check(engine, self.problems, self.time_limit)
            except Skipped as reason:
                told.append(f"{engine.name} {reason}")
            else:
                checked = True
        if not checked:
            pytest.skip("; ".join(told))

    def test_interface(self) -> None:
        """Name, options, pure `supports`, reasons for refusals."""
        self._run(check_interface)

    def test_feasible_and_bounded(self) -> None:
        """Bound <= optimum <= objective, schedules verified, statuses true."""
        self._run(check_feasible_and_bounded)

    def test_degenerate(self) -> None:
        """The corners of the problem."""
        self._run(check_degenerate)

    def test_random(self) -> None:
        """Random graphs against brute force."""
        self._run(check_random)

    def test_metamorphic(self) -> None:
        """Values change as the problem does."""
        self._run(check_metamorphic)

    def test_equal_jobs(self) -> None:
        """Rolling equal jobs: the optimum is known."""
        self._run(check_equal_jobs)

    def test_exact(self) -> None:
        """Tiny problems are closed, if the solver is exact."""
        if self.exact:
            self._run(check_exact)

    def test_status(self) -> None:
        """What the solver itself returns claims no more than was proved."""
        self._run(check_status)

    def test_infeasible(self) -> None:
        """Infeasible problems are never solved, and never called feasible."""
        self._run(check_infeasible)

    def test_reproducible(self) -> None:
        """Same instance, seed and iterations give the same schedule."""
        self._run(check_reproducible)

    def test_limits(self) -> None:
        """Limits of zero, a second, a target: obeyed, with a legal status."""
        self._run(check_limits)

    def test_hostile_limits(self) -> None:
        """Limits and options out of range are refused by name."""
        self._run(check_hostile_limits)

    def test_warm_start(self) -> None:
        """A warm start is never lost; a foreign or broken one is rejected."""
        self._run(check_warm_start)

    def test_monitor(self) -> None:
        """Incumbents fall, bounds rise, callbacks may stop or raise."""
        self._run(check_monitor)

    def test_progress(self) -> None:
        """News come while the solver works."""
        self._run(check_progress)

    def test_stopping(self) -> None:
        """Stopping criteria are obeyed."""
        self._run(check_stopping)

    def test_interrupt(self) -> None:
        """Ctrl-C is obeyed."""
        self._run(check_interrupt)

    def test_leaves_no_trace(self) -> None:
        """Problem, random state, settings and threads are as before."""
        self._run(check_leaves_no_trace)

    def test_silent(self) -> None:
        """Nothing is printed."""
        self._run(check_silent)

    def test_subset_choices(self) -> None:
        """Choices of GPUs are allowed, worth what they say, and bounded by the optimum."""
        self._run(check_subset_choices)

    def test_subset_runs(self) -> None:
        """Choices of GPUs repeat, and warm starts are kept."""
        self._run(check_subset_runs)

    def test_subset_status(self) -> None:
        """Bounds of choices that the solver itself reports are bounds."""
        self._run(check_subset_status)

    def test_subset_exact(self) -> None:
        """Small choices are proved, if the solver is exact."""
        if self.exact:
            self._run(check_subset_exact)

    def test_quota_plans(self) -> None:
        """Quotas are allowed, worth what they say, and bounded by the optimum."""
        self._run(check_quota_plans)

    def test_quota_runs(self) -> None:
        """Quotas repeat, and warm starts are kept."""
        self._run(check_quota_runs)

    def test_quota_status(self) -> None:
        """Bounds of quotas that the solver itself reports are bounds."""
        self._run(check_quota_status)

    def test_quota_order(self) -> None:
        """The order of the jobs does not matter."""
        self._run(check_quota_order)

    def test_quota_traces(self) -> None:
        """Plans and random state are as before."""
        self._run(check_quota_traces)

    def test_quota_exact(self) -> None:
        """Small plans are proved, if the solver is exact."""
        if self.exact:
            self._run(check_quota_exact)
