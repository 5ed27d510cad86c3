"""Weights of micro-batches, and their comparison with the loss of the whole batch."""

from __future__ import annotations

import gc
import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from optsched.arraypipe.model.inputs import tensors_in, unchanged
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optsched.arraypipe.job import Loss

Weight: TypeAlias = "Callable[[Any], float | Tensor] | Literal['sum'] | None"
"""Weight of a micro-batch from its target (a dict batch: from the batch); None: by the loss."""

Factors: TypeAlias = "Callable[[Sequence[Any]], list[float]]"
"""Factors by which the losses of the micro-batches of a batch are multiplied."""

_IGNORED = -100  # default `ignore_index` of torch and transformers
_SHIFTED = ("ForCausalLM", "ForConditionalGeneration", None)  # loss types of transformers


class NotMean(InputError):
    """The loss of a batch is not the weighted sum of the losses of its micro-batches."""


def factors_of(loss: Loss | None, weight: Weight, model: nn.Module) -> Factors:
    """Choose the weights of micro-batches with which accumulation equals the whole batch.

    The result takes micro-batches: pairs (input, target), or dicts.
    """
    if _is_sum(loss, weight):
        return lambda parts: [1.0] * len(parts)
    count = counts_of(loss, weight, model)

    def factors(parts: Sequence[Any]) -> list[float]:
        if len(parts) == 1:
            return [1.0]
        counts = [count(part) for part in parts]
        total = math.fsum(counts)
        return [n / total if total else math.nan for n in counts]

    return factors


def _is_sum(loss: Loss | None, weight: Weight) -> bool:
    return weight == "sum" or (weight is None and _options(loss).get("reduction") == "sum")


def counts_of(loss: Loss | None, weight: Weight, model: nn.Module) -> Callable[[Any], float]:
    """What the loss of a micro-batch is a mean over.

    Targets that count for a loss that ignores some (with their class weights), 1 for
    ``reduction="sum"``, else samples; `weight` overrides.
    """
    options = _options(loss)
    shift = loss is None and _shifts_labels(model)

    def count(part: Any) -> float:
        if _is_sum(loss, weight):
            return 1.0
        target = part if isinstance(part, dict) else part[1]
        if callable(weight):
            return _checked(weight(target))
        if isinstance(target, dict) and loss is None:
            if {"start_positions", "end_positions"} <= target.keys():
                return _answers(target)
            target = target.get("labels")
        if not isinstance(target, Tensor) or target.is_floating_point():
            return float(samples_of(part))
        if shift and target.dim() > 1:
            target = target[..., 1:]
        valid = target != options.get("ignore_index", _IGNORED)
        if (classes := options.get("weight")) is not None:
            return float(classes.detach().to(target.device)[target[valid]].double().sum())
        return float(valid.sum())

    return count


def _checked(given: Any) -> float:
    found = float(given)
    if not 0 <= found < math.inf:
        raise InputError(f"weight: expected a number >= 0 for a micro-batch, got {found}")
    return found


def _answers(batch: dict[str, Any]) -> float:
    """Samples whose answer is inside of the sequence; transformers ignores positions behind it."""
    length = max(t.shape[1] for t in tensors_in(batch) if t.dim() > 1)
    starts, ends = (batch[name] < length for name in ("start_positions", "end_positions"))
    if starts.sum() != ends.sum():
        raise InputError(
            "data: start_positions and end_positions of a micro-batch have different numbers of "
            "positions behind the sequence, so that no weight fits both; set microbatches=1"
        )
    return float(starts.sum())


