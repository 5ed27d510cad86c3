"""Lower bounds of a job array's period, and what recomputing costs in time and saves in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.model.bounds import family_changes, makespan_bound
from optsched.model.graph import evaluate
from optsched.model.memory_bounds import least_time, paths_from, residences
from optsched.model.schedule import Arcs, Csr, Schedule
from optsched.problems.jobarray.graph import build

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.problems.jobarray.fields import JobArrayFields

    Floats = npt.NDArray[np.float64]
    Flags = npt.NDArray[np.bool_]

STEPS: Final = 300
"""Weightings of the bounds that are tried."""

ROUNDING: Final = 1e-9
"""Share by which sums of floats may be too large."""


def period_bounds(array: JobArrayFields, recomputes: Sequence[bool]) -> dict[str, int]:
    """Lower bounds of the least period, by name.

    Returns
    -------
    dict
        ``load``: the busiest device, with the switches that no order avoids. ``chain``: the
        longest way round through all iterations of one job. ``lap``: the longest that one job with
        several micro-batches takes alone. ``energy``: bytes x time that a cycle needs, over the
        memory there is.
    """
    from optsched.kernels.cycle_ratio import cycle_time

    once = build(array, recomputes)
    return {
        "load": max(device_loads(array, once)),
        "chain": cycle_time(build(array, recomputes, cyclic=True)).period,
        "lap": lap_bound(array, once),
        "energy": _energy(array, once),
    }


def device_loads(array: JobArrayFields, once: Schedule) -> list[int]:
    """Per device its durations in a cycle, and the least time that changing jobs takes there."""
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
    """What changing to and from a job takes at least per cycle on a device that others use too.

    One change, always. Where the job has one F and one B a cycle, also a second change or the wait
    that avoids it: between F and B, or between B and the next F, nothing else may run then.
    """
    on = once.users[device]
    mine = on[once.job[on] == job]
    switch = int((once.setup_in + once.setup_out)[mine].min())
    once_each = sorted(once.kind[mine].tolist()) == ["B", "F"] and array.multiplicity[job] == 1
    if not once_each or once.stage[mine[0]] != once.stage[mine[1]]:
        return switch
    forward, backward = mine.tolist() if once.kind[mine[0]] == "F" else mine[::-1].tolist()
    there = max(0, paths_from(once, forward)[backward] - int(once.duration[forward]))
    return switch + min(switch, there, _way_back(array, once, backward))


def _way_back(array: JobArrayFields, once: Schedule, backward: int) -> int:
    """Least time from the end of a job's only B on a stage to its next F there."""
    behind = paths_from(once, backward)
    job, stage = int(once.job[backward]), int(once.stage[backward])
    mine = np.flatnonzero(once.job == job)
    longest = int(once.duration[backward])
    for first in mine[once.kind[mine] == "F"].tolist():
        there = paths_from(once, first)
        forward = next(i for i in mine.tolist() if once.kind[i] == "F" and once.stage[i] == stage)
        last = [i for i in behind if once.stage[i] == once.stage[first] and once.kind[i] in "BU"]
        if forward in there:
            for i in last:
                way = behind[i] + int(once.duration[i]) + there[forward]
                longest = max(longest, way)
    return longest - int(once.duration[backward])


def job_energy(once: Schedule) -> npt.NDArray[np.object_]:
    """Bytes x shortest residence of one iteration of every job on every capped device.

    Returns
    -------
    numpy.ndarray
        Python integers, shape (jobs, devices). Of holdings that another order may end sooner only
        the workspaces count.
    """
    work = np.zeros((int(once.job.max(initial=-1)) + 1, once.n_resources), object)
    for r, size, i, _, time in residences(once):
        work[once.job[i], r] += size * time
    return work


def _energy(array: JobArrayFields, once: Schedule) -> int:
    """Per capped device the least time that the residences of a whole cycle need."""
    alike: dict[int, dict[int, int]] = {}
    for r, size, i, _, time in residences(once):
        sizes = alike.setdefault(r, {})
        sizes[size] = sizes.get(size, 0) + time * int(array.multiplicity[once.job[i]])
    least = (least_time(sizes, int(once.memory[r])) for r, sizes in alike.items())
    return max(least, default=0)


def lap_bound(array: JobArrayFields, once: Schedule) -> int:
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
        op_resources=Csr(np.arange(len(kept) + 1), once.single_resource[kept]),
        duration=counted[kept],
        arcs=Arcs(number[tail], number[head], lags, np.zeros(len(tail), np.int64)),
        **columns,
    )


def window_bound(once: Schedule, mine: npt.NDArray[np.int64]) -> int:
    """The longest that one iteration of a job keeps any stage: its work there and what is idle.

    From the first forward block of an iteration to that of the next lies all work of the stage,
    and the window. Within the window only weight gradients and updates run: those of the last k
    micro-batches, where k - 1 of them fit the memory beside what the last gradient block needs.

    Parameters
    ----------
    once
        Graph of one iteration; each job's micro-batches in fixed order.
    mine
        The operations of the job.
    """
    stages = [_Stage(once, mine[once.stage[mine] == v]) for v in np.unique(once.stage[mine])]
    ways = [paths_from(once, stage.first) for stage in stages]
    longest = 0
    for v, stage in enumerate(stages):
        behind = paths_from(once, stage.gradient)
        returns = [
            behind[stages[u].last] + int(once.duration[stages[u].last]) + ways[u][stage.first]
            for u in range(v + 1)
            if stages[u].last in behind and stage.first in ways[u]
        ]
        window = max(returns, default=0) - int(once.duration[stage.gradient])
        if stage.alone:
            longest = max(longest, stage.work + max(0, window - stage.put_off))
    return longest


