"""What a plan is made of and what a run leaves: blocks with their checks, messages, records."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.analysis.occupancy import held_bytes
from optsched.errors import InputError
from optsched.io.strict_json import format_json

if TYPE_CHECKING:
    from collections.abc import Collection

    from optsched.model.schedule import Schedule

    Sequences = tuple[tuple[int, ...], ...]
    Labels = tuple[tuple["Block", ...], int, tuple[int, ...], tuple[int, ...]]

KINDS: Final = ("F", "B", "R", "W", "U")
"""Kinds of blocks. With W blocks a B block has the gradients of the inputs alone (I)."""
MARK: Final = "end"  # an operation without a resource: the end of a job, no work
_MOST_CYCLES: Final = 10_000  # largest offset: a run looks at so many cycles more


class Block(NamedTuple):
    """One operation of the schedule as the executor sees it; `copy` counts within one cycle."""

    operation: int
    kind: str
    job: int
    stage: int
    microbatch: int
    copy: int
    device: int
    offset: int

    def __str__(self) -> str:
        copy = f", copy {self.copy}" if self.copy else ""
        part = "" if self.kind in ("U", MARK) else f", micro-batch {self.microbatch}"
        where = "" if self.kind == MARK else f", stage {self.stage}"
        return f"{self.kind} of job {self.job}{where}{part}{copy} (operation {self.operation})"


COPIES: Final = {"in": "copy in", "out": "copy out"}  # kinds of copies of states, by direction
STOP: Final = 1  # flags of a message: its job ends with this iteration,
FAILED: Final = 2  # it has failed,
TOMBSTONE: Final = 4  # and nothing is carried


class Message(NamedTuple):
    """What one block makes and another takes, both in the same iteration of their job.

    ``"activation"`` F(s) to F(s+1), ``"gradient"`` B(s+1) to B(s), ``"tied"`` the gradient of a
    shared weight from B(user) to B(owner), ``"weight"`` its value from the owner's first F to the
    user's, ``"factor"`` (the norm of all gradients) from the last B(0) to U(s). All of them follow
    from the chain of the blocks, so they add no precedence.
    """

    kind: str
    producer: int
    consumer: int


class Channel(NamedTuple):
    """Messages from one device to another, in the order in which the source makes them."""

    source: int
    target: int
    messages: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Routes:
    """All messages of a plan."""

    messages: tuple[Message, ...]  # one per cycle each
    inputs: tuple[tuple[int, ...], ...]  # messages by consuming operation,
    outputs: tuple[tuple[int, ...], ...]  # and by producing one
    channels: tuple[Channel, ...]  # those between different devices
    channel_of: tuple[int, ...]  # channel of every message, -1 if it stays on its device


class Instance(NamedTuple):
    """One execution of an operation: in which cycle, and which iteration of its job it is."""

    operation: int
    cycle: int
    iteration: int


class Record(NamedTuple):
    """One executed block; times of a monotonic clock."""

    segment: int  # its position in the run
    operation: int
    cycle: int
    iteration: int
    start_ns: int
    end_ns: int
    waited_ns: int = 0  # for messages, before the start
    exposed_ns: int = 0  # for copies of its state, before the start


class Copied(NamedTuple):
    """Bytes of a job's state that went from the host to a device (``"in"``), or back."""

    device: int
    direction: str  # "in" or "out"
    job: int
    stage: int
    start_ns: int
    end_ns: int
    size: int = 0


def identify(schedule: Schedule) -> Labels:
    """Return blocks, stages, micro-batches and copies per job; refuse what is incomplete."""
    s = schedule
    columns = (s.kind, s.job, s.stage, s.microbatch, s.iteration, s.offset)
    labels = zip(*(column.tolist() for column in columns), strict=True)
    rows = s.op_resources.to_lists()
    blocks = tuple(
        [_block(i, row, *label) for i, (label, row) in enumerate(zip(labels, rows, strict=True))]
    )
    work = [block for block in blocks if block.kind != MARK]
    if not work:
        raise InputError("operations: there is no block to run")
    n_jobs = _count("job", {b.job for b in work})
    n_stages = _count("stage", {b.stage for b in work})
    microbatches: list[set[int]] = [set() for _ in range(n_jobs)]
    copies: list[set[int]] = [set() for _ in range(n_jobs)]
    for block in blocks:
        if block.job >= n_jobs:
            raise InputError(
                f"operations[{block.operation}]: {block} belongs to a job without blocks"
            )
        if block.kind != MARK:
            microbatches[block.job].add(block.microbatch)
            copies[block.job].add(block.copy)
    parts = [_count("micro-batch", row, f"job {j}: ") for j, row in enumerate(microbatches)]
    turns = [_count("iteration", row, f"job {j}: ") for j, row in enumerate(copies)]
    _check_complete(work, n_stages, parts, turns)
    _check_alike(work, schedule)
    return blocks, n_stages, tuple(parts), tuple(turns)


def check_microbatches(blocks: tuple[Block, ...], sequences: Sequences) -> None:
    """Check that F, B and W of a (job, stage) ascend in the micro-batch: sums depend on it."""
    position = {i: place for row in sequences for place, i in enumerate(row)}
    groups: dict[tuple[str, int, int, int], list[Block]] = {}
    for block in blocks:
        if block.kind in ("F", "B", "W"):
            groups.setdefault((block.kind, block.job, block.stage, block.copy), []).append(block)
    for group in groups.values():
        for a, b in pairwise(sorted(group, key=lambda block: block.microbatch)):
            if (a.offset, position[a.operation]) > (b.offset, position[b.operation]):
                raise InputError(
                    f"sequences[{a.device}]: {b} comes before {a}; micro-batches of a stage must "
                    f"ascend, or the results differ from training alone; solve the problem with "
                    f'microbatch_order="fixed"'
                )