def _options(loss: Any) -> dict[str, Any]:
    """Options of a loss that decide what its mean is taken over."""
    found: dict[str, Any] = {}
    while isinstance(loss, partial):
        found, loss = {**loss.keywords, **found}, loss.func
    weighted = (nn.CrossEntropyLoss, nn.NLLLoss)
    if isinstance(loss, nn.Module):
        found["reduction"] = getattr(loss, "reduction", None)
    if isinstance(loss, weighted):
        found |= {"ignore_index": loss.ignore_index, "weight": loss.weight}
    elif loss not in (functional.cross_entropy, functional.nll_loss):
        found.pop("weight", None)
    return found


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the model's own loss compares every output with the next label (transformers).

    Models with an encoder shift what their decoder reads instead.
    """
    found = next((m for m in model.modules() if "loss_type" in m.__dict__), None)
    encoder = getattr(getattr(found, "config", None), "is_encoder_decoder", False)
    return found is not None and not encoder and found.__dict__["loss_type"] in _SHIFTED


@dataclass(frozen=True, eq=False)
class Criterion:
    """The loss of a micro-batch from the output of the last stage, times its factor.

    Without `loss` it is that of the model's output.
    """

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
    """The loss that a model has put into its output."""
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
    """Compare loss and gradients of a batch with the sum of its micro-batches.

    Returns a sentence; ``""`` if they are equal except for rounding.
    """
    values, rows = [], []
    for calls in ([(whole, 1.0)], [(p, f) for p, f in zip(parts, factors, strict=True) if f]):
        total, sums = 0.0, list(map(torch.zeros_like, tensors))
        for call, factor in calls:
            value = call().reshape(()) * factor
            total += value.item()
            trained = [k for k, t in enumerate(tensors) if t.requires_grad and value.requires_grad]
            found: Sequence[Tensor | None] = ()
            if trained:
                row = [tensors[k] for k in trained]
                found = torch.autograd.grad(value, row, allow_unused=True)
            for k, gradient in zip(trained, found, strict=True):
                sums[k] = sums[k] if gradient is None else sums[k] + gradient
        values.append(total)
        rows.append(sums)
    a, b, apart = map(_norm, (*rows, [x - y for x, y in zip(*rows, strict=True)]))
    epsilon = max([torch.finfo(t.dtype).eps for t in tensors] or [1e-7])
    tolerance = max(1e-5, math.sqrt(epsilon))
    scale = sum(float((g * t.detach()).abs().sum()) for g, t in zip(rows[0], tensors, strict=True))
    alike = apart <= tolerance * (a + b) + 1e3 * epsilon / len(parts) or (a != a and b != b)
    if alike and _close(values[0], values[1], tolerance, scale):
        return ""
    return (
        f"loss: expected that micro-batches add up to their batch, got {values[0]:.6g} for the "
        f"batch and {values[1]:.6g} for {len(parts)} micro-batches weighted by "
        f"{[round(f, 4) for f in factors][:8]}; the gradients differ by "
        f"{apart / (max(a, b) or 1.0):.2g} of their norm; give ArrayTrainer weight=, a function "
        f'of a micro-batch\'s target (or "sum"), or set microbatches=1'
    )


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Switch modules to evaluation for a while; buffers and attributes are restored."""
    parts = {part: part.training for module in modules for part in module.modules()}
    with unchanged(modules):
        for part in parts:
            part.training = False
        try:
            yield
        finally:
            for part, training in parts.items():
                part.training = training


def check_trained(value: Tensor, outputs: Sequence[Tensor], trained: Iterable[Tensor]) -> None:
    """Refuse a loss with gradients of a tensor that no stage trains.

    The graph of the loss ends at the `outputs` of the model.
    """
    known = {id(t) for t in (*trained, *outputs)}
    pending = [value.grad_fn] if value.grad_fn is not None else []
    seen = {*pending, *(t.grad_fn for t in outputs)}
    while pending:
        node: Any = pending.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in known:
            rows = [row for row in gc.get_referrers(leaf) if type(row) is dict]
            name = next((repr(k) for row in rows for k in [*row] if row[k] is leaf), "a tensor")
            raise InputError(
                f"loss: its parameter ({name}, shape {tuple(leaf.shape)}) would never be trained; "
                f"make the loss an nn.Module that has it, put it into the last stage of the model, "
                f"or freeze it with requires_grad_(False)"
            )
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        pending += following


def samples_of(part: Any) -> int:
    """Samples of a micro-batch."""
    return next(t.shape[0] for t in tensors_in(part) if t.dim())


def _norm(row: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in row))


def _close(a: float, b: float, tolerance: float, more: float = 0.0) -> bool:
    same = a == b or (a != a and b != b)
    return same or abs(a - b) <= tolerance * (abs(a) + abs(b) + more)
