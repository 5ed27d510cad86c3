"""What blocks, worker and backends share: payloads, what is kept for a backward, precisions."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from optsched.errors import InputError, OptschedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optsched.arraypipe.job import Tensors
    from optsched.arraypipe.model.inputs import Inputs
    from optsched.arraypipe.runtime.split_backward import Branches


class PeerLost(OptschedError):
    """Another process has ended or cannot be reached any more."""


class Payload(NamedTuple):
    """What a message carries: tensors (none in a tombstone), flags, and the loss if it is known.

    `absent` are the places of gradients that there are none of, in a vector of their norms.
    Activations are leaves that require a gradient or not.
    """

    tensors: tuple[Tensor | None, ...]
    flags: int = 0
    loss: float = math.nan
    absent: tuple[int, ...] = ()


class Norms(NamedTuple):
    """Norms of gradients in one vector, and the places of those that there are none of.

    The places are known on the host without reading the vector.
    """

    vector: Tensor | None = None
    absent: tuple[int, ...] = ()


@dataclass(eq=False)
class Kept:
    """What a stage keeps of one micro-batch from F to B."""

    inputs: Tensors  # hidden states
    batch: Inputs
    key: int
    end: Callable[[Any], Tensor] | None  # output -> loss, on the last stage
    roots: Tensors | None = None  # of the autograd graph; None until recomputed
    buffers: Tensors = ()  # values that F started from, for the recompute
    trained: tuple[bool, ...] = ()  # `requires_grad` of the parameters; before F until recomputed
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of the inputs
    branches: list[Branches] | None = None  # after a B that has left the weights to W


def tensors_of(x: Any, place: str) -> Tensors:
    """A tensor or tuple of tensors as a tuple; `InputError` for anything else."""
    row = x if isinstance(x, tuple) else (x,)
    for t in row:
        if not isinstance(t, Tensor):
            raise InputError(
                f"{place} is a {type(x).__name__}"
                + (f" with a {type(t).__name__} in it" if isinstance(x, tuple) else "")
                + ", expected a tensor or a tuple of tensors"
            )
    return row


def check_form(x: Any, packed: bool, place: str) -> None:
    """Refuse a tensor where the first batch had a tuple, or the other way round."""
    if isinstance(x, tuple) != packed:
        forms = ("a tuple", "a tensor")
        raise InputError(f"{place} is {forms[packed]}, in the first batch {forms[not packed]}")


Pause: TypeAlias = tuple[torch.cuda.Event, torch.cuda.Event]

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
