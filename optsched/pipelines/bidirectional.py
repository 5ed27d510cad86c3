"""Chimera: two pipelines in opposite directions over the same devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.pipelines.fixed_order import Step, Unit, fixed, one_stage_a_device, repeated

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


def chimera(job: JobArray) -> Schedule:
    """Every other micro-batch runs through the devices in reverse (Li & Hoefler 2021).

    Every device then holds two stages of the model, v and S - 1 - v, each with its weights. The
    order is that of the paper for equal F and B: in slots of one block, F of the k-th micro-batch
    of a direction runs on stage v in slot v + 2k, B in slot 2S - 1 - v + 2k; S micro-batches make
    a unit, and units follow each other 2S slots apart ("direct concatenation").

    Parameters
    ----------
    job
        Stage v on device v, an even number of stages. Odd micro-batches are mirrored here: the
        schedule's graph is that of the job with such a `place` and ``microbatch_order="free"``
        (the two directions do not wait for each other), and an update of its own block instead
        of a fused one. Exchanging gradients between the two copies of the weights takes no time.

    Raises
    ------
    InputError
        An odd number of stages, or a job that is placed otherwise.
    """
    stages = one_stage_a_device(job, "chimera")
    if stages % 2:
        raise InputError(f"chimera: needs an even number of stages, got {stages}")
    both = _mirrored(job)
    return fixed(both, "chimera", repeated(both, lambda units: _steps(both, units)))


def _steps(both: JobArray, units: list[Unit]) -> list[list[Step]]:
    stages = both.n_stages
    ahead = [0, 0]  # micro-batches so far, down and up
    slots: list[list[tuple[int, int, Step]]] = [[] for _ in range(stages)]
    for k, (j, _, m) in enumerate(units):
        devices = both.devices_of(j, m).tolist()
        up = int(devices[0] > 0)
        group, within = divmod(ahead[up], stages // 2)
        ahead[up] += 1
        begin = 2 * stages * group + 2 * within
        for v in range(stages):
            slots[devices[v]].append((begin + v, k, Step("F", k, v)))
            slots[devices[v]].append((begin + 2 * stages - 1 - v, k, Step("B", k, v)))
    return [[step for *_, step in sorted(row)] for row in slots]


def _mirrored(job: JobArray) -> JobArray:
    """The job with every other micro-batch, counted through all jobs, in the other direction."""
    down = tuple(range(job.n_stages))
    place, k = [], 0
    for micro_batches in job.micro_batches.tolist():
        place.append([down[::-1] if (k + m) % 2 else down for m in range(micro_batches)])
        k += micro_batches
    fused = job.update_mode == "fused" and job.update.any()
    mode = "block" if fused else job.update_mode
    return job.replace(place=place, microbatch_order="free", update_mode=mode)
