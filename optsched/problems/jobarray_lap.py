"""How long one iteration of a job takes at least from its first to its last block on stage 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.bounds import makespan_bound
from optsched.schedule import Arcs, Rows, Schedule

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.problems.jobarray import JobArray


def lap_bound(array: JobArray, once: Schedule) -> int:
    """The longest iterations of one job in a cycle, each alone on all devices; 0 if none counts.

    A job's next iteration begins on stage 0 when its last gradient block (or update) there has
    ended, so whatever lies between its first and that block, all gradients of a pipeline, is done
    in one lap: the lap is at least as long as the makespan of those blocks alone. Only jobs with
    several micro-batches in fixed order are looked at; for one, the longest chain says the same.

    Parameters
    ----------
    array, once
        The array and the graph of one iteration of it.
    """
    if array.microbatch_order != "fixed":
        return 0
    known: dict[bytes, int] = {}  # siblings of one size are alike
    longest = 0
    for j in np.flatnonzero(array.micro_batches > 1).tolist():
        mine = np.flatnonzero(once.job == j)
        key = b"".join(getattr(once, name)[mine].tobytes() for name in _TOLD)
        if key not in known:
            known[key] = makespan_bound(_lap(once, mine))
        longest = max(longest, int(array.multiplicity[j]) * known[key])
    return longest


_TOLD = ("duration", "stage", "microbatch", "acquire", "free", "workspace", "kind")


def _lap(once: Schedule, mine: npt.NDArray[np.int64]) -> Schedule:
    """A job's blocks behind its first one and before its last gradient block or update there."""
    on_first = mine[once.stage[mine] == 0]
    closing = np.isin(once.kind[on_first], ["B", "W", "U"])
    updates = on_first[once.kind[on_first] == "U"]
    last = int(updates[0] if len(updates) else on_first[closing][-1])
    tail, head, lag, _ = once.arcs
    inside = once.job[tail] == once.job[mine[0]]
    tail, head, lag = tail[inside], head[inside], lag[inside]
    before = np.zeros(once.n_operations, bool)
    before[last] = True
    late_first = np.argsort(-tail, kind="stable")  # ids are topological
    for i, k in zip(tail[late_first].tolist(), head[late_first].tolist(), strict=True):
        before[i] |= before[k]
    kept = mine[before[mine]]
    number = np.full(once.n_operations, -1, np.int64)
    number[kept] = np.arange(len(kept))
    arcs = (number[tail] >= 0) & (number[head] >= 0)
    columns = {
        name: getattr(once, name)[kept]
        for name in ("duration", "kind", "job", "stage", "microbatch", "acquire", "free",
                     "workspace")
    }  # fmt: skip
    return Schedule(
        name=once.name,
        time_unit=once.time_unit,
        resources=once.resources,
        op_resources=Rows(np.arange(len(kept) + 1), once.single_resource[kept]),
        arcs=Arcs(
            number[tail[arcs]], number[head[arcs]], lag[arcs], np.zeros(int(arcs.sum()), np.int64)
        ),
        **columns,
    )
