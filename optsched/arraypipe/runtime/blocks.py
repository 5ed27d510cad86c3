"""The blocks of training on one stage, its first forward, and norms of gradients."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optsched.arraypipe.checkpoint.plain import python_numbers
from optsched.arraypipe.job import Tensors, seed_generator
from optsched.arraypipe.model.inputs import (
    buffer_holders,
    buffers_at,
    copied,
    unchanged,
)
from optsched.arraypipe.runtime.cuda_streams import aligned_copy
from optsched.arraypipe.runtime.state import Kept, Norms, autocast
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.arraypipe.model.inputs import Inputs
    from optsched.arraypipe.runtime.losses import Criterion
    from optsched.arraypipe.runtime.state import JobRun, JobStage


def norms_from(stage: JobStage, later: Norms) -> Norms:
    """Compute the norms of the unscaled gradients of this stage and all later stages."""
    if stage.scaler is not None:
        stage.scaler.unscale(p.grad for _, p in stage.parameters)
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
    found = iter(norms)
    like = present[0] if present else stage.trained[0][1].detach()
    nothing = torch.zeros((), dtype=like.dtype, device=like.device)
    vector = torch.stack([nothing if g is None else next(found) for g in gradients])
    absent = [k for k, g in enumerate(gradients) if g is None]
    absent += [k + len(gradients) for k in later.absent]
    if later.vector is not None:
        vector = torch.cat([vector, later.vector.to(vector)])
    return Norms(vector, tuple(absent))


def total_norm(run: JobRun, norms: Norms) -> Tensor:
    """Norm of all gradients as `torch.nn.utils.get_total_norm` has it on the unsplit model."""
    if norms.vector is None:
        return torch.tensor(0.0)
    rows = norms.vector.unbind()
    present = [rows[k] for k in run.unsplit_order if k not in norms.absent]
    return torch.linalg.vector_norm(torch.stack(present)) if present else torch.tensor(0.0)


def gradients_of(stage: JobStage) -> list[Tensor | None]:
    """Gradients of the parameters as the optimizer will see them."""
    rows = [parameter.grad for _, parameter in stage.parameters]
    if stage.masters is None:
        return rows
    return [g if g is None else g.float() for g in rows]


def forward(
    stage: JobStage,
    microbatch: int,
    x: Tensors,
    batch: Inputs,
    key: int,
    end: Criterion | None,
    recompute: bool,
) -> Tensors:
    """Run the stage on one micro-batch and keep what the backward needs.

    `x` are the hidden states of the stage before; `key` seeds the random numbers, `end` turns the
    output of the last stage into the loss; with `recompute` only the inputs are kept. Inputs and
    outputs are leaves: each has in `requires_grad` whether it needs a gradient in this micro-batch.
    """
    kept = Kept(tuple(map(leaf, x)), batch, key, end)
    if recompute:
        kept.buffers = copied(stage.buffers())
    # with a graph even if it is thrown away: kernels may depend on whether there is one
    output = _run(stage, kept, survive=recompute)
    if not recompute:
        kept.roots = output
    stage.kept[microbatch] = kept
    # the next forward may change a buffer that an output is a view of
    buffers = {_memory(buffer) for buffer in stage.buffers()}
    return tuple(aligned_copy(t) if _memory(t) in buffers else leaf(t) for t in output)


def recompute(stage: JobStage, microbatch: int) -> None:
    """Run the forward again, with the random numbers and buffers it had, and keep its graph.

    The statistics of normalisation layers were updated by F: here the modules point at copies.
    """
    kept = stage.kept[microbatch]
    with buffers_at(stage.holders, kept.buffers):
        kept.roots = _run(stage, kept, survive=False)
    kept.buffers = ()


def backward(
    stage: JobStage,
    microbatch: int,
    gradients: Sequence[Tensor | None] | None,
    tied: Sequence[tuple[Tensor, Tensor]] = (),
) -> tuple[Tensor | None, ...]:
    """Backward of one micro-batch; parameters accumulate, gradients of the inputs are returned."""
    kept = stage.kept.pop(microbatch)
    assert kept.roots is not None, "backward before recompute"
    roots, given = list[Tensor](), list[Tensor]()
    if gradients is None:
        scale = 1.0 if stage.scaler is None else stage.scaler.scale
        roots, given = [kept.roots[0]], [torch.full_like(kept.roots[0], scale)]
    else:
        for root, gradient in chain(zip(kept.roots, gradients, strict=True), tied):
            if gradient is not None and root.requires_grad:
                roots.append(root)
                given.append(gradient)
    if roots:
        torch.autograd.backward(roots, given)
    return tuple(map(kept.gradients.get, range(len(kept.inputs))))


def update(stage: JobStage, clip_norm: float | None, norm: Tensor | None, loss: float) -> None:
    """Step of the stage's optimizer and scheduler, after its last micro-batch."""
    _check_flags(stage)
    finite = stage.scaler is None or norm is None or bool(norm.isfinite())
    if stage.scaler is not None:
        stage.scaler.update(finite)
    if stage.optimizer is not None:
        if stage.masters is not None:
            for (_, master), gradient in zip(stage.masters, gradients_of(stage), strict=True):
                master.grad = gradient
        if clip_norm is not None:
            assert norm is not None
            nn.utils.clip_grads_with_norm_([p for _, p in stage.trained], clip_norm, norm)
        if finite:
            stage.optimizer.step()
        if stage.scheduler is not None:
            stage.scheduler.step(loss) if stage.needs_metric else stage.scheduler.step()
        python_numbers(stage.optimizer, stage.scheduler)
        if stage.masters is not None:
            with torch.no_grad():
                for (_, p), (_, master) in zip(stage.parameters, stage.masters, strict=True):
                    if p.requires_grad:  # else it may be shared
                        p.copy_(master)
                    master.grad = None
    for _, parameter in stage.parameters:
        parameter.grad = None


