"""State of a search at one moment, as callbacks and stopping criteria get it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

LOGGER = "optsched"
"""Name of the logger for warnings."""


class Progress(NamedTuple):
    """State of a search at one moment; ``str`` makes one line of it.

    Examples
    --------
    >>> now = optsched.Progress(12.34, 1204000, 930, 915, "incumbent", "tabu")
    >>> print(now)  # H marks a new best schedule
       12.3 s  1204000 steps  objective 930 H  bound 915  gap 1.64%  tabu
    """

    elapsed: float
    """Seconds since the call."""
    iteration: int
    """Steps reported so far by all engines together; each solver defines its step."""
    objective: int | None
    """Value of the best schedule."""
    lower_bound: int | None
    """Best proved bound."""
    event: str
    """``"incumbent"``, ``"bound"``, or ``"tick"`` (no event since the last call)."""
    source: str = ""
    """Engine that caused the event."""
    best_elapsed: float = 0.0
    """`elapsed` when the best schedule was found."""
    best_iteration: int = 0
    """`iteration` when the best schedule was found."""

    @property
    def gap(self) -> float | None:
        """Relative gap; see `relative_gap`."""
        return relative_gap(self.objective, self.lower_bound)

    def __str__(self) -> str:
        """Format the state as one line."""
        steps = f"  {self.iteration} steps" if self.iteration else ""
        best = "-" if self.objective is None else str(self.objective)
        mark = " H" if self.event == "incumbent" else ""
        bound = "-" if self.lower_bound is None else str(self.lower_bound)
        gap = "-" if self.gap is None else f"{self.gap:.2%}"
        return (
            f"{self.elapsed:7.1f} s{steps}  objective {best}{mark}  bound {bound}  gap {gap}  "
            f"{self.source}"
        ).rstrip()


Criterion: TypeAlias = Callable[[Progress], object]
"""Stopping criterion: a true return value ends the search; see `optsched.stop`."""


def relative_gap(objective: int | None, lower_bound: int | None) -> float | None:
    """``(objective - lower_bound) / |lower_bound|``; 0 if equal, None if unknown or bound 0."""
    if objective is None or lower_bound is None:
        return None
    if objective == lower_bound:
        return 0.0
    return (objective - lower_bound) / abs(lower_bound) if lower_bound else None
