"""Weights of micro-batches, and their comparison with the loss of the whole batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from optsched.arraypipe.model.inputs import tensors_in
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optsched.arraypipe.job import Loss

Weight: TypeAlias = "Callable[[Any], float | Tensor] | Literal['sum'] | None"
"""Weight of a micro-batch from its target (a dict batch: from the batch); None: by the loss."""

_IGNORED = -100  # default `ignore_index` of torch and transformers
_SHIFTED = ("ForCausalLM", "ForConditionalGeneration", None)  # loss types of transformers


class NotMean(InputError):
    """The loss of a batch is not the weighted sum of the losses of its micro-batches."""


def factors_of(
    loss: Loss | None, weight: Weight, model: nn.Module
) -> Callable[[Sequence[Any]], list[float]]:
    """Choose the factors of micro-batches with which accumulation equals the whole batch."""
    count = counts_of(loss, weight, model)

    def factors(parts: Sequence[Any]) -> list[float]:
        if len(parts) == 1 or count is _one:
            return [1.0] * len(parts)
        counts = [count(part) for part in parts]
        total = math.fsum(counts)
        return [n / total if total else math.nan for n in counts]

    return factors


def counts_of(loss: Loss | None, weight: Weight, model: nn.Module) -> Callable[[Any], float]:
    """Return what the loss of a micro-batch is a mean over."""
    options = _options(loss)
    if weight == "sum" or (weight is None and options.get("reduction") == "sum"):
        return _one
    shifts = False
    if loss is None:  # outputs are compared with the next label, unless an encoder shifts inputs
        found = next((m for m in model.modules() if "loss_type" in m.__dict__), None)
        encoder = getattr(getattr(found, "config", None), "is_encoder_decoder", False)
        shifts = found is not None and not encoder and found.__dict__["loss_type"] in _SHIFTED
        adapter: Any = getattr(model, "active_peft_config", None)
        if getattr(adapter, "is_prompt_learning", False) and "PREFIX" not in str(adapter.peft_type):
            shifts = False  # PEFT puts learned prompts before the first label

    def count(part: Any) -> float:
        target = part if isinstance(part, dict) else part[1]
        if callable(weight):
            given = float(weight(target))
            if not 0 <= given < math.inf:
                raise InputError(f"weight: expected a number >= 0 for a micro-batch, got {given}")
            return given
        if isinstance(target, dict) and loss is None:
            target = target.get("labels")
        if not isinstance(target, Tensor) or target.is_floating_point():
            return float(samples_of(part))
        if shifts and target.dim() > 1:
            target = target[..., 1:]
        valid = target != options.get("ignore_index", _IGNORED)
        if (classes := options.get("weight")) is not None:
            return float(classes.detach().to(target.device)[target[valid]].double().sum())
        return float(valid.sum())

    return count


def samples_of(part: Any) -> int:
    """Return samples of a micro-batch."""
    return next(t.shape[0] for t in tensors_in(part) if t.dim())


def _one(part: Any) -> float:
    return 1.0


def _options(loss: Any) -> dict[str, Any]:
    """Return options of a loss that decide what its mean is taken over."""
    found: dict[str, Any] = {}
    while isinstance(loss, partial):
        found, loss = {**loss.keywords, **found}, loss.func
    if isinstance(loss, nn.Module):
        found["reduction"] = getattr(loss, "reduction", None)
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        found |= {"ignore_index": loss.ignore_index, "weight": loss.weight}
    elif loss not in (functional.cross_entropy, functional.nll_loss):
        found.pop("weight", None)
    return found


@dataclass(frozen=True, eq=False)
class Criterion:
    """The loss of a micro-batch from the output of the last stage, times its factor."""

    loss: Loss | None
    target: Any
    factor: float

    def __call__(self, output: Any) -> Tensor:
        """Part of the iteration's loss; 0 if no target counts, where a mean would be 0 / 0."""
        if self.factor == 0:
            rows = [t for t in tensors_in(output) if t.requires_grad and t.dim()]
            return torch.stack([t.sum() * 0 for t in rows]).sum() if rows else torch.zeros(())
        value = loss_in(output) if self.loss is None else self.loss(output, self.target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError("loss: expected a function that returns a tensor with one element")
        return value * self.factor


def loss_in(output: Any) -> Tensor:
    """Return the loss that a model has put into its output."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor):
        found = output
    elif found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise InputError(
            "loss: without a loss function the model's output needs a loss (output.loss); give the "
            "model labels in its batches, or ArrayTrainer a loss"
        )
    return found


def difference(
    whole: Callable[[], Tensor],
    parts: Sequence[Callable[[], Tensor]],
    factors: Sequence[float],
    tensors: Sequence[Tensor],
) -> str:
    """Compare loss and gradients of a batch with the sum of its micro-batches."""
    value, rows = _summed([whole], [1.0], tensors)
    other, sums = _summed(parts, factors, tensors)
    if math.isnan(value) and math.isnan(other):
        return ""
    a, b, apart = map(_norm, (rows, sums, [x - y for x, y in zip(rows, sums, strict=True)]))
    epsilon = max([torch.finfo(t.dtype).eps for t in tensors] or [1e-7])
    tolerance = max(1e-5, math.sqrt(epsilon))
    scale = sum(float((g * t.detach()).abs().sum()) for g, t in zip(rows, tensors, strict=True))
    near = abs(value - other) <= tolerance * (abs(value) + abs(other) + scale)
    if near and not apart > tolerance * (a + b) + 1e3 * epsilon / len(parts):
        return ""
    return (
        f"loss: expected that micro-batches add up to their batch, got {value:.6g} for the "
        f"batch and {other:.6g} for {len(parts)} micro-batches weighted by "
        f"{[round(f, 4) for f in factors][:8]}; the gradients differ by "
        f"{apart / (max(a, b) or 1.0):.2g} of their norm; give ArrayTrainer weight=, a function "
        f'of a micro-batch\'s target (or "sum"), or set microbatches=1'
    )


def _summed(
    calls: Sequence[Callable[[], Tensor]], factors: Sequence[float], tensors: Sequence[Tensor]
) -> tuple[float, list[Tensor]]:
    """Return weighted sums of losses and of their gradients."""
    total, sums = 0.0, list(map(torch.zeros_like, tensors))
    for call, factor in zip(calls, factors, strict=True):
        if not factor:
            continue
        value = call().reshape(()) * factor
        total += value.item()
        if tensors and value.requires_grad:
            found = torch.autograd.grad(value, tensors, allow_unused=True)
            sums = [s if g is None else s + g for s, g in zip(sums, found, strict=True)]
    return total, sums


def _norm(row: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in row))


def check_trained(value: Tensor, outputs: Sequence[Tensor], trained: Iterable[Tensor]) -> None:
    """Refuse a loss with gradients of a tensor that no stage trains."""
    known = {id(t) for t in (*trained, *outputs)}
    pending = [value.grad_fn] if value.grad_fn is not None else []
    seen = {*pending, *(t.grad_fn for t in outputs)}
    while pending:
        node: Any = pending.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in known:
            raise InputError(
                f"loss: its parameter of shape {tuple(leaf.shape)} would never be trained; make "
                f"the loss an nn.Module that has it, put it into the last stage of the model, or "
                f"freeze it with requires_grad_(False)"
            )
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        pending += following
