"""The blackboard between the engines of a search and whoever watches it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from optsched.errors import InternalError
from optsched.solving.progress import Progress, ProgressLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.progress import Criterion, Watcher
    from optsched.solving.result import Result

BOUND_INTERVAL = 0.05
"""Least seconds between two calls of a watcher that bring no new incumbent."""

OWN = "bounds"
"""Who proves the problem's own bound, before any engine."""

TICK = 0.5
"""Seconds without news after which a watcher hears that the search is alive."""


class Monitor:
    """Keeps the incumbent and the bound of one run, its history, and its limits.

    Engines may call `incumbent`, `bound`, `advance`, `restart`, `best` and `should_stop` from any
    number of threads. Users are called from the thread that made the monitor (that called
    `optsched.solve`), whenever it calls `poll` or one of the former.

    Parameters
    ----------
    limits
        Time, target and stopping criteria; `should_stop` obeys them.
    on_progress
        Called with a `Progress` at every new incumbent at once, at new bounds at most 20 times a
        second, and with a tick every half second; a true return value stops the search.
    started
        ``time.perf_counter()`` of the call, if that was earlier.
    watcher
        See `Watcher`; hears the same, by method, and of restarts.
    reserve
        Seconds of the time limit that engines do not get: what comes after them needs it.
    """

    def __init__(
        self,
        limits: Limits,
        on_progress: Callable[[Progress], object] | None = None,
        started: float | None = None,
        watcher: Watcher | None = None,
        reserve: float = 0.0,
    ) -> None:
        self.limits = limits
        self._reserve = reserve
        self.objective: int | None = None
        self.lower_bound: int | None = None
        self.solution: Any = None
        self.iteration = 0
        self.history: list[Progress] = []
        self.interrupted = False
        self.callback_failed = False
        self.contradiction = ""
        self.missing: set[str] = set()
        self._waiting, self._waited = 0, 0.0
        self._started = time.perf_counter() if started is None else started
        self._home = threading.get_ident()
        self._lock = threading.RLock()
        self._stop = False
        self._best_at = (0.0, 0)
        self._proved_by = ""
        self._own_bound: int | None = None
        self._on_progress, self._watcher = on_progress, watcher
        self._log = ProgressLog.if_wanted()
        self._told, self._told_at = 0, 0.0
        self._asked, self._asked_at = -1, 0.0
        self._restarted: Progress | None = None
        self._criteria: tuple[Criterion, ...] = ()
        self._users: tuple[Criterion, ...] = ()
        if limits.stop is not None:
            from optsched.solving.stop import split

            self._criteria, self._users = split(limits.stop)

    # what engines report

    def incumbent(self, solution: Any, objective: int, source: str = "") -> bool:
        """Offer a solution, of the class that this kind of problem has; False if it is no better.

        If it is better than the proved bound, that is dropped; see `contradicted`.
        """
        with self._lock:
            if self.objective is not None and objective >= self.objective:
                return False
            self.objective, self.solution = int(objective), solution
            if self.lower_bound is not None and objective < self.lower_bound:
                self._refuted(self.lower_bound, self._proved_by)
            self._best_at = self.elapsed, self.iteration
            self.history.append(self.progress("incumbent", source))
        self.poll()
        return True

    def bound(self, value: int, source: str = "") -> bool:
        """Offer a proved lower bound; False if it is not higher than the best known one.

        Raises
        ------
        InternalError
            A better schedule exists, or some claim was refuted before (see `contradicted`): the
            engine ends, the run goes on without it.
        """
        with self._lock:
            if self.lower_bound is not None and value <= self.lower_bound:
                return False
            if self.objective is not None and value > self.objective:
                raise InternalError(self._refuted(int(value), source))
            if self.contradiction:  # this one may have been derived from the false one
                raise InternalError(self.contradiction)
            self.lower_bound, self._proved_by = int(value), source
            if source == OWN:
                self._own_bound = self.lower_bound
            self.history.append(self.progress("bound", source))
        self.poll()
        return True

    def advance(self, steps: int) -> None:
        """Report steps (moves, nodes, ...: the solver's iterations) done since the last report."""
        with self._lock:
            self.iteration += int(steps)

    def contradicted(self, what: str) -> None:
        """Report that a claim of an engine was refuted, in a sentence for whoever mends it.

        Of the bounds only the problem's own is left, if no schedule refutes that too, and no
        further one is taken: whatever engines prove may rest on the false claim.
        """
        with self._lock:
            self.contradiction = self.contradiction or what
            self.lower_bound = self._own_bound
            best = self.objective
            if best is not None and self.lower_bound is not None and best < self.lower_bound:
                self.lower_bound = None
            if self.limits.time_limit is None and self.limits.iterations is None:
                self._stop = True  # perhaps only a proof would have ended the run

    def restart(self, source: str = "") -> None:
        """Report that an engine starts afresh."""
        with self._lock:
            self._restarted = self.progress("restart", source)
        self.poll()

    # what engines ask

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._started

    @property
    def remaining(self) -> float:
        """Seconds left for engines, infinite without a time limit."""
        limit = self.limits.time_limit
        if limit is None:
            return float("inf")
        with self._lock:
            now = self.elapsed
            waited = self._waited + (now if self._waiting else 0.0)
        spent = now - (waited if self.limits.by_default else 0.0)
        return max(0.0, limit - min(self._reserve, limit / 2) - spent)

    @property
    def proved(self) -> bool:
        """Whether objective and lower bound meet."""
        return self.objective is not None and self.objective == self.lower_bound

    @property
    def best(self) -> tuple[int | None, Any]:
        """Objective and solution of the incumbent, which belong together."""
        with self._lock:
            return self.objective, self.solution

    @contextmanager
    def waiting_for_kernels(self) -> Iterator[None]:
        """While an engine waits here, the clock stands still if the user gave no limit."""
        with self._lock:
            if not self._waiting:
                self._waited -= self.elapsed
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._waited += self.elapsed

    def should_stop(self) -> bool:
        """Whether a limit, a criterion, a proof or a user asks the engine to stop."""
        self.poll()
        target = self.limits.target
        if (
            self._stop
            or self.proved
            or self.remaining <= 0
            or (target is not None and self.objective is not None and self.objective <= target)
        ):
            return True
        if self._criteria:
            now = self.progress("tick")
            self._stop = any(criterion(now) for criterion in self._criteria) or self._stop
        return self._stop

    def progress(self, event: str = "tick", source: str = "") -> Progress:
        """The state at this moment."""
        with self._lock:
            return Progress(
                self.elapsed, self.iteration, self.objective, self.lower_bound, event, source,
                *self._best_at,
            )  # fmt: skip

    # what `optsched.solve` does

    def stop(self) -> None:
        """Ask the engines to stop soon: the user wants it."""
        self._stop = self.interrupted = True

    def begin(self, problem: Problem) -> None:
        """Tell the watcher that the run begins."""
        if self._watcher is not None:
            self._call(self._watcher.on_start, problem)

    def end(self, result: Result) -> None:
        """Tell the watcher that the run is over."""
        if self._watcher is not None:
            try:
                self._watcher.on_end(result)
            except Exception as error:
                error.result = result  # type: ignore[attr-defined]
                raise

    def poll(self, *, last: bool = False) -> None:
        """Tell the user what is new, if this is the user's thread; `last`: without delay."""
        if threading.get_ident() != self._home:
            return
        if self._on_progress or self._watcher or self._log:
            with self._lock:
                news = self._news(last)
            for event in news:
                self._tell(event)
        if self._users:
            self._ask(last)

    def _news(self, last: bool) -> list[Progress]:
        """Events to tell now: incumbents at once, all else after `BOUND_INTERVAL`, or a tick."""
        now = self.elapsed
        fresh, waited = self.history[self._told :], now - self._told_at
        urgent = last or any(event.event == "incumbent" for event in fresh)
        if not urgent and waited < BOUND_INTERVAL:
            return []
        if self._restarted is not None:
            fresh = sorted([*fresh, self._restarted], key=lambda event: event.elapsed)
            self._restarted = None
        if not fresh and not last and waited >= TICK:
            fresh = [self.progress("tick")]
        if fresh:
            self._told, self._told_at = len(self.history), now
        return fresh

    def _tell(self, event: Progress) -> None:
        if self._log is not None:
            self._log(event)
        if self._watcher is not None and event.event != "tick":
            self._call(getattr(self._watcher, f"on_{event.event}"), event)
        if self._on_progress is not None and event.event != "restart":
            self._call(self._on_progress, event)

    def _call(self, callback: Callable[..., object], argument: object) -> None:
        try:
            wants_to_stop = callback(argument)
        except BaseException:
            self.callback_failed = True
            raise
        if wants_to_stop:
            self.stop()

    def _ask(self, last: bool) -> None:
        """Ask the user's own criteria, at once after news and else from time to time."""
        now, events = self.progress(), len(self.history)
        if not last and events == self._asked and now.elapsed - self._asked_at < BOUND_INTERVAL:
            return
        self._asked, self._asked_at = events, now.elapsed
        try:
            self._stop = any(criterion(now) for criterion in self._users) or self._stop
        except BaseException:
            self.callback_failed = True
            raise

    def _refuted(self, bound: int, proved_by: str) -> str:
        """Drop what the best schedule refutes, and say so."""
        what = (
            f"{proved_by or 'a solver'} proved the bound {bound}, but a schedule of "
            f"{self.objective} exists"
        )
        fell = self.lower_bound
        self.contradicted(what)
        if self.lower_bound != fell:
            self.history.append(self.progress("bound", proved_by))
        return what
