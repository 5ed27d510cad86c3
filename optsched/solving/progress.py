"""News of a search: its state as a `Progress`, and who hears of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import logging

    from optsched.model.schedule import Problem

LOGGER = "optsched"
"""Name of the logger; lines have level INFO."""

FIRST_AFTER = 1.0  # seconds of silence
EVERY = 5.0  # seconds


class Progress(NamedTuple):
    """State of a search at one moment; printed, it is one line."""

    elapsed: float
    """Seconds since the call."""
    iteration: int
    """Steps that the engines have reported so far, all together; see each solver."""
    objective: int | None
    """Value of the best schedule."""
    lower_bound: int | None
    """Best proved bound."""
    event: str
    """``"incumbent"``, ``"bound"``, ``"restart"``, or ``"tick"`` (nothing new, still alive)."""
    source: str = ""
    """The engine that caused the event."""
    best_elapsed: float = 0.0
    """`elapsed` when the best schedule was found."""
    best_iteration: int = 0
    """`iteration` when the best schedule was found."""

    @property
    def gap(self) -> float | None:
        """Relative gap ``objective / lower_bound - 1``; None without both values."""
        return relative_gap(self.objective, self.lower_bound)

    def __str__(self) -> str:
        """``12.3 s  1204000 steps  objective 930 H  bound 915  gap 1.64%  tabu`` (H: new best)."""
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
"""When to stop: see `optsched.stop`."""


class Watcher:
    """Override what is of interest and pass an object as ``optsched.solve(..., watcher=...)``.

    Every method is called from the thread that called `optsched.solve`. All but `on_end` stop the
    search by returning true; an exception stops it too, and comes out of `optsched.solve` with the
    best so far in its ``.result``. A method that takes long delays only its own thread.
    """

    def on_start(self, problem: Problem) -> object:
        """The arguments are in order; nothing is computed yet."""

    def on_incumbent(self, progress: Progress) -> object:
        """A better schedule was found; at once, and none is left out."""

    def on_bound(self, progress: Progress) -> object:
        """A higher lower bound was proved; at most 20 times a second, and none is left out."""

    def on_restart(self, progress: Progress) -> object:
        """An engine (`Progress.source`) started afresh; at most 20 times a second, the last."""

    def on_end(self, result: Any) -> None:
        """The search is over, with this `Result`; not called if it ends with an exception."""


class ProgressLog:
    """Hears every event of a search and lets a line through from time to time."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._next = FIRST_AFTER
        self._better = False
        self._source = ""

    @classmethod
    def if_wanted(cls) -> ProgressLog | None:
        """One, if somebody listens: who has never imported `logging` does not, and saves that."""
        logging = sys.modules.get("logging")
        if logging is None:
            return None
        logger = logging.getLogger(LOGGER)
        return cls(logger) if logger.isEnabledFor(logging.INFO) else None

    def __call__(self, progress: Progress) -> None:
        """Log the state, if it is time to; ``H`` marks a better schedule since the last line."""
        self._better = self._better or progress.event == "incumbent"
        self._source = progress.source or self._source
        if progress.elapsed < self._next:
            return
        # a state does not know of the events between it and the last line
        event = "incumbent" if self._better else "tick"
        self.logger.info("%s", progress._replace(event=event, source=self._source))
        self._better = False
        self._next = progress.elapsed + EVERY


def relative_gap(objective: int | None, lower_bound: int | None) -> float | None:
    """``(objective - lower_bound) / |lower_bound|``; 0 if equal, None if unknown or bound 0."""
    if objective is None or lower_bound is None:
        return None
    if objective == lower_bound:
        return 0.0
    return (objective - lower_bound) / abs(lower_bound) if lower_bound else None
