"""Lower bounds of a job array's period."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.model.bounds import makespan_bound
from optsched.model.memory_bounds import least_time, paths_from, residences
from optsched.model.schedule import Arcs, Csr, Schedule
from optsched.problems.jobarray.graph import build

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.model.schedule import IntArray
    from optsched.problems.jobarray.fields import JobArrayFields


def period_bounds(array: JobArrayFields, recomputes: Sequence[bool]) -> dict[str, int]:
    """Return lower bounds of the least period, by name.

    ``load``: the busiest device, with the switches that no order avoids. ``chain``: the longest
    cycle through all iterations of one job. ``lap``: the iterations in a cycle of one job of
    several micro-batches, alone. ``energy``: bytes x time that a cycle needs, over the memory.
    """
    from optsched.kernels.cycle_ratio import cycle_time

    once = build(array, recomputes)
    return {
        "load": max(device_loads(array, once)),
        "chain": cycle_time(build(array, recomputes, cyclic=True)).period,
        "lap": _iteration_bound(array, once),
        "energy": _energy(array, once),
    }


def device_loads(array: JobArrayFields, once: Schedule) -> list[int]:
    """Return durations per device in a cycle, and the least time of changing jobs."""
    loads = []
    for d in range(array.n_devices):
        on = once.users[d]
        total = int((once.duration[on] * array.multiplicity[once.job[on]]).sum())
        jobs = np.unique(once.job[on])
        if len(jobs) > 1 and once.has_setups:
            total += sum(_switch_loss(array, once, d, int(j)) for j in jobs)
        loads.append(total)
    return loads


def _switch_loss(array: JobArrayFields, once: Schedule, device: int, job: int) -> int:
    """Least time per cycle of changing to and from a job on a device with other jobs.

    One change, always. A job with one F and one B a cycle also needs a second change or the idle
    time that avoids it: between F and B, or between B and the next F, no other block may run then.
    """
    on = once.users[device]
    blocks = on[once.job[on] == job]
    switch = int((once.setup_in + once.setup_out)[blocks].min())
    once_each = sorted(once.kind[blocks].tolist()) == ["B", "F"] and array.multiplicity[job] == 1
    if not once_each or once.stage[blocks[0]] != once.stage[blocks[1]]:
        return switch
    forward, backward = blocks.tolist() if once.kind[blocks[0]] == "F" else blocks[::-1].tolist()
    between = paths_from(once, forward)[backward] - int(once.duration[forward])
    return switch + min(switch, max(0, between), _until_next(once, forward, backward))


def _until_next(once: Schedule, forward: int, backward: int) -> int:
    """Least time from the end of a job's only B on a stage to its next F on that stage."""
    after = paths_from(once, backward)
    job = once.job == once.job[backward]
    longest = int(once.duration[backward])
    for first in np.flatnonzero(job & (once.kind == "F")).tolist():
        before = paths_from(once, first).get(forward)
        if before is not None:
            ends = [
                after[i] + int(once.duration[i])
                for i in after
                if once.stage[i] == once.stage[first] and once.kind[i] in "BU"
            ]
            longest = max([longest, *(before + end for end in ends)])
    return longest - int(once.duration[backward])


def _energy(array: JobArrayFields, once: Schedule) -> int:
    """Least time per capped device that the residences of a whole cycle need."""
    alike: dict[int, dict[int, int]] = {}
    for r, size, i, _, time in residences(once):
        sizes = alike.setdefault(r, {})
        sizes[size] = sizes.get(size, 0) + time * int(array.multiplicity[once.job[i]])
    least = (least_time(sizes, int(once.memory[r])) for r, sizes in alike.items())
    return max(least, default=0)


def _iteration_bound(array: JobArrayFields, once: Schedule) -> int:
    """Longest total of the iterations of one job in a cycle, each alone; 0 if none counts.

    The next iteration of a job begins on stage 0 after its last gradient block (or update) there.
    All blocks that precede that one, so all gradients of a pipeline, lie between: an iteration
    takes at least the makespan of these blocks alone. Only jobs with several micro-batches in
    fixed order count; for one micro-batch the longest chain is as strong.
    """
    if array.microbatch_order != "fixed":
        return 0
    known: dict[bytes, int] = {}  # siblings of one size are alike
    longest = 0
    for j in np.flatnonzero(array.micro_batches > 1).tolist():
        blocks = np.flatnonzero(once.job == j)
        lags = once.arcs.lag[once.job[once.arcs.tail] == j]
        columns = [getattr(once, name)[blocks] for name in ("duration", *_COLUMNS)]
        key = b"".join(x.tobytes() for x in (once.single_resource[blocks], lags, *columns))
        if key not in known:
            known[key] = max(makespan_bound(_until_last(once, blocks)), window_bound(once, blocks))
        longest = max(longest, int(array.multiplicity[j]) * known[key])
    return longest


