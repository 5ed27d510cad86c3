"""What a solver returns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.model.schedule import STATUSES
from optsched.solving.progress import relative_gap

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule
    from optsched.solving.progress import Progress


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
    missing
        Kernels that were not compiled when the time was over: engines that never joined.
    contradiction
        A claim of an engine that the schedule refutes, in a sentence: a bug of that engine. The
        schedule is verified all the same, and nothing that engines proved is left in this result.
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
        """Relative gap ``objective / lower_bound - 1``; None without both."""
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

    def primal_integral(self, best_known: int | None = None, horizon: float | None = None) -> float:
        """Mean primal gap over time: how soon good schedules were there, not only how good.

        The integral of gamma(t) dt / T (Berthold, Measuring the impact of primal heuristics, OR
        Letters 41, 2013): gamma is 1 before the first schedule, then ``(z - z*) / z`` for the best
        value z so far, and 0 if that beats z*.

        Parameters
        ----------
        best_known
            The reference z*; by default the objective of this result.
        horizon
            T in seconds, by default `seconds`; the last schedule counts until then. Use the same
            for all runs that are compared.

        Returns
        -------
        float
            0 (the best at once) to 1 (nothing found).

        Raises
        ------
        InputError
            `best_known` is no integer >= 0 (where objectives are negative it may be, too), or
            `horizon` is not positive.
        """
        found = [(e.elapsed, e.objective) for e in self.history if e.event == "incumbent"]
        reference = self.objective if best_known is None else best_known
        return primal_integral(
            [(at, value) for at, value in found if value is not None],
            0 if reference is None else reference,
            self.seconds if horizon is None else horizon,
        )


def primal_integral(found: list[tuple[float, int]], best_known: int, horizon: float) -> float:
    """Mean primal gap of incumbents ``(seconds, value)`` in order; see `Result`."""
    whole = isinstance(best_known, int) and not isinstance(best_known, bool)
    if not whole or (best_known < 0 and all(value >= 0 for _, value in found)):
        raise InputError(f"best_known: expected an integer >= 0, got {best_known!r:.60}")
    if not 0 < horizon < math.inf:
        raise InputError(f"horizon: expected seconds > 0, got {horizon!r:.60}")
    area, since, gap = 0.0, 0.0, 1.0
    for at, value in found:
        if at >= horizon:
            break
        area += gap * (at - since)
        since, gap = at, primal_gap(value, best_known)
    return (area + gap * (horizon - since)) / horizon


def primal_gap(value: int, best_known: int) -> float:
    """``|value - best_known| / max(|value|, |best_known|)``, at most 1; 0 if it is as good."""
    if value <= best_known:
        return 0.0
    return min(1.0, (value - best_known) / max(abs(value), abs(best_known)))
