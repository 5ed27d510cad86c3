"""A schedule compiled for execution: block lists, recurrent arcs, proof that it never hangs."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.arraypipe.liveness import token_free_cycle
from optsched.arraypipe.plan_checks import Block, check_memory, check_orders, identify
from optsched.errors import CyclicOrder, InputError, InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.schedule import Schedule


class RecurrentArc(NamedTuple):
    """Instance c of `head` waits for instance ``c - tokens`` of `tail`; `lag` is advisory."""

    tail: int
    head: int
    tokens: int
    lag: int


class Instance(NamedTuple):
    """One execution of an operation: in which cycle, and which iteration of its job it is."""

    operation: int
    cycle: int
    iteration: int


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """What the executor runs: made by `compile`, which has checked that it is complete and live.

    Device d repeats ``sequences[d]`` for cycles c = 0, 1, 2, ...; an operation with offset o, copy
    a, of a job with r copies a cycle, then runs iteration ``(c - o) * r + a`` of its job and is
    skipped where the job has no such iteration.

    Parameters
    ----------
    schedule
        The document it was compiled from.
    blocks
        One per operation; a mark (kind ``"end"``) has device -1.
    sequences
        Operations per device in their binding order.
    arcs
        Everything an instance waits for, the device orders apart.
    n_stages, microbatches, copies
        Stages of every job; micro-batches and iterations a cycle per job.
    """

    schedule: Schedule
    blocks: tuple[Block, ...]
    sequences: tuple[tuple[int, ...], ...]
    arcs: tuple[RecurrentArc, ...]
    n_stages: int
    microbatches: tuple[int, ...]
    copies: tuple[int, ...]
    barrier: bool

    @property
    def n_jobs(self) -> int:
        """Number of jobs."""
        return len(self.microbatches)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices, in the order of the schedule's resources."""
        return tuple(resource.name for resource in self.schedule.resources)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """Pairs (job, stage) whose recompute is an operation of its own."""
        return frozenset((b.job, b.stage) for b in self.blocks if b.kind == "R")

    @cached_property
    def updated(self) -> frozenset[int]:
        """Jobs whose updates are operations of their own (else they belong to the last B)."""
        return frozenset(b.job for b in self.blocks if b.kind == "U")

    @cached_property
    def cycle_time(self) -> int:
        """Predicted time of one cycle: the period, or the end of the last operation."""
        return self.schedule.period or max(self.schedule.makespan, 1)

    @cached_property
    def waits(self) -> tuple[tuple[RecurrentArc, ...], ...]:
        """Arcs by head."""
        rows: list[list[RecurrentArc]] = [[] for _ in self.blocks]
        for arc in self.arcs:
            rows[arc.head].append(arc)
        return tuple(map(tuple, rows))

    def check_fits(self, microbatches: Sequence[int], n_stages: int) -> None:
        """Refuse with a sentence a plan made for other jobs or another number of stages."""
        if self.n_jobs != len(microbatches):
            raise InputError(
                f"the schedule has {self.n_jobs} jobs, the trainer {len(microbatches)}"
            )
        if self.n_stages != n_stages:
            raise InputError(f"the schedule has {self.n_stages} stages, the model {n_stages}")
        for job, (planned, wanted) in enumerate(zip(self.microbatches, microbatches, strict=True)):
            if planned != wanted:
                raise InputError(
                    f"job {job}: the schedule has {planned} micro-batches, the job {wanted}"
                )

    def unroll(self, lengths: Sequence[int]) -> Iterator[Instance]:
        """All instances of a run with ``lengths[j]`` iterations of job j, in a topological order.

        Of the blocks that may run next the one with the earliest predicted start comes first;
        starts decide nothing else. Marks are left out.
        """
        run = _Unrolling(self, lengths)
        while run.ready:
            _, line = heapq.heappop(run.ready)
            instance = run.head(line)
            if self.blocks[instance.operation].device >= 0:
                yield instance
            run.complete(line)
        if any(run.position[k] < run.end(k) for k in range(len(run.lines))):
            raise InternalError("a plan that passed the liveness check came to a halt")


