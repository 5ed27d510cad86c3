"""Lower bounds of the period of a rolling job array."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.model.bounds import frees_in_order, holdings, paths_from
from optsched.problems.jobarray.graph import build
from optsched.problems.jobarray.lap import lap_bound

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


def period_bounds(array: JobArray, recomputes: Sequence[bool]) -> dict[str, int]:
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
    from optsched.problems.jobarray.cycle import cycle_graph

    once = build(array, recomputes)
    return {
        "load": max(device_loads(array, once)),
        "chain": cycle_time(cycle_graph(array, recomputes)).period,
        "lap": lap_bound(array, once),
        "energy": _energy(array, once),
    }


def device_loads(array: JobArray, once: Schedule) -> list[int]:
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


def _switch_loss(array: JobArray, once: Schedule, device: int, job: int) -> int:
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


def _way_back(array: JobArray, once: Schedule, backward: int) -> int:
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
    reach: dict[int, dict[int, int]] = {}
    held = [h for h in holdings(once) if once.memory[h.resource]]
    sound = {r for r in {h.resource for h in held} if frees_in_order(once, r, held, reach)}
    for r, size, i, k in held:
        if r in sound and k >= 0:
            work[once.job[i], r] += size * (reach[i][k] + int(once.duration[k]))
    for i in np.flatnonzero(once.workspace).tolist():
        r = int(once.single_resource[i])
        if once.memory[r]:
            work[once.job[i], r] += int(once.workspace[i]) * int(once.duration[i])
    return work


def _energy(array: JobArray, once: Schedule) -> int:
    """Per capped device: bytes x shortest residence of a whole cycle, over the memory."""
    capped = np.flatnonzero(once.memory).tolist()
    if not capped:
        return 0
    work = array.multiplicity.astype(object) @ job_energy(once)
    return max(-(-int(work[r]) // int(once.memory[r])) for r in capped)
