"""How long one iteration of a job takes at least from its first to its last block on stage 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.model.bounds import makespan_bound
from optsched.model.schedule import Arcs, Rows, Schedule
from optsched.problems.jobarray.window import window_bound

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.problems.jobarray.problem import JobArray


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
        lags = once.arcs.lag[once.job[once.arcs.tail] == j]
        told = [once.single_resource[mine], lags, *(getattr(once, name)[mine] for name in _TOLD)]
        key = b"".join(column.tobytes() for column in told)
        if key not in known:
            known[key] = max(makespan_bound(_lap(once, mine)), window_bound(once, mine))
        longest = max(longest, int(array.multiplicity[j]) * known[key])
    return longest


_TOLD = ("duration", "stage", "microbatch", "acquire", "free", "workspace", "kind")


def _lap(once: Schedule, mine: npt.NDArray[np.int64]) -> Schedule:
    """A job's blocks behind its first one and before its last gradient block or update there.

    A block counts as far as it must be done by the end of that last one: where a gradient leaves
    before its block has ended (a fused update follows it), the rest may run in the next lap.
    """
    on_first = mine[once.stage[mine] == 0]
    closing = np.isin(once.kind[on_first], ["B", "W", "U"])
    updates = on_first[once.kind[on_first] == "U"]
    last = int(updates[0] if len(updates) else on_first[closing][-1])
    tail, head, lag, _ = once.arcs
    inside = once.job[tail] == once.job[mine[0]]
    tail, head = tail[inside], head[inside]
    weight = once.duration[tail] + lag[inside]
    to_end = np.full(once.n_operations, -1, np.int64)  # longest path to the end of the last block
    to_end[last] = once.duration[last]
    late_first = np.argsort(-tail, kind="stable")  # ids are topological
    backwards = (tail[late_first], head[late_first], weight[late_first])
    for i, k, w in zip(*(column.tolist() for column in backwards), strict=True):
        if to_end[k] >= 0:
            to_end[i] = max(to_end[i], w + to_end[k])
    kept = mine[to_end[mine] >= 0]
    counted = np.minimum(once.duration, to_end)
    number = np.full(once.n_operations, -1, np.int64)
    number[kept] = np.arange(len(kept))
    arcs = (number[tail] >= 0) & (number[head] >= 0)
    columns = {
        name: getattr(once, name)[kept]
        for name in ("kind", "job", "stage", "microbatch", "acquire", "free", "workspace")
    }
    tail, head, weight = tail[arcs], head[arcs], weight[arcs]
    lags = weight - counted[tail]
    return Schedule(
        name=once.name,
        time_unit=once.time_unit,
        resources=once.resources,
        op_resources=Rows(np.arange(len(kept) + 1), once.single_resource[kept]),
        duration=counted[kept],
        arcs=Arcs(number[tail], number[head], lags, np.zeros(len(tail), np.int64)),
        **columns,
    )
