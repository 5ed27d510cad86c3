"""The conformance suite: what every backend, ours or a third party's, must keep.

A bug found in one backend is added here as a check, so that all gain (the idea of
MathOptInterface's shared tests and of scikit-learn's ``check_estimator``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from optsched.errors import InputError
from optsched.solving.solver import KINDS, Solver, solvers
from optsched.solving.solver import solver as find_solver
from optsched.testing.common import Skipped, warm_up
from optsched.testing.result_checks import (
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
from optsched.testing.run_checks import (
    check_hostile_limits,
    check_leaves_no_trace,
    check_limits,
    check_reproducible,
    check_silent,
    check_warm_start,
)
from optsched.testing.watching_checks import (
    check_interrupt,
    check_monitor,
    check_progress,
    check_stopping,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from optsched.testing.common import Check

CHECKS: tuple[Check, ...] = (
    check_interface, check_feasible_and_bounded, check_degenerate, check_random,
    check_metamorphic, check_equal_jobs, check_status, check_infeasible, check_reproducible,
    check_limits, check_hostile_limits, check_warm_start, check_monitor, check_progress,
    check_stopping, check_interrupt, check_leaves_no_trace, check_silent,
)  # fmt: skip
"""For every solver; `check_exact` is for those that prove."""

_NAMES = {check.__name__: check for check in (*CHECKS, check_exact)}


class Report(NamedTuple):
    """What `check_solver` did; printed, a line for every check."""

    seconds: dict[str, float]
    """How long each check took."""
    skipped: dict[str, str]
    """Why each skipped check was skipped, in the words of the solver's own `supports`."""

    def __str__(self) -> str:
        """``check_random        1.2 s`` or why it was skipped."""
        return "\n".join(
            f"{name:28s}{taken:6.1f} s  {self.skipped.get(name, '')}".rstrip()
            for name, taken in self.seconds.items()
        )


def check_solver(
    solver: str | Solver,
    problems: Sequence[Any] | None = None,
    time_limit: float = 1.0,
    exact: bool = False,
    only: Collection[str] | None = None,
    exclude: Collection[str] = (),
) -> Report:
    """Run every check; one error that lists all failures. Below two minutes, if nothing hangs.

    A check with problems that the solver takes none of is skipped.

    Parameters
    ----------
    solver
        A solver object, or the name of installed ones: of a name that several kinds of problems
        have, all are checked.
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
    Report
        How long each check took, and why some were skipped.

    Raises
    ------
    AssertionError
        With one line per failure: check, problem, what went wrong; or every check was skipped.
    InputError
        There is no check of a name.
    """
    checks = _chosen([*CHECKS, *([check_exact] if exact else [])], only, exclude)
    report = Report({}, {})
    for engine in engines(solver) if isinstance(solver, str) else [solver]:
        _check_all(engine, checks, problems or (), time_limit, report)
    return report


def _check_all(
    engine: Solver,
    checks: Sequence[Check],
    problems: Sequence[Any],
    time_limit: float,
    report: Report,
) -> None:
    """All checks of one solver, added to the report."""
    warm_up(engine)
    failures, skipped = list[str](), dict[str, str]()
    for check in checks:
        name, begin = check.__name__, time.perf_counter()
        try:
            check(engine, problems, time_limit)
        except Skipped as reason:
            skipped[name] = str(reason)
        except AssertionError as error:
            failures.append(f"{name}: {error}")
        except Exception as error:
            failures.append(f"{name}: raised {type(error).__name__}: {error}")
        spent = time.perf_counter() - begin
        report.seconds[name] = report.seconds.get(name, 0.0) + spent
    called = getattr(engine, "name", engine)
    if failures:
        raise AssertionError(f"{called} fails {len(failures)} checks:\n  " + "\n  ".join(failures))
    # a solver passes the check of its interface that takes nothing at all
    if {check.__name__ for check in checks} <= {*skipped, "check_interface"} and skipped:
        told = [f"{name}: {reason}" for name, reason in skipped.items()]
        raise AssertionError(f"nothing of {called} was checked:\n  " + "\n  ".join(told))
    report.skipped.update(skipped)


def engines(name: str) -> list[Solver]:
    """The solvers of this name, one for each kind of problem or several kinds."""
    found = [find_solver(name, kind) for kind in KINDS if name in solvers(kind)]
    return list({type(one): one for one in found}.values()) or [find_solver(name)]


def _chosen(
    checks: list[Check], only: Collection[str] | None, exclude: Collection[str]
) -> list[Check]:
    """The checks of these names, or without those; unknown names are refused."""
    for field, names in (("only", only or ()), ("exclude", exclude)):
        if isinstance(names, str):
            raise InputError(f"{field}: expected a list of names, got {names!r:.60}")
        for name in names:
            if name not in _NAMES:
                there = ", ".join(sorted(_NAMES))
                raise InputError(f"{field}: there is no check {name!r:.60}; there are {there}")
    chosen = [check for check in checks if only is None or check.__name__ in only]
    chosen = [check for check in chosen if check.__name__ not in exclude]
    if not chosen:
        raise InputError("only, exclude: no check is left")
    return chosen


class SolverTests:
    """Pytest class: subclass it, set `solver`, and every check becomes a test.

    ``check_random`` is `test_random`, and so on; `kind` is needed only with a name that solvers of
    several kinds of problems have.
    """

    solver: Any = None
    kind: str | None = None
    problems: Sequence[Any] = ()
    time_limit: float = 1.0
    exact: bool = False

    def _run(self, check: Check) -> None:
        import pytest

        if check is check_exact and not self.exact:
            pytest.skip("not asked for: exact = False")
        found = [self.solver]
        if isinstance(self.solver, str):
            found = [find_solver(self.solver, self.kind)] if self.kind else engines(self.solver)
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


for _name, _check in _NAMES.items():
    setattr(SolverTests, _name.replace("check_", "test_", 1), _as_test(_check))
