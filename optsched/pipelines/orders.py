"""Orders by hand with one stage a device: vanilla, GPipe, 1F1B, zero bubble, Chimera."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.pipelines.fixed_order import Step, Unit, check_array, one_stage_a_device, ordered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


def vanilla(job: JobArray) -> Schedule:
    """Run one micro-batch after another through the whole pipeline: nothing overlaps.

    Of several jobs the micro-batches follow each other, as in all orders.

    Examples
    --------
    >>> from optsched import pipelines
    >>> job = optsched.JobArray([[1] * 4], [[2] * 4], micro_batches=8)
    >>> pipelines.vanilla(job).makespan, pipelines.gpipe(job).makespan
    (96, 33)
    """
    stages = one_stage_a_device(job, "vanilla")
    return ordered(job, "vanilla", lambda units: steps_ahead([1] * stages, len(units)))


def gpipe(job: JobArray, *, reverse: bool = False) -> Schedule:
    """Run all forward blocks, then all backward blocks, on every stage (Huang et al. 2019).

    Parameters
    ----------
    reverse
        Backward from the last micro-batch to the first, as in the paper; torch goes forward. Needs
        ``microbatch_order="free"``. Makespan and activations are the same.

    Examples
    --------
    >>> from optsched import pipelines
    >>> job = optsched.JobArray([[1] * 4], [[2] * 4], micro_batches=8)
    >>> schedule = pipelines.gpipe(job)
    >>> schedule.makespan, float(pipelines.idle_share(schedule))
    (33, 0.2727272727272727)
    """
    stages = one_stage_a_device(job, "gpipe")
    if reverse and job.microbatch_order == "fixed":
        raise InputError(
            'gpipe: reverse needs a job with microbatch_order="free", this one has "fixed"'
        )

    def rows(units: Sequence[Unit]) -> list[list[Step]]:
        n = len(units)
        ascending = steps_ahead([n] * stages, n)
        return [row[:n] + row[n:][::-1] for row in ascending] if reverse else ascending

    return ordered(job, "gpipe", rows)


def one_f_one_b(job: JobArray) -> Schedule:
    """Run min(m, S - s) forward blocks on stage s of S, then one backward, one forward.

    DAPPLE (Fan et al. 2021), PipeDream-Flush (Narayanan et al. 2021); torch's `Schedule1F1B`.

    Examples
    --------
    >>> from optsched import pipelines
    >>> times = {"forward": [[1] * 4], "backward": [[2] * 4], "micro_batches": 8}
    >>> job = optsched.JobArray(**times, activation=1, memory=[4, 3, 2, 1])
    >>> optsched.verify(pipelines.one_f_one_b(job), problem=job)
    []
    """
    ahead = range(one_stage_a_device(job, "one_f_one_b"), 0, -1)
    return ordered(job, "one_f_one_b", lambda units: steps_ahead(ahead, len(units)))


def zb_h1(job: JobArray) -> Schedule:
    """Run 1F1B with the weight gradients of stage s put off by s (ZB-H1, Qi et al. 2024).

    Stage s of S runs S - s forward blocks ahead, then I, W of s micro-batches earlier, F. So every
    device holds at most S micro-batches until their W, and S - s until their I.
    The job has `weight` (the backward pass split in I and W).

    Examples
    --------
    >>> from optsched import pipelines
    >>> job = pipelines.uniform("zb_h1", stages=4, micro_batches=8)
    >>> pipelines.zb_h1(job).makespan
    54
    """
    return _zero_bubble(job, "zb_h1", 1)


def zb_h2(job: JobArray) -> Schedule:
    """Run twice the forward blocks ahead: no bubble in the rhythm (ZB-H2, Qi et al. 2024).

    Stage s runs 2(S - s) - 1 forward blocks ahead and puts weight gradients off by 2s; every
    device holds at most 2S - 1 micro-batches until their W. Within one iteration the devices still
    begin one after the other; without idle time they are with ``objective="period"``, where a
    device begins the next iteration as soon as it has ended its own.

    Examples
    --------
    >>> from optsched import pipelines
    >>> job = pipelines.uniform("zb_h2", stages=4, micro_batches=8, forward=2, backward=2, weight=2)
    >>> pipelines.zb_h2(job.with_objective("period")).period  # 8 micro-batches of 6, no bubble
    48
    """
    return _zero_bubble(job, "zb_h2", 2)


def _zero_bubble(job: JobArray, name: str, times: int) -> Schedule:
    check_array(job, name)
    if job.weight is None:
        raise InputError(
            f"{name}: needs weight blocks; give the job its input gradients as backward=... and "
            "its weight gradients as weight=..."
        )
    stages = one_stage_a_device(job, name)
    ahead = [times * (stages - s - 1) + 1 for s in range(stages)]
    return ordered(job, name, lambda units: steps_ahead(ahead, len(units), split=True))


def steps_ahead(ahead: Sequence[int], n: int, split: bool = False) -> list[list[Step]]:
    """One forward, one backward in turn, after so many forward blocks ahead, of every stage.

    With `split` backward is I alone, and W follows as many micro-batches later as the stage runs
    fewer blocks ahead than the first one.
    """
    rows = []
    for v, first in enumerate(ahead):
        late = min(n, ahead[0] - first)
        row = [Step("F", k, v) for k in range(min(n, first))]
        for k in range(n):
            row.append(Step("I" if split else "B", k, v))
            if split and k >= late:
                row.append(Step("W", k - late, v))
            if first + k < n:
                row.append(Step("F", first + k, v))
        if split:
            row += [Step("W", k, v) for k in range(n - late, n)]
        rows.append(row)
    return rows


def chimera(job: JobArray) -> Schedule:
    """Run every other micro-batch through the devices in reverse (Li & Hoefler 2021).

    Every device then holds two stages of the model, v and S - 1 - v, each with its weights. The
    order is that of the paper for equal F and B: in slots of one block, F of the k-th micro-batch
    of a direction runs on stage v in slot v + 2k, B in slot 2S - 1 - v + 2k; S micro-batches make
    a unit, and units follow each other 2S slots apart ("direct concatenation").

    The number of stages is even. Odd micro-batches are mirrored here: the schedule's graph is that
    of the job with such a `place` and ``microbatch_order="free"`` (the two directions do not wait
    for each other), and an update block instead of a fused one. Exchanging gradients between the
    two copies of the weights takes no time.

    Examples
    --------
    >>> from optsched import pipelines
    >>> job = pipelines.uniform("chimera", stages=4, micro_batches=8)
    >>> pipelines.chimera(job).makespan, pipelines.one_f_one_b(job).makespan
    (60, 66)
    """
    stages = one_stage_a_device(job, "chimera")
    if stages % 2:
        raise InputError(f"chimera: needs an even number of stages, got {stages}")
    both = _mirrored(job)
    return ordered(both, "chimera", lambda units: _chimera_steps(both, units))


def _chimera_steps(both: JobArray, units: list[Unit]) -> list[list[Step]]:
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
