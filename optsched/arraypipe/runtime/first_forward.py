"""The first forward of a job: forms of its boundaries, and a loss that stages can train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched.arraypipe.memory.state import measured
from optsched.arraypipe.model.inputs import tensors_in
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.runtime.data import DataEnded, brought
from optsched.arraypipe.runtime.losses import check_trained
from optsched.arraypipe.runtime.stages import in_place
from optsched.arraypipe.runtime.worker import reason
from optsched.errors import OptschedError

if TYPE_CHECKING:
    from torch import Tensor

    from optsched.arraypipe.runtime.state import JobRun, JobStage
    from optsched.arraypipe.runtime.worker import Worker


class FirstForward:
    """How the first forward of a job passes on; here all stages are in this process."""

    def is_local(self, stage: int) -> bool:
        """Whether a stage is trained here."""
        return True

    def receive(self, stage: int) -> Any:
        """The output of a stage of another rank; None if it has failed."""

    def send(self, stage: int, output: Any) -> None:
        """Send the output of a local stage to the next one, if that is on another rank."""


def rehearse(run: JobRun, worker: Worker, chain: FirstForward) -> None:
    """Run the first micro-batch through the local stages.

    `InputError`: a boundary is not a tensor or a tuple of tensors, or there is not even a first
    batch. `JobFailed`: alone the job would have failed there too.
    """
    if run.feed is None:
        return
    here, x = 0, None
    try:
        run.feed.draw(run.start)
        failed = False  # on the rank of an earlier stage
        for stage in run.stages:
            here = stage.index
            if not chain.is_local(here):
                continue
            if here and not chain.is_local(here - 1):
                x = chain.receive(here - 1)
                failed = x is None
            if not failed:
                x = _rehearsed(run, worker, stage, x)
            chain.send(here, None if failed else x)
    except Exception as error:
        pass_over(run, chain, here)
        if isinstance(error, OptschedError) and not (isinstance(error, DataEnded) and run.start):
            raise
        raise run.fail(here, run.start, reason(error)) from error


def _rehearsed(run: JobRun, worker: Worker, stage: JobStage, x: Any) -> Any:
    """The output of a stage on the first micro-batch, cut off its graph."""
    assert run.feed is not None
    x = brought(x, stage.device)
    with in_place(stage):
        batch, target = run.feed.microbatch(0, stage.device)
        end = worker.criterion(run, stage, 0, target)

        def loss(output: Any) -> Tensor:
            assert end is not None
            value = end(output)
            trained = [p for _, p in stage.parameters] + [entry.parameter for entry in stage.tied]
            check_trained(value, tensors_in(output), trained)
            return value

        given = () if x is None else x if isinstance(x, tuple) else (x,)
        x = blocks.rehearse(stage, x, batch, end and loss)
        if worker.limited:
            run.saved[stage.index] = measured(stage, given, batch, end)
    return tuple(map(blocks.leaf, x)) if isinstance(x, tuple) else blocks.leaf(x)


def pass_over(run: JobRun, chain: FirstForward, failed: int = -1) -> None:
    """Send later ranks an empty first forward of a job after a stage has failed."""
    for stage in run.stages[max(0, failed) :]:
        here = stage.index
        if chain.is_local(here):
            if here > max(0, failed) and not chain.is_local(here - 1):
                chain.receive(here - 1)
            chain.send(here, None)
