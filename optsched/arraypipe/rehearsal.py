"""The first forward of a job, which changes nothing: what its boundaries look like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.arraypipe import blocks
from optsched.arraypipe.feed import DataEnded, brought
from optsched.arraypipe.stages import in_place
from optsched.arraypipe.worker import reason
from optsched.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from optsched.arraypipe.job_run import JobRun
    from optsched.arraypipe.worker import Worker


def rehearse(run: JobRun, worker: Worker) -> list[tuple[Tensor, ...]]:
    """Run the first micro-batch through all stages; the outputs of each, the loss of the last.

    Raises
    ------
    InputError
        A boundary is not a tensor or a tuple of tensors, or there is not even a first batch.
    JobFailed
        The iterator of the data or the forward raised, or the data end where a checkpoint was
        written: alone the job would have failed there.
    """
    if run.feed is None:
        return []
    outputs: list[tuple[Tensor, ...]] = []
    here = run.stages[0].index
    try:
        run.feed.draw(run.start)
        x = run.feed.input(0, run.stages[0].device)
        needs = (False,) * len(blocks.tensors_of(x, "data: the input"))
        for stage in run.stages:
            here = stage.index
            x = brought(x, stage.device)
            with in_place(stage):
                x = blocks.rehearse(stage, x, needs, worker.criterion(run, stage, 0))
            needs = tuple(t.requires_grad for t in (x if isinstance(x, tuple) else (x,)))
            # the graph goes with its stage
            x = tuple(t.detach() for t in x) if isinstance(x, tuple) else x.detach()
            outputs.append(x if isinstance(x, tuple) else (x,))
    except DataEnded as error:
        if not run.start:
            raise
        raise run.fail(here, run.start, reason(error)) from error
    except InputError:
        raise
    except Exception as error:
        raise run.fail(here, run.start, reason(error)) from error
    return outputs
