"""A schedule compiled for execution: block lists, recurrent arcs, proof that it never hangs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.arraypipe.plan.checks import (
    check_memory,
    check_orders,
    check_together,
    counted_from_zero,
    identify_all,
)
from optsched.arraypipe.plan.edits import blocks_only
from optsched.arraypipe.plan.liveness import token_free_cycle
from optsched.arraypipe.plan.types import Block, Labels
from optsched.errors import CyclicOrder, InputError
from optsched.model.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence


class RecurrentArc(NamedTuple):
    """Instance c of `head` waits for instance ``c - tokens`` of `tail`; `lag` is advisory."""

    tail: int
    head: int
    tokens: int
    lag: int


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
    n_stages, microbatches, copies
        Stages of every job; micro-batches and iterations a cycle per job.
    barrier, together
        As given to `compile`.
    """

    schedule: Schedule
    blocks: tuple[Block, ...]
    sequences: tuple[tuple[int, ...], ...]
    n_stages: int
    microbatches: tuple[int, ...]
    copies: tuple[int, ...]
    barrier: bool
    together: frozenset[int] = frozenset()

    @cached_property
    def arcs(self) -> tuple[RecurrentArc, ...]:
        """Everything an instance waits for, the device orders apart."""
        labels = Labels(self.blocks, self.n_stages, self.microbatches, self.copies)
        return _arcs(self.schedule, labels, self.barrier, self.together)

    @cached_property
    def first_forwards(self) -> frozenset[int]:
        """Forwards that begin an iteration of a job on a stage."""
        return frozenset(b.operation for b in self.blocks if b.kind == "F" and not b.microbatch)

    @cached_property
    def last_backwards(self) -> frozenset[int]:
        """Backwards that end one."""
        return frozenset(b.operation for b in self.blocks if _ends(b, self.microbatches))

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
    def max_offset(self) -> int:
        """Largest offset: so many cycles after a job's first block its last one may begin."""
        return max((b.offset for b in self.blocks), default=0)

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


_SHOWN = 24  # blocks of a cycle that a message lists


def compile(
    schedule: Schedule,
    *,
    barrier: bool = False,
    together: Collection[int] = (),
) -> ExecutionPlan:
    """Turn a schedule document into a plan, or say in one sentence why it cannot be run.

    Dependencies follow from the labels of the blocks; further arcs of the document are kept.
    ``sequences`` are binding, ``starts`` only predict. A document without period is repeated for
    ever with offsets 0, every job starting its next iteration when its own update is done.

    Parameters
    ----------
    schedule
        A scheduled document with operations of the kinds F, B, R, U (and end marks). Messages and
        copies of states, which a trace has, are left out together with their links, and its
        iterations are counted from the first one of each job.
    barrier
        Let no job start its next iteration before all jobs have finished theirs.
    together
        Jobs whose updates wait for the last gradient of all stages, as gradient clipping and
        schedulers that need a metric do; they need update blocks.

    Raises
    ------
    InputError
        A block is missing, doubled or foreign, holds no or several resources, is of another kind;
        a job has one stage on two devices, or micro-batches out of order (sums of gradients depend
        on it); memory is exceeded; a job of `together` has no update blocks.
    CyclicOrder
        Orders and dependencies contradict each other; the message has the blocks on the cycle.
    """
    if not isinstance(barrier, bool):
        raise InputError(f"barrier: expected True or False, got {barrier!r}")
    if not isinstance(schedule, Schedule):
        raise InputError(f"schedule: expected a Schedule, got {schedule!r:.60}")
    if schedule.sequences is None:
        raise InputError("this graph is not scheduled: it has no sequences")
    schedule = counted_from_zero(blocks_only(schedule))
    labels = identify_all(schedule)
    check_together(together, labels)
    sequences = check_orders(schedule, labels.blocks)
    plan = ExecutionPlan(
        schedule=schedule,
        blocks=labels.blocks,
        sequences=sequences,
        n_stages=labels.n_stages,
        microbatches=labels.microbatches,
        copies=labels.copies,
        barrier=barrier,
        together=frozenset(together),
    )
    table = np.array(plan.arcs, np.int64).reshape(-1, 4)[:, :3]
    cycle = token_free_cycle(len(plan.blocks), table, _lines(plan))
    if cycle:
        if barrier and plan.max_offset:
            _check_offsets(plan, cycle)
        path = " -> ".join(str(plan.blocks[i]) for i in (*cycle[:_SHOWN], cycle[0]))
        if len(cycle) > _SHOWN:
            path += f" (the last arrow stands for {len(cycle) - _SHOWN} further blocks)"
        raise CyclicOrder(
            f"sequences: the orders can never be run, each block waits for the one before: {path}",
            cycle,
        )
    check_memory(schedule, plan.blocks, sequences)
    return plan


