"""Ruin and recreate on the circle: some jobs leave it, they and those without room come back.

The circle is shorter than the best period known. A state is a set of jobs on it and a bank of jobs
that found no room; whoever fails weighs more from then on (Nagata and Braysy, 2009, guided
ejection). An empty bank is a better schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numba import types

from optsched.compiled import BOOL, INT, INTS, READ, kernel
from optsched_solvers.rolling_insertion import CIRCLE, PLACES, Places, frozen, insert, take_out

if TYPE_CHECKING:
    from optsched.schedule import IntArray, Schedule
    from optsched_solvers.rolling_insertion import Circle


TRIES: Final = 40
"""Starts of a unit that are tried."""

BACK: Final = 8
"""Jobs that are put back in one step at most."""


class Ruin:
    """The search on one circle; `run` goes on where the last call ended.

    Parameters
    ----------
    graph, circle
        The cycle.
    seed
        Same seed and same calls, same answers.
    """

    def __init__(self, graph: Schedule, circle: Circle, seed: int) -> None:
        unit_job = graph.job[circle.unit_operations[circle.unit_indptr[:-1]]]
        jobs, number = np.unique(unit_job, return_inverse=True)
        self.circle = circle
        self.n_jobs = len(jobs)
        self.job_units = np.zeros(len(jobs) + 1, np.int64)  # units are job-major
        np.cumsum(np.bincount(number.ravel()), out=self.job_units[1:])
        work = np.zeros(len(unit_job), np.int64)
        unit_of = np.repeat(np.arange(len(unit_job)), np.diff(circle.unit_indptr))
        np.add.at(work, unit_of, circle.duration[circle.unit_operations])
        total = np.zeros(len(jobs), np.int64)
        np.add.at(total, number.ravel(), work)
        self.weight = total * 100 // max(1, int(total.max(initial=1))) + 1
        self.random = np.array([seed * 2654435761 % 2**31 + 1], np.int64)
        self.begin(1, None)

    def begin(self, period: int, starts: IntArray | None) -> None:
        """Empty the circle and change its length; jobs come back near these starts first."""
        self.period = period
        self.places = Places.none(self.circle)
        self.inside = np.zeros(self.n_jobs, np.int64)
        self.since = np.full(self.n_jobs, -1, np.int64)
        if starts is not None:
            first = self.circle.unit_operations[self.circle.unit_indptr[self.job_units[:-1]]]
            self.since = starts[first] % period

    def run(self, iterations: int) -> IntArray | None:
        """So many removals; the starts of all operations as soon as all jobs are inside."""
        done = _ruin_and_recreate(
            self.circle, self.places, frozen(self.job_units), self.inside, self.weight,
            self.since, self.random, self.period, iterations,
        )  # fmt: skip
        return self.places.start.copy() if done else None


@kernel(INT, INTS, INT)
def _below(random, n):  # type: ignore[no-untyped-def]
    """A number in 0..n-1 (Park and Miller, 1988)."""
    random[0] = random[0] * 48271 % 2147483647
    return random[0] % n


@kernel(BOOL, CIRCLE, PLACES, READ, INT, INT, INT)
def _enter(circle, places, job_units, job, since, period):  # type: ignore[no-untyped-def]
    """Insert all units of a job, or none."""
    at = since
    for unit in range(job_units[job], job_units[job + 1]):
        first = circle.unit_operations[circle.unit_indptr[unit]]
        follows = False
        for e in range(circle.before_indptr[first], circle.before_indptr[first + 1]):
            o = circle.before[e]
            if places.placed[o] and circle.before_tokens[e] == 0:
                follows = True
                at = max(at, places.start[o] + circle.before_weight[e])
        if not insert(circle, places, unit, at, period, follows, TRIES):
            for entered in range(unit - 1, job_units[job] - 1, -1):
                take_out(circle, places, entered, period)
            return False
        at = places.start[first]
    return True


@kernel(types.void, CIRCLE, PLACES, READ, INT, INT)
def _leave(circle, places, job_units, job, period):  # type: ignore[no-untyped-def]
    for unit in range(job_units[job + 1] - 1, job_units[job] - 1, -1):
        take_out(circle, places, unit, period)


@kernel(types.void, PLACES, PLACES)
def _copy(source, target):  # type: ignore[no-untyped-def]
    target.start[:] = source.start
    target.phase[:] = source.phase
    target.placed[:] = source.placed
    target.held[:] = source.held
    target.row[:] = source.row
    target.filled[:] = source.filled


@kernel(BOOL, CIRCLE, PLACES, READ, INTS, INTS, INTS, INTS, INT, INT)
def _ruin_and_recreate(  # type: ignore[no-untyped-def]
    circle, places, job_units, inside, weight, since, random, period, iterations,
):  # fmt: skip
    """Change places, inside, weight and random; True as soon as every job is inside."""
    n = len(inside)
    spare = Places(
        places.start.copy(), places.phase.copy(), places.placed.copy(), places.held.copy(),
        places.row.copy(), places.filled.copy(),
    )  # fmt: skip
    new = np.empty(n, np.int64)
    queue = np.empty(n, np.int64)
    for _ in range(iterations):
        _copy(places, spare)
        n_inside, before = 0, 0
        for j in range(n):
            new[j] = inside[j]
            n_inside += inside[j]
            if not inside[j]:
                before += weight[j]
        if n_inside == n:
            return True
        for _ in range(min(n_inside, 1 + _below(random, 4))):
            j = _below(random, n)
            if new[j]:
                new[j] = 0
                _leave(circle, spare, job_units, j, period)
        m = 0
        for j in range(n):
            if not new[j]:
                queue[m] = j
                m += 1
        for k in range(m - 1, 0, -1):  # in random order, mostly heavy ones first
            o = _below(random, k + 1)
            queue[k], queue[o] = queue[o], queue[k]
        after = 0
        if _below(random, 4):
            for k in range(1, m):
                j = queue[k]
                at = k
                while at > 0 and weight[queue[at - 1]] < weight[j]:
                    queue[at] = queue[at - 1]
                    at -= 1
                queue[at] = j
        for k in range(BACK, m):
            after += weight[queue[k]]
        m = min(m, BACK)
        for k in range(m):
            j = queue[k]
            at = since[j]
            since[j] = -1
            if at < 0:
                at = _below(random, period) if period < 2147483647 else _below(random, 2147483646)
            if _enter(circle, spare, job_units, j, at, period):
                new[j] = 1
            else:
                after += weight[j]
        if after <= before or _below(random, 200) == 0:
            _copy(spare, places)
            for j in range(n):
                inside[j] = new[j]
        else:
            for k in range(m):
                if not new[queue[k]]:
                    weight[queue[k]] += 1
    total = 0
    for j in range(n):
        total += inside[j]
    return total == n
