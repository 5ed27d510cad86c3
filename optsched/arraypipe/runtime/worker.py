"""Running one block of a plan on one device: what it receives, does and sends."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from traceback import format_tb
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import nn

from optsched.arraypipe.model.inputs import Inputs, mapped, tensors_in
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.runtime.blocks import own_norms, total_norm
from optsched.arraypipe.runtime.data import DataEnded, brought, cast, inputs_of, target_of
from optsched.arraypipe.runtime.losses import (
    Comparison,
    Criterion,
    NotMean,
    Weight,
    check_trained,
    evaluating,
    factors_of,
    first_comparison,
    loss_in,
)
from optsched.arraypipe.runtime.stages import in_place, move
from optsched.arraypipe.runtime.state import NotFinite
from optsched.arraypipe.runtime.types import Norms, Parcel
from optsched.errors import InputError, InternalError, OptschedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from optsched.arraypipe.job import Loss, Tensors
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Block, Copied, Instance
    from optsched.arraypipe.runtime.losses import Factors
    from optsched.arraypipe.runtime.state import JobRun, JobStage
    from optsched.arraypipe.runtime.types import Pause


Parcels: TypeAlias = "Mapping[int, Parcel]"  # by message
# not the fault of a job, or of a device that does nothing any more: the array cannot go on
_FATAL = (InternalError, getattr(torch, "AcceleratorError", InternalError))


class Memory:
    """Where the states of the jobs are: here each on its device, a switch is an index into a list.

    `optsched.arraypipe.memory.manager` has another one.
    """

    moves = False  # whether a state may leave its place while another job's block runs
    limits: Any = None  # what is known of bytes (`memory.budget.Limits`); None: all states fit

    def __init__(self, runs: Sequence[JobRun]) -> None:
        self.runs = runs

    @property
    def exposed_ns(self) -> int:
        """Time that blocks have waited for copies of states so far."""
        return 0

    @property
    def copies(self) -> Sequence[Copied]:
        """Copies of states so far."""
        return ()

    def pauses(self) -> Sequence[Pause]:
        """Events around what blocks have waited for on GPUs since the last call."""
        return ()

    def enter(self, job: int, stage: int, kind: str, now: Instance | None) -> JobStage:
        """Make the state of a job on a stage usable for a block."""
        found = self.runs[job].stages[stage]
        if found.away:  # it is new on its device
            move(found, found.device)
        return found

    def leave(self, job: int, stage: int, kind: str) -> None:
        """The block is over."""

    def forget(self, before_ns: int) -> None:
        """Forget the times of copies that ended before a time."""

    def close(self) -> None:
        """Put all states back where `JobRun.stages` has them."""


@dataclass(eq=False)
class Worker:
    """Executes blocks; which ones and in which order is the business of a backend."""

    runs: Sequence[JobRun]  # all jobs
    memory: Memory  # where their states are
    loss: Loss | None
    on_update: Callable[[JobRun, int, int], None]  # after every update: run, stage, iteration
    # when the loss of an iteration is known, before its backward: what the caller decides now holds
    # for the next iteration
    on_loss: Callable[[JobRun, int, float], None]
    weight: Weight = None  # of micro-batches
    aside_ns: int = 0  # of the last block for batches and callbacks, not its work
    interrupted: bool = False  # every job ends with its iteration

    def execute(self, segment: Segment, now: Instance, received: Parcels) -> dict[int, Parcel]:
        """Run a block on what its messages brought; the messages that it sends, by their index.

        A block of a job that has ended sends tombstones. One that raises ends its job and no other.
        """
        operation, _, iteration = now
        block = segment.plan.blocks[operation]
        kind, place, memory = block.kind, block.stage, self.memory
        run = self.runs[segment.seats[block.job]]
        for parcel in received.values():
            if parcel.flags:
                run.hear(parcel.flags, iteration)
        begins = kind == "F" and place == 0 and not block.microbatch
        if begins and (self.interrupted or run.job.life.stopping):
            run.stop_after(iteration - 1)
        if iteration < run.end:
            try:
                stage = memory.enter(run.index, place, kind, now)
                sent = self._run(segment, now, run, stage, received)
            except _FATAL:
                raise
            except Exception as error:
                run.fail(place, iteration, reason(error)).__cause__ = unbound(error)
                memory.leave(run.index, place, kind)
            else:
                if segment.plan.reported[operation]:
                    began_ns = time.perf_counter_ns()
                    self._report(block, run, iteration)
                    self.aside_ns += time.perf_counter_ns() - began_ns
                if memory.moves:
                    memory.leave(run.index, place, kind)
                return sent
        tombstone = Parcel((), run.last_word())
        return dict.fromkeys(segment.routes.outputs[operation], tombstone)

    def finish(self) -> None:
        """Read losses that a device was still computing; put all states back."""
        for run in self.runs:
            if run.unread:
                try:
                    run.read_loss()
                except ArithmeticError as error:
                    run.fail(len(run.stages) - 1, run.start + len(run.losses), reason(error))
                else:
                    self.report_loss(run)
        self.memory.close()

    def criterion(self, run: JobRun, stage: JobStage, m: int, target: Any) -> Criterion | None:
        """The loss of a micro-batch, on the last stage."""
        if not stage.last:
            return None
        assert run.feed is not None
        if run.weighed != run.feed.iteration:
            run.weighed, factors = run.feed.iteration, self.factors(run)
            run.factors = factors(run.feed.parts)
        return Criterion(stage.loss, target, run.factors[m])

    def factors(self, run: JobRun) -> Factors:
        """The weights of a job's micro-batches."""
        return factors_of(self.loss, self.weight, run.model)

    def _run(
        self, segment: Segment, now: Instance, run: JobRun, stage: JobStage, received: Parcels
    ) -> dict[int, Parcel]:
        block = segment.plan.blocks[now.operation]
        kind = block.kind
        if kind == "F":
            return self._forward(segment, now, run, stage, received)
        if kind == "R":
            blocks.recompute(stage, block.microbatch)
            return {}
        if kind == "W":
            blocks.backward_weights(stage, block.microbatch)
        sent = self._backward(segment, now, run, stage, received) if kind == "B" else {}
        if segment.plan.updates[block.operation]:
            if kind != "U" and self.memory.moves:  # the rest of the state is needed only now
                stage = self.memory.enter(run.index, block.stage, "U", now)
            norm, metric = run.total_norm, run.metric
            for parcel in received.values() if kind == "U" else ():
                norm, metric = parcel.tensors[0], parcel.loss
            blocks.update(stage, run.job.clip_norm, norm, metric)
        return sent

    def _forward(
        self, segment: Segment, now: Instance, run: JobRun, stage: JobStage, received: Parcels
    ) -> dict[int, Parcel]:
        block = segment.plan.blocks[now.operation]
        m, iteration, messages = block.microbatch, now.iteration, segment.routes.messages
        index, last = stage.index, stage.last
        x: Any = ()
        for k, parcel in received.items():
            message = messages[k]
            if message.kind == "activation":
                x = parcel.tensors
            else:
                lender = segment.plan.blocks[message.producer].stage
                with torch.no_grad():
                    for name, value in zip(run.lent[lender, index], parcel.tensors, strict=True):
                        assert value is not None
                        weight = stage.weight(name).copy_(value)
                        weight.requires_grad_(value.requires_grad)
        batch, target = Inputs(), None
        if stage.needs_batch:
            assert run.feed is not None
            if run.feed.iteration != iteration:
                began_ns = time.perf_counter_ns()
                run.feed.draw(iteration)
                self.aside_ns += time.perf_counter_ns() - began_ns
            batch, target = run.feed.microbatch(m, stage.device)
        recomputed = run.job.recompute or (block.job, index) in segment.plan.recomputed
        key = run.job.key(iteration, m, index)
        end = self.criterion(run, stage, m, target) if last else None
        if end is not None and run.compare_loss is not None and not m:
            assert run.feed is not None
            end = replace(end, check=partial(run.compare_loss, run.feed.parts, iteration))
        fixed = _fixed(run, stage, m)
        output = blocks.forward(stage, m, x, batch, key, end, recomputed)
        for name, trained in fixed.items():
            if stage.weight(name).requires_grad != trained:
                raise InputError(
                    f"stages: the forward of stage {index} changes requires_grad of {name!r}, "
                    f"which stages share, in micro-batch {m}; change it between iterations"
                )
        if last:
            run.note_loss(output[0])
        word = run.word(iteration)
        sent = {}
        for k in segment.routes.outputs[now.operation]:
            message = messages[k]
            if message.kind == "activation":
                sent[k] = Parcel(output, word)
            else:
                user = segment.plan.blocks[message.consumer].stage
                # they do not change before the user's backward has come back: may be read late
                weights = [stage.weight(name) for name in run.lent[index, user]]
                values = [weight.detach() for weight in weights]
                if self.memory.moves:
                    values = [value.clone() for value in values]
                for value, weight in zip(values, weights, strict=True):
                    value.requires_grad_(weight.requires_grad)
                sent[k] = Parcel(tuple(values), word)
        return sent

    def _backward(
        self, segment: Segment, now: Instance, run: JobRun, stage: JobStage, received: Parcels
    ) -> dict[int, Parcel]:
        block = segment.plan.blocks[now.operation]
        m, messages = block.microbatch, segment.routes.messages
        ends = now.operation in segment.plan.last_backwards
        clips = run.job.needs_norm
        gradients: Any = None
        if stage.last and ends:
            run.metric = run.losses[-1] if run.losses else math.nan
        # weights that later stages borrow, with the gradients from there: as roots of this backward
        # autograd adds them before the stage's own uses, as it does alone
        tied = []
        for k, parcel in received.items():
            message = messages[k]
            if message.kind != "gradient":
                user = segment.plan.blocks[message.producer].stage
                for name, gradient in zip(run.lent[stage.index, user], parcel.tensors, strict=True):
                    if gradient is not None:
                        tied.append((stage.weight(name), gradient))
                continue
            gradients = parcel.tensors
            if ends:
                run.metric = parcel.loss
                if clips:
                    *gradients, vector = gradients
                    stage.later_norms = Norms(vector, parcel.absent)
        if stage.kept[m].roots is None:
            blocks.recompute(stage, m)
        split = (block.job, stage.index) in segment.plan.split
        returned = blocks.backward(stage, m, gradients, tied, split)
        borrowed = {}  # gradients of the copies
        for entry in stage.borrowed:
            borrowed[entry.name], entry.parameter.grad = entry.parameter.grad, None
        norms = Norms()
        if ends and clips:
            norms = own_norms(stage, stage.later_norms)
            returned = (*returned, norms.vector)
            if stage.index == 0:
                run.total_norm = total_norm(run, norms)
        loss = run.metric if ends else math.nan
        word = run.word(now.iteration) if ends else 0
        sent = {}
        for k in segment.routes.outputs[now.operation]:
            message = messages[k]
            if message.kind == "gradient":
                sent[k] = Parcel(returned, word, loss, norms.absent)
            elif message.kind == "tied":
                lender = segment.plan.blocks[message.consumer].stage
                names = run.lent[lender, stage.index]
                sent[k] = Parcel(tuple(borrowed[name] for name in names), word)
            else:
                sent[k] = Parcel((run.total_norm,), word, loss)
        return sent

    def _report(self, block: Block, run: JobRun, iteration: int) -> None:
        """Callbacks after a last forward or an update, outside of what may fail a job."""
        if block.kind == "F":
            self.report_loss(run)
        else:
            run.updates += 1
            if run.job.life.status == "failed":
                run.drop_kept()
            self.on_update(run, block.stage, iteration)

    def report_loss(self, run: JobRun) -> None:
        """Tell the newest loss that is known, once; the caller may stop the job on it."""
        iteration = run.start + len(run.losses) - 1
        if iteration <= run.reported:
            return
        run.reported = iteration
        self.on_loss(run, iteration, run.losses[-1])
        if run.job.life.stopping:
            run.stop_after(iteration + bool(run.unread))  # a loss read late has a successor begun