def compile(schedule: Schedule, *, barrier: bool = False) -> ExecutionPlan:
    """Turn a schedule document into a plan, or say in one sentence why it cannot be run.

    Dependencies follow from the labels of the blocks; further arcs of the document are kept.
    ``sequences`` are binding, ``starts`` only predict. A document without period is repeated for
    ever with offsets 0, every job starting its next iteration when its own update is done.

    Parameters
    ----------
    schedule
        A scheduled document with operations of the kinds F, B, R, U (and end marks).
    barrier
        Let no job start its next iteration before all jobs have finished theirs.

    Raises
    ------
    InputError
        A block is missing, doubled or foreign, holds no or several resources, is of another kind;
        a job has one stage on two devices or micro-batches out of order; memory is exceeded.
    CyclicOrder
        Orders and dependencies contradict each other; the message has the blocks on the cycle.
    """
    if not isinstance(barrier, bool):
        raise InputError(f"barrier: expected True or False, got {barrier!r}")
    if schedule.sequences is None:
        raise InputError("this graph is not scheduled: it has no sequences")
    labels = identify(schedule)
    sequences = check_orders(schedule, labels.blocks)
    plan = ExecutionPlan(
        schedule=schedule,
        blocks=labels.blocks,
        sequences=sequences,
        arcs=_arcs(schedule, labels.blocks, labels.microbatches, labels.copies, barrier),
        n_stages=labels.n_stages,
        microbatches=labels.microbatches,
        copies=labels.copies,
        barrier=barrier,
    )
    cycle = token_free_cycle(len(plan.blocks), [a[:3] for a in plan.arcs], _lines(plan))
    if cycle:
        path = " -> ".join(str(plan.blocks[i]) for i in (*cycle, cycle[0]))
        raise CyclicOrder(
            f"sequences: the orders can never be run, each block waits for the one before: {path}",
            cycle,
        )
    check_memory(schedule, plan.blocks, sequences)
    return plan


def _lines(plan: ExecutionPlan) -> list[list[int]]:
    """Lists that are worked off in order: the devices, and every mark by itself."""
    return [list(row) for row in plan.sequences] + [
        [b.operation] for b in plan.blocks if b.device < 0
    ]


def _arcs(
    schedule: Schedule,
    blocks: tuple[Block, ...],
    microbatches: tuple[int, ...],
    copies: tuple[int, ...],
    barrier: bool,
) -> tuple[RecurrentArc, ...]:
    """The dependencies of training plus those of the document; the largest lag of equal ones."""
    lags: dict[tuple[int, int, int], int] = defaultdict(int)
    for tail, head, lag, distance in zip(*(c.tolist() for c in schedule.arcs), strict=True):
        key = (tail, head, distance)
        lags[key] = max(lag, lags.get(key, lag))
    for key in _training_arcs(blocks, microbatches, copies, barrier):
        lags[key]  # a dependency that the document leaves out still holds
    return tuple(
        RecurrentArc(tail, head, distance + blocks[head].offset - blocks[tail].offset, lag)
        for (tail, head, distance), lag in lags.items()
    )


