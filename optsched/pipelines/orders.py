"""One stage a device, one block of the model a stage: vanilla, GPipe, 1F1B."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.pipelines.fixed_order import Step, fixed, one_stage_a_device, repeated

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


def vanilla(job: JobArray) -> Schedule:
    """One micro-batch after another through the whole pipeline: nothing overlaps.

    Parameters
    ----------
    job
        Stage v on device v. Of several jobs the micro-batches follow each other, as in all orders.
    """
    stages = one_stage_a_device(job, "vanilla")
    rows = repeated(job, lambda units: [
        [s for k in range(len(units)) for s in (Step("F", k, v), Step("B", k, v))]
        for v in range(stages)
    ])  # fmt: skip
    return fixed(job, "vanilla", rows)


def gpipe(job: JobArray, *, reverse: bool = False) -> Schedule:
    """All forward blocks, then all backward blocks, on every stage (Huang et al. 2019).

    Parameters
    ----------
    job
        Stage v on device v.
    reverse
        Backward from the last micro-batch to the first, as in the paper; torch goes forward. Needs
        ``microbatch_order="free"``. Makespan and activations are the same.

    Raises
    ------
    InputError
        `reverse`, but the job demands ascending micro-batches.
    """
    stages = one_stage_a_device(job, "gpipe")
    if reverse and job.microbatch_order == "fixed":
        raise InputError(
            'gpipe: reverse needs a job with microbatch_order="free", this one has "fixed"'
        )
    rows = repeated(job, lambda units: _gpipe_steps(stages, len(units), reverse))
    return fixed(job, "gpipe", rows)


def _gpipe_steps(stages: int, n: int, reverse: bool) -> list[list[Step]]:
    back = range(n)[::-1] if reverse else range(n)
    return [
        [*(Step("F", k, v) for k in range(n)), *(Step("B", k, v) for k in back)]
        for v in range(stages)
    ]


def one_f_one_b(job: JobArray) -> Schedule:
    """Stage s of S runs min(m, S - s) forward blocks, then one backward, one forward.

    DAPPLE (Fan et al. 2021), PipeDream-Flush (Narayanan et al. 2021); torch's `Schedule1F1B`.
    """
    stages = one_stage_a_device(job, "one_f_one_b")
    rows = repeated(job, lambda units: one_f_one_b_steps(stages, len(units)))
    return fixed(job, "one_f_one_b", rows)


def one_f_one_b_steps(stages: int, n: int) -> list[list[Step]]:
    """The steps of 1F1B for n micro-batches."""
    rows = []
    for v in range(stages):
        ahead = min(n, stages - v)
        row = [Step("F", k, v) for k in range(ahead)]
        for k in range(n):
            row.append(Step("B", k, v))
            if ahead + k < n:
                row.append(Step("F", ahead + k, v))
        rows.append(row)
    return rows
