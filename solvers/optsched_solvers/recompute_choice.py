"""Which jobs recompute: candidates tried quickly, the best of them searched with the time left.

Recomputing costs time and saves bytes. So candidates recompute nothing, everything, and the jobs
that save most bytes for their time, more and more of them; then single jobs of the best one change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.monitor import Monitor
from optsched.problems.jobarray import JobArray
from optsched.problems.jobarray_choice import choosing, settled, with_choice
from optsched.result import Result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.limits import Limits
    from optsched.monitor import Progress
    from optsched.problem import Problem
    from optsched.registry import Solver

Choice = tuple[bool, ...]

PREFIXES: Final = 16
"""About so many candidates between nothing and everything."""

TRIES: Final = 0.4
"""Share of the limit for candidates; the rest is for the best of them."""

FLIPS: Final = 100
"""Single changes of the best candidate that are tried at most."""

SEARCHED: Final = 4
"""Candidates that are searched at length."""

QUICK: Final = 20
"""Steps of the quick engine per candidate."""


def solve(
    engine: Solver, quick: Solver, problem: Problem, limits: Limits, monitor: Monitor
) -> Result:
    """Choose, and search.

    Parameters
    ----------
    engine, quick
        Solvers of arrays whose choice is made: for the best candidates, and to compare all.
    problem
        A `JobArray` with ``recompute_mode="choose"``.
    limits, monitor
        As of any solver; every answer it is offered has the choice as its last row.
    """
    assert isinstance(problem, JobArray)
    search = _Search(engine, quick, problem, limits, monitor)
    search.compare()
    return search.finish()


def simplest(problem: Problem) -> JobArray:
    """The array in which nobody recomputes."""
    assert isinstance(problem, JobArray)
    return choosing(problem, [False] * problem.n_jobs)


class _Tried(NamedTuple):
    value: int
    number: int  # in the order of trying
    choice: Choice


class _Search:
    """Candidates so far, and what they are worth."""

    def __init__(
        self, engine: Solver, quick: Solver, array: JobArray, limits: Limits, monitor: Monitor
    ) -> None:
        self.engine, self.quick, self.array = engine, quick, array
        self.limits, self.monitor = limits, monitor
        self.until = monitor.elapsed + TRIES * monitor.remaining
        self.tried: list[_Tried] = []
        self.seen: set[Choice] = set()
        self.bounds: dict[Choice, int] = {}

    def compare(self) -> None:
        """Candidates by pressure first, then neighbours of the best; a quick answer to each."""
        for choice in by_pressure(self.array):
            if not self._goes_on():
                return
            self._try(choice)
        for flip in range(FLIPS):
            if not self.tried or not self._goes_on():
                return
            best = min(self.tried).choice
            job = flip % len(best)
            self._try((*best[:job], not best[job], *best[job + 1 :]))

    def finish(self) -> Result:
        """Search the best candidates, each with half of the time that is left."""
        searched = 0
        for _, _, choice in sorted(self.tried):
            if self.monitor.should_stop():
                break
            value = self.monitor.objective
            if searched >= SEARCHED or (value is not None and self.bounds[choice] >= value):
                continue
            searched += 1
            last = searched == min(SEARCHED, len(self.tried))
            self._run(self.engine, choice, self.limits.iterations, 1.0 if last else 0.5)
        if len(self.bounds) == len(self.tried) and len(self.seen) == 2**self.array.n_jobs:
            self.monitor.bound(min(self.bounds.values()), "recompute_choice")
        return Result("unknown")

    def _goes_on(self) -> bool:
        if not self.tried:
            return self.monitor.objective is None or not self.monitor.should_stop()
        return not self.monitor.should_stop() and self.monitor.elapsed < self.until

    def _try(self, choice: Choice) -> None:
        if choice in self.seen:
            return
        self.seen.add(choice)
        if choosing(self.array, choice).infeasibility():
            return
        value = self._run(self.quick, choice, QUICK, 1.0)
        if value is not None:
            self.tried.append(_Tried(value, len(self.tried), choice))

    def _run(
        self, engine: Solver, choice: Choice, iterations: int | None, share: float
    ) -> int | None:
        """The best objective that an engine finds for a choice."""
        array = choosing(self.array, choice)
        seconds = self.monitor.remaining * share
        given = replace(
            self.limits, iterations=iterations, options={}, stop=None,
            time_limit=None if seconds == float("inf") else seconds,
        )  # fmt: skip
        lap = _Chosen(self.monitor, choice, given)
        lap.bound(array.lower_bound(), "bounds")
        if not lap.should_stop() or lap.objective is None:
            engine.solve(array, given, lap)
        lap.tell()
        self.monitor.advance(lap.iteration)
        if lap.lower_bound is not None:
            self.bounds[choice] = max(lap.lower_bound, self.bounds.get(choice, 0))
        return lap.objective


class _Chosen(Monitor):
    """What the engine of one choice sees: bounds stay here, answers go on with the choice added.

    It listens as a user does, because laps of a race know nothing of subclasses.
    """

    def __init__(self, shared: Monitor, choice: Choice, limits: Limits) -> None:
        super().__init__(limits, self.tell)
        self._shared, self._choice = shared, choice

    def tell(self, _: Progress | None = None) -> bool:
        """Offer the best answer to all choices together; whether these must stop."""
        value, answer = self.best
        if value is not None and answer is not None:
            self._shared.incumbent(with_choice(answer, self._choice), value, "recompute_choice")
        return self._shared.should_stop()


def by_pressure(array: JobArray) -> Iterator[Choice]:
    """Nobody recomputes, everybody does, and those who save most bytes for their time.

    Jobs that fit in one way only always go that way.
    """
    must, never = settled(array)
    saved = (array.activation - array.checkpoint).sum(axis=1)
    time = np.maximum(array.recompute.sum(axis=1), 1)
    free = np.flatnonzero(~(must | never))
    order, n = free[np.argsort((-saved / time)[free], kind="stable")], len(free)
    counts = {0: None, n: None}  # in this order
    counts |= dict.fromkeys(np.linspace(0, n, min(n, PREFIXES) + 1).astype(int).tolist())
    for count in counts:
        chosen = must.copy()
        chosen[order[:count]] = True
        yield tuple(chosen.tolist())
