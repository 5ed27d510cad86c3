"""What a schedule document must be to be run: complete, one device a stage, orders, memory."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.analysis.occupancy import held_bytes, jobs_that_fit
from optsched.arraypipe.plan.types import KINDS, MARK, Block, Labels
from optsched.errors import InputError
from optsched.io.strict_json import format_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from optsched.model.schedule import IntArray, Schedule


MOST_CYCLES: Final = 10_000  # largest offset: a run looks at so many cycles more


def identify(schedule: Schedule) -> Labels:
    """Read the labels of all operations; `InputError` for a wrong, missing or doubled block."""
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
    n_jobs = _count(work, "job", {b.job for b in work}, "")
    n_stages = _count(work, "stage", {b.stage for b in work}, "")
    microbatches, copies = [], []
    by_job: list[list[Block]] = [[] for _ in range(n_jobs)]
    for block in work:
        by_job[block.job].append(block)
    for job, own in enumerate(by_job):
        here = f"job {job}: "
        microbatches.append(_count(own, "micro-batch", {b.microbatch for b in own}, here))
        copies.append(_count(own, "iteration", {b.copy for b in own}, here))
    for block in blocks:
        if block.job >= n_jobs:
            raise InputError(
                f"operations[{block.operation}]: {block} belongs to a job without blocks"
            )
    _check_complete(work, n_stages, microbatches, copies)
    _check_devices(work, schedule)
    return Labels(blocks, n_stages, tuple(microbatches), tuple(copies))


def check_orders(schedule: Schedule, blocks: tuple[Block, ...]) -> tuple[tuple[int, ...], ...]:
    """The sequences: each device has its own operations, each once; micro-batches ascend."""
    assert schedule.sequences is not None
    sequences = tuple(tuple(row) for row in schedule.sequences.to_lists())
    position: dict[int, int] = {}
    for device, row in enumerate(sequences):
        for place, i in enumerate(row):
            if blocks[i].device != device:
                owner = schedule.resources[blocks[i].device].name if blocks[i].device >= 0 else None
                raise InputError(
                    f"sequences[{device}][{place}]: {blocks[i]} runs on "
                    f"{'no device' if owner is None else format_json(owner)}"
                )
            if i in position:
                raise InputError(f"sequences[{device}][{place}]: {blocks[i]} is listed twice")
            position[i] = place
    for block in blocks:
        if block.device >= 0 and block.operation not in position:
            raise InputError(f"sequences[{block.device}]: {block} is missing")
    _check_microbatch_order(blocks, position)
    return sequences


def check_together(together: Collection[int], labels: Labels) -> None:
    """Jobs whose updates wait for all stages exist and have update blocks."""
    updated = {block.job for block in labels.blocks if block.kind == "U"}
    for job in together:
        if isinstance(job, bool) or not isinstance(job, int):
            raise InputError(f"together: expected numbers of jobs, got {job!r}")
        if not 0 <= job < len(labels.copies):
            raise InputError(
                f"together: there is no job {job} (the schedule has {len(labels.copies)})"
            )
        if job not in updated:
            raise InputError(
                f"together: job {job} has no update blocks (kind U), but gradient clipping, loss "
                f"scaling and schedulers that need a metric update all stages after its last "
                f'gradient; build the problem with update_mode="global"'
            )


def check_memory(
    schedule: Schedule, blocks: tuple[Block, ...], sequences: tuple[tuple[int, ...], ...]
) -> None:
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
    if kind == MARK and not devices and offset <= MOST_CYCLES:
        return Block(i, kind, job, stage, microbatch, copy, -1, offset)
    if kind in ("I", "W"):
        raise InputError(
            f'operations[{i}].kind: "{kind}" (split backward) is not run by the executor yet; '
            f"build the schedule with whole B blocks"
        )
    if kind not in KINDS:
        raise InputError(
            f"operations[{i}].kind: expected {', '.join(KINDS)}, got {format_json(kind)}"
        )
    if offset > MOST_CYCLES:
        raise InputError(
            f"operations[{i}].offset: expected at most {MOST_CYCLES} cycles, got {offset}"
        )
    if kind == "U":
        microbatch = 0
    block = Block(i, kind, job, stage, microbatch, copy, devices[0] if devices else -1, offset)
    if len(devices) != 1:
        count = f"{len(devices)} resources at once" if devices else "no resource"
        raise InputError(f"operations[{i}].resources: {block} holds {count}, expected one device")
    return block


def _count(work: list[Block], what: str, seen: set[int], here: str) -> int:
    """Number of distinct labels, which must be 0, 1, 2, ... without a gap."""
    if max(seen) + 1 == len(seen):
        return len(seen)
    gap = next(k for k in range(len(seen)) if k not in seen)
    raise InputError(f"operations: {here}there is no block of {what} {gap}, but one of {max(seen)}")


def _check_complete(
    work: list[Block], n_stages: int, microbatches: list[int], copies: list[int]
) -> None:
    seen: dict[tuple[str, int, int, int, int], Block] = {}
    for block in work:
        key = (block.kind, *block[2:6])
        if key in seen:
            raise InputError(
                f"operations[{block.operation}]: {block} is also operations[{seen[key].operation}]"
            )
        seen[key] = block
    recomputed = {(b.job, b.stage) for b in work if b.kind == "R"}
    updated = {b.job for b in work if b.kind == "U"}

    def expected() -> Iterator[tuple[str, int, int, int, int]]:
        for job, (n_micro, n_copies) in enumerate(zip(microbatches, copies, strict=True)):
            for copy in range(n_copies):
                for stage in range(n_stages):
                    for m in range(n_micro):
                        yield "F", job, stage, m, copy
                        yield "B", job, stage, m, copy
                        if (job, stage) in recomputed:
                            yield "R", job, stage, m, copy
                    if job in updated:
                        yield "U", job, stage, 0, copy

    # stops at the first gap, so that labels with huge ranges cost no more than the blocks there are
    for key in expected():
        if key not in seen:
            kind, job, stage, m, copy = key
            part = "" if kind == "U" else f", micro-batch {m}"
            raise InputError(
                f"operations: {kind} of job {job}, stage {stage}{part}, iteration {copy} is missing"
            )


def _check_devices(work: list[Block], schedule: Schedule) -> None:
    home: dict[tuple[int, int], Block] = {}
    for block in work:
        first = home.setdefault((block.job, block.stage), block)
        if block.device != first.device:
            names = [format_json(schedule.resources[b.device].name) for b in (first, block)]
            raise InputError(
                f"operations[{block.operation}].resources: {block} runs on {names[1]}, but "
                f"{first} on {names[0]}; a stage of a job stays on one device"
            )


def _check_microbatch_order(blocks: tuple[Block, ...], position: dict[int, int]) -> None:
    """F and B of a (job, stage) ascend in the micro-batch: sums and statistics depend on it."""
    groups: dict[tuple[str, int, int, int], list[Block]] = {}
    for block in blocks:
        if block.kind in ("F", "B"):
            groups.setdefault((block.kind, block.job, block.stage, block.copy), []).append(block)
    for group in groups.values():
        group.sort(key=lambda b: b.microbatch)
        for b, following in pairwise(group):
            if (b.offset, position[b.operation]) > (
                following.offset,
                position[following.operation],
            ):
                raise InputError(
                    f"sequences[{b.device}]: {following} comes before {b}; micro-batches of a "
                    f"stage must ascend, or the results differ from training alone; solve the "
                    f'problem with microbatch_order="fixed"'
                )


def counted_from_zero(schedule: Schedule) -> Schedule:
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


def identify_all(schedule: Schedule) -> Labels:
    """The labels of all operations (`identify`); of a trace it says what is wrong with it."""
    try:
        return identify(schedule)
    except InputError as error:
        if "executor" not in schedule.provenance:
            raise
        raise InputError(
            f"{error}; a trace can be run again if every job of the run has blocks in it (a job "
            f"that was complete before has none) and only whole iterations (a job that has failed, "
            f"or whose beginning was left out of a long trace, may have others); here iterations "
            f"count from each job's first"
        ) from error
