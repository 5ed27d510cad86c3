"""Entropy and margin of a model's predictions, summed up in any training loop."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.errors import InputError, MissingExtra
from optsched.io.values import integer

try:
    import torch
    import torch.distributed as dist
except ImportError:
    raise MissingExtra("EntropyMeter", "torch") from None

if TYPE_CHECKING:
    from torch import Tensor

_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SMALL, _TOGETHER = 2**15, 16  # small batches, of so many logits, are summed up so many at once


class Uncertainty(NamedTuple):
    """Means over the samples of a pass: H and Q in [0, 1], and the number of samples."""

    entropy: float
    margin: float | None
    count: int  # type: ignore[assignment]  # a tuple's method of this name is of no use here


class EntropyMeter:
    """How uncertain a model is, from its logits: one line a step, one line a pass.

    `num_classes` is C, at least 2; `dim` their axis: all others are samples (of a batch, of a
    sequence, of an image). With `margin` the ambiguity is summed up too, else `Uncertainty.margin`
    is None. Samples with the target `ignore_index` are left out, as in torch's cross entropy.

    With p = softmax(logits) over the classes and p_1, p_2 the two largest of it, a sample has the
    entropy -sum p ln p, normalised -sum p ln p / ln C, and the margin ambiguity 1 - (p_1 - p_2).
    `compute` gives H and Q of this rank: the means of the last two over the samples of its pass.
    Source: Sun & Huh, Entropy, Appl. Sci. 2026, 16, 3725, equations (2), (3), (13)-(17).

    Sums are float64 on the logits' device, outside the graph of gradients; nothing waits for the
    device before `compute`. Copies of small batches are kept there and summed up together: next to
    a small model's step, what an operation costs is its call. A logit of -inf adds no entropy.
    """

    def __init__(
        self, num_classes: int, *, margin: bool = False, dim: int = -1,
        ignore_index: int | None = None,
    ) -> None:  # fmt: skip
        self.num_classes = integer("num_classes", num_classes, 1, 2**31)
        if self.num_classes == 1:
            raise InputError("num_classes: 1: make one logit z two: torch.stack([0 * z, z], -1)")
        self.margin, self.dim = bool(margin), integer("dim", dim, -64, 63)
        if ignore_index is not None:
            integer("ignore_index", ignore_index, -(2**63), 2**63 - 1)
        self.ignore_index = ignore_index
        self.reset()

    def reset(self) -> None:
        """Begin a new pass."""
        self._waiting: list[Tensor] = []
        self._sums: list[Tensor | float] = [0.0, 0.0, 0.0]  # of entropy, p_1 - p_2, samples

    def update(
        self, logits: Tensor, target: Tensor | None = None, mask: Tensor | None = None
    ) -> None:
        """Count the samples of one batch.

        `logits` have any shape with C at axis `dim`; half, bfloat16, single or double precision.
        `target`, the classes, which only `ignore_index` needs, and `mask`, booleans of what to
        count, have that shape without the axis. Others are an `InputError`.
        """
        if not isinstance(logits, torch.Tensor) or logits.dtype not in _TYPES:
            kind = getattr(logits, "dtype", type(logits).__name__)
            raise InputError(f"logits: expected a tensor of floating point numbers, got {kind}")
        shape, dim = logits.shape, self.dim
        if not -len(shape) <= dim < len(shape) or shape[dim] != self.num_classes:
            raise InputError(
                f"logits: expected {self.num_classes} classes at axis {dim}, got the shape "
                f"{tuple(shape)}: set num_classes and dim"
            )
        plain = target is None and mask is None and self.ignore_index is None
        keep = None if plain else self._kept(logits, target, mask)
        size = logits.numel()
        if keep is None:
            self._sums[2] = self._sums[2] + size // self.num_classes
        if size > _SMALL or (size and keep is not None):
            self._add(logits, dim, keep)
        elif size:
            self._waiting.append(logits.detach().clone())
            if len(self._waiting) == _TOGETHER:
                self._flush()

    def _flush(self) -> None:
        if self._waiting:
            last = (x.movedim(self.dim, -1).reshape(-1, self.num_classes) for x in self._waiting)
            self._add(torch.cat(list(last)), -1)
            self._waiting.clear()

    def _add(self, logits: Tensor, dim: int, keep: Tensor | None = None) -> None:
        with torch.no_grad():
            wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
            p = torch.softmax(logits, dim, wide)
            values = [torch.special.entr(p)]
            if self.margin:
                first, second = p.topk(2, dim).values.unbind(dim)
                values.append(first - second)
            if keep is not None:
                values[0] = values[0].sum(dim)
                values = [torch.where(keep, value, 0.0) for value in values]
                self._sums[2] = self._sums[2] + keep.sum(dtype=torch.float64)
            for i, value in enumerate(values):
                # not in place: a sum made in inference mode could not be changed outside of it
                self._sums[i] = self._sums[i] + value.sum(dtype=torch.float64)

    def compute(self, reduce: bool = False) -> Uncertainty:
        """Means over all samples since the last `reset`; `InputError` if there are none, or NaN.

        `reduce`: over all ranks of the default process group, by one all-reduce, which all must
        join.
        """
        self._flush()
        entropy, margin, count = (float(value) for value in self._sums)
        if reduce:
            if not (dist.is_available() and dist.is_initialized()):
                raise InputError("reduce: there is no process group: leave it out, or make one")
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            sums = torch.tensor([entropy, margin, count], dtype=torch.float64, device=device)
            dist.all_reduce(sums)
            entropy, margin, count = sums.tolist()
        if count == 0:
            raise InputError("compute: no sample was counted: call update(logits) before")
        if math.isnan(entropy):
            raise InputError("compute: logits were NaN, +inf, or -inf in all classes: mask them")
        mean = min(max(entropy / count / math.log(self.num_classes), 0.0), 1.0)
        ambiguity = min(max(1.0 - margin / count, 0.0), 1.0) if self.margin else None
        return Uncertainty(mean, ambiguity, int(count))

    def _kept(self, logits: Tensor, target: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Which samples count; None: all."""
        axis = self.dim % logits.dim()
        shape, device = logits.shape[:axis] + logits.shape[axis + 1 :], logits.device
        for name, given in (("target", target), ("mask", mask)):
            if given is None and (name == "mask" or self.ignore_index is None):
                continue
            got = f"{given!r:.60}"
            if isinstance(given, torch.Tensor):
                if (given.shape, given.device) == (shape, device):
                    continue
                got = f"{tuple(given.shape)}, {given.device}"
            raise InputError(f"{name}: expected a tensor {tuple(shape)}, {device}, got {got}")
        if mask is not None and mask.dtype is not torch.bool:
            raise InputError(f"mask: expected booleans, got {mask.dtype}: give mask.bool()")
        if self.ignore_index is None or target is None:
            return mask
        keep = target != self.ignore_index
        return keep if mask is None else keep & mask
