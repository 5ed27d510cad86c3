"""Hand-made pipeline schedules as fixed orders: what people run today, in the same cost model.

Given several jobs, their micro-batches follow each other as those of one job would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from optsched.errors import InputError
from optsched.graph import scheduled
from optsched.schedule import Rows, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.problems.jobarray import JobArray

Step = tuple[Literal["F", "B"], int]


def sequential(array: JobArray) -> Schedule:
    """One micro-batch after another through the whole pipeline, nothing overlaps ("vanilla")."""
    return _fixed(array, "sequential", lambda stage, n: [s for k in range(n) for s in _pair(k)])


def gpipe(array: JobArray) -> Schedule:
    """All forward blocks, then all backward blocks, on every stage (GPipe)."""

    def steps(stage: int, n: int) -> list[Step]:
        return [("F", k) for k in range(n)] + [("B", k) for k in range(n)]

    return _fixed(array, "gpipe", steps)


def one_f_one_b(array: JobArray) -> Schedule:
    """Stage s of S runs min(n, S - s) forward blocks, then one backward, one forward (DAPPLE)."""

    def steps(stage: int, n: int) -> list[Step]:
        ahead = min(n, array.n_stages - stage)
        order: list[Step] = [("F", k) for k in range(ahead)]
        for k in range(n):
            order.append(("B", k))
            if ahead + k < n:
                order.append(("F", ahead + k))
        return order

    return _fixed(array, "one_f_one_b", steps)


def _pair(k: int) -> list[Step]:
    return [("F", k), ("B", k)]


def _fixed(array: JobArray, name: str, steps: Callable[[int, int], list[Step]]) -> Schedule:
    """The schedule that runs `steps(stage, n)` on every stage.

    Memory is not looked at: `optsched.verify` says whether the order fits.
    """
    if array.place != tuple(range(array.n_stages)):
        raise InputError(f"{name}: needs stage v on device v")
    graph = array.graph()
    number: dict[tuple[str, int, int, int], int] = {}
    keys = zip(graph.kind.tolist(), graph.job.tolist(), graph.microbatch.tolist(),
               graph.stage.tolist(), strict=True)  # fmt: skip
    for i, key in enumerate(keys):
        number[key] = i
    units = [(j, m) for j in range(array.n_jobs) for m in range(int(array.micro_batches[j]))]
    rows = []
    for v in range(array.n_stages):
        row: list[int] = []
        last: list[int] = []
        for kind, k in steps(v, len(units)):
            j, m = units[k]
            for block in ("F",) if kind == "F" else ("R", "B", "I", "W"):
                if (block, j, m, v) in number:
                    row.append(number[block, j, m, v])
            if kind == "B" and m == array.micro_batches[j] - 1 and ("U", j, 0, v) in number:
                (last if array.update_mode == "global" else row).append(number["U", j, 0, v])
        rows.append(row + last)
    empty: list[list[int]] = [[]] * (array.n_devices - len(rows))
    return scheduled(graph, Rows.of(rows + empty), {"pipeline": name})


def bubble(schedule: Schedule) -> float:
    """Idle share of the makespan, over all devices that are used."""
    used = [r for r in range(schedule.n_resources) if len(schedule.users[r])]
    busy = sum(int(schedule.duration[schedule.users[r]].sum()) for r in used)
    total = len(used) * schedule.makespan
    return 1 - busy / total if total else 0.0
