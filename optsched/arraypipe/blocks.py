"""The four blocks of training on one stage: forward, recompute, backward, update."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optsched.arraypipe.job import JobStage, Kept, Loss, Tensors, seed_generator
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Criterion:
    """The end of the last stage: the loss of a micro-batch, weighted by its share of the batch."""

    def __init__(self, loss: Loss, target: Any, share: float) -> None:
        self.loss, self.target, self.share = loss, target, share

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

    Parameters
    ----------
    x
        Output of the stage before; the input of the model on stage 0.
    key
        Seed of the random numbers (`Job.key`).
    end
        Turns the output into the loss, on the last stage.
    recompute
        Keep the inputs only.

    Returns
    -------
    Tensors
        The output, cut off the graph; on the last stage the weighted loss.
    """
    leaves = zip(x, stage.needs_gradient, strict=True)
    kept = Kept(tuple(t.detach().requires_grad_(need) for t, need in leaves), key, end)
    if recompute:
        kept.buffers = tuple(buffer.clone() for buffer in stage.buffers())
    # with a graph even if it is thrown away: kernels may depend on whether there is one
    output = _run(stage, kept)
    if not recompute:
        kept.roots = output
    stage.kept[microbatch] = kept
    return tuple(t.detach() for t in output)


def recompute(stage: JobStage, microbatch: int) -> None:
    """Run the forward again, with the random numbers and buffers it had, and keep its graph.

    The statistics of normalisation layers were updated by F: here the modules point at copies.
    """
    kept = stage.kept[microbatch]
    with _borrowed(stage, kept.buffers):
        kept.roots = _run(stage, kept)
    kept.buffers = ()


def backward(
    stage: JobStage, microbatch: int, gradients: Sequence[Tensor | None] | None
) -> tuple[Tensor | None, ...]:
    """Backward of one micro-batch; parameters accumulate, gradients of the inputs are returned.

    `gradients` are those of the outputs, None on the last stage. The gradients of the inputs are
    caught before autograd stores them, because storing may change their strides, and with them
    the kernels that the stage before would run.
    """
    kept = stage.kept.pop(microbatch)
    assert kept.roots is not None, "backward before recompute"
    found: dict[int, Tensor] = {}
    handles = [
        leaf.register_hook(_Catch(found, i))  # type: ignore[no-untyped-call]
        for i, leaf in enumerate(kept.inputs)
        if leaf.requires_grad
    ]
    if gradients is None:
        torch.autograd.backward(kept.roots[0])
    else:
        pairs = [
            (root, gradient)
            for root, gradient in zip(kept.roots, gradients, strict=True)
            if gradient is not None and root.requires_grad
        ]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
    for handle in handles:
        handle.remove()
    return tuple(found.get(i) for i in range(len(kept.inputs)))


def update(stage: JobStage) -> None:
    """Step of the stage's optimizer, after its last micro-batch."""
    if stage.optimizer is not None:
        stage.optimizer.step()
    for module in stage.modules:
        module.zero_grad(set_to_none=True)


def rehearse(stage: JobStage, x: Any, needs: Sequence[bool], end: Criterion | None) -> Any:
    """One forward of a stage that changes nothing of it, to see what its boundary looks like.

    Finds whether the stage changes its input in place: it gets a copy from then on, because a
    leaf of the graph must not change, and recompute would start from a destroyed input.

    Returns
    -------
    Any
        The output, still on the graph; `InputError` if it is not a tensor or a tuple of tensors.
    """
    stage.packed = isinstance(x, tuple)
    stage.needs_gradient = tuple(needs)
    leaves = zip(tensors_of(x, "data: the input"), needs, strict=True)
    with _borrowed(stage, [buffer.clone() for buffer in stage.buffers()]):
        copies = tuple(t.detach().requires_grad_(need).clone() for t, need in leaves)
        versions = [copy._version for copy in copies]
        output = stage.run(copies)
    stage.clones_input = any(c._version != v for c, v in zip(copies, versions, strict=True))
    if end is not None:
        return end(output)
    tensors_of(output, f"stages: the output of stage {stage.index}")
    return output


def tensors_of(x: Any, place: str) -> Tensors:
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


def _run(stage: JobStage, kept: Kept) -> Tensors:
    seed_generator(kept.key)
    inputs = tuple(t.clone() for t in kept.inputs) if stage.clones_input else kept.inputs
    output = stage.run(inputs)
    if kept.end is not None:
        return (kept.end(output),)
    return tensors_of(output, f"stages: the output of stage {stage.index}")


@contextmanager
def _borrowed(stage: JobStage, values: Sequence[Tensor]) -> Iterator[None]:
    """Point the modules at other buffers for a while, and then back at their own."""
    own = stage.buffers()
    stage.set_buffers(values)
    try:
        yield
    finally:
        stage.set_buffers(own)


class _Catch:
    """Tensor hook that notes the gradient and leaves it as it is."""

    def __init__(self, found: dict[int, Tensor], index: int) -> None:
        self.found, self.index = found, index

    def __call__(self, gradient: Tensor) -> None:
        self.found[self.index] = gradient
