"""A schedule compiled for execution: block lists, recurrent arcs, messages, proof of liveness."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.arraypipe.plan.checks import (
    blocks_only,
    check_memory,
    check_microbatches,
    check_together,
    identify,
)
from optsched.arraypipe.plan.types import Channel, Message, Routes
from optsched.errors import CyclicOrder, InputError
from optsched.io.text import NANOSECONDS
from optsched.model.graph import check_permutations
from optsched.model.schedule import Arcs, Schedule

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from optsched.arraypipe.plan.types import Block


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
    sequences
        Operations per device in their binding order.
    together
        As given to `compile`.
    blocks
        One per operation; a mark (kind ``"end"``) has device -1.
    n_stages, microbatches, copies
        Stages of every job; micro-batches and iterations a cycle per job.
    """

    schedule: Schedule
    sequences: tuple[tuple[int, ...], ...]
    together: frozenset[int]
    blocks: tuple[Block, ...]
    n_stages: int
    microbatches: tuple[int, ...]
    copies: tuple[int, ...]

    @cached_property
    def arcs(self) -> tuple[RecurrentArc, ...]:
        """Everything an instance waits for, the device orders apart; of equal ones the longest."""
        lags: dict[tuple[int, int, int], int] = {}
        columns = (column.tolist() for column in self.schedule.arcs)
        for tail, head, lag, distance in zip(*columns, strict=True):
            key = (tail, head, distance)
            lags[key] = max(lag, lags.get(key, lag))
        for key in training_arcs(self.blocks, self.microbatches, self.copies, self.together):
            lags.setdefault(key, 0)  # a dependency that the document leaves out still holds
        offset = [block.offset for block in self.blocks]
        return tuple(
            RecurrentArc(tail, head, distance + offset[head] - offset[tail], lag)
            for (tail, head, distance), lag in lags.items()
        )

    @cached_property
    def last_backwards(self) -> frozenset[int]:
        """Backwards that end an iteration of a job on a stage."""
        return frozenset(
            b.operation
            for b in self.blocks
            if b.kind == "B" and b.microbatch == self.microbatches[b.job] - 1
        )

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
    def split(self) -> frozenset[tuple[int, int]]:
        """Pairs (job, stage) whose gradients of weights have blocks of their own."""
        return frozenset((b.job, b.stage) for b in self.blocks if b.kind == "W")

    @cached_property
    def updated(self) -> frozenset[int]:
        """Jobs whose updates are operations of their own (else they belong to the last B)."""
        return frozenset(b.job for b in self.blocks if b.kind == "U")

    @cached_property
    def cycle_time(self) -> int:
        """Predicted time of one cycle, in the schedule's unit: the period, or the last end."""
        return self.schedule.period or max(self.schedule.makespan, 1)

    @cached_property
    def graph(self) -> Schedule:
        """All arcs between instances, as a periodic graph."""
        offset = self.schedule.offset.tolist()
        arcs = Arcs.of(
            (a.tail, a.head, a.lag, a.tokens - offset[a.head] + offset[a.tail]) for a in self.arcs
        )
        period = self.schedule.period or self.cycle_time
        return replace(self.schedule.graph(), arcs=arcs, period=period, offset=self.schedule.offset)

    @cached_property
    def least_period(self) -> int:
        """Least time of a cycle in the long run; `CyclicOrder` if the orders can never be run."""
        from optsched.kernels.cycle_ratio import cycle_time  # loads a compiler

        return cycle_time(self.graph, self.schedule.sequences, self.schedule.offset).period

    @cached_property
    def unit_ns(self) -> int:
        """Nanoseconds of the unit of all times of the schedule."""
        return NANOSECONDS[self.schedule.time_unit]

    @cached_property
    def latest(self) -> tuple[int, ...]:
        """Largest offset of every job."""
        rows = [0] * self.n_jobs
        for block in self.blocks:
            rows[block.job] = max(rows[block.job], block.offset)
        return tuple(rows)

    @cached_property
    def turns(self) -> tuple[tuple[int, int, int], ...]:
        """Per operation (job, rate, shift): cycle c runs iteration ``c * rate + shift``."""
        rates = self.copies
        return tuple((b.job, rates[b.job], b.copy - b.offset * rates[b.job]) for b in self.blocks)

    @cached_property
    def updates(self) -> tuple[bool, ...]:
        """Per operation whether it is the update of its stage, or a B or W that ends with it."""
        return tuple(
            b.kind == "U"
            or (
                b.kind == ("W" if (b.job, b.stage) in self.split else "B")
                and b.microbatch == self.microbatches[b.job] - 1
                and b.job not in self.updated
            )
            for b in self.blocks
        )

    @cached_property
    def reported(self) -> tuple[bool, ...]:
        """Per operation whether callbacks follow it: forwards of the last stage, and updates."""
        last = self.n_stages - 1
        return tuple(
            self.updates[b.operation] or (b.kind == "F" and b.stage == last) for b in self.blocks
        )

    @cached_property
    def waits(self) -> tuple[tuple[RecurrentArc, ...], ...]:
        """Arcs by head."""
        rows: list[list[RecurrentArc]] = [[] for _ in self.blocks]
        for arc in self.arcs:
            rows[arc.head].append(arc)
        return tuple(map(tuple, rows))


