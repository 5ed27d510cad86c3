"""Simulated annealing on machine orders for the total weighted completion time, compiled.

A move exchanges two machine neighbors on a critical path to the end of a random job: only such
exchanges can make that job earlier, and they keep the orders free of cycles. The value after every
move is exact, by the heads of the whole schedule; a refused move is taken back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numba import types

from optsched.kernels.compile import INT, READ, entry, helper
from optsched.model.objectives import job_ends, last_operations, per_job
from optsched_solvers._random import accepted_rise, random_below
from optsched_solvers.shop.rules import order_of
from optsched_solvers.shop.tabu.neighbourhoods import left_is_safe
from optsched_solvers.shop.tabu.state import STATE, arc_head, exchange, exchange_fits, machine_head
from optsched_solvers.shop.tabu.walk import Walk

if TYPE_CHECKING:
    from optsched.model.schedule import Csr, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

HOTTEST: Final = 6.0
"""First temperature of a round, as a share of the mean weight times the mean duration."""

COLDEST: Final = 0.004
"""Last temperature, as a share of the first one."""

FIRST_ROUND: Final = 200_000
"""Moves of the first round; every further one is twice as long, up to 2^5 times."""

SLICE: Final = 500_000
"""Operations evaluated between two checks of the limits."""


def improve(graph: Schedule, start: Csr, limits: Limits, monitor: Monitor) -> None:
    """Anneal from given machine orders, round after round, until a limit.

    One iteration is one move. Every further round starts from the best schedule, every fourth one
    from the last.
    """
    walk = _Total(graph, limits.seed)
    left = limits.iterations
    scale = sum(per_job(graph)) / len(per_job(graph)) * max(1.0, float(graph.duration.mean()))
    slice_moves = max(1, SLICE // graph.n_operations)
    walk.begin(start)
    number = 0
    while not monitor.should_stop() and left != 0:
        most = FIRST_ROUND << min(number, 5)
        made = 0
        while made < most and not monitor.should_stop() and left != 0:
            temperature = HOTTEST * scale * COLDEST ** (made / most)
            moves = min(slice_moves, most - made, most if left is None else left)
            before = walk.best
            walk.run(moves, temperature)
            made += moves
            left = None if left is None else left - moves
            monitor.advance(moves)
            if walk.best < before and (monitor.objective is None or walk.best < monitor.objective):
                monitor.incumbent(walk.sequences(), walk.best, "tabu")
        number += 1
        if number % 4:
            walk.begin(walk.sequences())


class _Total:
    """A schedule under annealing, and the best one so far."""

    def __init__(self, graph: Schedule, seed: int) -> None:
        self.graph, self.walk = graph, Walk(graph, seed)
        ends = last_operations(graph)
        order = np.argsort(graph.job[ends], kind="stable")
        self.ends = ends[order]
        jobs, counts = np.unique(graph.job[ends], return_counts=True)
        self.first = np.concatenate([[0], np.cumsum(counts)])
        self.weight = np.array(per_job(graph), np.int64)[jobs]

    @property
    def best(self) -> int:
        """Least value since the walk was made."""
        return self.walk.best

    def begin(self, sequences: Csr) -> None:
        """Go on from these machine orders."""
        walk = self.walk
        walk.load(order_of(self.graph, sequences))
        ends = job_ends(self.graph, walk.state.time["end"][:-1])[self.graph.job[self.ends]]
        total = int((ends[self.first[:-1]] * self.weight).sum())
        walk.control["value"] = walk.control["best"] = total

    def run(self, moves: int, temperature: float) -> None:
        """Try so many moves."""
        anneal(self.walk.state, self.ends, self.first, self.weight, moves, temperature)

    def sequences(self) -> Csr:
        """Machine orders of the best schedule."""
        return self.walk.best_sequences()


@helper(counted=False, inline=True)
def total_of(s, ends, first, weight):  # type: ignore[no-untyped-def]
    """Sum of w_j C_j; the last operations of row j are ``ends[first[j] : first[j + 1]]``."""
    value = 0
    for j in range(len(weight)):
        last = 0
        for k in range(first[j], first[j + 1]):
            last = max(last, s.time[ends[k]].end)
        value += weight[j] * last
    return value


@helper(counted=False, inline=True)
def latest_of(s, ends, first, j):  # type: ignore[no-untyped-def]
    """The operation with which job row j ends."""
    found = ends[first[j]]
    for k in range(first[j] + 1, first[j + 1]):
        if s.time[ends[k]].end > s.time[found].end:
            found = ends[k]
    return found


@helper(counted=False, inline=True)
def pick_exchange(s, i):  # type: ignore[no-untyped-def]
    """A random tight machine arc (u, v) on a random critical path to i, into the control; or none.

    `step` becomes the number of such arcs on that path.
    """
    c = s.control[0]
    c.step = 0
    while True:
        r = s.time[i].end - s.time[i].duration
        if r == s.op[i].release:
            break
        found, following = 0, i
        before = np.int64(s.link[i].machine_before)
        if before != len(s.order) and machine_head(True, s, i) == r:
            found, following = 1, before
            c.step += 1
            if c.step == 1 or random_below(c, c.step) == 0:
                c.u, c.v = before, i
        for e in range(s.op[i].arcs_in, s.op[i].arcs_in_end):
            if s.time[s.arc[e].other].end + s.arc[e].weight == r:
                found += 1
                if found == 1 or random_below(c, found) == 0:
                    following = s.arc[e].other
        if found == 0:
            break
        i = np.int64(following)


@helper(counted=False, inline=True)
def exchange_and_end(s, u, v):  # type: ignore[no-untyped-def]
    """Put u right behind its machine neighbor v; ends and levels follow, tails do not."""
    exchange(s, u, v)
    # invariant: ends at earlier places of the topological order are exact
    for k in range(np.int64(s.link[v].place), len(s.order)):
        i = s.order[k]
        s.time[i].end = s.time[i].duration + max(arc_head(True, s, i), machine_head(True, s, i))


@entry(INT, STATE, READ, READ, READ, INT, types.float64, counted=False)
def anneal(s, ends, first, weight, moves, temperature):  # type: ignore[no-untyped-def]
    """Try so many exchanges at a temperature; returns how many were kept."""
    c = s.control[0]
    kept = 0
    # invariant: links, order, ends and levels are exact for the present schedule, whose value is
    # c.value; c.best and best_order belong to the best schedule so far
    for _ in range(moves):
        c.moves += 1
        pick_exchange(s, latest_of(s, ends, first, random_below(c, len(weight))))
        if c.step == 0:
            continue
        u, v = c.u, c.v
        # the arc is tight: no other path leads from u to v where lags are >= 0 and blocks > 0
        if not left_is_safe(True, s, u, v) or not exchange_fits(s, u, v):
            continue
        most = c.value + accepted_rise(c, temperature)
        for _attempt in range(2):
            exchange_and_end(s, u, v)
            value = total_of(s, ends, first, weight)
            if value <= most:
                break
            u, v = v, u  # back: the same exchange again restores the schedule
        c.value = value
        kept += value <= most
        if value < c.best:
            c.best = value
            for k in range(len(s.order)):
                s.best_order[k] = s.order[k]
    return kept
