"""Stages of a model against the model itself: loss and all gradients on the first batch."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import set_stance

from optsched.arraypipe.job import seed_generator
from optsched.arraypipe.model.calls import at_cut, cut_alone, hooks, stage_models
from optsched.arraypipe.model.inputs import mapped, tensors_in
from optsched.arraypipe.model.optimizers import same
from optsched.arraypipe.model.unchanged import unchanged
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.model.calls import Cut, StageModel
    from optsched.arraypipe.model.inputs import Inputs

    MakeLoss = Callable[[Any], Tensor]
    Gradients = dict[str, Tensor | None]

_SEED = 1 << 20
_SUMS = 64  # of a gradient
_WAY_OUT = (
    "cut it at blocks that hand on all they compute as their first argument (a tensor or a tuple "
    "of tensors), or let build_model return an nn.Sequential or a list of stages"
)


def check_cut(model: nn.Module, cut: Cut, inputs: Inputs, loss: MakeLoss, title: str) -> None:
    """Refuse a cut with which loss or gradients are not those of the model.

    `loss` makes the loss from the model's output. Values that cross a cut beside the hidden states
    are not a number in the stages, which finds skip connections, attention of other layers, caches.
    """
    if not cut.names or not cut.calls.outputs:  # an nn.Sequential hands on nothing else
        return
    stages = stage_models(model, cut, title)
    kind = type(model).__name__
    # compiled code cannot run while tensors are recorded
    with unchanged([model, *(stage.skeleton for stage in stages)]), set_stance("force_eager"):
        value, gradients = _whole(model, cut, inputs, loss)
        try:
            loss_here, found, several = _staged(stages, model, inputs, loss)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"stages: {kind}, cut at {list(cut.names)}, raises in its stages on the first "
                f"batch ({' '.join(str(error).split()):.300}); {_culprit(stages, inputs)}"
                f"{_WAY_OUT}"
            ) from error
        eps = {n: torch.finfo(p.dtype).eps if n in several else 0 for n, p in trained(model)}
        differ = (n for n, g in gradients.items() if not _alike(g, found[n], eps[n]))
        what = next((f"another gradient of {name!r}" for name in differ), "")
        if not same(value, loss_here):
            what = f"the loss {loss_here.item():.9g} instead of {value.item():.9g}"
        if what:
            raise InputError(
                f"stages: {kind}, cut at {list(cut.names)}, has {what} on the first batch: a value "
                f"crosses a cut beside the hidden states; {_culprit(stages, inputs)}"
                f"{_WAY_OUT}"
            )


def _seed(stage: int) -> None:
    seed_generator(_SEED + stage, torch.device("cpu"))


def _whole(model: nn.Module, cut: Cut, inputs: Inputs, loss: MakeLoss) -> tuple[Tensor, Gradients]:
    undo = cut_alone(model, cut.names, _seed)
    try:
        _seed(0)
        value = loss(inputs.copied().call(model))
        return value.detach(), _gradients(model, [value], [None])
    finally:
        undo()


def _staged(
    stages: Sequence[StageModel], model: nn.Module, inputs: Inputs, loss: MakeLoss
) -> tuple[Tensor, Gradients, set[str]]:
    """Loss, gradients, and names of the parameters that several stages use."""
    rows: list[tuple[list[Tensor], list[Tensor]]] = []
    hidden: Any = None
    for stage in stages:
        _seed(stage.index)
        received = tensors_in(hidden)
        output = stage(at_cut(hidden), inputs.copied())
        output = loss(output) if stage.last else output
        rows.append((received, tensors_in(output)))
        hidden = mapped(output, lambda t: t.detach().requires_grad_(t.requires_grad))
    total: Gradients = {}
    several: set[str] = set()
    given: list[Tensor | None] = [None]
    for received, outputs in reversed(rows):
        for name, gradient in _gradients(model, outputs, given).items():
            known = total.get(name)
            several |= {name} if known is not None and gradient is not None else set()
            both = known is not None and gradient is not None
            total[name] = known + gradient if both else known if gradient is None else gradient  # type: ignore[operator]
        given = [t.grad for t in received]
    return rows[-1][1][0].detach(), total, several


def _gradients(
    model: nn.Module, outputs: Sequence[Tensor], given: Sequence[Tensor | None]
) -> Gradients:
    """Weighted sums of the gradients of the parameters, each freed at once.

    By `backward`, as reentrant checkpoints know no other way.
    """
    named = dict(trained(model))
    before = {name: p.grad for name, p in named.items()}
    model.zero_grad(set_to_none=True)
    found: Gradients = dict.fromkeys(named)

    def note(name: str, p: Tensor) -> None:
        if p.grad is not None:
            rows = p.grad.flatten().tensor_split(_SUMS)
            # not plain sums: behind a layer norm the entries of a row add up to zero
            draw = torch.Generator().manual_seed(_SEED)
            factors = torch.randn(len(rows[0]), generator=draw, dtype=torch.float64)
            sums = torch.stack([row.double() @ factors[: len(row)] for row in rows])
            known, p.grad = found[name], None
            found[name] = sums if known is None else known + sums

    parameters: dict[str, Any] = named
    ends = [
        p.register_post_accumulate_grad_hook(partial(note, name)) for name, p in parameters.items()
    ]
    rows = [
        (t, g) for t, g in zip(outputs, given, strict=True)
        if t.requires_grad and (g is not None or len(t.shape) == 0)
    ]  # fmt: skip
    try:
        if rows:
            torch.autograd.backward([t for t, _ in rows], [g for _, g in rows])
        return found
    finally:
        for end in ends:
            end.remove()
        for name, p in named.items():
            p.grad = before[name]


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that need a gradient, with their names."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _alike(a: Tensor | None, b: Tensor | None, eps: float) -> bool:
    """Whether sums of gradients are equal; those of several stages are sums in another order.

    Their additions are rounded by `eps`, which is 0 for a gradient of one stage.
    """
    if a is None or b is None:
        return a is b
    share = max(1e-3, math.sqrt(eps)) if eps else 0.0
    return same(a, b) or bool((a - b).norm() <= share * (a.norm() + b.norm()))


def _culprit(stages: Sequence[StageModel], inputs: Inputs) -> str:
    """The first module of a stage with an argument that is not a number, in words."""
    found: list[str] = []

    def before(name: str, module: nn.Module, arguments: Any, options: Any) -> None:
        named = {f"number {k}": value for k, value in enumerate(arguments)} | options
        for key, value in named.items() if stage.passage.entered else ():
            tensors = [t for t in tensors_in(value) if t.is_floating_point() and t.numel()]
            if any(bool(t.isnan().all()) for t in tensors):
                found.append(f"{name!r} gets its argument {key} from an earlier stage; ")

    hidden: Any = None
    for stage in stages:
        with torch.no_grad(), suppress(Exception), hooks(stage.skeleton, before):
            hidden = stage(hidden, inputs.copied())
        if found:
            return found[0]
    return ""
