"""PyTorch's pipelining CSV: the order of blocks on every rank, one row a rank.

The format of `_PipelineScheduleRuntime._load_csv` of `torch.distributed.pipelining`. A cell is
``<stage><F|B|I|W><micro-batch>``, an empty cell is idle. The file holds no times: a job gives them
back.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.errors import CyclicOrder, InputError
from optsched.formats.registry import Reader, Source
from optsched.io.csv_rows import csv_rows
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import format_json
from optsched.io.values import file_label
from optsched.model.graph import check_permutations, evaluate, scheduled
from optsched.model.schedule import Arcs, Csr, IntArray, Resource, Schedule

if TYPE_CHECKING:
    import os

    from optsched.model.schedule import Problem
    from optsched.problems.jobarray.problem import JobArray

KINDS: Final = ("F", "B", "I", "W")

_BLOCK: Final = re.compile(r"(0|[1-9][0-9]{0,6})([FBIW])(0|[1-9][0-9]{0,6})")
_OVERLAP: Final = re.compile(r"\(([0-9]+F[0-9]+);([0-9]+[BI][0-9]+)\)OVERLAP_F_B")
_IGNORED: Final = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB][0-9]+)")
"""Cells of ``format="compute_comms"`` that torch derives from the blocks."""

_ANY: Final = re.compile(r"(?:^|[,\n])\s*\(?[0-9]+[A-Z]")

IMPLICIT: Final = ("R", "U", "end")  # kinds without a cell: torch's runtime adds them
_COMPLETE: Final = (["B", "F"], ["F", "I", "W"])


class Block(NamedTuple):
    """Content of a cell: a forward, backward, input- or weight-gradient block."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Cell(NamedTuple):
    """A block and its place, ``file:row:cell``, both from 1."""

    block: Block
    place: str


def write(schedule: Schedule, path: str | os.PathLike[str], *, compact: bool = False) -> None:
    """Write the orders of a schedule, whole file or nothing; see `to_csv`."""
    write_atomic(path, to_csv(schedule, compact=compact))


def to_csv(schedule: Schedule, *, compact: bool = False) -> str:
    r"""Return the orders of a one-job schedule, one row a rank.

    Micro-batches are numbered as the last stage runs them, because torch keeps losses by arrival.
    R, U and ``end`` are left out.

    Parameters
    ----------
    compact
        Without idle cells. By default a block stands in a later column than its inputs:
        `PipelineScheduleMulti` works column by column and computes wrong gradients otherwise.

    Raises
    ------
    InputError
        What torch would reject: several jobs, a period, a stage on two ranks, a rank without
        blocks, a missing or doubled block; `CyclicOrder` for orders that deadlock.

    Examples
    --------
    >>> from optsched import pipelines
    >>> from optsched.formats import pipelining_csv
    >>> job = optsched.JobArray([[1, 1]], [[2, 2]], micro_batches=2)
    >>> pipelining_csv.to_csv(pipelines.gpipe(job), compact=True)
    '0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n'
    """
    rows = _orders(schedule)
    last = max(block.stage for row in rows for block in row)
    _check_torch(schedule, rows, last)
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
    if schedule.period is not None:
        raise InputError("a pipelining CSV holds one iteration, this schedule has a period")
    if schedule.sequences is None:
        raise InputError("a pipelining CSV holds orders, this graph has none: solve it first")
    check_permutations(schedule, schedule.sequences)
    if (jobs := len(np.unique(schedule.job))) > 1:
        raise InputError(f"a pipelining CSV holds one job, this schedule has {jobs}")
    labels = (schedule.kind.tolist(), schedule.stage.tolist(), schedule.microbatch.tolist())
    blocks = [Block(*label) for label in zip(*labels, strict=True)]
    for i, block in enumerate(blocks):
        if block.kind not in KINDS and block.kind not in IMPLICIT:
            raise InputError(
                f"operations[{i}].kind: a pipelining CSV holds F, B, I and W (and leaves out "
                f"{', '.join(IMPLICIT)}), got {block.kind!r:.60}"
            )
    rows = [
        [blocks[i] for i in row if blocks[i].kind in KINDS] for row in schedule.sequences.to_lists()
    ]
    if not rows or [] in rows:
        where = schedule.resources[rows.index([])].name if rows else "the schedule"
        raise InputError(f"{where}: runs no block, torch needs some on every rank")
    return rows


