"""Clock, best solution and best bound of one solve."""

from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from optsched.errors import InternalError
from optsched.solving.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.solving.limits import Limits

PROBLEM = "bounds"
"""Source of the bound that the problem computes itself, before any engine runs."""


class Clock:
    """Time since the call, and how much of its time limit is left.

    `started` is ``time.perf_counter()`` at the call (default: now). Engines may not use the last
    `reserve` seconds, at most half of the limit: evaluation and verification follow the search.
    """

    def __init__(self, limits: Limits, started: float | None = None, reserve: float = 0.0) -> None:
        self._started = time.perf_counter() if started is None else started
        limit = math.inf if limits.time_limit is None else limits.time_limit
        self._limit = limit - min(reserve, limit / 2) if limit < math.inf else limit
        self._can_pause = limits.by_default
        self._pauses, self._paused = 0, 0.0
        self._lock = threading.Lock()

    @property
    def elapsed(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self._started

    @property
    def remaining(self) -> float:
        """Seconds left for engines, infinite without a time limit."""
        if self._limit == math.inf:
            return math.inf
        with self._lock:
            now = self.elapsed
            paused = self._paused + (now if self._pauses else 0.0)
        return max(0.0, self._limit - now + (paused if self._can_pause else 0.0))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count this time where the user set no limit; threads may overlap.

        While any thread is inside, ``_paused + elapsed`` is the length of all pauses so far.
        """
        with self._lock:
            if not self._pauses:
                self._paused -= self.elapsed
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                if not self._pauses:
                    self._paused += self.elapsed


class Incumbent:
    """Best solution, best bound and history of one solve, safe to use from many threads.

    Invariants: along `history` objectives fall and bounds rise; ``lower_bound <= objective``;
    `solution` has the value `objective`. A bound above a known objective is a bug of an engine.
    Then every bound is dropped but the problem's, and no further one is accepted: it may have been
    derived from the false one. `shift` is what values and bounds of engines are above those of the
    user's problem, which `progress` and `history` show (`optsched.model.objectives.as_makespan`).
    """

    def __init__(self, clock: Clock, shift: int = 0) -> None:
        self.shift = shift
        self.objective: int | None = None
        self.lower_bound: int | None = None
        self.solution: Any = None
        self.iteration = 0
        self.history: list[Progress] = []
        self.contradiction = ""
        self.clock = clock
        self._lock = threading.RLock()
        self._found_at = (0.0, 0)
        self._proved_by = ""
        self._problem_bound: int | None = None

    def incumbent(self, solution: Any, objective: int, source: str = "") -> bool:
        """Report a solution (of the problem's solution type); False if it is no better.

        A solution better than the proved bound refutes that bound; see `contradicted`.
        """
        with self._lock:
            if self.objective is not None and objective >= self.objective:
                return False
            self.objective, self.solution = int(objective), solution
            if self.lower_bound is not None and objective < self.lower_bound:
                self._refute_bound(self.lower_bound, self._proved_by)
            self._found_at = self.clock.elapsed, self.iteration
            self.history.append(self.progress("incumbent", source))
            return True

    def bound(self, value: int, source: str = "") -> bool:
        """Report a proved lower bound; False if it is not higher than the best one.

        Raises
        ------
        InternalError
            A better schedule exists, or some claim was refuted before: the engine ends, the solve
            continues without it.
        """
        with self._lock:
            if self.lower_bound is not None and value <= self.lower_bound:
                return False
            if self.objective is not None and value > self.objective:
                raise InternalError(self._refute_bound(int(value), source))
            if self.contradiction:
                raise InternalError(self.contradiction)
            self.lower_bound, self._proved_by = int(value), source
            if source == PROBLEM:
                self._problem_bound = self.lower_bound
            self.history.append(self.progress("bound", source))
            return True

    def advance(self, steps: int) -> None:
        """Report steps (moves, nodes, ...: the solver's iterations) since the last report."""
        with self._lock:
            self.iteration += int(steps)

    def contradicted(self, message: str) -> None:
        """Record a refuted claim of an engine, and drop all bounds that may rest on it."""
        with self._lock:
            self.contradiction = self.contradiction or message
            self.lower_bound = self._problem_bound
            best = self.objective
            if best is not None and self.lower_bound is not None and best < self.lower_bound:
                self.lower_bound = None

    @property
    def best(self) -> tuple[int | None, Any]:
        """Objective and solution of the incumbent, read together."""
        with self._lock:
            return self.objective, self.solution

    @property
    def proved(self) -> bool:
        """Whether objective and lower bound meet."""
        return self.objective is not None and self.objective == self.lower_bound

    def progress(self, event: str = "tick", source: str = "") -> Progress:
        """The state at this moment."""
        with self._lock:
            best, bound = (
                None if value is None else value - self.shift
                for value in (self.objective, self.lower_bound)
            )
            return Progress(
                self.clock.elapsed, self.iteration, best, bound, event, source, *self._found_at
            )

    def events(self, first: int) -> list[Progress]:
        """New incumbents and bounds since the event of this number."""
        with self._lock:
            return self.history[first:]

    def _refute_bound(self, bound: int, source: str) -> str:
        message = (
            f"{source or 'a solver'} proved the bound {bound - self.shift}, but a schedule of "
            f"{self.progress().objective} exists"
        )
        before = self.lower_bound
        self.contradicted(message)
        if self.lower_bound != before:
            self.history.append(self.progress("bound", source))
        return message
