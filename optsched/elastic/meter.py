"""Entropy and margin of a model's predictions, added up in any training loop."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from optsched.errors import InputError, MissingExtra
from optsched.io.values import integer

try:
    import torch
except ImportError:
    raise MissingExtra("EntropyMeter", "torch") from None

if TYPE_CHECKING:
    from torch import Tensor


class Uncertainty(NamedTuple):
    """Hold means over the samples of a pass: H and Q in [0, 1], and the number of samples.

    Examples
    --------
    >>> optsched.elastic.Uncertainty(entropy=0.5, margin=0.7, count=64).count
    64
    """

    entropy: float
    margin: float
    count: int  # type: ignore[assignment]  # tuple.count


class EntropyMeter:
    """Measure how uncertain a model is, from its logits: one line a step, one line a pass.

    `num_classes` is C, at least 2; `dim` their axis: all others are samples (of a batch, of a
    sequence, of an image). Samples with the target `ignore_index` are left out, as in torch's
    cross entropy.

    With p = softmax(logits) over the classes and p_1, p_2 the two largest of it, a sample has the
    entropy -sum p ln p, normalised -sum p ln p / ln C, and the margin ambiguity 1 - (p_1 - p_2).
    `compute` gives H and Q of this rank: the means of the last two over the samples of its pass.
    Source: Sun & Huh, Entropy, Appl. Sci. 2026, 16, 3725, equations (2), (3), (13)-(17). Sums are
    float64 on the logits' device, without synchronisation before `compute`.

    Examples
    --------
    >>> import torch
    >>> meter = optsched.elastic.EntropyMeter(num_classes=10)
    >>> meter.update(torch.zeros(4, 10))
    >>> round(meter.compute().entropy, 3)
    1.0
    """

    def __init__(self, num_classes: int, *, dim: int = -1, ignore_index: int | None = None) -> None:
        self.num_classes = integer("num_classes", num_classes, 1, 2**31)
        if self.num_classes == 1:
            raise InputError("num_classes: 1: make one logit z two: torch.stack([0 * z, z], -1)")
        self.dim = integer("dim", dim, -64, 63)
        if ignore_index is not None:
            integer("ignore_index", ignore_index, -(2**63), 2**63 - 1)
        self.ignore_index = ignore_index
        self.reset()

    def reset(self) -> None:
        """Begin a new pass."""
        self._sums: Tensor | float = 0.0

    def update(self, logits: Tensor, target: Tensor | None = None) -> None:
        """Add the samples of one batch.

        `logits` have any shape with C at axis `dim`; half, bfloat16, single or double precision.
        `target`, the classes, which only `ignore_index` needs, has that shape without the axis.
        """
        if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
            kind = getattr(logits, "dtype", type(logits).__name__)
            raise InputError(f"logits: expected a tensor of floating point numbers, got {kind}")
        shape, dim = logits.shape, self.dim
        if not -len(shape) <= dim < len(shape) or shape[dim] != self.num_classes:
            raise InputError(
                f"logits: expected {self.num_classes} classes at axis {dim}, got the shape "
                f"{tuple(shape)}: set num_classes and dim"
            )
        if self.ignore_index is not None:
            expected = (*shape[: dim % len(shape)], *shape[dim % len(shape) + 1 :])
            got = f"{target!r:.60}"
            if isinstance(target, torch.Tensor):
                got = f"{tuple(target.shape)}, {target.device}"
            if got != f"{expected}, {logits.device}":
                raise InputError(f"target: expected {expected}, {logits.device}, got {got}")
        # not in place: a tensor of inference mode cannot be changed outside of it
        self._sums = self._sums + sums_of(logits, target, dim, self.ignore_index)

    def compute(self) -> Uncertainty:
        """Return means over all samples since the last `reset`; `InputError`: none, or NaN."""
        return means_of(self._sums.tolist() if isinstance(self._sums, torch.Tensor) else [0.0] * 3)


def sums_of(logits: Tensor, target: Tensor | None, dim: int, ignored: int | None) -> Tensor:
    """Sums of normalised entropy and margin ambiguity of a batch, and its number of samples."""
    with torch.no_grad():
        wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
        p = torch.softmax(logits, dim, wide)
        first, second = p.topk(2, dim).values.unbind(dim)
        values = [torch.special.entr(p).sum(dim) / math.log(p.shape[dim]), 1.0 - (first - second)]
        if ignored is None or target is None:
            count = torch.tensor(values[0].numel(), dtype=torch.float64, device=logits.device)
        else:
            keep = target != ignored
            values = [torch.where(keep, value, 0.0) for value in values]
            count = keep.sum(dtype=torch.float64)
        return torch.stack([*(value.sum(dtype=torch.float64) for value in values), count])


def means_of(sums: list[float]) -> Uncertainty:
    """Means of sums of `sums_of`."""
    entropy, margin, count = sums
    if count == 0:
        raise InputError("compute: no sample was counted: call update(logits) before")
    if math.isnan(entropy):
        raise InputError("compute: logits were NaN, +inf, or -inf in all classes: mask them")
    mean, ambiguity = (min(max(value / count, 0.0), 1.0) for value in (entropy, margin))
    return Uncertainty(mean, ambiguity, int(count))