def _fixed(run: JobRun, stage: JobStage, microbatch: int) -> dict[str, bool]:
    """`requires_grad` of the tied weights for which a forward may not change it.

    It travels with them, once an iteration, behind the forward of the stage that owns them.
    """
    names = [entry.name for entry in stage.borrowed]
    if microbatch:
        names += [name for pair, row in run.lent.items() if pair[0] == stage.index for name in row]
    return {name: stage.weight(name).requires_grad for name in names}


def unbound(error: BaseException) -> BaseException:
    """The error without frames, which would keep the tensors and jobs of the whole run alive.

    Where it was raised is a note of it.
    """
    rest: list[BaseException | None] = [error]
    while rest:
        found = rest.pop()
        if found is None or found.__traceback__ is None:
            continue
        found.add_note("".join(format_tb(found.__traceback__)).rstrip())
        found.__traceback__ = None
        rest += [found.__cause__, found.__context__]
    return error


def reason(error: BaseException) -> str:
    """Why a block failed, in words."""
    if isinstance(error, (OptschedError, NotFinite)):
        return str(error)
    return f"{type(error).__name__}: {error}"


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
    return tuple(map(blocks.leaf, x)) if isinstance(x, tuple) else blocks.leaf(x)


def pass_over(run: JobRun, chain: FirstForward, failed: int = -1) -> None:
    """Tell later ranks that there is no first forward of a job, because a stage has failed."""
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
    trained = [p for _, p in stage.parameters] + [entry.parameter for entry in stage.borrowed]
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
