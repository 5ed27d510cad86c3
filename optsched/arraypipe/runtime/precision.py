"""Mixed precision of a job: autocast around its blocks, and the scale of fp16 losses."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

AUTOCAST: Final = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
"""Type of the operations that autocast lowers, by precision."""

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000  # defaults of `torch.amp.GradScaler`


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Context of a forward in the precision of a job."""
    if precision not in AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST[precision])


@dataclass
class LossScale:
    """The scale of an ``"amp-fp16"`` job's losses, with the values of `torch.amp.GradScaler`.

    Every stage has one; all get the same updates.
    """

    scale: float = 2.0**16
    growth_tracker: int = 0  # updates since the scale has changed

    def unscale(self, gradients: Iterable[Tensor | None]) -> None:
        """Divide gradients by the scale, in place."""
        factor = 1.0 / self.scale
        present = [g for g in gradients if g is not None]
        if present and factor != 1.0:
            torch._foreach_mul_(present, factor)

    def update(self, finite: bool) -> None:
        """Grow after 2000 updates with finite gradients, shrink after one without."""
        self.growth_tracker += 1
        if not finite:
            self.scale, self.growth_tracker = self.scale * _BACKOFF, 0
        elif self.growth_tracker == _INTERVAL:
            grown = self.scale * _GROWTH
            self.scale = grown if grown <= torch.finfo(torch.float32).max else self.scale
            self.growth_tracker = 0


def is_finite(norm: Tensor | None) -> bool:
    """Whether gradients with this norm are finite."""
    return norm is None or math.isfinite(norm.item())
