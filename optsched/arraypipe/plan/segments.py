"""A run as segments of plans: the streams of blocks and messages, and which segment follows."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from optsched.arraypipe.plan.types import Instance, Transfer
from optsched.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.types import Routes


_AHEAD: Final = 64  # blocks a walk works out in one go, while its tables are in the cache


@dataclass(eq=False)
class Segment:
    """A plan with the jobs on its seats and how many iterations of each it runs.

    Every device does its segments one after the other, without waiting for other devices in
    between. Each segment runs whole iterations by a live plan, so their succession is live too:
    all blocks of one and then all of the next is a topological order.
    """

    plan: ExecutionPlan  # what is repeated
    routes: Routes
    seats: tuple[int, ...]  # job (its index in the run) of every job of the plan
    first: list[int]  # iteration of that job with which the seat begins
    count: list[int]  # iterations of it; may shrink meanwhile, but not below what has begun

    def runs(self, operation: int, cycle: int) -> int:
        """The job's iteration that this instance runs, or -1 if it is skipped."""
        seat, rate, shift = self.plan.turns[operation]
        turn = cycle * rate + shift
        return self.first[seat] + turn if 0 <= turn < self.count[seat] else -1

    @property
    def cycles(self) -> int:
        """Cycles until all iterations are over on all devices."""
        rows = zip(self.count, self.plan.copies, self.plan.latest, strict=True)
        return max((-(-n // rate) + latest for n, rate, latest in rows if n), default=0)


def device_stream(segment: Segment, device: int, cycle: int = 0) -> Iterator[Instance]:
    """Blocks of one device in the order of its list, from a cycle on.

    `count` is read as they are asked for.
    """
    row = segment.plan.sequences[device]
    while cycle < segment.cycles:
        for operation in row:
            iteration = segment.runs(operation, cycle)
            if iteration >= 0:
                yield Instance(operation, cycle, iteration)
        cycle += 1


def channel_stream(segment: Segment, channel: int) -> Iterator[Transfer]:
    """Messages of one channel in the order in which the receiver's list consumes them."""
    cycle = 0
    while cycle < segment.cycles:
        for k in segment.routes.channels[channel].messages:
            iteration = segment.runs(segment.routes.messages[k].consumer, cycle)
            if iteration >= 0:
                yield Transfer(k, cycle, iteration)
        cycle += 1


def places(plan: ExecutionPlan, seat: int) -> tuple[int, ...]:
    """Device of every stage of a seat."""
    row = [-1] * plan.n_stages
    for block in plan.blocks:
        if block.kind == "F" and block.job == seat:
            row[block.stage] = block.device
    return tuple(row)


def moved(now: Segment, then: Segment, live: Collection[int], titles: Sequence[str]) -> str:
    """Why jobs that are trained cannot go on with another plan: they stay on their devices."""
    homes = {job: places(now.plan, seat) for seat, job in enumerate(now.seats)}
    for seat in live:
        job, wanted = then.seats[seat], places(then.plan, seat)
        if homes.get(job, wanted) != wanted:
            return (
                f"the new plan has the stages of job {titles[job]} on devices {wanted}; they are "
                f"on {homes[job]} and cannot move while it is trained"
            )
    return ""


class Walk:
    """All blocks of a segment in a topological order.

    Of the blocks that may run next the one with the earliest predicted start comes first; starts
    decide nothing else. Marks (operations without a device) are passed in silence. With `cycle`
    everything before that cycle counts as over.
    """

    def __init__(self, segment: Segment, cycle: int = 0) -> None:
        self.segment = segment
        plan = self.plan = segment.plan
        marks = [[b.operation] for b in plan.blocks if b.device < 0]
        self.lines: list[Sequence[int]] = [row for row in (*plan.sequences, *marks) if row]
        line_of = {i: k for k, row in enumerate(self.lines) for i in row}
        followers: list[set[int]] = [set() for _ in plan.blocks]
        for arc in plan.arcs:
            followers[arc.tail].add(line_of[arc.head])
        self.followers = [  # whose head may be free once an operation is over, its own line first
            (line_of[i], *sorted(lines - {line_of[i]})) for i, lines in enumerate(followers)
        ]
        start = np.asarray(plan.schedule.start).tolist()
        self.predicted = [
            s + b.offset * plan.cycle_time for s, b in zip(start, plan.blocks, strict=True)
        ]
        self.cycle_time = plan.cycle_time
        self.cycles = segment.cycles
        self.begun = [0] * plan.n_jobs  # iterations of every seat that have a block behind them
        self.finished = [cycle] * len(plan.blocks)  # cycles of every operation that are over
        self.position = [0] * len(self.lines)
        self.cycle = [cycle] * len(self.lines)
        self.queued = [False] * len(self.lines)
        self.ready: list[tuple[int, int]] = []
        self._release(range(len(self.lines)))

    def __iter__(self) -> Iterator[Instance]:
        begun, count, first = self.begun, self.segment.count, self.segment.first
        order = self._order()
        while ahead := list(islice(order, _AHEAD)):
            for operation, cycle, seat, turn in ahead:
                if turn >= count[seat]:  # deleted in the meantime
                    continue
                if turn >= begun[seat]:
                    begun[seat] = turn + 1
                yield Instance(operation, cycle, first[seat] + turn)
        if any(cycle < self.cycles for cycle in self.cycle):
            raise InternalError("a plan that passed the liveness check came to a halt")

    def _order(self) -> Iterator[tuple[int, int, int, int]]:
        """Operation, cycle, seat and turn of every block."""
        ready, queued, lines = self.ready, self.queued, self.lines
        position, cycles, followers = self.position, self.cycle, self.followers
        turns, count = self.plan.turns, self.segment.count
        runs = [block.device >= 0 for block in self.plan.blocks]
        while ready:
            line = heapq.heappop(ready)[1]
            queued[line] = False
            operation, cycle = lines[line][position[line]], cycles[line]
            seat, rate, shift = turns[operation]
            turn = cycle * rate + shift
            if turn >= count[seat]:  # deleted while it was queued
                self._release((line,))
                continue
            # what follows is released before this block is run: it comes later all the same
            self._step(line, operation)
            self._release(followers[operation])
            if runs[operation]:
                yield operation, cycle, seat, turn

    def shorten(self, seat: int, count: int) -> None:
        """Run only so many iterations of a seat; what waited for the others is released."""
        if count < self.segment.count[seat]:
            self.segment.count[seat] = count
            self._release(range(len(self.lines)))

    def _step(self, line: int, operation: int) -> None:
        self.finished[operation] = self.cycle[line] + 1
        self.position[line] += 1
        if self.position[line] == len(self.lines[line]):
            self.position[line] = 0
            self.cycle[line] += 1

    def _release(self, lines: Sequence[int]) -> None:
        """Pass skipped blocks and queue the head of a line if it has to wait for nothing."""
        turns, waits = self.plan.turns, self.plan.waits
        count, finished = self.segment.count, self.finished
        for line in lines:
            if self.queued[line]:
                continue
            row = self.lines[line]
            while (cycle := self.cycle[line]) < self.cycles:
                operation = row[self.position[line]]
                seat, rate, shift = turns[operation]
                if 0 <= cycle * rate + shift < count[seat]:
                    break
                self._step(line, operation)
            else:
                continue
            for tail, _, tokens, _ in waits[operation]:
                if finished[tail] <= cycle - tokens:
                    seat, rate, shift = turns[tail]
                    if 0 <= (cycle - tokens) * rate + shift < count[seat]:
                        break
            else:
                self.queued[line] = True
                predicted = self.predicted[operation] + cycle * self.cycle_time
                heapq.heappush(self.ready, (predicted, line))


class Change(NamedTuple):
    """Another plan, or other jobs on its seats, from the next possible moment on."""

    plan: ExecutionPlan
    seats: tuple[int, ...]


class Planner(Protocol):
    """Wishes for a change of plan or seats."""

    joined: list[tuple[int, int]]
    """New jobs so far: after which job each has come, and from which iteration it goes on."""

    def poll(self, segment: Segment) -> Change | None:
        """A change, if one is wanted now; asked once a cycle and at the end, never waited for."""

    def join(self, rows: Sequence[tuple[int, int]]) -> None:
        """On another rank: make the jobs that have joined on the first one."""


class Course:
    """Makes the segments of a run, of all its jobs (`JobRun`), whose number may grow."""

    def __init__(
        self,
        plan: ExecutionPlan,
        runs: Sequence[Any],
        routes_of: Callable[[ExecutionPlan], Routes],
    ) -> None:
        self.runs, self.routes_of = runs, routes_of
        self.segments: list[Segment] = []
        self.name = plan.schedule.name
        self.forgotten = 0  # segments of which only the number is left
        self.follow(Change(plan, tuple(range(plan.n_jobs))))

    @property
    def now(self) -> Segment:
        """The segment that was begun last."""
        return self.segments[-1]

    def close(self) -> None:
        """Note that the segment is over: its jobs have done what it ran."""
        now = self.now
        for job, first, count in zip(now.seats, now.first, now.count, strict=True):
            run = self.runs[job]
            run.begin = first + count
            if run.begin >= run.end:
                run.rest()

    def follow(self, change: Change) -> Segment:
        """Begin another segment; jobs go on where the one before has left them."""
        self.segments.append(self.segment(change))
        return self.now

    def forget(self, number: int) -> None:
        """Keep nothing of the segments before this one: no block of theirs is remembered."""
        if number > self.forgotten:
            here = self.segments[number]
            empty = Segment(here.plan, here.routes, (), [], [])
            self.segments[self.forgotten : number] = [empty] * (number - self.forgotten)
            self.forgotten = number

    def segment(self, change: Change) -> Segment:
        """What would follow if the present segment were over."""
        plan = change.plan
        runs = [self.runs[job] for job in change.seats]
        known = [s.routes for s in self.segments[-1:] if s.plan is plan]
        routes = known[0] if known else self.routes_of(plan)
        return Segment(
            plan, routes, change.seats, [run.begin for run in runs],
            [max(0, run.end - run.begin) for run in runs],
        )  # fmt: skip