def _check_torch(schedule: Schedule, rows: list[list[Block]], last: int) -> None:
    """Check that every stage runs F and B, or F, I and W, of every micro-batch on one rank."""
    rank_of: dict[int, int] = {}
    kinds: dict[tuple[int, int], list[str]] = {}
    for r, row in enumerate(rows):
        for block in row:
            if (other := rank_of.setdefault(block.stage, r)) != r:
                first, second = schedule.resources[other].name, schedule.resources[r].name
                raise InputError(
                    f"stage {block.stage} runs on {first} and on {second}, torch allows one rank "
                    "per stage (no Chimera)"
                )
            kinds.setdefault((block.stage, block.microbatch), []).append(block.kind)
    most = max(m for _, m in kinds)
    for v, m in product(range(last + 1), range(most + 1)):
        present = sorted(kinds.get((v, m), []))
        if present not in _COMPLETE:
            raise InputError(
                f"stage {v}, micro-batch {m}: expected the blocks F, B or F, I, W, each once, "
                f"got {', '.join(present) or 'none'}"
            )


def _columns(schedule: Schedule, rows: list[list[Block]], last: int) -> IntArray:
    """Return the least columns, row by row: longest paths of blocks of length one."""
    blocks = [block for row in rows for block in row]
    number = {block: i for i, block in enumerate(blocks)}
    arcs = [
        (number[before], i)
        for i, block in enumerate(blocks)
        for before in _inputs(block, last)
        if before in number
    ]
    n = len(blocks)
    sequences = Csr(np.cumsum([0, *map(len, rows)]), np.arange(n))
    kind, stage, microbatch = zip(*blocks, strict=True)
    graph = Schedule(
        resources=tuple(Resource(resource.name) for resource in schedule.resources),
        duration=np.ones(n, np.int64),
        op_resources=Csr(np.arange(n + 1), np.repeat(np.arange(len(rows)), [*map(len, rows)])),
        arcs=Arcs.of(arcs),
        kind=np.array(kind),
        stage=np.array(stage),
        microbatch=np.array(microbatch),
    )
    return evaluate(graph, sequences).head


def _inputs(block: Block, last: int) -> list[Block]:
    """Return the inputs of a block in torch's runtime; some may not exist."""
    kind, v, m = block
    if kind in "FW":
        return [Block("F", v - 1, m) if kind == "F" else Block("I", v, m)]
    ahead = [Block("B", v + 1, m), Block("I", v + 1, m)] if v < last else []
    return [Block("F", v, m), *ahead]


def read(path: str | os.PathLike[str], job: JobArray) -> Schedule:
    """Read orders from a file; see `from_text`."""
    return from_text(read_text(path), str(path), job)


