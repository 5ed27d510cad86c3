"""Choose the jobs that recompute: candidates from a relaxation, then searches of the best.

Recomputing costs time and saves bytes x time. A linear relaxation chooses the jobs for which it
pays if memory could be packed without gaps; real schedules leave gaps, so it is solved for several
degrees of packing. Neighbors of the best candidate follow. All are evaluated by a quick engine, the
best are searched.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InternalError
from optsched.problems.jobarray.problem import JobArray
from optsched.problems.jobarray.recompute import tradeoff, with_choice
from optsched.solving.incumbent import PROBLEM
from optsched.solving.result import Result
from optsched_solvers._portfolio import SubSearch
from optsched_solvers.shop import hand_made

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.model.schedule import Problem
    from optsched.problems.jobarray.recompute import Tradeoff
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Solver

Choice = tuple[bool, ...]

PACKING: Final = (2.0, 3.0, 1.5, 2.5, 1.25, 4.0, 1.7, 1.1, 1.35, 1.0, 1.2)
"""Memory divided by the bytes x time in it; the most successful degrees first."""

ALL_OF: Final = 4
"""Number of jobs up to which every choice is a candidate."""

TRIES: Final = 0.25
"""Share of the remaining time for one comparison of candidates."""

CHANGED: Final = 40
"""Jobs on either side whose changes are considered: pairs of a thousand would take seconds."""

NEIGHBOURS: Final = 40
"""Neighbors of the best candidate that are evaluated at most."""

SEARCHED: Final = 2
"""Candidates that are searched besides the two extremes (all recompute, none does)."""

TRIAL: Final = 0.2
"""Share of the remaining time for each of these; the best one gets what remains then."""

UNHURRIED: Final = 5.0
"""Seconds for each of these without a time limit."""

QUICK: Final = 20
"""Steps of the quick engine per candidate."""


def solve(
    engine: Solver, quick: Solver, problem: Problem, limits: Limits, monitor: Monitor
) -> Result:
    """Choose, and search.

    With an iteration limit every search has that many iterations, and the two extremes are always
    searched, so the answer is never worse than the engine's to them.

    Parameters
    ----------
    engine, quick
        Solvers of arrays without a choice: for the best candidates, and to compare all.
    problem
        A `JobArray` with ``recompute_mode="choose"``.
    limits, monitor
        As of any solver; every solution reported has the choice in `recompute`.
    """
    assert isinstance(problem, JobArray)
    _Search(engine, quick, problem, limits, monitor).run()
    return Result("unknown")


def simplest(problem: Problem) -> JobArray:
    """Return the array in which no job recomputes."""
    assert isinstance(problem, JobArray)
    return problem.replace(recompute_mode=[False] * problem.n_jobs)


class _Tried(NamedTuple):
    value: int
    number: int  # in the order of trying
    choice: Choice


class _Search:
    """Candidates so far, and their values."""

    def __init__(
        self, engine: Solver, quick: Solver, array: JobArray, limits: Limits, monitor: Monitor
    ) -> None:
        self.engine, self.quick, self.array = engine, quick, array
        self.limits, self.monitor = limits, monitor
        self.tradeoff = tradeoff(array)
        self.extremes = (
            tuple(self.tradeoff.always.tolist()), tuple((~self.tradeoff.never).tolist()),
        )  # fmt: skip
        self.tried: dict[Choice, _Tried] = {}
        self.seen: set[Choice] = set()
        self.bounds: dict[Choice, int] = {}  # of all that are feasible among them
        self.answers: dict[Choice, tuple[int, Any]] = {}  # of those that were searched

    def run(self) -> None:
        """Compare candidates, then search the best; again while time remains."""
        for choice in self.extremes:
            array = self.array.replace(recompute_mode=choice)
            if not array.infeasibility():
                monitor = _Chosen(self.monitor, choice, self.limits)
                hand_made.offer_first(array, self.limits, monitor)
        self._compare(first_candidates(self.tradeoff, self.extremes))
        if not self.tried:
            self._search_any()
        self._search_best()
        known = 0
        while self.tried and not self._is_over() and len(self.seen) > known:
            known = len(self.seen)
            self._compare(self._neighbours())
            self._search_best()
            if self.limits.iterations is not None:
                break
        if self._all_seen() and self.bounds:
            self.monitor.bound(min(self.bounds.values()), "recompute_choice")

    def _compare(self, candidates: Iterator[Choice]) -> None:
        """Evaluate each candidate that may be better than the best known one."""
        until = self.monitor.elapsed + TRIES * self.monitor.remaining
        for choice in candidates:
            if self._is_over() or (self.tried and self.monitor.elapsed > until):
                return
            self._try(choice)

    def _search_any(self) -> None:
        """Search extremes while no candidate can be evaluated: kernels are being compiled."""
        for choice in (*self.extremes, *self.bounds):
            if self.monitor.objective is None and self._is_open(choice):
                self._run(self.engine, choice, self.limits.iterations, TRIAL)

    def _search_best(self) -> None:
        """Search the best candidates and the extremes briefly, then the best of them longer.

        Searches pack memory better than the quick engine, so then other jobs should recompute.
        """
        if not self.tried:
            return
        ranked = [t.choice for t in sorted(self.tried.values())]
        for choice in dict.fromkeys((*ranked[:SEARCHED], *self.extremes)):
            self._search(choice, TRIAL)
        for _ in range(SEARCHED):
            choice = rounded(self.tradeoff, self._packing())
            if choice not in self.answers:
                self._search(choice, TRIAL)
        possible = sorted(t for t in self.tried.values() if self._is_open(t.choice))
        if self.limits.iterations is None and possible:
            self._search(possible[0].choice, 1.0)

    def _search(self, choice: Choice, share: float) -> None:
        again = self.limits.iterations is not None and choice in self.answers
        if not again and not self._is_over() and self._is_open(choice):
            self._run(self.engine, choice, self.limits.iterations, share)

    def _is_over(self) -> bool:
        """Whether to stop; without a solution only the time counts."""
        if self.monitor.objective is None:
            return self.monitor.remaining <= 0 and bool(self.seen)
        return self.monitor.should_stop()

    def _is_ruled_out(self, choice: Choice) -> bool:
        value = self.monitor.objective
        return value is not None and self.bounds[choice] >= value

    def _all_seen(self) -> bool:
        is_settled = self.tradeoff.always | self.tradeoff.never
        return len(self.seen) >= int(2 ** is_settled.tolist().count(False))

    def _packing(self) -> float:
        """Memory divided by the bytes x time in it, in the best packed schedule so far."""
        packing = max(PACKING)
        for value, _, choice in self.tried.values():
            need = self.tradeoff.rows(choice)[self.tradeoff.energy].max(initial=0.0)
            packing = min(packing, value / max(1.0, need))
        return packing

    def _neighbours(self) -> Iterator[Choice]:
        """New choices with one job changed or two exchanged, by their relaxed values."""
        costs, packing = self.tradeoff, self._packing()
        promise = [
            (float(costs.rows(choice, packing).max()), choice)
            for choice in _changed(min(self.tried.values()).choice, costs)
            if choice not in self.seen
        ]
        for _, choice in sorted(promise)[:NEIGHBOURS]:
            yield choice

    def _is_open(self, choice: Choice) -> bool:
        """Whether the choice is feasible, and may be better than the best known one."""
        if choice not in self.seen:
            self.seen.add(choice)
            if not self.array.replace(recompute_mode=choice).infeasibility():
                self.bounds[choice] = self.tradeoff.bound(choice)
        return choice in self.bounds and not self._is_ruled_out(choice)

    def _try(self, choice: Choice) -> None:
        if choice in self.tried or not self._is_open(choice):
            return
        value = self._run(self.quick, choice, QUICK, 1.0)
        if value is not None:
            self.tried[choice] = _Tried(value, len(self.tried), choice)

    def _run(
        self, engine: Solver, choice: Choice, iterations: int | None, share: float
    ) -> int | None:
        """The best objective that an engine finds for a choice."""
        array = self.array.replace(recompute_mode=choice)
        seconds: float | None = self.monitor.remaining * share
        if seconds == float("inf"):
            seconds = None if iterations is not None or share == 1 else UNHURRIED
        given = replace(
            self.limits, iterations=iterations, options={}, stop=None, time_limit=seconds
        )
        monitor = _Chosen(self.monitor, choice, given)
        monitor.bound(array.lower_bound(), PROBLEM)
        if engine is self.engine and choice in self.answers:
            value, answer = self.answers[choice]
            monitor.incumbent(answer, value, "recompute_choice")
        if not monitor.should_stop() or monitor.objective is None:
            with suppress(InternalError):  # a bound was refuted: the solutions are valid
                engine.solve(array, given, monitor)
        if monitor.contradiction:
            self.monitor.contradicted(monitor.contradiction)
        self.monitor.advance(monitor.iteration)
        if monitor.lower_bound is not None:
            self.bounds[choice] = max(monitor.lower_bound, self.bounds[choice])
        best, found = monitor.best
        if engine is self.engine and best is not None and found is not None:
            self.answers[choice] = best, found
            self.tried[choice] = _Tried(best, len(self.tried), choice)
        return best


class _Chosen(SubSearch):
    """Monitor of one choice: its bounds stay here, its solutions go to the shared monitor."""

    def __init__(self, shared: Monitor, choice: Choice, limits: Limits) -> None:
        super().__init__(limits, shared.should_stop)
        self._shared, self._choice = shared, choice

    def incumbent(self, solution: Any, objective: int, source: str = "") -> bool:
        """Report a solution here, and with the choice added to the shared monitor."""
        better = super().incumbent(solution, objective, source)
        if better:
            chosen = with_choice(solution, self._choice)
            self._shared.incumbent(chosen, objective, "recompute_choice")
        return better


def first_candidates(costs: Tradeoff, extremes: tuple[Choice, Choice]) -> Iterator[Choice]:
    """Yield the extreme of the lower bound, rounded relaxations, the other extreme, all if few."""
    yield from sorted(extremes, key=costs.bound)[:1]
    for packing in PACKING:
        yield rounded(costs, packing)
    yield from sorted(extremes, key=costs.bound)[1:]
    n = len(costs.always)
    if n <= ALL_OF:
        for choice in product((False, True), repeat=n):
            flags = np.array(choice)
            if not (costs.always & ~flags).any() and not (costs.never & flags).any():
                yield choice


def rounded(costs: Tradeoff, packing: float) -> Choice:
    """Round the relaxation: jobs of the largest shares recompute, in the best number."""
    shares = costs.relaxed(packing)[1]
    order = np.argsort(-shares, kind="stable")
    order = order[~(costs.always | costs.never)[order]]
    choice = costs.always.copy()
    best = choice.copy()
    for j in order.tolist():
        choice[j] = True
        if costs.rows(choice, packing).max() < costs.rows(best, packing).max():
            best = choice.copy()
    return tuple(best.tolist())


def _changed(best: Choice, costs: Tradeoff) -> Iterator[Choice]:
    """Choices with one job changed, or two exchanged, the most fractional jobs first."""
    choice = np.array(best)
    doubt = np.argsort(np.abs(costs.relaxed()[1] - 0.5), kind="stable")
    doubt = doubt[~(costs.always | costs.never)[doubt]]
    into, out = doubt[~choice[doubt]].tolist(), doubt[choice[doubt]].tolist()
    for jobs in ((j,) for j in into[:CHANGED] + out[:CHANGED]):
        yield _flipped(best, jobs)
    for pair in product(into[:CHANGED], out[:CHANGED]):
        yield _flipped(best, pair)


def _flipped(choice: Choice, jobs: tuple[int, ...]) -> Choice:
    flags = list(choice)
    for j in jobs:
        flags[j] = not flags[j]
    return tuple(flags)
