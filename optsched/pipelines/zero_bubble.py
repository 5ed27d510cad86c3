"""ZB-H1 and ZB-H2: weight gradients wait until nothing else can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.pipelines.fixed_order import Step, check_array, fixed, one_stage_a_device, repeated

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


def zb_h1(job: JobArray) -> Schedule:
    """ZB-H1 (Qi et al. 2024, section 2): 1F1B whose stage s puts weight gradients off by s.

    Stage s of S runs S - s forward blocks ahead, then I, W of s micro-batches earlier, F. So every
    device holds at most S micro-batches until their W, and S - s until their I.

    Parameters
    ----------
    job
        Stage v on device v, with `weight` (the backward pass split in I and W).
    """
    stages = _split(job, "zb_h1")
    ahead = [stages - s for s in range(stages)]
    return fixed(job, "zb_h1", repeated(job, lambda units: _steps(stages, len(units), ahead)))


def zb_h2(job: JobArray) -> Schedule:
    """ZB-H2 (Qi et al. 2024, section 2): twice the forward blocks ahead, no bubble in the rhythm.

    Stage s runs 2(S - s) - 1 forward blocks ahead and puts weight gradients off by 2s; every
    device holds at most 2S - 1 micro-batches until their W. Within one iteration the devices still
    begin one after the other; without idle time they are with ``objective="period"``, where a
    device begins the next iteration as soon as it has ended its own.

    Parameters
    ----------
    job
        As for `zb_h1`.
    """
    stages = _split(job, "zb_h2")
    ahead = [2 * (stages - s) - 1 for s in range(stages)]
    return fixed(job, "zb_h2", repeated(job, lambda units: _steps(stages, len(units), ahead)))


def _steps(stages: int, n: int, ahead: list[int]) -> list[list[Step]]:
    """I, W, F in turn after `ahead[v]` forward blocks; stage v's W lags behind by what it lacks."""
    rows = []
    for v in range(stages):
        row = [Step("F", k, v) for k in range(min(n, ahead[v]))]
        late = min(n, ahead[0] - ahead[v])
        for k in range(n):
            row.append(Step("I", k, v))
            if k >= late:
                row.append(Step("W", k - late, v))
            if ahead[v] + k < n:
                row.append(Step("F", ahead[v] + k, v))
        row += [Step("W", k, v) for k in range(n - late, n)]
        rows.append(row)
    return rows


def _split(job: JobArray, name: str) -> int:
    check_array(job, name)
    if job.weight is None:
        raise InputError(
            f"{name}: needs weight blocks; give the job its input gradients as backward=... and "
            "its weight gradients as weight=..."
        )
    return one_stage_a_device(job, name)
