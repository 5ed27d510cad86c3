"""The four blocks of training on one stage, its first forward, and norms of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optsched.arraypipe.checkpoint.plain import python_numbers
from optsched.arraypipe.job import Loss, Tensors, seed_generator
from optsched.arraypipe.model.checks import buffers_at, copied, unchanged
from optsched.arraypipe.model.tied_weights import buffer_holders
from optsched.arraypipe.runtime.types import Kept, Norms, tensors_of
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.graph import Node

    from optsched.arraypipe.runtime.state import JobRun, JobStage


def own_norms(stage: JobStage, later: Norms) -> Norms:
    """Norms of the gradients of this stage and all later ones."""
    gradients = gradients_of(stage)
    present = [g for g in gradients if g is not None]
    if not gradients:
        return later
    # as `get_total_norm` has them: on a GPU many at once, which other kernels do
    norms = (
        torch._foreach_norm(present)
        if present and present[0].is_cuda
        else [torch.linalg.vector_norm(g) for g in present]
    )
    rest = iter(norms)
    like = present[0] if present else stage.trained[0][1].detach()
    nothing = torch.zeros((), dtype=like.dtype, device=like.device)
    vector = torch.stack([nothing if g is None else next(rest) for g in gradients])
    absent = [k for k, g in enumerate(gradients) if g is None]
    absent += [k + len(gradients) for k in later.absent]
    if later.vector is not None:
        vector = torch.cat([vector, later.vector.to(vector)])
    return Norms(vector, tuple(absent))


def total_norm(run: JobRun, norms: Norms) -> Tensor:
    """Norm of all gradients as `torch.nn.utils.get_total_norm` has it on the unsplit model.

    The norms come in the order of the stages; they are taken in that of the unsplit model.
    """
    if norms.vector is None:
        return torch.tensor(0.0)
    rows, absent = norms.vector.unbind(), frozenset(norms.absent)
    present = [rows[k] for k in run.unsplit_order if k not in absent]
    return torch.linalg.vector_norm(torch.stack(present)) if present else torch.tensor(0.0)


def gradients_of(stage: JobStage) -> list[Tensor | None]:
    """Gradients of the parameters as the optimizer will see them."""
    rows = [parameter.grad for _, parameter in stage.parameters]
    if stage.masters is None:
        return rows
    return [g if g is None else g.float() for g in rows]


@dataclass(frozen=True, eq=False)
class Criterion:
    """The end of the last stage: the loss of a micro-batch, weighted by its share of the batch."""

    loss: Loss
    target: Any
    share: float

    def __call__(self, output: Any) -> Tensor:
        """Part of the iteration's loss."""
        value = self.loss(output, self.target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError("loss: expected a function that returns a tensor with one element")
        return value * self.share


def forward(
    stage: JobStage, microbatch: int, x: Tensors, key: int, end: Criterion | None, recompute: bool
) -> Tensors:
    """Run the stage on one micro-batch and keep what the backward needs.

    `key` seeds the random numbers, `end` turns the output of the last stage into the loss; with
    `recompute` only the inputs are kept. The output is cut off the graph.
    """
    if len(x) != len(stage.needs_gradient):
        raise InputError(
            f"stage {stage.index} had {len(stage.needs_gradient)} inputs, now {len(x)}"
        )
    leaves = map(Tensor.requires_grad_, map(Tensor.detach, x), stage.needs_gradient)
    kept = Kept(tuple(leaves), key, end)
    if recompute:
        kept.buffers = copied(stage.buffers())
    # with a graph even if it is thrown away: kernels may depend on whether there is one
    output = _run(stage, kept)
    if not recompute:
        kept.roots = output
    stage.kept[microbatch] = kept
    sent = tuple(map(Tensor.detach, output))
    return tuple(map(Tensor.clone, sent)) if stage.clones_output else sent


def recompute(stage: JobStage, microbatch: int) -> None:
    """Run the forward again, with the random numbers and buffers it had, and keep its graph.

    The statistics of normalisation layers were updated by F: here the modules point at copies.
    """
    kept = stage.kept[microbatch]
    with buffers_at(stage.holders, kept.buffers):
        kept.roots = _run(stage, kept)
    kept.buffers = ()


def backward(
    stage: JobStage,
    microbatch: int,
    gradients: Sequence[Tensor | None] | None,
    tied: Sequence[tuple[Tensor, Tensor]] = (),
) -> tuple[Tensor | None, ...]:
    """Backward of one micro-batch; parameters accumulate, gradients of the inputs are returned.

    `gradients` are those of the outputs, None on the last stage; `tied` those of weights that later
    stages borrow. The gradients of the inputs are caught before autograd stores them: storing
    copies them and may change their strides, and with them the kernels of the stage before.
    """
    kept = stage.kept.pop(microbatch)
    assert kept.roots is not None, "backward before recompute"
    found: dict[int, Tensor] = {}
    nodes = []  # kept here: a leaf that no graph uses would lose its node, and the hook with it
    for i, leaf in enumerate(kept.inputs):
        if leaf.requires_grad:
            nodes.append(_accumulator(leaf))
            nodes[-1].register_prehook(partial(_catch, found, i))
    if gradients is None:
        torch.autograd.backward(kept.roots[0])
    else:
        roots, given = [], []
        for root, gradient in chain(zip(kept.roots, gradients, strict=True), tied):
            if gradient is not None and root.requires_grad:
                roots.append(root)
                given.append(gradient)
        if roots:
            torch.autograd.backward(roots, given)
    return tuple(map(found.get, range(len(kept.inputs))))


def update(stage: JobStage, clip_norm: float | None, norm: Tensor | None, loss: float) -> None:
    """Step of the stage's optimizer and scheduler, after its last micro-batch.

    Gradients are clipped to `clip_norm` by the `norm` that all of the job have; `loss` is for a
    scheduler that looks at it.
    """
    if stage.optimizer is not None:
        if stage.masters is not None:
            for (_, master), gradient in zip(stage.masters, gradients_of(stage), strict=True):
                master.grad = gradient
        if clip_norm is not None:
            assert norm is not None
            nn.utils.clip_grads_with_norm_([p for _, p in stage.trained], clip_norm, norm)
        stage.optimizer.step()
        if stage.scheduler is not None:
            stage.scheduler.step(loss) if stage.needs_metric else stage.scheduler.step()
        python_numbers(stage.optimizer, stage.scheduler)
        if stage.masters is not None:
            with torch.no_grad():
                for (_, parameter), (_, master) in zip(
                    stage.parameters, stage.masters, strict=True
                ):
                    parameter.copy_(master)
                    master.grad = None
    for _, parameter in stage.parameters:
        parameter.grad = None


def rehearse(stage: JobStage, x: Any, needs: Sequence[bool], end: Criterion | None) -> Any:
    """One forward of a stage that changes nothing of it, to see what its boundary looks like.

    A stage that changes its input in place gets a copy from then on: a leaf of the graph must not
    change, and recompute would start from a destroyed input. The output is still on the graph.
    """
    stage.packed = isinstance(x, tuple)
    stage.needs_gradient = tuple(needs)
    given = tensors_of(x, "data: the input")
    leaves = zip(given, needs, strict=True)
    with unchanged(stage.modules):
        copies = tuple(t.detach().requires_grad_(need).clone() for t, need in leaves)
        versions = [copy._version for copy in copies]
        output = stage.run(copies)
        _check_buffers(stage)
        row = output if isinstance(output, tuple) else (output,)
        own = {b.untyped_storage().data_ptr() for b in stage.buffers()}
        stage.clones_output = any(
            isinstance(t, Tensor) and t.untyped_storage().data_ptr() in own for t in row
        )
    stage.clones_input = any(c._version != v for c, v in zip(copies, versions, strict=True))
    if stage.clones_input and len({t.untyped_storage().data_ptr() for t in given}) < len(given):
        raise InputError(
            f"stages: stage {stage.index} changes its input in place, and two of its inputs are "
            f"views of one tensor; put the in-place layer before the cut, or make it inplace=False"
        )
    if end is not None:
        return end(output)
    tensors_of(output, f"stages: the output of stage {stage.index}")
    return output


def _check_buffers(stage: JobStage) -> None:
    """Refuse buffers that come into being in a forward: they would be in no checkpoint."""
    known = {(id(module), name) for module, name in stage.holders}
    for module, name in buffer_holders(stage.modules):
        if (id(module), name) not in known:
            module._buffers[name] = None
            raise InputError(
                f"stages: the forward of stage {stage.index} makes the buffer {name!r} of a "
                f"{type(module).__name__}; register it as a tensor when the model is built"
            )


def _run(stage: JobStage, kept: Kept) -> Tensors:
    seed_generator(kept.key, stage.place or stage.device)
    inputs = tuple(map(Tensor.clone, kept.inputs)) if stage.clones_input else kept.inputs
    output = stage.run(inputs)
    if kept.end is not None:
        return (kept.end(output),)
    return tensors_of(output, f"stages: the output of stage {stage.index}")


def _accumulator(leaf: Tensor) -> Node:
    """The node that stores the gradient of a leaf (`get_gradient_edge` takes twice as long)."""
    view = leaf.view_as(leaf).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    return node


def _catch(found: dict[int, Tensor], index: int, gradients: tuple[Tensor | None, ...]) -> Any:
    """Hook before `AccumulateGrad` that takes the gradient, so that nothing is stored."""
    if gradients[0] is not None:
        found[index] = gradients[0]
    return (None,)
