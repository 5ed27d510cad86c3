"""A lower bound of the time of a cycle that knows that copies take up slots while they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from optsched.arraypipe.states.visits import CHANGES, NEEDS, POOLS
from optsched.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.states.visits import State, Visit


class Rates(NamedTuple):
    """Time per byte in and out, and whether both directions take turns."""

    inward: float
    outward: float
    shared: bool = False


def least_time(
    states: Sequence[State], visits: Sequence[Visit], slots: Sequence[int], rates: Rates
) -> float:
    """Time per cycle that no plan with so many slots (per pool) goes below, in the long run.

    A linear program (GLOP). A *gap* is the time between two visits in a row to one state in one
    pool. Take any plan, and of every gap of the cycle, in the mean over very many cycles,

    * kept: how often the state stays in its slot throughout the gap;
    * arrived: how much of what it needs next has been copied in, if it does not stay, by the start
      and by the end of every block in the gap, as a part of it;
    * dirty: how much of what the visit before the gap has changed is still to be written, if the
      state does not stay;

    and of every block the stall before it. The program has these means as variables, and as rows
    only what holds at each moment of each plan, so that the means of any plan satisfy it:

    1. A slot has one state that is kept or used, or else bytes that have arrived for one gap, and
       beside those bytes that are still dirty of the state before. So at the start and at the end
       of every block kept + arrived is at most the slots less the one of the block, and so is
       kept + (arrived + dirty bytes) / bytes of a slot.
    2. A copy for a gap that is not kept goes into a slot that is neither kept nor the block's. So
       over a block kept + the part of its time with such copies into the pool is at most the slots
       less the one of the block.
    3. A state that is not kept has arrived, and what it changed has been written, at the end of
       its gap.
    4. A link carries one copy at a time, in every block and in every stall, and over the cycle all
       writes, also those of states that leave later than in the first gap after the change.

    The time is that of the blocks and the stalls. Means may be fractions where one plan has to
    decide, copies are cut into any parts and have no latency, so no plan may reach the bound. It is
    not always above `copy_bound`: the larger of the two is a bound.

    Parameters
    ----------
    states, visits
        What the device works on, and one cycle of its blocks.
    slots
        For weights and for moments.
    rates
        Of the link to the host; latencies count as none.
    """
    return _Program(visits, rates).solve(states, slots)


class _Gap(NamedTuple):
    state: int
    before: int  # visit that it follows
    after: int  # visit that it ends with
    inside: tuple[int, ...]  # visits to other states in between


class _Program:
    """The linear program; sums of variables are pywraplp's, which has no types."""

    def __init__(self, visits: Sequence[Visit], rates: Rates) -> None:
        from ortools.linear_solver import pywraplp

        self.visits, self.rates = visits, rates
        self.solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        n = len(visits)
        self.stalls = [self.solver.NumVar(0, self.solver.infinity(), "") for _ in visits]
        # time of copies by visit: in the stall before it, and during its block
        self.inward: list[list[list[Any]]] = [[[] for _ in range(n)] for _ in range(2)]
        self.outward: list[list[list[Any]]] = [[[] for _ in range(n)] for _ in range(2)]
        self.written: list[Any] = []  # time of all writes of a cycle

    def solve(self, states: Sequence[State], slots: Sequence[int]) -> float:
        """Add everything, minimise the stalls."""
        for pool, count in zip(POOLS, slots, strict=True):
            if any(state.bytes[piece] for state in states for piece in pool):
                self._pool(states, pool, count)
        blocks = sum(v.duration + v.gap for v in self.visits)
        for i, visit in enumerate(self.visits):
            for k, time in enumerate((self.stalls[i] + visit.gap, visit.duration)):
                coming, going = sum(self.inward[k][i]), sum(self.outward[k][i])
                if self.rates.shared:
                    self.solver.Add(coming + going <= time)
                else:
                    self.solver.Add(coming <= time)
                    self.solver.Add(going <= time)
        whole = blocks + sum(self.stalls)
        reading = sum(sum(row) for side in self.inward for row in side)
        self.solver.Add(sum(self.written) + (reading if self.rates.shared else 0) <= whole)
        self.solver.Minimize(sum(self.stalls))
        if self.solver.Solve() != self.solver.OPTIMAL:
            raise InternalError("the linear program of the least time of a cycle was not solved")
        return float(blocks + self.solver.Objective().Value())

    def _pool(self, states: Sequence[State], pool: Sequence[int], slots: int) -> None:
        n = len(self.visits)
        kept: list[list[Any]] = [[] for _ in range(n)]
        # what takes up slots at the start and at the end of each block, and copies during it
        taken: list[list[list[Any]]] = [[[] for _ in range(n)] for _ in range(2)]
        coming: list[list[Any]] = [[] for _ in range(n)]
        full: list[list[list[Any]]] = [[[] for _ in range(n)] for _ in range(2)]
        size = sum(max(s.bytes[piece] for s in states) for piece in pool)
        rows: dict[int, list[tuple[_Gap, Any]]] = {}
        for gap in _gaps(self.visits, pool):
            stays = self.solver.NumVar(0, 1, "")
            rows.setdefault(gap.state, []).append((gap, stays))
            for i in gap.inside:
                kept[i].append(stays)
            for i, k, arrived, left, copied in self._fill(states[gap.state], pool, gap, stays):
                full[k][i].append(arrived)
                taken[k][i].append(left * (1 / size))
                coming[i] += copied
        for state, row in rows.items():
            self._write(states[state], pool, row)
        for i, visit in enumerate(self.visits):
            free = slots - bool(set(NEEDS[visit.kind]) & set(pool))
            for k in range(2):
                self.solver.Add(sum(kept[i]) + sum(full[k][i]) <= free)
                self.solver.Add(sum(kept[i]) + sum(taken[k][i]) <= free)
            if visit.duration:
                self.solver.Add(sum(kept[i]) + sum(coming[i]) * (1 / visit.duration) <= free)

    def _fill(
        self, state: State, pool: Sequence[int], gap: _Gap, stays: Any
    ) -> Iterator[tuple[int, int, Any, Any, list[Any]]]:
        """Copies of a gap; by visit, start or end of its block: arrived, bytes taken, copying."""
        needs, changes = (
            sum(state.bytes[piece] for piece in pool if piece in table[self.visits[i].kind])
            for table, i in ((NEEDS, gap.after), (CHANGES, gap.before))
        )
        arrived: Any = 0
        dirty: Any = 1 - stays if changes else 0
        for i in (*gap.inside, gap.after):
            for k in range(1 + (i != gap.after and self.visits[i].duration > 0)):
                part = self.solver.NumVar(0, 1, "")
                arrived = self._sum(arrived + part)
                copying = part * (needs * self.rates.inward)
                self.inward[k][i].append(copying)
                if changes:
                    part = self.solver.NumVar(0, 1, "")
                    dirty = self._sum(dirty - part)
                    self.outward[k][i].append(part * (changes * self.rates.outward))
                if i != gap.after:
                    yield i, k, arrived, arrived * needs + dirty * changes, [copying] * k
        self.solver.Add(arrived >= 1 - stays)
        if changes:
            self.solver.Add(dirty <= 0)

    def _write(self, state: State, pool: Sequence[int], row: Sequence[tuple[_Gap, Any]]) -> None:
        """Every change is written unless the state is kept until the next one."""
        for piece in pool:
            changes = [
                k
                for k, (gap, _) in enumerate(row)
                if piece in CHANGES[self.visits[gap.before].kind]
            ]
            for k, later in zip(changes, [*changes[1:], *changes[:1]], strict=True):
                written = self.solver.NumVar(0, 1, "")
                for step in range((later - k) % len(row) or len(row)):
                    self.solver.Add(written >= 1 - row[(k + step) % len(row)][1])
                self.written.append(written * (state.bytes[piece] * self.rates.outward))

    def _sum(self, expression: Any) -> Any:
        """A variable for it, so that rows stay short; from 0 to 1."""
        variable = self.solver.NumVar(0, 1, "")
        self.solver.Add(variable == expression)
        return variable


def _gaps(visits: Sequence[Visit], pool: Sequence[int]) -> list[_Gap]:
    """Between visits of one state that need something of the pool, by state in order."""
    n = len(visits)
    asked: dict[int, list[int]] = {}
    for i, visit in enumerate(visits):
        if set(NEEDS[visit.kind]) & set(pool):
            asked.setdefault(visit.state, []).append(i)
    found = []
    for state, row in asked.items():
        for before, after in zip(row, [*row[1:], row[0]], strict=True):
            length = (after - before) % n or n
            inside = tuple((before + k) % n for k in range(1, length))
            found.append(_Gap(state, before, after, inside))
    return found