def rehearse(stage: JobStage, x: Any, batch: Inputs, end: Callable[[Any], Tensor] | None) -> Any:
    """Run one forward of a stage that changes nothing of it, to see the form of its boundary.

    Only that is noted: whether hidden states are tuples, and what is trained. The output is still
    on the graph.
    """
    stage.packed, stage.flags = isinstance(x, tuple), trained_now(stage)
    given = () if x is None else _tensors_of(x, f"stages: the input of stage {stage.index}")
    without = [p for p in stage.used() if p.grad is None]
    with unchanged(stage.modules):
        with shared_unchanged(stage), autocast(stage.precision, stage.device):
            output = stage.run(tuple(leaf(t).clone() for t in given), batch.copied())
        for module, name in buffer_holders(stage.modules):
            if (module, name) not in stage.holders:  # it would be in no checkpoint
                module._buffers[name] = None
                raise InputError(
                    f"stages: the forward of stage {stage.index} makes the buffer {name!r} of a "
                    f"{type(module).__name__}; register it as a tensor when the model is built"
                )
    _check_flags(stage)
    if any(p.grad is not None for p in without):
        raise InputError(
            f"stages: the forward of stage {stage.index} calls backward(): its gradients would "
            f"be added in another order; use torch.autograd.grad"
        )
    if end is not None:
        with unchanged(stage.modules), autocast(stage.precision, stage.device):
            return end(output)
    stage.packs = isinstance(output, tuple)
    _tensors_of(output, f"stages: the output of stage {stage.index}")
    return output


@contextmanager
def shared_unchanged(stage: JobStage) -> Iterator[None]:
    """Refuse a forward that changes a tensor which other jobs have, too."""
    before = [(id(t), t._version) for t in stage.shared_tensors()]
    yield
    now = [(id(t), t._version) for t in stage.shared_tensors()]
    for (_, _, sentence), known, found in zip(stage.shared, before, now, strict=True):
        if known != found:
            raise InputError(
                f"{sentence}, which is changed in stage {stage.index}; make new modules on every "
                f"call, or freeze these and call eval() of them"
            )


def trained_now(stage: JobStage) -> tuple[bool, ...]:
    """`requires_grad` of all parameters that the stage uses."""
    return tuple([p.requires_grad for p in stage.used()])


def leaf(t: Tensor) -> Tensor:
    """The tensor cut off its graph; it still needs a gradient if it did."""
    return t.detach().requires_grad_(t.requires_grad)


def _run(stage: JobStage, kept: Kept, survive: bool) -> Tensors:
    """Run the modules of a stage on the inputs, or on copies of inputs that must `survive`."""
    seed_generator(kept.key, stage.place or stage.device)
    row = [aligned_copy(t) for t in kept.inputs] if survive else kept.inputs
    inputs = tuple(
        _Entry.apply(t, kept.gradients, k) if t.requires_grad else t.detach()  # type: ignore[no-untyped-call]
        for k, t in enumerate(row)
    )
    batch = kept.batch.copied() if survive else kept.batch
    with autocast(stage.precision, stage.device):
        with shared_unchanged(stage) if stage.shared else nullcontext():
            output = stage.run(inputs, batch)
            _check_flags(stage)
        if kept.end is not None:
            return (kept.end(output),)
    place = f"stages: the output of stage {stage.index}"
    if isinstance(output, tuple) != stage.packs:
        forms = ("a tuple", "a tensor")
        raise InputError(
            f"{place} is {forms[stage.packs]}, in the first batch {forms[not stage.packs]}"
        )
    return _tensors_of(output, place)


def _check_flags(stage: JobStage) -> None:
    """Refuse `requires_grad` that has changed: other micro-batches would be trained by it, too."""
    if trained_now(stage) != stage.flags:
        names = [n for n, _ in stage.parameters] + [entry.name for entry in stage.tied]
        rows = zip(names, trained_now(stage), stage.flags, strict=True)
        name = next(name for name, now, then in rows if now != then)
        raise InputError(
            f"stages: requires_grad of {name!r} (stage {stage.index}) has changed since the model "
            f"was built; a job trains the same parameters from its first to its last iteration"
        )


def _tensors_of(x: Any, place: str) -> Tensors:
    """A tensor or tuple of tensors as a tuple; `InputError` for anything else."""
    row = x if isinstance(x, tuple) else (x,)
    for t in row:
        if not isinstance(t, Tensor):
            raise InputError(
                f"{place} is a {type(x).__name__}"
                + (f" with a {type(t).__name__} in it" if isinstance(x, tuple) else "")
                + ", expected a tensor or a tuple of tensors"
            )
    return row


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


class _Entry(torch.autograd.Function):
    """Input of a stage: no leaf, as in the unsplit model, so that layers may change it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: dict[int, Tensor], index: int) -> Tensor:
        ctx.found, ctx.index = found, index
        ctx.set_materialize_grads(False)
        return x.detach()  # the same memory and version, no view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None:
            ctx.found[ctx.index] = gradient.contiguous()  # as alone, see `calls.at_cut`
        return None, None, None