def _training_arcs(
    blocks: tuple[Block, ...],
    microbatches: tuple[int, ...],
    copies: tuple[int, ...],
    barrier: bool,
) -> Iterator[tuple[int, int, int]]:
    """Arcs (tail, head, distance in cycles) without which training would not be exact."""
    at = {
        (b.kind, b.job, b.stage, b.microbatch if b.kind != "U" else 0, b.copy): b.operation
        for b in blocks
    }
    last_updates, first_forwards = [], []
    for block in blocks:
        kind, j, s, m, a = block[1:6]
        i = block.operation
        if kind == "F":
            if ("F", j, s + 1, m, a) in at:
                yield i, at["F", j, s + 1, m, a], 0
            yield i, at.get(("R", j, s, m, a), at["B", j, s, m, a]), 0
        if kind == "R":
            yield i, at["B", j, s, m, a], 0
        if kind == "B" and s > 0:
            yield i, at["B", j, s - 1, m, a], 0
        if kind in ("F", "B") and m + 1 < microbatches[j]:
            yield i, at[kind, j, s, m + 1, a], 0
        if kind == "B" and m + 1 == microbatches[j] and ("U", j, s, 0, a) in at:
            yield i, at["U", j, s, 0, a], 0
        if kind == "U" or (
            kind == "B" and m + 1 == microbatches[j] and ("U", j, s, 0, a) not in at
        ):
            following = (a + 1) % copies[j]
            yield i, at["F", j, s, 0, following], int(following == 0)
            if following == 0:
                last_updates.append(i)
        if kind == "F" and s == m == a == 0:
            first_forwards.append(i)
    if barrier:
        yield from ((u, f, 1) for u in last_updates for f in first_forwards)


class _Unrolling:
    """Which instance every line is at, and which of them may run (see `ExecutionPlan.unroll`)."""

    def __init__(self, plan: ExecutionPlan, lengths: Sequence[int]) -> None:
        self.plan, self.lengths = plan, lengths
        self.lines = _lines(plan)
        self.line_of = {i: k for k, row in enumerate(self.lines) for i in row}
        self.cycles = max(
            (b.offset + -(-lengths[b.job] // plan.copies[b.job]) for b in plan.blocks), default=0
        )
        self.finished = [0] * len(plan.blocks)  # cycles of every operation that are over
        self.followers: list[list[int]] = [[] for _ in plan.blocks]
        for arc in plan.arcs:
            self.followers[arc.tail].append(arc.head)
        start = np.asarray(plan.schedule.start).tolist()
        self.predicted = [
            s + b.offset * plan.cycle_time for s, b in zip(start, plan.blocks, strict=True)
        ]
        self.position = [0] * len(self.lines)
        self.queued = [False] * len(self.lines)
        self.ready: list[tuple[int, int]] = []
        for k in range(len(self.lines)):
            self._advance(k)

    def end(self, line: int) -> int:
        return len(self.lines[line]) * self.cycles

    def head(self, line: int) -> Instance:
        cycle, place = divmod(self.position[line], len(self.lines[line]))
        operation = self.lines[line][place]
        return Instance(operation, cycle, self._iteration(operation, cycle))

    def complete(self, line: int) -> None:
        operation, cycle, _ = self.head(line)
        self.finished[operation] = cycle + 1
        self.position[line] += 1
        self.queued[line] = False
        self._advance(line)
        for other in self.followers[operation]:
            k = self.line_of[other]
            if not self.queued[k] and self.position[k] < self.end(k):
                self._advance(k)

    def _iteration(self, operation: int, cycle: int) -> int:
        block = self.plan.blocks[operation]
        return (cycle - block.offset) * self.plan.copies[block.job] + block.copy

    def _runs(self, operation: int, cycle: int) -> bool:
        length = self.lengths[self.plan.blocks[operation].job]
        return cycle >= 0 and 0 <= self._iteration(operation, cycle) < length

    def _advance(self, line: int) -> None:
        """Step over skipped instances; queue the head of the line if it has to wait for nothing."""
        row, end = self.lines[line], self.end(line)
        while self.position[line] < end:
            cycle, place = divmod(self.position[line], len(row))
            if self._runs(row[place], cycle):
                break
            self.finished[row[place]] = cycle + 1
            self.position[line] += 1
        else:
            return
        if all(
            self.finished[arc.tail] > cycle - arc.tokens
            or not self._runs(arc.tail, cycle - arc.tokens)
            for arc in self.plan.waits[row[place]]
        ):
            self.queued[line] = True
            predicted = self.predicted[row[place]] + cycle * self.plan.cycle_time
            heapq.heappush(self.ready, (predicted, line))
