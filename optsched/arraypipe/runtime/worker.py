"""Running one block of a plan on one device: what it receives, does and sends."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from traceback import format_tb
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from optsched.arraypipe.model.inputs import Inputs
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.runtime.losses import Criterion, Weight, factors_of
from optsched.arraypipe.runtime.stages import move
from optsched.arraypipe.runtime.state import Norms, NotFinite, Payload, PeerLost
from optsched.errors import InternalError, OptschedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from optsched.arraypipe.distributed.replicas import Replicas
    from optsched.arraypipe.job import Loss
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Block, Copied, Instance
    from optsched.arraypipe.runtime.cuda_streams import Pause
    from optsched.arraypipe.runtime.state import JobRun, JobStage


Payloads: TypeAlias = "Mapping[int, Payload]"  # by message
# not the fault of a job, or of a device that does nothing any more: the array cannot go on
_FATAL = (InternalError, PeerLost, getattr(torch, "AcceleratorError", InternalError))


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

    def enter(self, job: int, stage: int, kind: str, now: Instance) -> JobStage:
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
    """Executes blocks, in an order that a backend chooses."""

    runs: Sequence[JobRun]  # all jobs
    memory: Memory  # where their states are
    loss: Loss | None
    on_update: Callable[[JobRun, int, int], None]  # after every update: run, stage, iteration
    # when the loss of an iteration is known, before its backward: what the caller decides now holds
    # for the next iteration
    on_loss: Callable[[JobRun, int, float], None]
    weight: Weight = None  # of micro-batches
    limited: bool = False  # the first forward measures what stages keep
    excluded_ns: int = 0  # of the last block for batches and callbacks, not its work
    interrupted: bool = False  # every job ends with its iteration
    replicas: Replicas | None = None  # of this process's stages

    def execute(self, segment: Segment, now: Instance, received: Payloads) -> dict[int, Payload]:
        """Run a block on what its messages brought; the messages that it sends, by their index.

        A block of a job that has ended sends tombstones. One that raises ends its job and no other.
        """
        operation, _, iteration = now
        block, memory = segment.plan.blocks[operation], self.memory
        run = self.runs[segment.slots[block.job]]
        for payload in received.values():
            if payload.flags:
                run.receive_flags(payload.flags, iteration)
        begins = block.kind == "F" and block.stage == 0 and not block.microbatch
        if begins and self.stops(run):
            run.stop_after(iteration - 1)
        if iteration < run.end:
            try:
                stage = memory.enter(run.index, block.stage, block.kind, now)
                sent = self._run(segment, now, run, stage, received)
            except _FATAL:
                raise
            except Exception as error:
                run.fail(block.stage, iteration, reason(error)).__cause__ = unbound(error)
                memory.leave(run.index, block.stage, block.kind)
            else:
                self._report(block, run, iteration, segment.plan.updates[operation], stage.last)
                if memory.moves:
                    memory.leave(run.index, block.stage, block.kind)
                return sent
        tombstone = Payload((), run.final_flags())
        return dict.fromkeys(segment.routes.outputs[operation], tombstone)

    def stops(self, run: JobRun) -> bool:
        """Whether a job ends with its iteration; replicas stop together, between segments."""
        return self.replicas is None and (self.interrupted or run.job.life.stopping)

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
        """Return the loss of a micro-batch, on the last stage."""
        if not stage.last:
            return None
        feed = run.feed
        assert feed is not None
        if feed.weigh is None:
            feed.weigh = factors_of(self.loss, self.weight, run.model)
        feed.factors = feed.factors or feed.weigh(feed.parts)
        return Criterion(stage.loss, target, feed.factors[m])

    def _run(
        self, segment: Segment, now: Instance, run: JobRun, stage: JobStage, received: Payloads
    ) -> dict[int, Payload]:
        block, plan, replicas = segment.plan.blocks[now.operation], segment.plan, self.replicas
        kind, sent = block.kind, dict[int, Payload]()
        if kind == "F":
            return self._forward(segment, now, run, stage, received)
        if kind == "R":
            blocks.recompute(stage, block.microbatch)
        elif kind == "B":
            sent = self._backward(segment, now, run, stage, received)
        elif kind == "W":
            blocks.backward_weights(stage, block.microbatch)
            if replicas is not None and block.microbatch == plan.microbatches[block.job] - 1:
                replicas.start(run.index, stage)
        if plan.updates[block.operation]:
            if replicas is not None:
                replicas.finish(run.index, stage)
            if kind != "U" and self.memory.moves:  # the rest of the state is needed only now
                stage = self.memory.enter(run.index, block.stage, "U", now)
            norm, metric = run.total_norm, run.metric
            for payload in received.values() if kind == "U" else ():
                norm, metric = payload.tensors[0], payload.loss
            blocks.update(stage, run.job.clip_norm, norm, metric)
        return sent

    def _forward(
        self, segment: Segment, now: Instance, run: JobRun, stage: JobStage, received: Payloads
    ) -> dict[int, Payload]:
        block, messages = segment.plan.blocks[now.operation], segment.routes.messages
        m, x = block.microbatch, tuple[Any, ...]()
        for k, payload in received.items():
            if messages[k].kind == "activation":
                x = payload.tensors
                continue
            names = run.tied_pairs[segment.plan.blocks[messages[k].producer].stage, stage.index]
            _take_weights(stage, names, payload.tensors)
        batch, target = self._microbatch(run, stage, m, now.iteration)
        recomputed = run.job.recompute or (block.job, stage.index) in segment.plan.recomputed
        first = 0 if self.replicas is None else self.replicas.index * run.job.microbatches
        key = run.job.key(now.iteration, first + m, stage.index)
        end = self.criterion(run, stage, m, target)
        output = blocks.forward(stage, m, x, batch, key, end, recomputed)
        if stage.last:
            run.note_loss(output[0])
        flags, sent = run.flags(now.iteration), {}
        for k in segment.routes.outputs[now.operation]:
            tensors = output
            if messages[k].kind == "weight":  # it does not change before that stage's B is back
                user = segment.plan.blocks[messages[k].consumer].stage
                names = run.tied_pairs[stage.index, user]
                tensors = tuple(stage.weight(name).detach() for name in names)
                if self.memory.moves:
                    tensors = tuple(t.clone() for t in tensors)
            sent[k] = Payload(tensors, flags)
        return sent

    def _microbatch(
        self, run: JobRun, stage: JobStage, m: int, iteration: int
    ) -> tuple[Inputs, Any]:
        """Return inputs and target of a micro-batch; drawing the batch is no time of the block."""
        if not (stage.last or stage.model.needs_inputs):
            return Inputs(), None
        assert run.feed is not None
        if run.feed.iteration != iteration:
            began_ns = time.perf_counter_ns()
            run.feed.draw(iteration)
            self.excluded_ns += time.perf_counter_ns() - began_ns
        if stage.model.needs_inputs:
            return run.feed.microbatch(m, stage.device)
        return Inputs(), run.feed.target(m, stage.device)

    def _backward(
        self, segment: Segment, now: Instance, run: JobRun, stage: JobStage, received: Payloads
    ) -> dict[int, Payload]:
        block, messages = segment.plan.blocks[now.operation], segment.routes.messages
        m, ends = block.microbatch, now.operation in segment.plan.last_backwards
        if stage.last and ends:
            run.metric = run.losses[-1] if run.losses else math.nan
            if self.replicas is not None and run.needs_metric:
                run.metric = self.replicas.mean(run.metric)
        gradients, tied = _gradients(segment, run, stage, received, ends)
        if stage.kept[m].roots is None:
            blocks.recompute(stage, m)
        split = (block.job, stage.index) in segment.plan.split
        returned = blocks.backward(stage, m, gradients, tied, split)
        copies = {}  # gradients of the copies of tied weights
        for entry in stage.tied:
            copies[entry.name], entry.parameter.grad = entry.parameter.grad, None
        if self.replicas is not None and ends and not split:
            self.replicas.start(run.index, stage)
            if run.job.needs_norm:
                self.replicas.finish(run.index, stage)
        norms = Norms()
        if ends and run.job.needs_norm:
            norms = blocks.norms_from(stage, stage.later_norms)
            returned = (*returned, norms.vector)
            if stage.index == 0:
                run.total_norm = blocks.total_norm(run, norms)
        loss = run.metric if ends else math.nan
        flags, sent = run.flags(now.iteration) if ends else 0, {}
        for k in segment.routes.outputs[now.operation]:
            if messages[k].kind == "gradient":
                sent[k] = Payload(returned, flags, loss, norms.absent)
            elif messages[k].kind == "tied":
                names = run.tied_pairs[segment.plan.blocks[messages[k].consumer].stage, stage.index]
                sent[k] = Payload(tuple(copies[name] for name in names), flags)
            else:
                sent[k] = Payload((run.total_norm,), flags, loss)
        return sent

    def _report(self, block: Block, run: JobRun, iteration: int, updated: bool, last: bool) -> None:
        """Callbacks after a last forward or an update, outside of what may fail a job."""
        began_ns = time.perf_counter_ns()
        if block.kind == "F" and last:
            self.report_loss(run)
        elif updated:
            run.updates += 1
            if run.job.life.status == "failed":
                run.drop_kept()
            self.on_update(run, block.stage, iteration)
        self.excluded_ns += time.perf_counter_ns() - began_ns

    def report_loss(self, run: JobRun) -> None:
        """Report the newest known loss once; the caller may stop the job on it."""
        iteration = run.start + len(run.losses) - 1
        if iteration <= run.reported:
            return
        run.reported = iteration
        self.on_loss(run, iteration, run.losses[-1])
        if self.stops(run):
            run.stop_after(iteration + bool(run.unread))  # a loss read late has a successor begun


def _take_weights(stage: JobStage, names: Sequence[str], values: Sequence[Tensor | None]) -> None:
    """Copy tied weights of an earlier stage into this stage's."""
    shared = set(map(id, stage.shared_tensors()))
    with torch.no_grad():
        for name, value in zip(names, values, strict=True):
            assert value is not None
            if id(weight := stage.weight(name)) not in shared:  # else it is frozen, and has them
                weight.copy_(value)


