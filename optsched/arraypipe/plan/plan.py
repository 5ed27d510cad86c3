"""A schedule compiled for execution: block lists, recurrent arcs, messages, proof of liveness.

Also orders that no solver has made: drawn at random, or what is left of one without some jobs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.arraypipe.plan.types import (
    Block,
    Channel,
    Message,
    Routes,
    check_memory,
    check_microbatches,
    check_together,
    identify,
)
from optsched.errors import CyclicOrder, InputError
from optsched.io.text import NANOSECONDS
from optsched.model.graph import check_permutations, evaluate, scheduled
from optsched.model.schedule import COLUMNS, Arcs, Csr, Resource, Schedule

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import numpy.typing as npt


class RecurrentArc(NamedTuple):
    """Instance c of `head` follows instance ``c - tokens`` of `tail`; `lag` is advisory."""

    tail: int
    head: int
    tokens: int
    lag: int


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """What the executor runs: made by `compile_plan`, which has checked that it is live.

    Device d repeats ``sequences[d]`` for cycles c = 0, 1, 2, ...; an operation with offset o, copy
    a, of a job with r copies a cycle, then runs iteration ``(c - o) * r + a`` of its job and is
    skipped where the job has no such iteration.

    Examples
    --------
    >>> from optsched.arraypipe import compile_plan, random_schedule
    >>> plan = compile_plan(random_schedule([2], n_stages=2))
    >>> [plan.blocks[i].kind for i in plan.sequences[1]]
    ['F', 'F', 'B', 'B']
    """

    schedule: Schedule  # the document it was compiled from
    sequences: tuple[tuple[int, ...], ...]  # operations per device in their binding order
    together: frozenset[int]
    blocks: tuple[Block, ...]  # one per operation; a mark (kind ``"end"``) has device -1
    n_stages: int  # of every job
    microbatches: tuple[int, ...]  # per job,
    copies: tuple[int, ...]  # and its iterations a cycle

    def __repr__(self) -> str:
        size = f"{self.n_jobs} jobs in {self.n_stages} stages on {len(self.devices)} devices"
        return f"<ExecutionPlan {self.schedule.name!r:.60}: {size}>"

    @cached_property
    def arcs(self) -> tuple[RecurrentArc, ...]:
        """Predecessors of an instance, the device orders apart; of equal arcs the longest."""
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
        """Pairs (job, stage) with blocks for recomputation."""
        return frozenset((b.job, b.stage) for b in self.blocks if b.kind == "R")

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """Pairs (job, stage) with blocks for the gradients of weights."""
        return frozenset((b.job, b.stage) for b in self.blocks if b.kind == "W")

    @cached_property
    def updated(self) -> frozenset[int]:
        """Jobs with updates as separate operations (else they belong to the last B)."""
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
        return tuple(max(b.offset for b in self.blocks if b.job == j) for j in range(self.n_jobs))

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
    def waits(self) -> tuple[tuple[RecurrentArc, ...], ...]:
        """Arcs by head."""
        rows: list[list[RecurrentArc]] = [[] for _ in self.blocks]
        for arc in self.arcs:
            rows[arc.head].append(arc)
        return tuple(map(tuple, rows))


_LISTED = 24  # blocks of a cycle that a message lists


def compile_plan(schedule: Schedule, *, together: Collection[int] = ()) -> ExecutionPlan:
    """Turn a schedule document into a plan, or say in one sentence why it cannot be run.

    Dependencies follow from the labels of the blocks; further arcs of the document are kept.
    ``sequences`` are binding, ``starts`` only predict. A document without period is repeated for
    ever with offsets 0, every job starting its next iteration when its own update is done.

    Updates of the jobs in `together` wait for the last gradient of all stages, as gradient clipping
    and schedulers that need a metric do; they need update blocks.

    Raises
    ------
    InputError
        Blocks are missing, doubled, of another kind or on several devices, micro-batches out of
        order (sums of gradients depend on it), or memory is exceeded.
    CyclicOrder
        Orders and dependencies contradict each other; the message has the blocks on the cycle.

    Examples
    --------
    >>> from optsched.arraypipe import compile_plan, random_schedule
    >>> plan = compile_plan(random_schedule([1, 1], n_stages=2))
    >>> plan.n_jobs, plan.devices
    (2, ('device0', 'device1'))
    """
    if not isinstance(schedule, Schedule):
        raise InputError(f"schedule: expected a Schedule, got {schedule!r:.60}")
    if schedule.sequences is None:
        raise InputError("this graph is not scheduled: it has no sequences")
    labels = identify(schedule)
    check_together(together, labels[0], len(labels[2]))
    sequences = tuple(map(tuple, schedule.sequences.to_lists()))
    plan = ExecutionPlan(schedule, sequences, frozenset(together), *labels)
    check_permutations(schedule, schedule.sequences)
    check_microbatches(plan.blocks, sequences)
    _check_live(plan)
    check_memory(schedule, plan.blocks, sequences)
    return plan


def _check_live(plan: ExecutionPlan) -> None:
    """Refuse orders with blocks that wait for each other for ever."""
    try:
        assert plan.least_period
    except CyclicOrder as error:
        cycle = error.cycle
        path = " -> ".join(str(plan.blocks[i]) for i in (*cycle[:_LISTED], cycle[0]))
        if len(cycle) > _LISTED:
            path += f" (the last arrow stands for {len(cycle) - _LISTED} further blocks)"
        text = "sequences: the orders can never be run, each block waits for the one before"
        raise CyclicOrder(f"{text}: {path}", cycle) from None


def training_arcs(
    blocks: Sequence[Block],
    microbatches: Sequence[int],
    copies: Sequence[int],
    together: Collection[int],
) -> Iterator[tuple[int, int, int]]:
    """Yield arcs (tail, head, distance in cycles) without which training would not be right."""
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
    """Return the messages of a plan.

    `ties` are pairs (stage, next stage that uses one of its weights), the same for all jobs; the
    updates of the jobs `together` wait for the gradients of all stages.
    """
    if ties and plan.split:
        raise InputError(
            "schedule: W blocks (split backward) cannot be run with a weight that several stages "
            "use, and its gradient comes with B; use B blocks, or cut the model elsewhere"
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
    channels = [
        Channel(*ends, tuple(sorted(row, key=lambda k: (place[messages[k].producer], k))))
        for ends, row in sorted(by_channel.items())
    ]
    channel_of = [-1] * len(messages)
    for number, channel in enumerate(channels):
        for k in channel.messages:
            channel_of[k] = number
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


_DURATION = {"F": 2, "R": 2, "B": 4, "U": 1}


def random_schedule(
    microbatches: Sequence[int],
    n_stages: int,
    *,
    place: Sequence[int] | None = None,
    recompute: Collection[int] = (),
    update: Collection[int] = (),
    together: Collection[int] = (),
    seed: int = 0,
) -> Schedule:
    """Make one iteration of a job array in a random feasible order.

    `microbatches` are those of every job, `place` the device of every stage (by default one each).
    Jobs in `recompute` and `update` have blocks for these; those in `together` update when the
    gradients of all stages are there. Durations are made up (F 2, R 2, B 4, U 1).

    Examples
    --------
    >>> import optsched
    >>> from optsched.arraypipe import random_schedule
    >>> schedule = random_schedule([1, 2], n_stages=2, seed=1)
    >>> schedule.n_operations, optsched.verify(schedule)
    (12, [])
    """
    if len(microbatches) == 0 or min(microbatches) < 1:
        raise InputError(f"microbatches: expected a number >= 1 for every job, got {microbatches}")
    if n_stages < 1:
        raise InputError(f"n_stages: expected a number >= 1, got {n_stages}")
    devices = list(range(n_stages)) if place is None else list(place)
    labels: list[tuple[str, int, int, int]] = []
    for job, n_micro in enumerate(microbatches):
        for m in range(n_micro):
            labels += [("F", job, s, m) for s in range(n_stages)]
            for s in reversed(range(n_stages)):
                labels += [("R", job, s, m)] * (job in recompute) + [("B", job, s, m)]
        labels += [("U", job, s, 0) for s in range(n_stages)] * (job in update)
    kind, job_of, stage, microbatch = zip(*labels, strict=True)
    blocks = [Block(i, *label, 0, devices[label[2]], 0) for i, label in enumerate(labels)]
    rows = training_arcs(blocks, microbatches, [1] * len(microbatches), together)
    arcs = {(tail, head) for tail, head, distance in rows if not distance}
    sequences: list[list[int]] = [[] for _ in range(max(devices) + 1)]
    for i in topological(len(labels), arcs, random.Random(seed)):
        sequences[blocks[i].device].append(i)
    graph = Schedule(
        name=f"random order {seed}",
        resources=tuple(Resource(f"device{d}") for d in range(len(sequences))),
        duration=[_DURATION[k] for k in kind],  # type: ignore[arg-type]
        op_resources=Csr.of([[b.device] for b in blocks]),
        arcs=Arcs.of(sorted(arcs)),
        kind=kind, job=job_of, stage=stage, microbatch=microbatch,  # type: ignore[arg-type]
    )  # fmt: skip
    orders = Csr.of(sequences)
    provenance = {"order": "random", "seed": seed}
    return graph.with_orders(orders, evaluate(graph, orders).head, None, provenance)


def topological(n: int, arcs: Iterable[tuple[int, int]], draw: random.Random) -> list[int]:
    """Return a random topological order of 0..n-1."""
    after: list[list[int]] = [[] for _ in range(n)]
    waiting = [0] * n
    for i, j in sorted(arcs):
        after[i].append(j)
        waiting[j] += 1
    ready = [i for i in range(n) if not waiting[i]]
    order = []
    while ready:
        i = ready.pop(draw.randrange(len(ready)))
        order.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    return order


def without(schedule: Schedule, jobs: Collection[int]) -> Schedule:
    """Return a schedule without some jobs; the others keep their order and start early.

    It is feasible if the schedule was, and its period (or makespan) is no longer, as long as no
    family of setups spans two jobs. Jobs, and families if they are jobs, are numbered anew.
    `InputError` if there is no such job, or none would be left.
    """
    if schedule.sequences is None:
        raise InputError("this graph is not scheduled: it has no sequences")
    known = set(schedule.job.tolist())
    for job in jobs:
        if isinstance(job, bool) or job not in known:
            raise InputError(f"jobs: the schedule has no job {job!r}")
    if known <= set(jobs):
        raise InputError(f"jobs: none would be left of {len(known)}")
    kept = _subset(schedule, ~np.isin(schedule.job, np.array([*jobs], np.int64)))
    number = np.unique(kept.job, return_inverse=True)[1].astype(np.int64)
    family = number if np.array_equal(kept.family, kept.job) else kept.family
    kept = replace(kept, job=number, family=family)
    assert kept.sequences is not None
    provenance = {"order": "jobs deleted", "jobs": sorted(set(jobs))}
    if kept.period is None:
        return scheduled(kept.graph(), kept.sequences, provenance)
    from optsched.analysis.rolling import rolling  # compiled

    return rolling(kept.graph(), kept.sequences, kept.offset, provenance)


def _subset(schedule: Schedule, keep: npt.NDArray[np.bool_]) -> Schedule:
    """Some operations, renumbered in order, with the arcs between them, their orders and starts."""
    number = np.where(keep, np.cumsum(keep) - 1, -1)
    tail, head, lag, distance = schedule.arcs
    inner = keep[tail] & keep[head]
    rows = None if schedule.sequences is None else schedule.sequences.to_lists()
    return replace(
        schedule,
        op_resources=Csr.of([schedule.op_resources[i] for i in np.flatnonzero(keep).tolist()]),
        arcs=Arcs(number[tail[inner]], number[head[inner]], lag[inner], distance[inner]),
        sequences=None
        if rows is None
        else Csr.of([[int(number[i]) for i in row if keep[i]] for row in rows]),
        start=None if schedule.start is None else schedule.start[keep],
        objective=None,
        **{key: getattr(schedule, key)[keep] for key in COLUMNS},
    )
