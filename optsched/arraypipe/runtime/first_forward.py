"""The first forward of a job: forms of its boundaries, and a loss that can be trained exactly."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from optsched.arraypipe.memory.stage_bytes import measured
from optsched.arraypipe.model.inputs import mapped, tensors_in
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.runtime.data import DataEnded, brought, cast, inputs_of, target_of
from optsched.arraypipe.runtime.losses import (
    Comparison,
    Criterion,
    NotMean,
    check_trained,
    evaluating,
    first_comparison,
    loss_in,
)
from optsched.arraypipe.runtime.stages import in_place
from optsched.arraypipe.runtime.worker import reason
from optsched.errors import OptschedError

if TYPE_CHECKING:
    from torch import Tensor

    from optsched.arraypipe.job import Tensors
    from optsched.arraypipe.runtime.state import JobRun, JobStage
    from optsched.arraypipe.runtime.worker import Worker


class FirstForward(Protocol):
    """How the first forward of a job passes from rank to rank."""

    def is_local(self, stage: int) -> bool:
        """Whether a stage is trained here."""

    def receive(self, stage: int) -> Any:
        """The output of a stage of another rank; None if it has failed."""

    def send(self, stage: int, output: Any) -> None:
        """Send the output of a local stage to the next one, if that is on another rank."""

    def close(self) -> None:
        """Wait until everything has left."""


class Whole:
    """All stages are in this process."""

    def is_local(self, stage: int) -> bool:
        """They are."""
        return True

    def receive(self, stage: int) -> Any:
        """Nothing arrives."""

    def send(self, stage: int, output: Any) -> None:
        """Nothing leaves."""

    def close(self) -> None:
        """Nothing is under way."""


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
        if isinstance(error, NotMean):
            raise NotMean(f"job {run.title}: {error}") from None
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
        first = end and partial(_first_loss, run, stage, worker, end)
        given = () if x is None else x if isinstance(x, tuple) else (x,)
        x = blocks.rehearse(stage, x, batch, first)
        if stage.last:
            _compare_last_stage(run, worker, given)
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


def _first_loss(
    run: JobRun, stage: JobStage, worker: Worker, end: Criterion, output: Any
) -> Tensor:
    """Compute the loss of the first micro-batch; refuse one that cannot be trained exactly."""
    assert run.feed is not None
    value, parts = end(output), run.feed.parts
    trained = [p for _, p in stage.parameters] + [entry.parameter for entry in stage.tied]
    check_trained(value, tensors_in(output), trained)
    if len(parts) > 1 and end.loss is not None:
        loss, device = end.loss, stage.device
        modules = [loss] if isinstance(loss, nn.Module) else []

        def head(inputs: Any, part: Any) -> Tensor:
            with evaluating(modules):
                return loss(inputs, brought(target_of(part), device))

        upcast = run.loss_module is None or run.job.precision != "bf16"
        comparison = Comparison(head, worker.factors(run), upcast)
        if first_comparison(comparison, parts, mapped(output, torch.Tensor.detach)):
            run.compare_loss = comparison.check
    return value


def _compare_last_stage(run: JobRun, worker: Worker, hidden: Tensors) -> None:
    """Compare the first batch with its micro-batches, with the model's own loss."""
    assert run.feed is not None
    stage, feed = run.stages[-1], run.feed
    if len(feed.parts) < 2 or stage.loss is not None or not stage.last:
        return
    entries = len(feed.inputs[0].arguments) > 1

    def head(inputs: Any, part: Any) -> Tensor:
        batch = brought(cast(inputs_of(part, entries), run.job.precision), stage.device)
        with evaluating(stage.modules):
            return loss_in(stage.run(inputs, batch))

    first_comparison(Comparison(head, worker.factors(run), False), feed.parts, hidden)