class _Stage:
    """One job's blocks on one stage; ids ascend with the micro-batches."""

    def __init__(self, once: Schedule, blocks: npt.NDArray[np.int64]) -> None:
        def of_kind(*kinds: str) -> list[int]:
            found: list[int] = blocks[np.isin(once.kind[blocks], kinds)].tolist()
            return found

        forward, weights, updates = of_kind("F"), of_kind("W"), of_kind("U")
        self.first = forward[0]
        self.gradient = of_kind("B", "I")[-1]
        self.last = (updates or weights or [self.gradient])[-1]
        self.alone = len(np.unique(once.single_resource[blocks])) == 1  # not Chimera's
        self.work = int(once.duration[blocks].sum())
        late = len(weights)
        memory = int(once.memory[once.single_resource[self.gradient]])
        kept = int(once.free[weights[-1]]) if weights else 0
        if memory and kept:
            beside = int(once.acquire[forward[-1]] + once.workspace[self.gradient])
            late = min(late, 1 + max(0, memory - beside) // kept)
        put_off = [*weights[len(weights) - late :], *updates]
        self.put_off = int(once.duration[put_off].sum())


@dataclass(frozen=True)
class Tradeoff:
    """Bounds of the objective that are linear in the choice; rows: loads, then energies."""

    base: Floats
    """What no job adds, shape (rows,)."""
    kept: Floats
    """What every job adds without recomputation, shape (K, rows)."""
    again: Floats
    """The same with it."""
    energy: Flags
    """Which rows are about bytes, shape (rows,)."""
    must: Flags
    """Jobs that recompute in any case, shape (K,)."""
    never: Flags
    """Jobs that recompute in no case."""

    def rows(self, choice: npt.ArrayLike, packing: float = 1.0) -> Floats:
        """All bounds of a choice (of shares in 0..1 too), energies times `packing`."""
        share = np.asarray(choice, np.float64)
        parts = share @ self.again + (1 - share) @ self.kept
        rows: Floats = self.base + parts * np.where(self.energy, packing, 1.0)
        return rows

    def bound(self, choice: npt.ArrayLike) -> int:
        """A lower bound of the objective with this choice."""
        return int(np.ceil(self.rows(choice).max() * (1 - ROUNDING)))

    def relaxed(self, packing: float = 1.0) -> tuple[float, Floats]:
        """A bound for every choice, and shares of jobs that nearly meet it.

        The rows are weighted, and every job chooses what is less in the weighted sum: that bounds
        the least largest row from below whatever the weights. Rows that come out large gain weight
        (multiplicative weights; Arora, Hazan & Kale 2012).

        Parameters
        ----------
        packing
            How much more than bytes x time the memory has to offer; a bound only if 1.
        """
        scale = np.where(self.energy, packing, 1.0)
        base, kept, again = self.base, self.kept * scale, self.again * scale
        best, total = 0.0, np.zeros(len(self.must))
        largest = max(1.0, float(self.rows(self.must, packing).max()))
        log_weight = np.zeros(len(base))
        for step in range(STEPS):
            weight = np.exp(log_weight - log_weight.max())
            weight /= weight.sum()
            share = np.where(again @ weight < kept @ weight, 1.0, 0.0)
            share[self.must], share[self.never] = 1.0, 0.0
            rows = base + share @ again + (1 - share) @ kept
            best = max(best, float(weight @ rows))
            if step >= STEPS // 2:
                total += share
            log_weight += rows / largest * (10 / np.sqrt(step + 1))
        return best * (1 - ROUNDING), total / (STEPS - STEPS // 2)


def tradeoff(array: JobArrayFields, must: Flags, never: Flags) -> Tradeoff:
    """Loads and energies of an array whose recomputation is to be chosen.

    Parameters
    ----------
    array
        Any array; its own `recompute_mode` does not count.
    must, never
        Jobs that recompute in any case, and in no case; shape (K,).
    """
    ways = [build(array, [way] * array.n_jobs) for way in (False, True)]
    periodic = array.objective == "period"
    times = array.multiplicity if periodic else np.ones_like(array.multiplicity)
    capped = np.flatnonzero(array.memory)
    room = array.memory[capped].astype(object)
    kept, again = (
        np.hstack([
            durations(graph, array.n_jobs) * times[:, None],
            (job_energy(graph)[:, capped] * times[:, None] / room).astype(np.float64),
        ])
        for graph in ways
    )  # fmt: skip
    if periodic:
        plain = kept[:, : array.n_devices].sum(axis=0)
        base = np.append(device_loads(array, ways[0]) - plain, np.zeros(len(capped)))
    else:
        ends, changes = _around(ways[0])
        base = np.append(ends + changes, ends[capped])
    energy = np.arange(len(base)) >= array.n_devices
    return Tradeoff(base, kept, again, energy, must, never)


def durations(graph: Schedule, jobs: int) -> Floats:
    """Time of every job's blocks on every device, shape (jobs, devices)."""
    total = np.zeros((jobs, graph.n_resources))
    placed = graph.single_resource >= 0
    np.add.at(total, (graph.job[placed], graph.single_resource[placed]), graph.duration[placed])
    return total


def _around(graph: Schedule) -> tuple[Floats, Floats]:
    """Per device the least time before its first and behind its last block, and all its setups."""
    paths = evaluate(graph)
    ends, changes = np.zeros((2, graph.n_resources))
    for d in range(graph.n_resources):
        on = graph.users[d]
        if len(on):
            ends[d] = paths.head[on].min() + (paths.tail[on] - graph.duration[on]).min()
            changes[d] = family_changes(graph, on)
    return ends, changes
