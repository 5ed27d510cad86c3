"""The schedule of a job under the orders of a PyTorch pipelining CSV, read strictly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optsched.errors import CyclicOrder, InputError
from optsched.formats.pipelining_cells import Block, Cell, cells_of
from optsched.io.files import read_text
from optsched.io.values import file_label
from optsched.model.graph import scheduled
from optsched.model.schedule import Rows

if TYPE_CHECKING:
    import os

    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


def read(path: str | os.PathLike[str], job: JobArray) -> Schedule:
    """Read orders from a file; see `from_text`."""
    return from_text(read_text(path), str(path), job)


def from_text(text: str, name: str, job: JobArray) -> Schedule:
    """The schedule of a job under the orders of a CSV: every block starts as early as they allow.

    Memory is not looked at: `optsched.verify` says whether the order fits.

    Parameters
    ----------
    text
        The CSV. In a job with weight blocks a cell B is I, then W.
    name
        File name for messages.
    job
        One job, makespan. Its R go directly before their gradient blocks, its U behind the last
        gradient block of their stage (``update_mode="global"``: to the end of the row).

    Raises
    ------
    InputError
        With ``file:row:cell``: no block, a block that the job does not have or has elsewhere, or
        that is there twice or not at all. `CyclicOrder` for orders that deadlock.
    """
    if job.n_jobs != 1:
        raise InputError(f"{name}: holds one job, but {job.n_jobs} are given (try subset([0]))")
    if job.objective != "makespan":
        raise InputError(f'{name}: holds one iteration: take job.with_objective("makespan")')
    rows = [_in_kinds_of(job, row) for row in cells_of(text, name)]
    if len(rows) != job.n_devices:
        raise InputError(
            f"{name}: has {len(rows)} rows, one per rank, but the job has {job.n_devices} devices"
        )
    graph = job.graph()
    number = _numbers(graph)
    _check(rows, name, job, graph, number)
    sequences = Rows.of(
        _with_implicit_blocks([cell.block for cell in row], number, job) for row in rows
    )
    try:
        return scheduled(graph, sequences, {"pipeline": file_label(Path(name).stem)})
    except CyclicOrder as error:
        raise CyclicOrder(f"{name}: {error}", error.cycle) from None


def _in_kinds_of(job: JobArray, row: list[Cell]) -> list[Cell]:
    """A row in which the whole backward B of a job with weight blocks is I, then W."""
    if job.weight is None:
        return row
    return [
        Cell(block._replace(kind=kind), place)
        for block, place in row
        for kind in (("I", "W") if block.kind == "B" else (block.kind,))
    ]


def _numbers(graph: Schedule) -> dict[Block, int]:
    """The operation of every block, R, U and ``end`` included."""
    labels = (graph.kind.tolist(), graph.stage.tolist(), graph.microbatch.tolist())
    return {Block(*label): i for i, label in enumerate(zip(*labels, strict=True))}


def _check(
    rows: list[list[Cell]], name: str, job: JobArray, graph: Schedule, number: dict[Block, int]
) -> None:
    """Every block of the job once, on its device, and in an order that the job allows."""
    resource = graph.single_resource.tolist()
    seen: dict[Block, str] = {}
    previous: dict[tuple[str, int], Block] = {}
    for rank, row in enumerate(rows):
        for block, place in row:
            if block not in number:
                raise InputError(f"{place}: {block}: {_why_unknown(block, job)}")
            if block in seen:
                raise InputError(f"{place}: {block} is already at {seen[block]}")
            seen[block] = place
            if (home := resource[number[block]]) != rank:
                raise InputError(
                    f"{place}: {block}: stage {block.stage} is in row {rank + 1}, but the job has "
                    f"it on {job.devices[home]} (row {home + 1}){_place_of(rows, job)}"
                )
            before = previous.get((block.kind, block.stage), block)
            if job.microbatch_order == "fixed" and before.microbatch > block.microbatch:
                raise InputError(
                    f'{place}: {block} after {before}, but the job has microbatch_order="fixed" '
                    '("free" allows it)'
                )
            previous[block.kind, block.stage] = block
    for block, i in number.items():
        if block.kind in "FBIW" and block not in seen:
            raise InputError(
                f"{name}: {block} is missing in row {resource[i] + 1} ({job.devices[resource[i]]})"
            )


def _why_unknown(block: Block, job: JobArray) -> str:
    if block.stage >= job.n_stages:
        return f"there is no stage {block.stage}, the job has {job.n_stages}"
    if block.microbatch >= job.micro_batches[0]:
        return f"there is no micro-batch {block.microbatch}, the job has {job.micro_batches[0]}"
    return f"the job has no weight blocks, {block.kind} needs JobArray(weight=...)"


def _place_of(rows: list[list[Cell]], job: JobArray) -> str:
    """The `place` that would fit the file, if one does."""
    ranks = {(cell.block.stage, rank) for rank, row in enumerate(rows) for cell in row}
    rank_of = dict(sorted(ranks))
    if len(ranks) != len(rank_of) or [*rank_of] != [*range(job.n_stages)]:
        return ""
    return f"; place={[*rank_of.values()]} fits this file"


def _with_implicit_blocks(row: list[Block], number: dict[Block, int], job: JobArray) -> list[int]:
    """Operations of one rank: R before its gradient block, U behind the last of its stage."""
    last = {block.stage: block for block in row if block.kind != "F"}
    order: list[int] = []
    end: list[int] = []
    for block in row:
        kind, v, m = block
        if kind in "BI" and (again := Block("R", v, m)) in number:
            order.append(number[again])
        order.append(number[block])
        if last.get(v) is block and (update := Block("U", v, 0)) in number:
            # global: U also waits for stage 0, whose blocks may follow on this device
            (end if job.update_mode == "global" else order).append(number[update])
    return order + end