def _check_offsets(plan: ExecutionPlan, cycle: list[int]) -> None:
    """Say that it is the barrier that the orders cannot be run with, if it is."""
    free = replace(plan, barrier=False)
    table = np.array(free.arcs, np.int64).reshape(-1, 4)[:, :3]
    if not token_free_cycle(len(free.blocks), table, _lines(free)):
        late = max(plan.blocks, key=lambda b: b.offset)
        raise CyclicOrder(
            f"barrier: jobs that wait for each other after every iteration cannot run a schedule "
            f"with offsets, whose blocks belong to several iterations at a time, such as {late} "
            f"with offset {late.offset}; leave the barrier out, or solve the problem with "
            f'objective="makespan"',
            cycle,
        )


def _lines(plan: ExecutionPlan) -> list[list[int]]:
    """Lists that are worked off in order: the devices, and every mark by itself."""
    return [list(row) for row in plan.sequences] + [
        [b.operation] for b in plan.blocks if b.device < 0
    ]


def _arcs(
    schedule: Schedule,
    labels: Labels,
    barrier: bool,
    together: Collection[int],
) -> tuple[RecurrentArc, ...]:
    """The dependencies of training plus those of the document; the largest lag of equal ones."""
    lags: dict[tuple[int, int, int], int] = {}
    for tail, head, lag, distance in zip(*(c.tolist() for c in schedule.arcs), strict=True):
        key = (tail, head, distance)
        lags[key] = max(lag, lags.get(key, lag))
    for key in _training_arcs(labels):
        lags.setdefault(key, 0)  # a dependency that the document leaves out still holds
    for key in _barrier_arcs(labels) if barrier else ():
        lags.setdefault(key, 0)
    for key in _gathering_arcs(labels, together) if together else ():
        lags.setdefault(key, 0)
    offset = [block.offset for block in labels.blocks]
    return tuple(
        RecurrentArc(tail, head, distance + offset[head] - offset[tail], lag)
        for (tail, head, distance), lag in lags.items()
    )


def _ends(block: Block, microbatches: tuple[int, ...]) -> bool:
    """Whether it is the last backward of an iteration on its stage."""
    return block.kind == "B" and block.microbatch == microbatches[block.job] - 1


def _training_arcs(labels: Labels) -> Iterator[tuple[int, int, int]]:
    """Arcs (tail, head, distance in cycles) without which training would not be right."""
    blocks, copies = labels.blocks, labels.copies
    at = {
        (b.kind, b.job, b.stage, b.microbatch if b.kind != "U" else 0, b.copy): b.operation
        for b in blocks
    }
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
        if kind in ("F", "B") and (kind, j, s, m + 1, a) in at:
            yield i, at[kind, j, s, m + 1, a], 0
        ends = _ends(block, labels.microbatches)
        if ends and ("U", j, s, 0, a) in at:
            yield i, at["U", j, s, 0, a], 0
        if kind == "U" or (ends and ("U", j, s, 0, a) not in at):
            following = (a + 1) % copies[j]
            yield i, at["F", j, s, 0, following], int(following == 0)


def _barrier_arcs(labels: Labels) -> Iterator[tuple[int, int, int]]:
    """From what every job does last in a cycle to what every job does first in the next one."""
    updated = {b.job for b in labels.blocks if b.kind == "U"}
    first = [
        b.operation
        for b in labels.blocks
        if b.kind == "F" and b.stage == b.copy == b.microbatch == 0
    ]
    for b in labels.blocks:
        if b.copy + 1 < labels.copies[b.job]:
            continue
        # without update blocks all other stages are over before the last B of stage 0
        last = b.stage == 0 and _ends(b, labels.microbatches)
        if b.kind == "U" if b.job in updated else last:
            yield from ((b.operation, i, 1) for i in first)


def _gathering_arcs(labels: Labels, together: Collection[int]) -> Iterator[tuple[int, int, int]]:
    """From the last gradient of a job, that of stage 0, to its updates on all stages."""
    last = {
        (b.job, b.copy): b.operation
        for b in labels.blocks
        if b.stage == 0 and _ends(b, labels.microbatches)
    }
    for b in labels.blocks:
        if b.kind == "U" and b.job in together:
            yield last[b.job, b.copy], b.operation, 0
