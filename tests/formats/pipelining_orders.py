"""Random jobs and feasible orders for tests of the pipelining CSV; its cells, read plainly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched import JobArray, Schedule
from optsched.model.graph import scheduled
from optsched.model.schedule import Csr

if TYPE_CHECKING:
    from random import Random

Block = tuple[str, int, int]  # kind, stage, micro-batch


def random_job(rng: Random, stages: int = 4, micro_batches: int = 4) -> JobArray:
    """One job with any place of its stages and any option that torch may see."""
    v, m = rng.randint(1, stages), rng.randint(1, micro_batches)
    ranks = [rng.randrange(v) for _ in range(v)]
    used = rng.sample(sorted(set(ranks)), len(set(ranks)))
    fields: dict[str, Any] = {"place": [used.index(rank) for rank in ranks], "micro_batches": m}

    def row(low: int, high: int, width: int = v) -> list[list[int]]:
        return [[rng.randint(low, high) for _ in range(width)]]

    if rng.random() < 0.5:
        fields["weight"] = row(0, 4)
    if rng.random() < 0.5:
        fields["lag_forward"], fields["lag_backward"] = row(0, 3, v - 1), row(0, 3, v - 1)
    fields["microbatch_order"] = rng.choice(["fixed", "free"])
    if rng.random() < 0.5:
        fields["update_mode"] = rng.choice(["block", "global", "none"])
        fields["update"] = row(0, 3)
    if rng.random() < 0.3:
        fields |= {"recompute": row(0, 3), "recompute_mode": "always", "recompute_as_block": True}
    fields |= {"switch": 2, "trailing_switch": rng.random() < 0.3}
    return JobArray(row(0, 5), row(0, 5), **fields)


def random_orders(rng: Random, graph: Schedule) -> Csr:
    """Orders along a random topological order: they never contradict each other."""
    waiting = [0] * graph.n_operations
    for head in graph.arcs.head.tolist():
        waiting[head] += 1
    ready = [i for i, count in enumerate(waiting) if not count]
    rows: list[list[int]] = [[] for _ in graph.resources]
    while ready:
        i = ready.pop(rng.randrange(len(ready)))
        for r in graph.op_resources[i].tolist():
            rows[r].append(i)
        for k in graph.arcs.head[graph.arcs.tail == i].tolist():
            waiting[k] -= 1
            if not waiting[k]:
                ready.append(k)
    return Csr.of(rows)


def random_schedule(rng: Random, job: JobArray) -> Schedule:
    """A schedule of random feasible orders."""
    graph = job.graph()
    return scheduled(graph, random_orders(rng, graph))


def blocks_of(schedule: Schedule) -> list[list[Block]]:
    """Blocks of every device in order, with those that have no cell."""
    assert schedule.sequences is not None
    columns = (schedule.kind.tolist(), schedule.stage.tolist(), schedule.microbatch.tolist())
    names = list(zip(*columns, strict=True))
    return [[names[i] for i in row] for row in schedule.sequences.to_lists()]


def cells_in(text: str) -> list[dict[Block, int]]:
    """Every block of every row with its column."""
    rows = []
    for line in text.splitlines():
        row = {}
        for column, cell in enumerate(line.split(",")):
            if cell:
                kind = next(k for k in "FBIW" if k in cell)
                stage, m = cell.split(kind)
                row[kind, int(stage), int(m)] = column
        rows.append(row)
    return rows


def as_text(rows: list[list[str]]) -> str:
    """A CSV of cells."""
    return "".join(",".join(row) + "\n" for row in rows)
