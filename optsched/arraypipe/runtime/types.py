"""What state, blocks, worker and backends share: payloads, norms, what is kept for a backward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.arraypipe.job import Tensors
    from optsched.arraypipe.model.inputs import Inputs
    from optsched.arraypipe.runtime.split_backward import Branches


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
