"""Losses: micro-batches against the whole batch, and tensors that no stage trains.

Micro-batches are weighted by their samples, which is right for a mean over the samples only.
"""

from __future__ import annotations

import gc
import math
import warnings
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from optsched.arraypipe.model.checks import flat
from optsched.arraypipe.runtime.datasets import seeded
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optsched.arraypipe.job import Loss

Batch: TypeAlias = tuple[Any, list[int]]
"""Targets of a batch, and the samples of every micro-batch."""

_BYTES: Final = 4 * 2**20  # of the outputs that are compared; in the first batch 16 times as many


class NotMean(InputError):
    """The loss of a batch is not the mean of the losses of its parts, weighted by samples."""


@dataclass(eq=False)
class SampleMean:
    """Compares the loss of a batch with that of its micro-batches, on the same outputs.

    These are drawn from the outputs of one micro-batch, so that neither layers that look across
    samples nor random numbers of the model make a difference, and no output has to be kept.
    """

    loss: Loss
    cast: torch.dtype | None  # of what the loss is given; None: as it is
    layout: str  # where an output has its samples
    checked: int = -1  # newest iteration
    only_samples: bool = False  # whether the loss depends on outputs of samples, and on no others

    def check(self, batch: Batch, iteration: int, output: Any) -> None:
        """Raise `NotMean` if the parts of a batch are weighted wrongly; `output` is of the first.

        A GPU, which the host would have to wait for, is looked at in iterations 16, 32, 64 ...
        """
        rare = iteration >= 16 and not iteration & (iteration - 1)
        waits = not rare and any(t.is_cuda for t in tensors_in(output))
        if iteration == self.checked or waits:  # it may be recomputed
            return
        self.checked, sentence = iteration, ""
        with suppress(Exception):  # the training itself raises it
            sentence = self.apart(output, batch, iteration, quick=True)
        if sentence:
            raise NotMean(sentence)

    def apart(
        self, output: Any, batch: Batch, first: int, most: int = _BYTES, quick: bool = False
    ) -> str:
        """How the whole and its parts differ, in words; ``""``: no more than sums are rounded.

        Losses and gradients are compared; if `quick`, gradients only if losses differ: they may be
        sums of both signs that cancel.
        """
        given, size = batch[1][0], sum(t.nbytes for t in tensors_in(output))
        batch = _some(batch, max(2, most * given // max(1, size)), first)
        if len(batch[1]) < 2:
            return ""
        if quick:
            with suppress(Exception), torch.no_grad():
                whole, parts, *_ = self._sides(output, given, batch, quick)
                if _close(whole.item(), parts.item(), 1e-5):
                    return ""
        whole, parts, leaves, others = self._sides(output, given, batch)
        every, rows = [*leaves, *others], []
        for value in (whole, parts):
            found: tuple[Tensor | None, ...] = (None,) * len(every)
            if value.requires_grad:
                found = torch.autograd.grad(value, every, allow_unused=True)
            pairs = zip(found, every, strict=True)
            rows.append([torch.zeros_like(t) if g is None else g.detach() for g, t in pairs])
            used = [g is not None for g in found[: len(leaves)]]
            self.only_samples = any(used) and not any(map(torch.any, rows[-1][len(leaves) :]))
        a, b, apart = map(_norm, (*rows, [x - y for x, y in zip(*rows, strict=True)]))
        epsilon = max(float(torch.finfo(t.dtype).eps) for t in (whole, *every))
        tolerance = max(1e-5, math.sqrt(epsilon))
        least = 1e3 * epsilon / sum(batch[1])  # 0 but for rounding
        # what is added up to the loss, as far as it is linear
        added = sum(
            float((g * t.detach()).abs().sum()) for g, t in zip(rows[0], every, strict=True)
        )
        alike = apart <= tolerance * (a + b) + least or (a != a and b != b)
        if alike and _close(whole.item(), parts.item(), tolerance, added):
            return ""
        return (
            f"loss: expected a mean over the samples (no sum, weights by class, ignored targets, "
            f"or samples compared with others), got {whole.item():.6g} for {sum(batch[1])} samples "
            f"at once and {parts.item():.6g} for {len(batch[1])} micro-batches weighted by their "
            f"samples, whose gradients differ by {apart / (max(a, b) or 1.0):.2g} of their norm; "
            f"divide by the number of samples, or set microbatches=1"
        )

    def _sides(
        self, output: Any, given: int, batch: Batch, quick: bool = False
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Loss of the whole, and of its parts weighted; outputs of samples, and the others."""
        total = sum(batch[1])
        leaves, others, samples = list[Tensor](), list[Tensor](), set[int]()
        place = tensors_in(output)[0].device
        draw = torch.Generator().manual_seed(0)
        index = torch.randint(given, (total,), generator=draw).to(place)

        def leaf(t: Tensor) -> Tensor:
            found = self._samples_first(t.detach(), given)
            made = self._to(t.detach() if found is None else found[index])
            if given == 1 and found is not None and made.is_floating_point():
                scale = 1 - torch.arange(total, device=place) / (2 * total)  # none like another
                made = made * scale.to(made.dtype).view(-1, *(1,) * (made.dim() - 1))
            if found is not None:
                samples.add(id(made))
            if made.is_floating_point():
                (others if found is None else leaves).append(made.requires_grad_(not quick))
            return made

        def own(t: Tensor) -> Tensor:  # it may be changed in place
            return t if quick else t.clone(memory_format=torch.contiguous_format)

        def value(first: int, end: int) -> Tensor:
            part = mapped(whole, lambda t: own(self._back(t[first:end]) if id(t) in samples else t))
            return self.loss(part, mapped(target, lambda t: own(t[first:end]))).reshape(())

        whole, target = mapped(output, leaf), mapped(batch[0], lambda t: self._to(t.to(place)))
        rows = zip(accumulate(batch[1]), batch[1], strict=True)
        parts = sum(value(end - n, end).double() * (n / total) for end, n in rows)
        return value(0, total), torch.as_tensor(parts), leaves, others

    def _to(self, t: Tensor) -> Tensor:
        return t.to((self.cast if t.is_floating_point() else None) or t.dtype, copy=True)

    def _samples_first(self, t: Tensor, given: int) -> Tensor | None:
        """The tensor with samples in the first dimension; None if it has none."""
        if self.layout == "second":
            return t.transpose(0, 1) if t.shape[1:2] == (given,) else None
        if not t.dim() or not t.shape[0] or t.shape[0] % given:
            return None
        if self.layout == "samples":
            return t.reshape(given, -1, *t.shape[1:])
        return t.reshape(-1, given, *t.shape[1:]).transpose(0, 1)

    def _back(self, t: Tensor) -> Tensor:
        """The form that outputs have."""
        turned = t if self.layout == "samples" else t.transpose(0, 1)
        return turned if self.layout == "second" else turned.flatten(0, 1)


def first_loss(
    end: Callable[[Any], Tensor], loss: Loss, target: Any, own: Iterable[Tensor], batch: Batch,
    output: Any,
) -> tuple[Tensor, Callable[[Batch, int, Any], None] | None]:  # fmt: skip
    """Look at the loss of the first micro-batch of a job, before anything is trained.

    `end` makes it of the output, `own` are the tensors that the last stage trains. Returned is the
    loss, and what compares the next batches: None if there is but one micro-batch, or if the loss
    cannot be compared (with a warning). `InputError`: it is not what can be trained.
    """
    tensors = tensors_in(output)
    nodes = {t.grad_fn for t in tensors}
    value = end(output)
    if tensors:
        _check_trained(value, nodes, {id(t) for t in (*own, *tensors)})
    if len(batch[1]) < 2:
        return value, None
    found = _comparison(loss, mapped(output, Tensor.detach), target, batch)
    if isinstance(found, SampleMean):
        return value, found.check
    warnings.warn(
        f"loss: cannot be compared between the batch and its micro-batches ({found}); these are "
        f"weighted by their samples, which is right for a mean over the samples only",
        stacklevel=2,
    )
    return value, None


def _comparison(loss: Loss, output: Any, target: Any, batch: Batch) -> SampleMean | str:
    """The way to compare a loss, or why there is none."""
    given, why, apart = batch[1][0], "", ""
    shapes = [t.shape for t in tensors_in(output)]
    counts = {s[0] // given for s in shapes if s and s[0] and not s[0] % given}
    layouts = ["samples"] * bool(counts) + ["views"] * bool(counts - {1})
    layouts += ["second"] * any(shape[1:2] == (given,) for shape in shapes)
    try:
        with seeded(0, 0):
            pairs = [(mapped(output, Tensor.clone), mapped(target, Tensor.clone)) for _ in "12"]
            once, again = (float(loss(*pair).item()) for pair in pairs)
        if not _close(once, again, 1e-5 if tensors_in(output)[0].is_cuda else 1e-12):
            return f"called twice it is {once:.9g} and {again:.9g}: it is random or keeps state"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for cast, layout in product((torch.float64, None), layouts):
        if apart and layout == layouts[0]:
            break
        try:
            copies = cast is not None and isinstance(loss, nn.Module) and not [*loss.parameters()]
            mean = SampleMean(deepcopy(loss).to(cast) if copies else loss, cast, layout)  # type: ignore[attr-defined]
            sentence = mean.apart(output, batch, 0, 16 * _BYTES)
        except Exception as error:
            why = why or f"{type(error).__name__}: {error}"
            continue
        if mean.only_samples and not sentence:
            return mean
        apart = apart or sentence
        why = why if sentence else "it depends on other outputs than rows for the samples"
    if apart:
        raise NotMean(apart)
    return why or "its output has no rows for the samples"


def _check_trained(value: Tensor, nodes: set[Any], known: set[int]) -> None:
    """Refuse a loss whose gradients reach a tensor that no stage trains.

    `nodes` are those of the outputs, where the graph of the loss ends; `known` identities of
    tensors that may be reached.
    """
    rest = [value.grad_fn] if value.grad_fn is not None else []
    seen = {*rest, *nodes}
    while rest:
        node: Any = rest.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in known:
            rows = [row for row in gc.get_referrers(leaf) if type(row) is dict]
            name = next((repr(k) for row in rows for k in [*row] if row[k] is leaf), "a tensor")
            raise InputError(
                f"loss: its parameter ({name}, shape {tuple(leaf.shape)}) would never be trained, "
                f"because it is in no stage; put it into the last stage of the model (an input can "
                f"bring the labels there), or freeze it with requires_grad_(False)"
            )
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        rest += following


def _some(batch: Batch, count: int, first: int) -> Batch:
    """About so many samples of a batch, spread over it; others for another `first`."""
    target, sizes = batch
    step = -(-sum(sizes) // count)
    index = range(first % step, sum(sizes), step)
    rows = zip(accumulate(sizes), sizes, strict=True)
    found = [sum(end - n <= k < end for k in index) for end, n in rows]
    return mapped(target, lambda t: t[first % step :: step]), [*filter(None, found)]


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """An output or a target with other tensors, of the same classes."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        parts = [mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    made = copy(value)
    if isinstance(value, dict):
        for key in value:
            made[key] = mapped(value[key], change)
    elif is_dataclass(value):
        for entry in fields(value):
            object.__setattr__(made, entry.name, mapped(getattr(value, entry.name), change))
    return made


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of an output or a target."""
    return [part for part in flat(value) if isinstance(part, Tensor)]


def _norm(row: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in row))


def _close(a: float, b: float, tolerance: float, more: float = 0.0) -> bool:
    same = a == b or (a != a and b != b)
    return same or abs(a - b) <= tolerance * (abs(a) + abs(b) + more)
