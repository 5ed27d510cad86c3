"""Interface of solvers, and their registry: one group of entry points per kind of problem."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from optsched.errors import InputError, UnsupportedProblem
from optsched.io.values import did_you_mean
from optsched.model.objectives import TOTAL, as_makespan

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.result import Result

KINDS = ("jobshop", "jobarray", "periodic", "quota", "gpus")
"""Kinds of problems (`Problem.problem_kind`); ``optsched.solvers.KIND`` is the entry-point group of
the solvers for a kind."""


class Support(NamedTuple):
    """Whether a solver supports a problem, and if not, why (one sentence)."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@runtime_checkable
class Solver(Protocol):
    """A solver. Register the class as an entry point; test it with `optsched.testing.check_solver`.

    Attributes ``options``, ``kinds`` and ``objectives`` and the method ``runs_inline`` may be
    absent. A solver without ``"total_weighted_completion"`` in ``objectives`` never gets a problem
    with it; one of maximum lateness arrives as a graph of least makespan. ``options`` maps the keys
    of `optsched.solve(options=...)` to a line of help each; ``kinds`` lists the supported kinds of
    problems (default: job shops and job arrays); a true attribute ``chooses`` means that the solver
    also chooses which jobs recompute. ``runs_inline(problem)`` is true if `solve` takes
    milliseconds at most: then it runs in the thread of the caller.
    """

    name: str
    options: Mapping[str, str]

    def supports(self, problem: Problem) -> Support:
        """Test whether `solve` supports this problem, which is of one of its kinds; pure, quick."""
        ...

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search until a limit; report every incumbent and bound to the monitor at once.

        The result adds what was not reported, or ``"infeasible"`` with a reason; the status
        follows from objective and bound.
        """
        ...


def kinds(engine: Solver) -> tuple[str, ...]:
    """Return the kinds of problems that a solver supports."""
    return tuple(getattr(engine, "kinds", ("jobshop", "jobarray")))


def support(engine: Solver, problem: Problem) -> Support:
    """Test whether a solver supports a problem: by kind, then by its own method."""
    if problem.problem_kind not in kinds(engine):
        return Support(False, f"it takes no problem of the kind {problem.problem_kind}")
    if getattr(problem, "chooses", False) and not getattr(engine, "chooses", False):
        return Support(False, "it does not choose which jobs recompute")
    searched, _ = as_makespan(problem)
    if searched.objective_name == TOTAL and TOTAL not in getattr(engine, "objectives", ()):
        return Support(False, f"it does not minimize the {TOTAL}")
    answer = engine.supports(searched)
    return Support(bool(answer), getattr(answer, "reason", "" if answer else "refused"))


def support_by_name(name: str, problem: Problem) -> Support:
    """`support` of the solver of this name for the problem's kind; `InputError` if none has it."""
    try:
        engine = solver(name, problem.problem_kind)
    except UnsupportedProblem as error:
        return Support(False, str(error))
    try:
        return support(engine, problem)
    except Exception as error:  # of another package: the other solvers are still listed
        return Support(False, f"supports() raises {type(error).__name__}: {error}")


def runs_inline(engine: Solver, problem: Problem) -> bool:
    """Test whether a solver needs no second thread for this problem."""
    method = getattr(engine, "runs_inline", None)
    return callable(method) and bool(method(problem))


@cache
def _entry_points(kind: str) -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # 20 ms: not at import

    return {point.name: point for point in entry_points(group=f"optsched.solvers.{kind}")}


def solvers(kind: str | None = None) -> list[str]:
    """List the installed solvers for a kind of problem (`Problem.problem_kind`), or all.

    Raises
    ------
    InputError
        Unknown kind.

    Examples
    --------
    >>> {"auto", "branch_and_bound", "cpsat", "dispatch"} <= set(optsched.solvers("jobshop"))
    True
    """
    if kind is not None and kind not in KINDS:
        raise InputError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r:.60}")
    return sorted({name for one in ([kind] if kind else KINDS) for name in _entry_points(one)})


@cache
def solver(name: str, kind: str = "jobshop") -> Solver:
    """Return the solver of this name for a kind of problem.

    Raises
    ------
    InputError
        Unknown name; the message lists the installed solvers.
    UnsupportedProblem
        It solves other kinds of problems, or its package is broken.
    """
    points = _entry_points(kind)
    if name in points:
        try:
            found: Solver = points[name].load()()
        except Exception as error:
            what = f"solver {name}: its entry point {points[name].value} cannot be loaded"
            raise UnsupportedProblem(f"{what} ({type(error).__name__}: {error})") from error
        return found
    elsewhere = [one for one in KINDS if name in _entry_points(one)]
    if elsewhere:
        able = ", ".join(sorted(points)) or "none"
        raise UnsupportedProblem(
            f"{name} does not solve this problem: it takes no problem of the kind {kind}; "
            f"these do: {able}"
        )
    hint = did_you_mean(name, points)
    known = ", ".join(sorted(points)) or "none: is the package installed?"
    own = "; one of your own: as an entry point of a package" if ":" in name else ""
    raise InputError(f"solver: there is no {name!r:.60}{hint}; installed: {known}{own}")
