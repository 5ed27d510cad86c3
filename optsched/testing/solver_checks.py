"""`check_solver`: the conformance suite of solvers, ours and those of other packages.

A bug found in one solver becomes a check here, so that all solvers gain (the idea of
MathOptInterface's shared tests and of scikit-learn's ``check_estimator``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from optsched.errors import InputError
from optsched.solving.solver import KINDS, Solver, solvers
from optsched.solving.solver import solver as find_solver
from optsched.testing.checks import (
    check_brute_force,
    check_feasible_and_bounded,
    check_hostile_limits,
    check_infeasible,
    check_limits,
    check_proofs,
    check_warm_start,
)
from optsched.testing.common import Skipped, warm_up
from optsched.testing.repeatability import check_reproducible

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from optsched.testing.common import Check

CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        check_brute_force, check_feasible_and_bounded, check_infeasible, check_reproducible,
        check_limits, check_hostile_limits, check_warm_start, check_proofs,
    )
}  # fmt: skip
"""Name to check; `check_proofs` runs only with ``exact=True``."""


class Report(NamedTuple):
    """Result of `check_solver`; printed, one line per check."""

    seconds: dict[str, float]
    """Duration of each check."""
    skipped: dict[str, str]
    """Reasons of skipped checks, from the solver's `supports`."""

    def __str__(self) -> str:
        """``check_limits        1.2 s``, followed by the reason of a skipped check."""
        return "\n".join(
            f"{name:28s}{taken:6.1f} s  {self.skipped.get(name, '')}".rstrip()
            for name, taken in self.seconds.items()
        )


def check_solver(
    solver: str | Solver,
    problems: Sequence[Any] = (),
    time_limit: float = 1.0,
    exact: bool = False,
    only: Collection[str] | None = None,
    exclude: Collection[str] = (),
) -> Report:
    """Run every check of a solver; raise one error that lists all failures.

    A check is skipped if the solver supports none of its problems.

    Parameters
    ----------
    solver
        A solver, or a name: all installed solvers of that name are checked, one for each kind of
        problem.
    problems
        More problems for `check_feasible_and_bounded`.
    time_limit
        Seconds for each solve; a tiny problem gets a fraction.
    exact
        Also require a proof of every tiny problem.
    only, exclude
        Names of checks, such as ``"check_limits"``, to run or to leave out.

    Raises
    ------
    AssertionError
        One line per failure: check, problem, fault. Also if every check was skipped.
    InputError
        An unknown name of a check; a class instead of a solver object.

    Examples
    --------
    >>> from optsched.testing import check_solver
    >>> report = check_solver("dispatch", time_limit=0.1, only=["check_infeasible"])
    """
    checks = _chosen(exact, only, exclude)
    report = Report({}, {})
    for engine in engines(solver):
        _run_checks(engine, checks, problems, time_limit, report)
    return report


def _run_checks(
    engine: Solver,
    checks: dict[str, Check],
    problems: Sequence[Any],
    time_limit: float,
    report: Report,
) -> None:
    """Run all checks of one solver and add them to the report."""
    warm_up(engine)
    failures, skipped = list[str](), dict[str, str]()
    for name, check in checks.items():
        begin = time.perf_counter()
        try:
            check(engine, problems, time_limit)
        except Skipped as reason:
            skipped[name] = str(reason)
        except AssertionError as error:
            failures.append(f"{name}: {error}")
        except Exception as error:
            failures.append(f"{name}: raised {type(error).__name__}: {error}")
        report.seconds[name] = report.seconds.get(name, 0.0) + time.perf_counter() - begin
    label = getattr(engine, "name", engine)
    if failures:
        raise AssertionError(f"{label} fails {len(failures)} checks:\n  " + "\n  ".join(failures))
    if len(skipped) == len(checks):
        reasons = "\n  ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise AssertionError(f"nothing of {label} was checked:\n  {reasons}")
    report.skipped.update(skipped)


def engines(name: str | Solver) -> list[Solver]:
    """Return the solvers of this name, one for each kind of problem; or the solver alone."""
    if not isinstance(name, str):
        if isinstance(name, type) or not callable(getattr(name, "solve", None)):
            raise InputError(f"solver: expected a name or a solver object, got {name!r:.60}")
        return [name]
    found = [find_solver(name, kind) for kind in KINDS if name in solvers(kind)]
    return list({type(engine): engine for engine in found}.values()) or [find_solver(name)]


def _chosen(
    exact: bool, only: Collection[str] | None, exclude: Collection[str]
) -> dict[str, Check]:
    """Select checks by name; refuse unknown names and an empty selection."""
    for field, names in (("only", only or ()), ("exclude", exclude)):
        if isinstance(names, str):
            raise InputError(f"{field}: expected a list of names, got {names!r:.60}")
        for name in names:
            if name not in CHECKS:
                known = ", ".join(sorted(CHECKS))
                raise InputError(f"{field}: unknown check {name!r:.60}; checks are {known}")
    chosen = {
        name: check
        for name, check in CHECKS.items()
        if (only is None or name in only)
        and name not in exclude
        and (exact or check is not check_proofs)
    }
    if not chosen:
        raise InputError("only, exclude: no check is left")
    return chosen


class SolverTests:
    """Pytest class: subclass it and set `solver`; `check_limits` becomes `test_limits`, and so on.

    `kind` is needed only with a name that solvers of several kinds of problems share.

    Examples
    --------
    >>> from optsched.testing import SolverTests
    >>> class TestDispatch(SolverTests):
    ...     solver, kind = "dispatch", "jobshop"
    """

    solver: Any = None
    kind: str | None = None
    problems: Sequence[Any] = ()
    time_limit: float = 1.0
    exact: bool = False

    def _run(self, check: Check) -> None:
        import pytest

        if check is check_proofs and not self.exact:
            pytest.skip("exact = False")
        named = isinstance(self.solver, str) and self.kind
        found = [find_solver(self.solver, self.kind)] if named else engines(self.solver)
        for engine in found:
            warm_up(engine)
            try:
                check(engine, self.problems, self.time_limit)
            except Skipped as reason:
                if len(found) == 1:
                    pytest.skip(f"{engine.name} {reason}")


def _as_test(check: Check) -> Any:
    def test(self: SolverTests) -> None:
        self._run(check)

    test.__doc__ = check.__doc__
    return test


for _name, _check in CHECKS.items():
    setattr(SolverTests, _name.replace("check_", "test_", 1), _as_test(_check))
