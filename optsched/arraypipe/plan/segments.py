"""A run as segments of plans: the order of blocks and messages, and which segment follows."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from optsched.arraypipe.plan.types import Instance
from optsched.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.types import Routes


@dataclass(eq=False)
class Segment:
    """A plan with the jobs in its slots and how many iterations of each it runs.

    All of it is fixed when the segment begins. Every device runs its segments one after the other.
    Each runs whole iterations by a live plan, so their succession is live too: all blocks of one
    and then all of the next is a topological order.
    """

    plan: ExecutionPlan  # what is repeated
    routes: Routes
    slots: tuple[int, ...]  # job (its index in the run) of every job of the plan
    first: list[int]  # iteration of that job with which the slot begins
    count: list[int]  # iterations of it

    def runs(self, operation: int, cycle: int) -> int:
        """Return the job's iteration that this instance runs, or -1 if it is skipped."""
        slot, rate, shift = self.plan.turns[operation]
        turn = cycle * rate + shift
        return self.first[slot] + turn if 0 <= turn < self.count[slot] else -1

    @property
    def cycles(self) -> int:
        """Cycles until all iterations are over on all devices."""
        rows = zip(self.count, self.plan.copies, self.plan.latest, strict=True)
        return max((-(-n // rate) + latest for n, rate, latest in rows if n), default=0)


def device_stream(segment: Segment, device: int, cycle: int = 0) -> Iterator[Instance]:
    """Yield blocks of one device in the order of its list, from a cycle on."""
    row = segment.plan.sequences[device]
    for now in range(cycle, segment.cycles):
        for operation in row:
            iteration = segment.runs(operation, now)
            if iteration >= 0:
                yield Instance(operation, now, iteration)


FIRST_CYCLES: Final = 8
"""Cycles of the first segment; its time determines the length of others."""

SEGMENT_S: Final = 4.0
"""Seconds of a segment: short enough for changes and Ctrl-C, long enough for its fill and drain."""


def cycles_for(segment: Segment, seconds: float) -> int:
    """Return cycles that take about `SEGMENT_S`, by those of a segment that took so many seconds.

    At most four times as many: the blocks of ended jobs take no time.
    """
    done = max(1, segment.cycles)
    return max(1, min(4 * done, int(SEGMENT_S * done / max(seconds, 1e-9))))


def places(plan: ExecutionPlan, slot: int) -> tuple[int, ...]:
    """Return device of every stage of the job in a slot."""
    found = {b.stage: b.device for b in plan.blocks if b.job == slot and b.kind == "F"}
    return tuple(found[stage] for stage in range(plan.n_stages))


def moved(
    now: Segment,
    then: Segment,
    live: Collection[int],
    titles: Sequence[str],
    placement: Callable[[int], tuple[int, ...]] | None = None,
) -> str:
    """Return why jobs cannot go on with another plan: they stay on their devices.

    On ranks `placement` has the devices of a job, where it was built.
    """
    homes = {job: places(now.plan, slot) for slot, job in enumerate(now.slots)}
    for slot in live:
        job, wanted = then.slots[slot], places(then.plan, slot)
        found = homes.get(job, wanted) if placement is None else placement(job)
        if found != wanted:
            return (
                f"the new plan has the stages of job {titles[job]} on devices {wanted}; they are "
                f"on {found} and cannot move while it is trained"
            )
    return ""


class Walk:
    """All blocks of a segment in a topological order.

    Of the blocks that may run next the one with the earliest predicted start comes first; starts
    decide nothing else. Marks (operations without a device) are passed over. With `cycle`
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
        self.followers = [  # lines to look at once an operation is over, its own line first
            (line_of[i], *sorted(lines - {line_of[i]})) for i, lines in enumerate(followers)
        ]
        start: Any = plan.schedule.start
        self.predicted = (start + plan.schedule.offset * plan.cycle_time).tolist()
        self.cycles = segment.cycles
        self.finished = [cycle] * len(plan.blocks)  # cycles of every operation that are over
        self.position = [0] * len(self.lines)
        self.cycle = [cycle] * len(self.lines)
        self.queued = [False] * len(self.lines)
        self.ready: list[tuple[int, int]] = []
        self._release(range(len(self.lines)))

    def __iter__(self) -> Iterator[Instance]:
        while self.ready:
            line = heapq.heappop(self.ready)[1]
            self.queued[line] = False
            operation, cycle = self.lines[line][self.position[line]], self.cycle[line]
            # what follows is released before this block is run: it comes later all the same
            self._step(line, operation)
            self._release(self.followers[operation])
            if self.plan.blocks[operation].device >= 0:
                yield Instance(operation, cycle, self.segment.runs(operation, cycle))
        if any(cycle < self.cycles for cycle in self.cycle):
            raise InternalError("a plan that passed the liveness check came to a halt")

    def _step(self, line: int, operation: int) -> None:
        self.finished[operation] = self.cycle[line] + 1
        self.position[line] += 1
        if self.position[line] == len(self.lines[line]):
            self.position[line] = 0
            self.cycle[line] += 1

    def _release(self, lines: Sequence[int]) -> None:
        """Pass skipped blocks and queue the head of a line if it has to wait for nothing."""
        runs, finished = self.segment.runs, self.finished
        for line in lines:
            if self.queued[line]:
                continue
            row = self.lines[line]
            while (cycle := self.cycle[line]) < self.cycles:
                operation = row[self.position[line]]
                if runs(operation, cycle) >= 0:
                    break
                self._step(line, operation)
            else:
                continue
            if not any(
                finished[tail] <= cycle - tokens and runs(tail, cycle - tokens) >= 0
                for tail, _, tokens, _ in self.plan.waits[operation]
            ):
                self.queued[line] = True
                predicted = self.predicted[operation] + cycle * self.plan.cycle_time
                heapq.heappush(self.ready, (predicted, line))


class Change(NamedTuple):
    """Another plan, or other jobs in its slots, for the next segment."""

    plan: ExecutionPlan
    slots: tuple[int, ...]


class RunPlan:
    """Makes the segments of a run, of all its jobs (`JobRun`); their number may grow.

    `cycles` are those of the first segment, at most.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        runs: Sequence[Any],
        routes_of: Callable[[ExecutionPlan], Routes],
        cycles: int = 10**9,
    ) -> None:
        self.runs, self.routes_of = runs, routes_of
        self.segments: list[Segment] = []
        self.name = plan.schedule.name
        self.follow(Change(plan, tuple(range(plan.n_jobs))), cycles)

    @property
    def now(self) -> Segment:
        """The segment that was begun last."""
        return self.segments[-1]

    def close(self) -> None:
        """Note that the segment is over: what its jobs have done, without tombstones."""
        now = self.now
        for slot, job in enumerate(now.slots):
            run = self.runs[job]
            now.count[slot] = min(now.count[slot], max(0, run.end - now.first[slot]))
            run.begin = now.first[slot] + now.count[slot]
            if run.begin >= run.end:
                run.feed = None  # and with it the processes that may load its batches

    def follow(self, change: Change, cycles: int = 10**9, until_first_end: bool = False) -> Segment:
        """Begin another segment of at most so many cycles; jobs go on where they are.

        With `until_first_end` it is over when the first of its jobs has reached its target.
        """
        made = self.segment(change)
        copies = change.plan.copies
        if until_first_end:
            left = [-(-n // rate) for n, rate in zip(made.count, copies, strict=True) if n]
            cycles = min([cycles, *left])
        made.count = [min(n, cycles * rate) for n, rate in zip(made.count, copies, strict=True)]
        self.segments.append(made)
        return made

    def segment(self, change: Change) -> Segment:
        """Return all remaining iterations of a plan and its jobs."""
        plan, runs = change.plan, [self.runs[job] for job in change.slots]
        known = [s.routes for s in self.segments[-1:] if s.plan is plan]
        first = [run.begin for run in runs]
        count = [max(0, run.end - run.begin) for run in runs]
        routes = known[0] if known else self.routes_of(plan)
        return Segment(plan, routes, change.slots, first, count)
