"""The blackboard between a running solver and whoever watches it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from optsched.errors import InternalError
from optsched.result import relative_gap

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.limits import Limits
    from optsched.schedule import Rows

BOUND_INTERVAL = 0.05
"""Least seconds between two calls of a watcher that only bring a new bound."""


class Progress(NamedTuple):
    """State of a search at one moment: seconds since the call, best value, proved bound."""

    elapsed: float
    objective: int | None
    lower_bound: int | None
    event: str
    """``"incumbent"``, ``"bound"``, or ``"tick"`` (nothing new, the search is alive)."""
    source: str = ""
    """The engine that found it."""

    @property
    def gap(self) -> float | None:
        """Relative gap; None without both values."""
        return relative_gap(self.objective, self.lower_bound)


class Monitor:
    """Keeps the incumbent and the bound of one run, its history, and its limits.

    Engines may call `incumbent`, `bound` and `should_stop` from any thread; users are called from
    the thread that called `solve`, whenever it calls `poll` or one of the former.

    Parameters
    ----------
    limits
        Time, target; `should_stop` obeys them.
    on_progress
        Called with a `Progress` at every new incumbent at once, at new bounds at most 20 times a
        second, and with a tick every half second; a true return value stops the search.
    """

    def __init__(
        self,
        limits: Limits,
        on_progress: Callable[[Progress], object] | None = None,
        started: float | None = None,
    ) -> None:
        self.limits = limits
        self.objective: int | None = None
        self.lower_bound: int | None = None
        self.sequences: Rows | None = None
        self.history: list[Progress] = []
        self.interrupted = False
        self.callback_failed = False
        self._on_progress = on_progress
        self._started = time.perf_counter() if started is None else started
        self._home = threading.get_ident()
        self._lock = threading.RLock()
        self._told = 0
        self._told_at = 0.0
        self._stop = False

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._started

    @property
    def remaining(self) -> float:
        """Seconds left, infinite without a time limit."""
        limit = self.limits.time_limit
        return float("inf") if limit is None else max(0.0, limit - self.elapsed)

    def incumbent(self, sequences: Rows, objective: int, source: str = "") -> bool:
        """Offer a schedule; False if it is not better than the best known one."""
        with self._lock:
            if self.objective is not None and objective >= self.objective:
                return False
            self.objective, self.sequences = int(objective), sequences
            self._record("incumbent", source)
        self.poll()
        return True

    def bound(self, value: int, source: str = "") -> bool:
        """Offer a proved lower bound; False if it is not higher than the best known one."""
        with self._lock:
            if self.lower_bound is not None and value <= self.lower_bound:
                return False
            self.lower_bound = int(value)
            self._record("bound", source)
        self.poll()
        return True

    @property
    def proved(self) -> bool:
        """Whether objective and lower bound meet."""
        return self.objective is not None and self.objective == self.lower_bound

    def should_stop(self) -> bool:
        """Whether a limit, the target, a proof or a user asks the engine to stop."""
        self.poll()
        target = self.limits.target
        return (
            self._stop
            or self.proved
            or self.remaining <= 0
            or (target is not None and self.objective is not None and self.objective <= target)
        )

    def stop(self) -> None:
        """Ask the engine to stop soon."""
        self._stop = self.interrupted = True

    def poll(self, *, last: bool = False) -> None:
        """Tell the user what is new, if this is the user's thread; `last`: without delay."""
        if self._on_progress is None or threading.get_ident() != self._home:
            return
        now = self.elapsed
        with self._lock:
            fresh = self.history[self._told :]
            urgent = last or any(event.event == "incumbent" for event in fresh)
            if not fresh and not last and now - self._told_at >= 0.5:
                fresh = [Progress(now, self.objective, self.lower_bound, "tick")]
            elif not urgent and now - self._told_at < BOUND_INTERVAL:
                return
            self._told, self._told_at = len(self.history), now
        for event in fresh:
            try:
                wants_to_stop = self._on_progress(event)
            except BaseException:
                self.callback_failed = True
                raise
            if wants_to_stop:
                self.stop()

    def _record(self, event: str, source: str) -> None:
        if (
            self.objective is not None
            and self.lower_bound is not None
            and self.lower_bound > self.objective
        ):
            raise InternalError(
                f"{source or 'a solver'} proved the bound {self.lower_bound}, but a schedule of "
                f"{self.objective} exists: please report this instance"
            )
        self.history.append(Progress(self.elapsed, self.objective, self.lower_bound, event, source))
