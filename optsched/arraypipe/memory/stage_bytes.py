"""Bytes of a stage: kept from F to B, across its boundary, of parameters, and beside its state."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optsched.arraypipe.memory.budget import StageBytes
from optsched.arraypipe.memory.state import rows_of
from optsched.arraypipe.runtime import blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.arraypipe.job import Tensors
    from optsched.arraypipe.model.inputs import Inputs
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.runtime.losses import Criterion
    from optsched.arraypipe.runtime.state import JobStage


def extra_bytes(runs: Sequence[Any], segment: Segment) -> dict[tuple[int, int], StageBytes]:
    """Bytes in addition to the state, by job and stage of the segment's plan.

    What is kept from F to B was measured by the first forward, on the stages of this process. A job
    whose first forward has failed counts like the largest, as another one may replace it.
    """
    rows = [runs[j].saved for j in segment.slots]
    found = {}
    for place, j in enumerate(segment.slots):
        run = runs[j]
        for stage in run.stages:
            saved, inputs = run.saved.get(stage.index, (0, 0))
            if run.job.error is not None:
                known = [row.get(stage.index, (0, 0)) for row in rows]
                saved, inputs = max(a for a, _ in known), max(b for _, b in known)
            gradients, tied, masters = map(_trained, rows_of(stage))
            found[place, stage.index] = StageBytes(
                gradients, tied, masters, saved, inputs, run.job.recompute
            )
    return found


def measured(stage: JobStage, x: Tensors, batch: Inputs, end: Criterion | None) -> tuple[int, int]:
    """Bytes kept of a micro-batch, without and with recomputation; nothing of the stage changes."""
    before, device = stage.buffers(), stage.device
    stage.set_buffers([buffer.clone() for buffer in before])
    try:
        with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
            return saved_bytes(stage, x, batch, end)[:2]
    finally:
        stage.set_buffers(before)
        stage.kept.clear()


def saved_bytes(
    stage: JobStage, x: Tensors, batch: Inputs, end: Criterion | None
) -> tuple[int, int, Tensors]:
    """Run F; bytes kept until B without and with recomputation, and the output.

    Every storage counts once; those of parameters and buffers not at all. The stage keeps the
    graph, for `blocks.backward`.
    """
    states = {
        t.untyped_storage().data_ptr() for t in (*chain(*rows_of(stage)[:2]), *stage.buffers())
    }
    found: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        _count(t, found, states)
        return t.detach()  # not the tensor itself, which would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        output = blocks.forward(stage, 0, x, batch, 1, end, False)
    inputs: dict[int, int] = {}
    given = (*x, *(batch.tensors() if stage.model.needs_inputs else ()))
    for t in given:
        _count(t, inputs, states)
    for t in (*given, *output):
        _count(t, found, states)
    return sum(found.values()), sum(inputs.values()) + boundary_bytes(stage.buffers()), output


def boundary_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Payload of a message."""
    return sum(t.nbytes for t in tensors if t is not None)


def parameters_bytes(stage: JobStage) -> int:
    """Parameters on the stage, copies of tied ones included."""
    return boundary_bytes(chain(*rows_of(stage)[:2]))


def gradients_bytes(stage: JobStage) -> int:
    """Gradients of all parameters that are trained."""
    return _trained(chain(*rows_of(stage)[:2]))


def state_bytes(stage: JobStage) -> int:
    """Parameters, their masters, buffers, and the state of the optimizer."""
    tensors = [*chain(*rows_of(stage)), *stage.buffers()]
    if stage.optimizer is not None:
        entries = stage.optimizer.state.values()
        tensors += [t for entry in entries for t in entry.values() if isinstance(t, Tensor)]
    return boundary_bytes(tensors)


def _trained(parameters: Iterable[Tensor]) -> int:
    return boundary_bytes(p for p in parameters if p.requires_grad)


def _count(t: Tensor, found: dict[int, int], without: set[int]) -> None:
    """Note the storage of a tensor, unless it has none in plain memory."""
    try:
        storage = t.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and other wrapped tensors
        found[id(t)] = t.numel() * t.element_size()
        return
    if storage.data_ptr() not in without and storage.nbytes():
        found[storage.data_ptr()] = storage.nbytes()
