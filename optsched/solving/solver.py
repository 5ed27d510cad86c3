"""Solvers found by the entry-point group ``optsched.solvers``, and what a solver must offer."""

from __future__ import annotations

import difflib
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.problem import Problem
    from optsched.solving.result import Result


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
    solver without options need not have it. ``answers`` lists what it can find (`Problem.answers`);
    ``("orders",)`` if it is not there. A method ``instant(problem)`` may say that `solve` takes
    milliseconds at most: it is then called without a thread of its own.
    """

    name: str
    options: Mapping[str, str]

    def supports(self, problem: Problem) -> Support:
        """Whether `solve` takes this problem. Pure, and quick."""
        ...

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search until a limit; report every incumbent and bound to the monitor as it comes.

        Of the result only what the monitor has not seen yet is used, and ``"infeasible"`` with its
        reason; whether a schedule is optimal follows from objective and bound.
        """
        ...


def support(engine: Solver, problem: Problem) -> Support:
    """Whether a solver takes a problem: it finds such answers, and says so."""
    if problem.answers not in answers(engine):
        return Support(False, f"it finds no {problem.answers}")
    said = engine.supports(problem)
    return Support(bool(said), getattr(said, "reason", "" if said else "refused"))


def instant(engine: Solver, problem: Problem) -> bool:
    """Whether a solver says that it needs no thread of its own for this problem."""
    said = getattr(engine, "instant", None)
    return callable(said) and bool(said(problem))


def answers(engine: Solver) -> tuple[str, ...]:
    """What a solver can find; see `Problem.answers`."""
    found: tuple[str, ...] = tuple(getattr(engine, "answers", ("orders",)))
    return found


@cache
def _entry_points() -> dict[str, object]:
    from importlib.metadata import entry_points  # 20 ms that `import optsched` need not pay

    return {point.name: point for point in entry_points(group="optsched.solvers")}


def solvers() -> list[str]:
    """Names of all installed solvers."""
    return sorted(_entry_points())


@cache
def solver(name: str) -> Solver:
    """The solver of this name.

    Raises
    ------
    InputError
        There is none; the message lists the names.
    """
    points = _entry_points()
    if name not in points:
        close = difflib.get_close_matches(name, points, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        known = ", ".join(sorted(points)) or "none: is the package installed?"
        raise InputError(f"solver: there is no {name!r:.60}{hint}; installed: {known}")
    found: Solver = points[name].load()()  # type: ignore[attr-defined]
    return found
