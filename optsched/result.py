"""What a solver returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.schedule import STATUSES

if TYPE_CHECKING:
    from optsched.monitor import Progress
    from optsched.schedule import Schedule


@dataclass(frozen=True)
class Result:
    """Outcome of `optsched.solve`.

    Parameters
    ----------
    status
        ``"optimal"`` (objective equals the proved lower bound), ``"feasible"``, ``"infeasible"``
        (proved; `reason` says why) or ``"unknown"``.
    schedule, objective
        The best schedule found and its value, or None.
    lower_bound
        Proved lower bound, None if there is none.
    history
        Every new incumbent and bound with its time, in order.
    seconds
        Wall-clock time of the call.
    solver, reason
        Who solved it; why there is no schedule.
    interrupted
        Whether Ctrl-C (or a callback) ended the search.
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

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise InputError(f"status: expected one of {', '.join(STATUSES)}, got {self.status!r}")

    @property
    def gap(self) -> float | None:
        """Relative gap ``objective / lower_bound - 1``; None without both."""
        return relative_gap(self.objective, self.lower_bound)


def relative_gap(objective: int | None, lower_bound: int | None) -> float | None:
    """``objective / lower_bound - 1``; 0 for equal values, None if unknown or the bound is 0."""
    if objective is None or lower_bound is None:
        return None
    if objective == lower_bound:
        return 0.0
    return (objective - lower_bound) / lower_bound if lower_bound > 0 else None
