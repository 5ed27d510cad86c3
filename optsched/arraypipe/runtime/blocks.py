"""The blocks of training on one stage, its first forward, and norms of gradients.

Backward may be two blocks: gradients of a stage's inputs (I) first, of its weights (W) later. A
weight's gradient needs the gradients that arrive at the nodes where its branch of the autograd
graph leaves the paths to the inputs. I notes these gradients, W runs the branches with them.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from optsched.arraypipe.checkpoint.plain import python_numbers
from optsched.arraypipe.job import Tensors, seed_generator
from optsched.arraypipe.model.inputs import (
    buffer_holders,
    buffers_at,
    changed_since,
    copied,
    counts_of,
    unchanged,
)
from optsched.arraypipe.runtime.cuda_streams import aligned_copy
from optsched.arraypipe.runtime.state import Kept, Norms, autocast
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
    """Return norm of all gradients as `torch.nn.utils.get_total_norm` has it on the unsplit model.

    The norms come in the order of the stages; they are taken in that of the unsplit model.
    """
    if norms.vector is None:
        return torch.tensor(0.0)
    rows = norms.vector.unbind()
    present = [rows[k] for k in run.unsplit_order if k not in norms.absent]
    return torch.linalg.vector_norm(torch.stack(present)) if present else torch.tensor(0.0)


def gradients_of(stage: JobStage) -> list[Tensor | None]:
    """Return gradients of the parameters as the optimizer will see them."""
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
    split: bool = False,
) -> tuple[Tensor | None, ...]:
    """Backward of one micro-batch; parameters accumulate, gradients of the inputs are returned.

    `gradients` are those of the outputs, None on the last stage; `tied` those of weights that later
    stages use too. With `split` parameters are left to `backward_weights`.
    """
    kept = stage.kept[microbatch] if split else stage.kept.pop(microbatch)
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
    if split:
        kept.branches = backward_input(roots, given, kept.inputs)
    elif roots:
        torch.autograd.backward(roots, given)
    return tuple(map(kept.gradients.get, range(len(kept.inputs))))


def backward_weights(stage: JobStage, microbatch: int) -> None:
    """Accumulate the gradients of the parameters that a split backward has left out."""
    branches = stage.kept.pop(microbatch).branches
    assert branches is not None, "gradients of weights before those of inputs"
    for branch in branches:
        branch.run()


def update(stage: JobStage, clip_norm: float | None, norm: Tensor | None, loss: float) -> None:
    """Step of the stage's optimizer and scheduler, after its last micro-batch.

    Gradients are clipped to `clip_norm` by the `norm` that all of the job have; `loss` is for a
    scheduler that looks at it. Without finite gradients a scaled job makes no step.
    """
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
        before = counts_of(stage.modules)
        with shared_unchanged(stage), autocast(stage.precision, stage.device):
            output = stage.run(tuple(leaf(t).clone() for t in given), batch.copied())
        for module, name in buffer_holders(stage.modules):
            if (module, name) not in stage.holders:  # it would be in no checkpoint
                module._buffers[name] = None
                raise InputError(
                    f"stages: the forward of stage {stage.index} makes the buffer {name!r} of a "
                    f"{type(module).__name__}; register it as a tensor when the model is built"
                )
        stage.forgotten = changed_since(before)
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
    """Return the tensor cut off its graph; it still needs a gradient if it did."""
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
    """Return a tensor or tuple of tensors as a tuple; `InputError` for anything else."""
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
    """Input of a stage: no leaf, as in the unsplit model, so that layers may change it in place.

    The backward takes the gradient before autograd stores it, which would copy it.
    """

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


@dataclass(eq=False)
class Branches:
    """Nodes with common weights below them, and those weights."""

    nodes: list[Node]  # on paths to inputs
    weights: dict[int, Tensor]  # by identity
    arrived: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)  # at the nodes
    outputs: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    """Outputs of the stage that depend on no input, with their gradients."""

    def run(self) -> None:
        """Accumulate the gradients of the weights."""
        pairs = list(self.outputs)
        for node, row in self.arrived.items():
            pairs += [(GradientEdge(node, k), g) for k, g in enumerate(row) if g is not None]
        if not pairs:
            return
        # a path from one node to another would add its gradient a second time
        handles = [
            node.register_prehook(partial(_replaced, row)) for node, row in self.arrived.items()
        ]
        edges, given = zip(*pairs, strict=True)
        try:
            torch.autograd.backward(
                edges, given, retain_graph=True, inputs=list(self.weights.values())
            )
        finally:
            for handle in handles:
                handle.remove()


def _replaced(row: Any, gradients: Any) -> Any:
    return row


def backward_input(
    roots: Sequence[Tensor], given: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Branches]:
    """Run the backward of some outputs down to the inputs only.

    Returns the branches that are to be run for the gradients of the weights.
    """
    leaves = [t for t in inputs if t.requires_grad]
    edges = [get_gradient_edge(root) for root in roots]
    reaches, weights = _below([edge.node for edge in edges], {id(t) for t in leaves})
    branches: list[Branches] = []
    for node, found in weights.items():
        if reaches[node] and found:
            branches = _joined(branches, Branches([node], dict(found)))
    for edge, gradient in zip(edges, given, strict=True):
        if weights[edge.node] and not reaches[edge.node]:
            part = Branches([], dict(weights[edge.node]), outputs=[(edge, gradient)])
            branches = _joined(branches, part)
    handles = [
        node.register_prehook(partial(part.arrived.__setitem__, node))
        for part in branches
        for node in part.nodes
    ]
    inner = [k for k, edge in enumerate(edges) if reaches[edge.node]]
    try:
        if inner:
            torch.autograd.backward(
                [roots[k] for k in inner], [given[k] for k in inner], retain_graph=True,
                inputs=leaves,
            )  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()
    return branches


def _joined(groups: Sequence[Branches], part: Branches) -> list[Branches]:
    """Return the groups with one more, joined to those with which it has weights in common."""
    apart = []
    for group in groups:
        if group.weights.keys() & part.weights.keys():
            part.nodes += group.nodes
            part.weights |= group.weights
            part.outputs += group.outputs
        else:
            apart.append(group)
    return [*apart, part]


def _below(
    roots: Iterable[Node], targets: set[int]
) -> tuple[dict[Node, bool], dict[Node, dict[int, Tensor]]]:
    """By node of a graph whether it leads to the targets, and the weights of branches off that."""
    reaches: dict[Node, bool] = {}
    weights: dict[Node, dict[int, Tensor]] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        children = [child for child, _ in node.next_functions if child is not None]
        below = [child for child in children if child not in reaches]
        if below:
            stack += below
            continue
        leaf: Any = getattr(stack.pop(), "variable", None)
        reaches[node] = id(leaf) in targets or any(reaches[child] for child in children)
        found: dict[int, Tensor] = {}
        if leaf is not None and not reaches[node]:
            found = {id(leaf): leaf}
        for child in children:
            if not reaches[child]:
                found |= weights[child]
        weights[node] = found
    return reaches, weights