def check_together(together: Collection[int], blocks: tuple[Block, ...], n_jobs: int) -> None:
    """Check that jobs that update all stages together exist and have update blocks."""
    kinds = {(block.job, block.kind) for block in blocks}
    what = "gradient clipping, loss scaling and schedulers that need a metric update all stages"
    for job in together:
        if job not in range(n_jobs):
            raise InputError(f"together: there is no job {job!r} (the schedule has {n_jobs})")
        if (job, "W") in kinds:
            raise InputError(
                f"together: job {job} has W blocks (split backward), but {what} after the last B; "
                f"build the problem without weight="
            )
        if (job, "U") not in kinds:
            raise InputError(
                f"together: job {job} has no update blocks (kind U), but {what} after its last "
                f'gradient; build the problem with update_mode="global"'
            )


def _block(
    i: int,
    devices: list[int],
    kind: str,
    job: int,
    stage: int,
    microbatch: int,
    copy: int,
    offset: int,
) -> Block:
    kind = "B" if kind == "I" else kind
    is_mark = kind == MARK and not devices
    if kind not in KINDS and not is_mark:
        raise InputError(
            f"operations[{i}].kind: expected {', '.join(KINDS)} or I, got {format_json(kind)}"
        )
    if offset > _MOST_CYCLES:
        raise InputError(
            f"operations[{i}].offset: expected at most {_MOST_CYCLES} cycles, got {offset}"
        )
    part, device = 0 if kind == "U" else microbatch, devices[0] if devices else -1
    block = Block(i, kind, job, stage, part, copy, device, offset)
    if len(devices) != 1 and not is_mark:
        count = f"{len(devices)} resources at once" if devices else "no resource"
        raise InputError(f"operations[{i}].resources: {block} holds {count}, expected one device")
    return block


def _count(what: str, seen: set[int], here: str = "") -> int:
    """Number of distinct labels, refused unless 0, 1, 2, ... without a gap."""
    if max(seen) + 1 == len(seen):
        return len(seen)
    gap = next(k for k in range(len(seen)) if k not in seen)
    raise InputError(f"operations: {here}there is no block of {what} {gap}, but one of {max(seen)}")


def _check_complete(
    work: list[Block], n_stages: int, microbatches: list[int], copies: list[int]
) -> None:
    """Check that a job has the same blocks in all its stages, micro-batches and iterations."""
    seen: dict[tuple[str, int, int, int, int], Block] = {}
    for block in work:
        other = seen.setdefault(block[1:6], block)
        if other is not block:
            raise InputError(
                f"operations[{block.operation}]: {block} is also operations[{other.operation}]"
            )
    found = {(b.job, b.stage, b.kind) for b in work}
    updated = {b.job for b in work if b.kind == "U"}
    # stops at the first gap, so that labels with huge ranges cost no more than the blocks there are
    for job, (n_micro, n_copies) in enumerate(zip(microbatches, copies, strict=True)):
        for copy, stage, m in product(range(n_copies), range(n_stages), range(n_micro)):
            kinds = ["F", "B", *(kind for kind in "RW" if (job, stage, kind) in found)]
            for kind in kinds + ["U"] * (job in updated and m == 0):
                if (kind, job, stage, m, copy) not in seen:
                    part = "" if kind == "U" else f", micro-batch {m}"
                    raise InputError(
                        f"operations: {kind} of job {job}, stage {stage}{part}, iteration {copy} "
                        f"is missing"
                    )


def _check_alike(work: list[Block], schedule: Schedule) -> None:
    """Check that a stage of a job has one device, and I blocks if and only if it has W blocks."""
    split = {(b.job, b.stage) for b in work if b.kind == "W"}
    first_of: dict[tuple[int, int], Block] = {}
    for block in work:
        kind, place = str(schedule.kind[block.operation]), (block.job, block.stage)
        if kind in ("B", "I") and (kind == "I") != (place in split):
            raise InputError(
                f"operations[{block.operation}].kind: job {block.job} has I blocks on stage "
                f"{block.stage} without W blocks, or W blocks beside B blocks; a split backward "
                f"needs I and W, a whole one B alone"
            )
        first = first_of.setdefault(place, block)
        if block.device != first.device:
            names = [format_json(schedule.resources[b.device].name) for b in (first, block)]
            raise InputError(
                f"operations[{block.operation}].resources: {block} runs on {names[1]}, but "
                f"{first} on {names[0]}; a stage of a job stays on one device"
            )


def check_memory(schedule: Schedule, blocks: tuple[Block, ...], sequences: Sequences) -> None:
    """Check held memory and workspace of every device over one cycle of the steady state."""
    for (name, memory), sequence in zip(schedule.resources, sequences, strict=True):
        row = list(sequence)
        if not memory or not row:
            continue
        if gain := int((schedule.acquire[row] - schedule.free[row]).sum()):
            raise InputError(f"{format_json(name)} gains {gain} bytes in every cycle")
        levels = held_bytes(schedule, row) + schedule.workspace[row]
        if (levels > memory).any():
            k = int(np.argmax(levels > memory))
            raise InputError(
                f"{format_json(name)}: {blocks[row[k]]} needs {levels[k]} bytes in all, the "
                f"device has {memory}"
            )
