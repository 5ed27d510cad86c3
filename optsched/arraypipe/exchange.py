"""What stages of a job owe each other beyond activations: tied weights, norms for clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from optsched.arraypipe.job import Norms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from optsched.arraypipe.job import JobStage, Tensors
    from optsched.arraypipe.job_run import JobRun


def weights_to_send(run: JobRun, stage: JobStage, user: int) -> Tensors:
    """Values of the weights that the next stage to use them borrows from this one (no copies).

    They do not change before the user's backward has come back, so they may be read late.
    """
    return tuple(stage.weight(name).detach() for name in run.lent[stage.index, user])


def receive_weights(
    run: JobRun, stage: JobStage, lender: int, values: Sequence[Tensor | None]
) -> None:
    """Bring the borrowed copies up to date."""
    with torch.no_grad():
        for name, value in zip(run.lent[lender, stage.index], values, strict=True):
            assert value is not None
            stage.weight(name).copy_(value)


def take_borrowed(stage: JobStage) -> dict[str, Tensor | None]:
    """Gradients on the borrowed copies, of one micro-batch or all; the copies keep none."""
    found: dict[str, Tensor | None] = {}
    for entry in stage.borrowed:
        found[entry.name] = entry.parameter.grad
        entry.parameter.grad = None
    return found


def tied_roots(
    run: JobRun, stage: JobStage, tied: Sequence[tuple[int, Sequence[Tensor | None]]]
) -> list[tuple[nn.Parameter, Tensor]]:
    """Weights that later stages borrow, with the gradients that have come from there.

    They become roots of this stage's backward, so that autograd adds them before the stage's own
    uses, as it does alone: sums of floating point numbers depend on the order.

    Parameters
    ----------
    tied
        Pairs (user stage, gradients of its copies), of one micro-batch or summed over all.
    """
    return [
        (stage.weight(name), gradient)
        for user, gradients in tied
        for name, gradient in zip(run.lent[stage.index, user], gradients, strict=True)
        if gradient is not None
    ]


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
    like = present[0] if present else gradients_like(stage)
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


def gradients_like(stage: JobStage) -> Tensor:
    """A tensor with the type and the device of the gradients that the optimizer will see."""
    return stage.trained[0][1].detach()


def load_masters(stage: JobStage) -> None:
    """Give the float32 masters the gradients of the bfloat16 weights."""
    assert stage.masters is not None
    for (_, master), gradient in zip(stage.masters, gradients_of(stage), strict=True):
        master.grad = gradient


def store_masters(stage: JobStage) -> None:
    """Round the masters into the weights."""
    assert stage.masters is not None
    with torch.no_grad():
        for (_, parameter), (_, master) in zip(stage.parameters, stage.masters, strict=True):
            parameter.copy_(master)
            master.grad = None