_SHOWN = 24  # blocks of a cycle that a message lists


def compile_plan(
    schedule: Schedule,
    *,
    together: Collection[int] = (),
) -> ExecutionPlan:
    """Turn a schedule document into a plan, or say in one sentence why it cannot be run.

    Dependencies follow from the labels of the blocks; further arcs of the document are kept.
    ``sequences`` are binding, ``starts`` only predict. A document without period is repeated for
    ever with offsets 0, every job starting its next iteration when its own update is done.

    Parameters
    ----------
    schedule
        A scheduled document with operations of the kinds F, B, R, U, or I and W instead of B (and
        end marks). Messages and
        copies of states, which a trace has, are left out together with their links, and its
        iterations are counted from the first one of each job.
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
    if not isinstance(schedule, Schedule):
        raise InputError(f"schedule: expected a Schedule, got {schedule!r:.60}")
    if schedule.sequences is None:
        raise InputError("this graph is not scheduled: it has no sequences")
    schedule = _counted_from_zero(blocks_only(schedule))
    assert schedule.sequences is not None
    try:
        labels = identify(schedule)
    except InputError as error:
        if "executor" not in schedule.provenance:
            raise
        raise InputError(
            f"{error}; a trace can be run again if every job of the run has blocks in it (a job "
            f"that was complete before has none) and only whole iterations (a job that has failed, "
            f"or whose beginning was left out of a long trace, may have others); here iterations "
            f"count from each job's first"
        ) from error
    check_together(together, labels[0], len(labels[2]))
    sequences = tuple(map(tuple, schedule.sequences.to_lists()))
    plan = ExecutionPlan(schedule, sequences, frozenset(together), *labels)
    check_permutations(schedule, schedule.sequences)
    check_microbatches(plan.blocks, sequences)
    _check_live(plan)
    check_memory(schedule, plan.blocks, sequences)
    return plan


def _counted_from_zero(schedule: Schedule) -> Schedule:
    """A document whose jobs all begin with iteration 0; periodic ones are given back as they are.

    Iterations of a trace count from the job's seed: those of a run that went on from checkpoints
    begin where each job did, those of a long run where its memory does.
    """
    if schedule.period or not schedule.n_operations:
        return schedule
    jobs, place = np.unique(schedule.job, return_inverse=True)
    first = np.full(len(jobs), np.iinfo(np.int64).max)
    np.minimum.at(first, place, schedule.iteration)
    before = first[place]
    return replace(schedule, iteration=schedule.iteration - before) if before.any() else schedule


def _check_live(plan: ExecutionPlan) -> None:
    """Refuse orders with blocks that wait for each other for ever."""
    try:
        assert plan.least_period
    except CyclicOrder as error:
        cycle = error.cycle
        path = " -> ".join(str(plan.blocks[i]) for i in (*cycle[:_SHOWN], cycle[0]))
        if len(cycle) > _SHOWN:
            path += f" (the last arrow stands for {len(cycle) - _SHOWN} further blocks)"
        raise CyclicOrder(
            f"sequences: the orders can never be run, each block waits for the one before: {path}",
            cycle,
        ) from None


def training_arcs(
    blocks: Sequence[Block],
    microbatches: Sequence[int],
    copies: Sequence[int],
    together: Collection[int],
) -> Iterator[tuple[int, int, int]]:
    """Arcs (tail, head, distance in cycles) without which training would not be right."""
    at = {block[1:6]: block.operation for block in blocks}
    for i, kind, j, s, m, a, *_ in blocks:
        split, updates = ("W", j, s, m, a) in at, ("U", j, s, 0, a) in at
        ends = kind == ("W" if split else "B") and m == microbatches[j] - 1
        if kind == "F":
            if ("F", j, s + 1, m, a) in at:
                yield i, at["F", j, s + 1, m, a], 0
            yield i, at.get(("R", j, s, m, a), at["B", j, s, m, a]), 0
        if kind == "R":
            yield i, at["B", j, s, m, a], 0
        if kind == "B" and s > 0:
            yield i, at["B", j, s - 1, m, a], 0
        if kind == "B" and split:
            yield i, at["W", j, s, m, a], 0
        if kind in ("F", "B", "W") and (kind, j, s, m + 1, a) in at:
            yield i, at[kind, j, s, m + 1, a], 0
        if ends and updates:
            yield i, at["U", j, s, 0, a], 0
        if kind == "U" and j in together:  # the last gradient of a job is that of stage 0
            yield at["B", j, 0, microbatches[j] - 1, a], i, 0
        if kind == "U" or (ends and not updates):
            following = (a + 1) % copies[j]
            yield i, at["F", j, s, 0, following], int(following == 0)


def routes(
    plan: ExecutionPlan,
    ties: Sequence[tuple[int, int]] = (),
    together: Collection[int] = (),
) -> Routes:
    """The messages of a plan.

    `ties` are pairs (stage, next stage that uses one of its weights), the same for all jobs; the
    updates of the jobs `together` wait for the gradients of all stages.
    """
    if ties and plan.split:
        raise InputError(
            "schedule: W blocks (split backward) cannot be run with a weight that several stages "
            "use, whose gradient comes with B; use B blocks, or cut the model elsewhere"
        )
    messages = tuple(_messages(plan, ties, together))
    inputs: list[list[int]] = [[] for _ in plan.blocks]
    outputs: list[list[int]] = [[] for _ in plan.blocks]
    place = {i: k for row in plan.sequences for k, i in enumerate(row)}
    by_channel: dict[tuple[int, int], list[int]] = {}
    for k, message in enumerate(messages):
        inputs[message.consumer].append(k)
        outputs[message.producer].append(k)
        source, target = (plan.blocks[i].device for i in (message.producer, message.consumer))
        if source != target:
            by_channel.setdefault((source, target), []).append(k)
    channels: list[Channel] = []
    channel_of = [-1] * len(messages)
    for key in sorted(by_channel):
        row = sorted(by_channel[key], key=lambda k: (place[messages[k].producer], k))
        for k in row:
            channel_of[k] = len(channels)
        channels.append(Channel(*key, tuple(row)))
    return Routes(
        messages, tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), tuple(channels),
        tuple(channel_of),
    )  # fmt: skip


def _messages(
    plan: ExecutionPlan, ties: Sequence[tuple[int, int]], together: Collection[int]
) -> Iterator[Message]:
    at = {block[1:6]: block.operation for block in plan.blocks}
    last = plan.n_stages - 1
    for i, kind, j, s, m, a, *_ in plan.blocks:
        if kind == "F" and m == 0:
            for owner, user in ties:
                if owner == s:
                    yield Message("weight", i, at["F", j, user, 0, a])
        if kind == "F" and s < last:
            yield Message("activation", i, at["F", j, s + 1, m, a])
        if kind == "B":
            if s > 0:
                yield Message("gradient", i, at["B", j, s - 1, m, a])
            for owner, user in ties:
                if user == s:
                    yield Message("tied", i, at["B", j, owner, m, a])
            if s == 0 and j in together and i in plan.last_backwards:
                for other in range(1, plan.n_stages):
                    yield Message("factor", i, at["U", j, other, 0, a])