def _gradients(
    segment: Segment, run: JobRun, stage: JobStage, received: Payloads, ends: bool
) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Gradients of the outputs (None on the last stage), and of tied weights of later stages."""
    gradients: Any = None
    tied: list[tuple[Tensor, Tensor]] = []
    for k, payload in received.items():
        message = segment.routes.messages[k]
        if message.kind == "gradient":
            gradients = payload.tensors
            if ends:
                run.metric = payload.loss
                if run.job.needs_norm:
                    *gradients, vector = gradients
                    stage.later_norms = Norms(vector, payload.absent)
            continue
        names = run.tied_pairs[stage.index, segment.plan.blocks[message.producer].stage]
        pairs = zip(names, payload.tensors, strict=True)
        tied += [(stage.weight(name), g) for name, g in pairs if g is not None]
    return gradients, tied


def unbound(error: BaseException) -> BaseException:
    """Remove the frames of an error, which keep tensors alive; the traceback becomes a note."""
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is not None and found.__traceback__ is not None:
            found.add_note("".join(format_tb(found.__traceback__)).rstrip())
            found.__traceback__ = None
            pending += [found.__cause__, found.__context__]
    return error


def reason(error: BaseException) -> str:
    """Return why a block failed, in words."""
    if isinstance(error, (OptschedError, NotFinite)):
        return str(error)
    return f"{type(error).__name__}: {error}"
