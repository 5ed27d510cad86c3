"""Interface between engines, `optsched.solve` and the callbacks of the user."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from optsched.solving.incumbent import Clock, Incumbent
from optsched.solving.stop import split

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.solving.limits import Limits
    from optsched.solving.progress import Criterion, Progress

BOUND_INTERVAL = 0.05
"""Least seconds between two callbacks that report no new incumbent."""

TICK = 0.5
"""Seconds without an event after which a callback gets a tick."""


class Reporter:
    """Calls functions of the user, and only in the thread that called `optsched.solve`."""

    def __init__(
        self, on_progress: Callable[[Progress], object] | None, criteria: tuple[Criterion, ...]
    ) -> None:
        self.failed = False
        self._thread = threading.get_ident()
        self._on_progress, self._criteria = on_progress, criteria
        self._reported, self._reported_at = 0, 0.0
        self._checked, self._checked_at = -1, 0.0

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the one that called `optsched.solve`."""
        return threading.get_ident() == self._thread

    def report(self, state: Incumbent, last: bool) -> bool:
        """Call `on_progress` with all events that are due; whether it wants to stop."""
        if self._on_progress is None:
            return False
        return any([self._call(self._on_progress, event) for event in self._due(state, last)])

    def check(self, state: Incumbent, last: bool) -> bool:
        """Whether a criterion of the user is met; evaluated after events, else every 50 ms."""
        if not self._criteria:
            return False
        now, events = state.progress(), len(state.history)
        waited = now.elapsed - self._checked_at
        if not last and events == self._checked and waited < BOUND_INTERVAL:
            return False
        self._checked, self._checked_at = events, now.elapsed
        return any(self._call(criterion, now) for criterion in self._criteria)

    def _due(self, state: Incumbent, last: bool) -> list[Progress]:
        """Incumbents at once with all events before them, bounds in bundles, else a tick."""
        now, events = state.progress(), state.events(self._reported)
        waited = now.elapsed - self._reported_at
        urgent = last or any(event.event == "incumbent" for event in events)
        if not urgent and waited < BOUND_INTERVAL:
            return []
        self._reported += len(events)
        if not events and not last and waited >= TICK:
            events = [now]
        if events:
            self._reported_at = now.elapsed
        return events

    def _call(self, function: Callable[[Progress], object], now: Progress) -> bool:
        try:
            return bool(function(now))
        except BaseException:
            self.failed = True
            raise


class Monitor(Incumbent):
    """Shared incumbent, bound and stop flag of one solve.

    Engines may call `incumbent`, `bound`, `advance`, `best` and `should_stop` from any thread.

    Parameters
    ----------
    limits
        Time, target and stopping criteria; `should_stop` checks them.
    on_progress
        Called with a `Progress` at every new incumbent at once, at new bounds at most 20 times a
        second, and with a tick every half second; a true return value stops the search.
    started
        ``time.perf_counter()`` of the call; default: now.
    reserve
        Seconds of the time limit that engines may not use.
    shift
        See `Incumbent`; the target of `limits` is in the values of engines.

    Examples
    --------
    >>> monitor = optsched.Monitor(optsched.Limits(time_limit=60))
    >>> monitor.bound(8, "relaxation"), monitor.incumbent(optsched.Csr.of([[0, 1]]), 10, "rule")
    (True, True)
    >>> monitor.incumbent(optsched.Csr.of([[1, 0]]), 11), monitor.should_stop()
    (False, False)
    """

    def __init__(
        self,
        limits: Limits,
        on_progress: Callable[[Progress], object] | None = None,
        started: float | None = None,
        reserve: float = 0.0,
        shift: int = 0,
    ) -> None:
        super().__init__(Clock(limits, started, reserve), shift)
        self.limits = limits
        self.interrupted = False
        self.missing: set[str] = set()
        """Kernels that were not compiled in time."""
        self._criteria, criteria = split(limits.stop)
        self._reporter = Reporter(on_progress, criteria)
        self._stop = False

    def incumbent(self, solution: Any, objective: int, source: str = "") -> bool:
        """Report a solution (of the problem's solution type); False if it is no better."""
        better = super().incumbent(solution, objective, source)
        if better:
            self.poll()
        return better

    def bound(self, value: int, source: str = "") -> bool:
        """Report a proved lower bound; see `Incumbent.bound`."""
        better = super().bound(value, source)
        if better:
            self.poll()
        return better

    @property
    def elapsed(self) -> float:
        """Seconds since the call."""
        return self.clock.elapsed

    @property
    def remaining(self) -> float:
        """Seconds left for engines, infinite without a time limit."""
        return self.clock.remaining

    def should_stop(self) -> bool:
        """Test whether a limit, a criterion, a proof or the user ends the search."""
        self.poll()
        limits, objective = self.limits, self.objective
        if (
            self._stop
            or self.proved
            or self.remaining <= 0
            or (limits.target is not None and objective is not None and objective <= limits.target)
        ):
            return True
        if self.contradiction and limits.time_limit is None and limits.iterations is None:
            return True  # perhaps only a proof would have ended the search
        if self._criteria:
            now = self.progress()
            self._stop = any(criterion(now) for criterion in self._criteria) or self._stop
        return self._stop

    # for `optsched.solve`

    @property
    def callback_failed(self) -> bool:
        """Whether a function of the user raised an exception."""
        return self._reporter.failed

    def stop(self) -> None:
        """Stop the engines soon: Ctrl-C, or a callback that returned true."""
        self._stop = self.interrupted = True

    def poll(self, *, last: bool = False) -> None:
        """Call the user's functions if this is their thread; `last`: without delay."""
        if not self._reporter.is_here:
            return
        if self._reporter.report(self, last):
            self.stop()
        if self._reporter.check(self, last):
            self._stop = True
