"""What worker, backends and memory share: parcels, pauses, where the states of jobs are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.job import JobStage, Tensors
    from optsched.arraypipe.plan.types import Copied, Instance


class Parcel(NamedTuple):
    """What a message carries: tensors (none in a tombstone), flags, and the loss if it is known.

    `absent` are the places of gradients that there are none of, in a vector of their norms.
    """

    tensors: tuple[Tensor | None, ...]
    flags: int = 0
    loss: float = math.nan
    absent: tuple[int, ...] = ()


class Memory(Protocol):
    """Where the states of the jobs are; see `optsched.arraypipe.memory.manager`."""

    moves: bool  # whether a state may leave its place while another job's block runs
    limits: Any  # what is known of bytes (`memory.budget.Limits`); None: all states fit

    @property
    def exposed(self) -> int:
        """Nanoseconds that blocks have waited for copies of states so far."""

    @property
    def copies(self) -> Sequence[Copied]:
        """Copies of states so far."""

    def pauses(self) -> Sequence[Pause]:
        """Events around what blocks have waited for on GPUs since the last call."""

    def enter(self, job: int, stage: int, kind: str, now: Instance | None) -> JobStage:
        """Make the state of a job on a stage usable for a block."""

    def leave(self, job: int, stage: int, kind: str) -> None:
        """The block is over."""

    def forget(self, before: int) -> None:
        """Forget the times of copies that ended before a time."""

    def close(self) -> None:
        """Put all states back where `JobRun.stages` has them."""


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


Pause: TypeAlias = tuple[torch.cuda.Event, torch.cuda.Event]
