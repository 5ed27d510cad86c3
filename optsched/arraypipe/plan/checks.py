"""Checks of a schedule document before it is run: complete, one device a stage, orders, memory."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.analysis.occupancy import held_bytes, jobs_that_fit
from optsched.arraypipe.plan.types import COPIES, KINDS, MARK, MESSAGES, Block
from optsched.errors import InputError
from optsched.io.strict_json import format_json
from optsched.model.schedule import Rows, Schedule

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from optsched.model.schedule import IntArray

    Sequences = tuple[tuple[int, ...], ...]
    Labels = tuple[tuple[Block, ...], int, tuple[int, ...], tuple[int, ...]]


_MOST_CYCLES: Final = 10_000  # largest offset: a run looks at so many cycles more


def blocks_only(schedule: Schedule) -> Schedule:
    """A scheduled document without messages and copies of states, and without their links.

    What a message joined is joined by an arc. Documents without links are given back as
    they are.
    """
    carried = np.isin(schedule.kind, [*MESSAGES, *COPIES.values()])
    if not carried.any():
        return schedule
    kept = schedule.subset(~carried)
    used = [r for r in range(len(kept.users)) if not len(schedule.users[r]) or len(kept.users[r])]
    at = np.full(schedule.n_resources, -1)
    at[used] = np.arange(len(used))
    assert kept.sequences is not None
    return replace(
        kept,
        resources=tuple(schedule.resources[r] for r in used),
        op_resources=Rows(kept.op_resources.indptr, at[kept.op_resources.ids]),
        sequences=Rows.of(kept.sequences[r] for r in used),
    )


def identify(schedule: Schedule) -> Labels:
    """Blocks, number of stages, micro-batches and copies per job; refuses what is incomplete."""
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
    by_job: list[list[Block]] = [[] for _ in range(_count("job", {b.job for b in work}))]
    n_stages = _count("stage", {b.stage for b in work})
    for block in blocks:
        if block.job >= len(by_job):
            raise InputError(
                f"operations[{block.operation}]: {block} belongs to a job without blocks"
            )
    for block in work:
        by_job[block.job].append(block)
    microbatches, copies = [], []
    for job, of_job in enumerate(by_job):
        microbatches.append(_count("micro-batch", {b.microbatch for b in of_job}, f"job {job}: "))
        copies.append(_count("iteration", {b.copy for b in of_job}, f"job {job}: "))
    _check_complete(work, n_stages, microbatches, copies)
    _check_split(work, schedule)
    _check_devices(work, schedule)
    return blocks, n_stages, tuple(microbatches), tuple(copies)


def check_microbatches(blocks: tuple[Block, ...], sequences: Sequences) -> None:
    """F, B and W of a (job, stage) ascend in the micro-batch: sums and statistics depend on it."""
    position = {i: place for row in sequences for place, i in enumerate(row)}
    groups: dict[tuple[str, int, int, int], list[Block]] = {}
    for block in blocks:
        if block.kind in ("F", "B", "W"):
            groups.setdefault((block.kind, block.job, block.stage, block.copy), []).append(block)
    for group in groups.values():
        group.sort(key=lambda b: b.microbatch)
        turns = [(b.offset, position[b.operation]) for b in group]
        for (b, turn), (following, its) in pairwise(zip(group, turns, strict=True)):
            if turn > its:
                raise InputError(
                    f"sequences[{b.device}]: {following} comes before {b}; micro-batches of a "
                    f"stage must ascend, or the results differ from training alone; solve the "
                    f'problem with microbatch_order="fixed"'
                )


def check_together(together: Collection[int], blocks: tuple[Block, ...], n_jobs: int) -> None:
    """Jobs whose updates wait for all stages exist and have update blocks."""
    updated = {block.job for block in blocks if block.kind == "U"}
    split = {block.job for block in blocks if block.kind == "W"}
    for job in together:
        if isinstance(job, bool) or not isinstance(job, int):
            raise InputError(f"together: expected numbers of jobs, got {job!r}")
        if not 0 <= job < n_jobs:
            raise InputError(f"together: there is no job {job} (the schedule has {n_jobs})")
        if job in split:
            raise InputError(
                f"together: job {job} has W blocks (split backward), but gradient clipping, loss "
                f"scaling and schedulers that need a metric update all stages after the last B; "
                f"build the problem without weight="
            )
        if job not in updated:
            raise InputError(
                f"together: job {job} has no update blocks (kind U), but gradient clipping, loss "
                f"scaling and schedulers that need a metric update all stages after its last "
                f'gradient; build the problem with update_mode="global"'
            )


def check_memory(schedule: Schedule, blocks: tuple[Block, ...], sequences: Sequences) -> None:
    """Held memory and workspace of every device over one cycle of the steady state."""
    limits = [(d, memory) for d, (_, memory) in enumerate(schedule.resources) if memory]

    def needed(device: int, jobs: float = math.inf) -> tuple[list[int], IntArray]:
        """Operations of the first jobs on a device, and all that is held during each."""
        row = [i for i in sequences[device] if blocks[i].job < jobs]
        return row, held_bytes(schedule, row) + schedule.workspace[row]

    def fits(jobs: int) -> bool:
        return all(needed(d, jobs)[1].max(initial=0) <= memory for d, memory in limits)

    for device, capacity in limits:
        name = format_json(schedule.resources[device].name)
        row, levels = needed(device)
        if gain := int((schedule.acquire[row] - schedule.free[row]).sum()):
            raise InputError(f"{name} gains {gain} bytes in every cycle (acquire - free)")
        if (levels > capacity).any():
            k = int(np.argmax(levels > capacity))
            fit = jobs_that_fit(1 + max(block.job for block in blocks), fits)
            alone = f"the first {fit} job{'s' * (fit > 1)} alone would fit"
            raise InputError(
                f"{name}: {blocks[row[k]]} needs {levels[k]} bytes in all, the device has "
                f"{capacity}; {alone if fit else 'job 0 alone does not fit either'}"
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
    seen: dict[tuple[str, int, int, int, int], Block] = {}
    for block in work:
        other = seen.setdefault(block[1:6], block)
        if other is not block:
            raise InputError(
                f"operations[{block.operation}]: {block} is also operations[{other.operation}]"
            )
    recomputed = {(b.job, b.stage) for b in work if b.kind == "R"}
    updated = {b.job for b in work if b.kind == "U"}
    split = {(b.job, b.stage) for b in work if b.kind == "W"}

    def expected() -> Iterator[tuple[str, int, int, int, int]]:
        for job, (n_micro, n_copies) in enumerate(zip(microbatches, copies, strict=True)):
            for copy in range(n_copies):
                for stage in range(n_stages):
                    for m in range(n_micro):
                        yield "F", job, stage, m, copy
                        yield "B", job, stage, m, copy
                        if (job, stage) in recomputed:
                            yield "R", job, stage, m, copy
                        if (job, stage) in split:
                            yield "W", job, stage, m, copy
                    if job in updated:
                        yield "U", job, stage, 0, copy

    # stops at the first gap, so that labels with huge ranges cost no more than the blocks there are
    for kind, job, stage, m, copy in expected():
        if (kind, job, stage, m, copy) not in seen:
            part = "" if kind == "U" else f", micro-batch {m}"
            raise InputError(
                f"operations: {kind} of job {job}, stage {stage}{part}, iteration {copy} is missing"
            )


def _check_split(work: list[Block], schedule: Schedule) -> None:
    """Stages with W blocks have I blocks, others B blocks."""
    split = {(b.job, b.stage) for b in work if b.kind == "W"}
    for block in work:
        kind = str(schedule.kind[block.operation])
        if kind in ("B", "I") and (kind == "I") != ((block.job, block.stage) in split):
            raise InputError(
                f"operations[{block.operation}].kind: job {block.job} has I blocks on stage "
                f"{block.stage} without W blocks, or W blocks beside B blocks; a split backward "
                f"needs I and W, a whole one B alone"
            )


def _check_devices(work: list[Block], schedule: Schedule) -> None:
    first_of: dict[tuple[int, int], Block] = {}
    for block in work:
        first = first_of.setdefault((block.job, block.stage), block)
        if block.device != first.device:
            names = [format_json(schedule.resources[b.device].name) for b in (first, block)]
            raise InputError(
                f"operations[{block.operation}].resources: {block} runs on {names[1]}, but "
                f"{first} on {names[0]}; a stage of a job stays on one device"
            )