_COLUMNS: Final = ("kind", "job", "stage", "microbatch", "acquire", "free", "workspace")


def _until_last(once: Schedule, blocks: IntArray) -> Schedule:
    """The graph of a job's blocks that precede its last gradient block or update on stage 0.

    A block counts as far as it is done by the end of that last one: where a gradient leaves before
    its block has ended (a fused update follows it), the remainder may run in the next iteration.
    """
    on_first = blocks[once.stage[blocks] == 0]
    updates = on_first[once.kind[on_first] == "U"]
    closing = on_first[np.isin(once.kind[on_first], ["B", "W"])]
    last = int(updates[0] if len(updates) else closing[-1])
    inside = once.job[once.arcs.tail] == once.job[blocks[0]]
    tail, head, lag = (column[inside] for column in once.arcs[:3])
    weight = once.duration[tail] + lag
    to_end = np.full(once.n_operations, -1, np.int64)  # longest path to the end of the last block
    to_end[last] = once.duration[last]
    for a in np.argsort(-tail, kind="stable").tolist():  # ids are topological
        if to_end[head[a]] >= 0:
            to_end[tail[a]] = max(to_end[tail[a]], weight[a] + to_end[head[a]])
    kept = blocks[to_end[blocks] >= 0]
    counted = np.minimum(once.duration, to_end)
    number = np.full(once.n_operations, -1, np.int64)
    number[kept] = np.arange(len(kept))
    arcs = (number[tail] >= 0) & (number[head] >= 0)
    tail, head, weight = tail[arcs], head[arcs], weight[arcs]
    return Schedule(
        name=once.name,
        time_unit=once.time_unit,
        resources=once.resources,
        op_resources=Csr(np.arange(len(kept) + 1), once.single_resource[kept]),
        duration=counted[kept],
        arcs=Arcs(number[tail], number[head], weight - counted[tail], np.zeros_like(tail)),
        **{name: getattr(once, name)[kept] for name in _COLUMNS},
    )


def window_bound(once: Schedule, blocks: IntArray) -> int:
    """Return the longest time that one iteration of a job keeps a stage: work and idle time.

    From the first forward block of an iteration to that of the next lies all work of the stage,
    and the window from its last gradient block on. Within the window only weight gradients and
    updates run: those of the last k micro-batches, where k - 1 of them fit the memory beside what
    the last gradient block needs. `once` is the graph of one iteration, each job's micro-batches in
    fixed order; `blocks` are the operations of the job.
    """
    stages = [_Stage(once, blocks[once.stage[blocks] == v]) for v in np.unique(once.stage[blocks])]
    paths = [paths_from(once, stage.first) for stage in stages]
    longest = 0
    for v, stage in enumerate(stages):
        after = paths_from(once, stage.gradient)
        returns = [
            after[earlier.last] + int(once.duration[earlier.last]) + paths[u][stage.first]
            for u, earlier in enumerate(stages[: v + 1])
            if earlier.last in after and stage.first in paths[u]
        ]
        window = max(returns, default=0) - int(once.duration[stage.gradient])
        if stage.alone:
            longest = max(longest, stage.work + max(0, window - stage.deferred))
    return longest


class _Stage:
    """One job's blocks on one stage; ids ascend with the micro-batches."""

    def __init__(self, once: Schedule, blocks: npt.NDArray[np.int64]) -> None:
        kinds = once.kind[blocks]
        forward, weights, updates = (blocks[kinds == kind].tolist() for kind in "FWU")
        self.first = forward[0]
        self.gradient = int(blocks[np.isin(kinds, ["B", "I"])][-1])
        self.last = (updates or weights or [self.gradient])[-1]
        self.alone = len(np.unique(once.single_resource[blocks])) == 1  # not Chimera's
        self.work = int(once.duration[blocks].sum())
        late = len(weights)
        memory = int(once.memory[once.single_resource[self.gradient]])
        kept = int(once.free[weights[-1]]) if weights else 0
        if memory and kept:
            held = int(once.acquire[forward[-1]] + once.workspace[self.gradient])
            late = min(late, 1 + max(0, memory - held) // kept)
        deferred = [*weights[len(weights) - late :], *updates]
        self.deferred = int(once.duration[deferred].sum())
