"""Outcome of a solve, and solutions of graphs; orders of one iteration alone are a `Csr`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.io.text import one_line
from optsched.model.schedule import STATUSES
from optsched.solving.progress import relative_gap

if TYPE_CHECKING:
    import pandas

    from optsched.model.schedule import Csr, IntArray, Schedule
    from optsched.solving.progress import Progress


@dataclass(frozen=True, eq=False, slots=True)
class Orders:
    """Orders of one iteration, where the solver also chose which jobs recompute."""

    sequences: Csr
    """One order of operations per resource."""
    recompute: tuple[bool, ...] | None = None
    """Which jobs recompute; None where that was not to be chosen."""


@dataclass(frozen=True, eq=False, slots=True)
class PeriodicOrders:
    """Orders of a cycle, each repeated for ever."""

    sequences: Csr
    """One order of operations per resource."""
    offset: IntArray
    """Cycles by which the iteration of every operation is late, shape (n_operations,)."""
    recompute: tuple[bool, ...] | None = None
    """Which jobs recompute; None where that was not to be chosen."""


@dataclass(frozen=True)
class Result:
    """Outcome of `optsched.solve`.

    Parameters
    ----------
    status
        ``"optimal"`` (objective equals the proved lower bound), ``"feasible"``, ``"infeasible"``
        (proved; see `reason`) or ``"unknown"``.
    schedule, objective
        The best schedule found and its value, or None.
    lower_bound
        Proved lower bound, None if there is none.
    history
        Every new incumbent and bound with its time, in order.
    seconds
        Wall-clock time of the call.
    solver, reason
        Name of the solver; why no schedule exists.
    interrupted
        Whether Ctrl-C (or a callback) ended the search.
    missing
        Kernels that were not compiled in time: engines that could not run.
    contradiction
        A claim of an engine that the schedule refutes: a bug of that engine. The schedule is
        verified all the same, and the result contains no bound proved by an engine.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
    >>> result = optsched.solve(shop)
    >>> result.status, result.objective, result.lower_bound, result.gap
    ('optimal', 6, 6, 0.0)
    """

    status: str
    schedule: Schedule | None = None
    objective: int | None = None
    lower_bound: int | None = None
    history: tuple[Progress, ...] = ()
    seconds: float = 0.0
    solver: str = ""
    reason: str = ""
    interrupted: bool = False
    missing: tuple[str, ...] = ()
    contradiction: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise InputError(
                f"status: expected one of {', '.join(STATUSES)}, got {self.status!r:.60}"
            )

    @property
    def gap(self) -> float | None:
        """Relative gap ``(objective - lower_bound) / |lower_bound|``; None without both."""
        return relative_gap(self.objective, self.lower_bound)

    @property
    def time_to_best(self) -> float | None:
        """Seconds until the returned schedule was found; None without one."""
        at = [e.elapsed for e in self.history if e.objective == self.objective]
        return at[0] if at and self.objective is not None else None

    @property
    def time_to_proof(self) -> float | None:
        """Seconds until objective and bound met; None unless `status` is ``"optimal"``."""
        if self.status != "optimal":
            return None
        met = [e for e in self.history if e.objective is not None and e.gap == 0]
        return met[0].elapsed if met else None

    def to_pandas(self) -> pandas.DataFrame:
        """Make a data frame of `history`: one row per incumbent or bound; see `Progress`.

        Examples
        --------
        >>> result = optsched.solve(optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]]))
        >>> int(result.to_pandas()["objective"].min())
        6
        """
        from optsched.plots.notebook import frame

        names = ("elapsed", "iteration", "objective", "lower_bound", "gap", "event", "source")
        return frame({name: [getattr(step, name) for step in self.history] for name in names})

    def __repr__(self) -> str:
        found = f"objective {self.objective}, lower bound {self.lower_bound}"
        text = one_line(self.reason, 80) or found
        return f"<Result {self.status}: {text}, {self.solver:.40} in {self.seconds:.2f} s>"

    def _repr_html_(self) -> str:
        from optsched.plots.notebook import result_view

        return result_view(self)
