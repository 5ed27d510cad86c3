"""Bytes of a stage: what is kept from F to B, what crosses its boundary, what a job owns there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optsched.arraypipe import blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.arraypipe.job import JobStage, Tensors


def saved_bytes(
    stage: JobStage, x: Tensors, end: blocks.Criterion | None
) -> tuple[int, int, Tensors]:
    """Run F; bytes kept until B without and with recomputation, and the output.

    Every storage counts once; those of parameters and buffers not at all, as they are there
    anyway. The stage keeps the graph, for `blocks.backward`.
    """
    own = {_place(t) for t in _owned(stage)}
    found: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        _count(t, found, own)
        return t.detach()  # not the tensor itself, which would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        output = blocks.forward(stage, 0, x, 1, end, False)
    inputs: dict[int, int] = {}
    for t in x:
        _count(t, inputs, own)
    for t in (*x, *output):
        _count(t, found, own)
    buffers = sum(t.numel() * t.element_size() for t in stage.buffers())
    return sum(found.values()), sum(inputs.values()) + buffers, output


def boundary_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Payload of a message."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def parameters_bytes(stage: JobStage) -> int:
    """Parameters on the stage, borrowed ones included."""
    return boundary_bytes(_parameters(stage))


def gradients_bytes(stage: JobStage) -> int:
    """Gradients of all parameters that are trained."""
    return boundary_bytes(p for p in _parameters(stage) if p.requires_grad)


def state_bytes(stage: JobStage) -> int:
    """Parameters, their masters, buffers, and the moments of the optimizer."""
    masters: Sequence[Any] = [p for _, p in stage.masters or ()]
    moments: list[Tensor] = []
    if stage.optimizer is not None:
        for entry in stage.optimizer.state.values():
            moments += [value for value in entry.values() if isinstance(value, Tensor)]
    return boundary_bytes([*_owned(stage), *masters, *moments])


def _parameters(stage: JobStage) -> list[Tensor]:
    seen: dict[int, Tensor] = {}
    for module in stage.modules:
        seen.update((id(p), p) for p in module.parameters())
    return list(seen.values())


def _owned(stage: JobStage) -> list[Tensor]:
    return [*_parameters(stage), *stage.buffers()]


def _place(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _count(t: Tensor, found: dict[int, int], without: set[int]) -> None:
    """Note the storage of a tensor, unless it has none that is plain memory."""
    try:
        storage = t.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and other wrapped tensors
        found[id(t)] = t.numel() * t.element_size()
        return
    if storage.data_ptr() not in without and storage.nbytes():
        found[storage.data_ptr()] = storage.nbytes()
