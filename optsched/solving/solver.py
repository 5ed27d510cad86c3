"""What a solver must offer, and solvers found by entry points, a group for each kind of problem."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from optsched.errors import InputError, UnsupportedProblem
from optsched.io.values import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.result import Result

KINDS = ("jobshop", "jobarray", "periodic", "quota", "gpus", "routing")
"""Kinds of problems (`Problem.problem_kind`); solvers of a kind are the entry-point group
``optsched.solvers.KIND``, where a name is looked up that `optsched.solve` is given."""


class Support(NamedTuple):
    """Whether a solver takes a problem, and if not, why (one sentence)."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@runtime_checkable
class Solver(Protocol):
    """A backend. Register a class by an entry point; prove it with `optsched.testing.check_solver`.

    ``options`` names what `optsched.solve(options=...)` may hold, with a line of help each; a
    solver without options need not have it. ``kinds`` lists the kinds of problems it takes, job
    shops and job arrays if it is not there; ``chooses`` says that it also chooses which jobs
    recompute. A method ``runs_inline(problem)`` may say that `solve` takes milliseconds at most:
    it is then called without a thread of its own.
    """

    name: str
    options: Mapping[str, str]

    def supports(self, problem: Problem) -> Support:
        """Whether `solve` takes this problem, which is of one of its kinds. Pure, and quick."""
        ...

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search until a limit; report every incumbent and bound to the monitor as it comes.

        Of the result only what the monitor has not seen yet is used, and ``"infeasible"`` with its
        reason; whether a schedule is optimal follows from objective and bound.
        """
        ...


def kinds(engine: Solver) -> tuple[str, ...]:
    """The kinds of problems that a solver takes."""
    found: tuple[str, ...] = tuple(getattr(engine, "kinds", ("jobshop", "jobarray")))
    return found


def support(engine: Solver, problem: Problem) -> Support:
    """Whether a solver takes a problem: it takes such a kind, and says so."""
    if problem.problem_kind not in kinds(engine):
        return Support(False, f"it takes no problem of the kind {problem.problem_kind}")
    if getattr(problem, "chooses", False) and not getattr(engine, "chooses", False):
        return Support(False, "it does not choose which jobs recompute")
    said = engine.supports(problem)
    return Support(bool(said), getattr(said, "reason", "" if said else "refused"))


def support_by_name(name: str, problem: Problem) -> Support:
    """`support` of the solver of this name for the problem's kind.

    Raises
    ------
    InputError
        No kind of problem has a solver of this name.
    """
    try:
        return support(solver(name, problem.problem_kind), problem)
    except UnsupportedProblem as error:
        return Support(False, str(error))


def runs_inline(engine: Solver, problem: Problem) -> bool:
    """Whether a solver says that it needs no thread of its own for this problem."""
    said = getattr(engine, "runs_inline", None)
    return callable(said) and bool(said(problem))


@cache
def _entry_points(kind: str) -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # 20 ms that `import optsched` need not pay

    return {point.name: point for point in entry_points(group=f"optsched.solvers.{kind}")}


def solvers(kind: str | None = None) -> list[str]:
    """Names of the installed solvers of a kind of problems (`Problem.problem_kind`), or of all.

    Raises
    ------
    InputError
        There is no such kind.
    """
    if kind is not None and kind not in KINDS:
        raise InputError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r:.60}")
    return sorted({name for one in ([kind] if kind else KINDS) for name in _entry_points(one)})


@cache
def solver(name: str, kind: str = "jobshop") -> Solver:
    """The solver of this name for a kind of problems.

    Raises
    ------
    InputError
        There is none; the message lists the names.
    UnsupportedProblem
        It takes other kinds of problems.
    """
    points = _entry_points(kind)
    if name in points:
        found: Solver = points[name].load()()
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
    raise InputError(f"solver: there is no {name!r:.60}{hint}; installed: {known}")