def from_text(text: str, name: str, job: JobArray) -> Schedule:
    r"""Make the schedule of a job under the orders of a CSV: every block starts when it can.

    Memory is not checked: `optsched.verify` does.

    Parameters
    ----------
    text
        The CSV. In a job with weight blocks a cell B is I, then W. Cells of communication and of
        sharding, which torch derives from the blocks, are ignored.
    job
        One job, makespan. Its R go directly before their gradient blocks, its U after the last
        gradient block of their stage (``update_mode="global"``: to the end of the row).

    Raises
    ------
    InputError
        With ``file:row:cell``: an invalid cell, or a block that the job does not have or has
        elsewhere, or that is doubled or missing.

    Examples
    --------
    >>> from optsched.formats import pipelining_csv
    >>> job = optsched.JobArray([[1, 1]], [[2, 2]], micro_batches=2)
    >>> text = "0F0,0F1,,0B0,0B1\n,1F0,1F1,1B0,1B1\n"
    >>> pipelining_csv.from_text(text, "order.csv", job).makespan
    9
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
    sequences = Csr.of(
        _with_implicit_blocks([cell.block for cell in row], number, job) for row in rows
    )
    try:
        return scheduled(graph, sequences, {"pipeline": file_label(Path(name).stem)})
    except CyclicOrder as error:
        raise CyclicOrder(f"{name}: {error}", error.cycle) from None


def _in_kinds_of(job: JobArray, row: list[Cell]) -> list[Cell]:
    """Replace B by I, then W, if the job has weight blocks."""
    if job.weight is None:
        return row
    return [
        Cell(block._replace(kind=kind), place)
        for block, place in row
        for kind in (("I", "W") if block.kind == "B" else (block.kind,))
    ]


def _numbers(graph: Schedule) -> dict[Block, int]:
    """Return the operation of every block, R, U and ``end`` included."""
    labels = (graph.kind.tolist(), graph.stage.tolist(), graph.microbatch.tolist())
    return {Block(*label): i for i, label in enumerate(zip(*labels, strict=True))}


def _check(
    rows: list[list[Cell]], name: str, job: JobArray, graph: Schedule, number: dict[Block, int]
) -> None:
    """Check that every block runs once, on its device, in an order that the job allows."""
    resource = graph.single_resource.tolist()
    seen: dict[Block, str] = {}
    previous: dict[tuple[str, int], Block] = {}
    for rank, row in enumerate(rows):
        for block, place in row:
            if block not in number:
                raise InputError(f"{place}: {block}: {_unknown(block, job)}")
            if block in seen:
                raise InputError(f"{place}: {block} is already at {seen[block]}")
            seen[block] = place
            if (device := resource[number[block]]) != rank:
                raise InputError(
                    f"{place}: {block}: stage {block.stage} is in row {rank + 1}, but the job has "
                    f"it on {job.devices[device]} (row {device + 1}){_place_of(rows, job)}"
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


def _unknown(block: Block, job: JobArray) -> str:
    if block.stage >= job.n_stages:
        return f"there is no stage {block.stage}, the job has {job.n_stages}"
    if block.microbatch >= job.micro_batches[0]:
        return f"there is no micro-batch {block.microbatch}, the job has {job.micro_batches[0]}"
    return f"the job has no weight blocks, {block.kind} needs JobArray(weight=...)"


def _place_of(rows: list[list[Cell]], job: JobArray) -> str:
    """Suggest the `place` that fits the file, if there is one."""
    ranks = {(cell.block.stage, rank) for rank, row in enumerate(rows) for cell in row}
    rank_of = dict(sorted(ranks))
    if len(ranks) != len(rank_of) or [*rank_of] != [*range(job.n_stages)]:
        return ""
    return f"; place={[*rank_of.values()]} fits this file"


def _with_implicit_blocks(row: list[Block], number: dict[Block, int], job: JobArray) -> list[int]:
    """Return operations of one rank: R before its gradient block, U after the last one."""
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


def cells_of(text: str, name: str) -> list[list[Cell]]:
    """Parse the blocks of every rank in order; idle and ignored cells are left out.

    A cell ``(0F4;7B0)OVERLAP_F_B`` gives F, then B.
    """
    rows: list[list[Cell]] = []
    for place, cells in csv_rows(text, name):
        row = [
            Cell(block, f"{place}:{k}")
            for k, cell in enumerate(cells, 1)
            if cell and not _IGNORED.fullmatch(cell)
            for block in _blocks(cell, f"{place}:{k}")
        ]
        if not row:
            raise InputError(f"{place}: a row without blocks; every rank needs some")
        rows.append(row)
    if not rows:
        raise InputError(f"{name}: the file is empty, expected one row per rank")
    return rows


def _blocks(cell: str, place: str) -> list[Block]:
    overlap = _OVERLAP.fullmatch(cell)
    found = []
    for part in overlap.groups() if overlap else (cell,):
        block = _BLOCK.fullmatch(part)
        if block is None:
            what = "<stage><F|B|I|W><micro-batch> such as 0F0"
            raise InputError(f"{place}: expected {what}, got {format_json(part)}")
        found.append(Block(block[2], int(block[1]), int(block[3])))
    return found


def _recognises(source: Source) -> bool:
    named = source.tree is None and source.file.lower().endswith(".csv")
    return named and _ANY.search(source.text[:100_000]) is not None


def _read(source: Source) -> Problem:
    raise InputError(
        f"problem: missing; {source.file} holds orders only (--problem X.jobarray.json)"
    )


def _write(problem: Problem) -> str:
    if not isinstance(problem, Schedule):
        raise InputError("a CSV holds the orders of a schedule: solve it first")
    return to_csv(problem)


READER = Reader("csv", _recognises, _read, _write, (".csv",), holds="orders only")
