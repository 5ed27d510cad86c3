"""PyTorch's pipelining CSV: the order of blocks on every rank, one row a rank.

What `_PipelineScheduleRuntime._load_csv` of `torch.distributed.pipelining` reads and `_dump_csv`
writes with ``format="compute_only"``. A cell is ``<stage><F|B|I|W><micro-batch>``, an empty cell
is idle. The file holds no times: a job gives them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.errors import InputError
from optsched.formats.pipelining_cells import KINDS, Block
from optsched.formats.pipelining_csv_read import from_text, read
from optsched.io.files import write_atomic
from optsched.model.graph import check_permutations, evaluate
from optsched.model.schedule import Arcs, IntArray, Resource, Rows, Schedule

if TYPE_CHECKING:
    import os

__all__ = ["from_text", "read", "to_csv", "write"]

IMPLICIT: Final = ("R", "U", "end")
"""Kinds without a cell: torch's runtime does them by itself."""

_COMPLETE: Final = (["B", "F"], ["F", "I", "W"])


def write(schedule: Schedule, path: str | os.PathLike[str], *, compact: bool = False) -> None:
    """Write the orders of a schedule (whole file or nothing); see `to_csv`."""
    write_atomic(path, to_csv(schedule, compact=compact))


def to_csv(schedule: Schedule, *, compact: bool = False) -> str:
    """The orders of a one-job schedule, one row a rank.

    Micro-batches are numbered as the last stage runs them, because torch keeps losses by arrival.

    Parameters
    ----------
    schedule
        Blocks F, B or F, I, W of every stage and micro-batch. R, U and ``end`` are left out.
    compact
        Without idle cells. By default a block stands in a later column than those it waits for:
        `PipelineScheduleMulti` works column by column and computes wrong gradients otherwise.

    Raises
    ------
    InputError
        What torch would reject: several jobs, a period, a stage on two ranks, a rank without
        blocks, a missing or doubled block. `CyclicOrder` for orders that deadlock.
    """
    rows = _orders(schedule)
    last = max(block.stage for row in rows for block in row)
    _check_ranks(schedule, rows)
    _check_complete(rows, last)
    columns = iter(_columns(schedule, rows, last).tolist())
    arrival = [b.microbatch for row in rows for b in row if (b.kind, b.stage) == ("F", last)]
    label = {m: k for k, m in enumerate(arrival)}
    placed = [{next(columns): f"{v}{kind}{label[m]}" for kind, v, m in row} for row in rows]
    width = 1 + max(max(row) for row in placed)
    return "".join(
        ",".join(row.values() if compact else [row.get(k, "") for k in range(width)]) + "\n"
        for row in placed
    )


def _orders(schedule: Schedule) -> list[list[Block]]:
    """The blocks of every rank in order."""
    if schedule.period is not None:
        raise InputError("a pipelining CSV holds one iteration, this schedule has a period")
    if schedule.sequences is None:
        raise InputError("a pipelining CSV holds orders, this graph has none: solve it first")
    check_permutations(schedule, schedule.sequences)
    if (jobs := len(np.unique(schedule.job))) > 1:
        raise InputError(f"a pipelining CSV holds one job, this schedule has {jobs}")
    resource = schedule.single_resource
    labels = (schedule.kind.tolist(), schedule.stage.tolist(), schedule.microbatch.tolist())
    blocks = [Block(*label) for label in zip(*labels, strict=True)]
    for i, block in enumerate(blocks):
        if block.kind not in KINDS and block.kind not in IMPLICIT:
            raise InputError(
                f"operations[{i}].kind: a pipelining CSV holds F, B, I and W (and leaves out "
                f"{', '.join(IMPLICIT)}), got {block.kind!r:.60}"
            )
        if block.kind in KINDS and resource[i] < 0:
            raise InputError(f"operations[{i}].resources: block {block} runs on no rank")
    rows = [
        [blocks[i] for i in row if blocks[i].kind in KINDS] for row in schedule.sequences.to_lists()
    ]
    if not rows or [] in rows:
        where = schedule.resources[rows.index([])].name if rows else "the schedule"
        raise InputError(f"{where}: runs no block, torch needs some on every rank")
    return rows


def _check_ranks(schedule: Schedule, rows: list[list[Block]]) -> None:
    """Every stage runs on one rank."""
    rank_of: dict[int, int] = {}
    for r, row in enumerate(rows):
        for block in row:
            if (other := rank_of.setdefault(block.stage, r)) != r:
                first, second = schedule.resources[other].name, schedule.resources[r].name
                raise InputError(
                    f"stage {block.stage} runs on {first} and on {second}, torch allows one rank "
                    "per stage (no Chimera)"
                )


def _check_complete(rows: list[list[Block]], last: int) -> None:
    """Every stage runs F and B, or F, I and W, of every micro-batch, once."""
    kinds: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        for block in row:
            kinds.setdefault((block.stage, block.microbatch), []).append(block.kind)
    most = max(m for _, m in kinds)
    for v in range(last + 1):
        for m in range(most + 1):
            there = sorted(kinds.get((v, m), []))
            if there not in _COMPLETE:
                raise InputError(
                    f"stage {v}, micro-batch {m}: expected the blocks F, B or F, I, W, each once, "
                    f"got {', '.join(there) or 'none'}"
                )


def _columns(schedule: Schedule, rows: list[list[Block]], last: int) -> IntArray:
    """Least columns, row by row: the longest path if every block takes one column."""
    blocks = [block for row in rows for block in row]
    number = {block: i for i, block in enumerate(blocks)}
    arcs = [
        (number[before], i)
        for i, block in enumerate(blocks)
        for before in _inputs(block, last)
        if before in number
    ]
    n = len(blocks)
    sequences = Rows(np.cumsum([0, *map(len, rows)]), np.arange(n))
    kind, stage, microbatch = zip(*blocks, strict=True)
    graph = Schedule(
        resources=tuple(Resource(resource.name) for resource in schedule.resources),
        duration=np.ones(n, np.int64),
        op_resources=Rows(np.arange(n + 1), np.repeat(np.arange(len(rows)), [*map(len, rows)])),
        arcs=Arcs.of(arcs),
        kind=np.array(kind),
        stage=np.array(stage),
        microbatch=np.array(microbatch),
    )
    return evaluate(graph, sequences).head


def _inputs(block: Block, last: int) -> list[Block]:
    """Blocks that torch's runtime waits for before this one, if they exist."""
    kind, v, m = block
    if kind == "F":
        return [Block("F", v - 1, m)]
    if kind == "W":
        return [Block("I", v, m)]
    ahead = [Block("B", v + 1, m), Block("I", v + 1, m)] if v < last else []
    return [Block("F", v, m), *ahead]
