"""The batches of one job, in order and ahead of nobody: iteration t exists while it is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optsched.arraypipe.distributed.wire import copied
from optsched.arraypipe.job import PRECISIONS
from optsched.arraypipe.runtime.cuda_streams import uploaded
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.types import tensors_of
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.arraypipe.job import Data, Job


class DataEnded(InputError):
    """The iterator of a job has no batch for an iteration."""


class Feed:
    """Draws the batches of a job from its own iterator and cuts them into micro-batches."""

    def __init__(self, data: Data, job: Job, title: str, start: int) -> None:
        self.job, self.title = job, title
        try:
            self.batches = iter(data(job, start))
        except TypeError as error:
            raise InputError(
                f"data: job {title}: expected an iterator of pairs ({error})"
            ) from error
        self.iteration = start - 1
        self.whole: Any = None
        self.inputs: list[Any] = []
        self.targets: list[Any] = []

    def draw(self, iteration: int) -> None:
        """Make the batch of an iteration the current one (nothing happens if it is)."""
        if iteration == self.iteration:
            return
        assert iteration == self.iteration + 1, "batches are drawn in order"
        try:
            pair = next(self.batches)
        except StopIteration:
            raise DataEnded(
                f"data: job {self.title} has no batch for iteration {iteration}"
            ) from None
        self._cut(pair, iteration)
        self.iteration = iteration

    def input(self, microbatch: int, device: torch.device) -> Any:
        """Input of a micro-batch of the current batch, in memory that the model may change."""
        x = self.inputs[microbatch]
        there = brought(cast(x, self.job.precision), device)  # after the cut, as alone
        own = map(_private, _row(there), _row(x))
        return tuple(own) if isinstance(x, tuple) else next(own)

    def target(self, microbatch: int, device: torch.device) -> Any:
        """Target of a micro-batch of the current batch."""
        return brought(self.targets[microbatch], device)

    def parts(self) -> list[Any]:
        """The micro-batches of the current batch, each a pair (input, target)."""
        return list(zip(self.inputs, self.targets, strict=True))

    def peek(self) -> Any:
        """Input of the first batch, whole."""
        self.draw(self.iteration + 1)
        return cast(self.whole, self.job.precision)

    def _cut(self, pair: Any, iteration: int) -> None:
        parts = self.job.microbatches
        place = f"data: job {self.title}, iteration {iteration}"
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(f"{place}: expected a pair (input, target), got {type(pair).__name__}")
        x, target = pair
        self.whole = x
        inputs = tensors_of(x, f"{place}: the input")
        if parts == 1:
            self.inputs, self.targets = [x], [target]
            return
        targets = tensors_of(target, f"{place}: the target")
        if len({t.shape[:1] for t in (*inputs, *targets)}) > 1:
            raise InputError(f"{place}: inputs and targets differ in their first dimension")
        size = inputs[0].shape[0] if inputs[0].dim() else 0
        if size < parts:
            raise InputError(f"{place}: {size} samples cannot be cut into {parts} micro-batches")
        self.inputs, self.targets = _split(x, parts), _split(target, parts)


def brought(value: Any, device: torch.device) -> Any:
    """Tensors of an input or a target on a device."""
    if isinstance(value, tuple):
        return tuple(brought(part, device) for part in value)
    if not isinstance(value, Tensor) or value.device == device:
        return value
    return uploaded(value, device) if on_gpu(device) else value.to(device)


def _row(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def cast(x: Any, precision: str) -> Any:
    """Floating point inputs in the precision of a job; ``"fp32"`` leaves them as they are."""
    if precision not in ("fp64", "bf16"):
        return x
    if isinstance(x, tuple):
        return tuple(cast(t, precision) for t in x)
    is_float = isinstance(x, Tensor) and x.is_floating_point()
    return x.to(PRECISIONS[precision]) if is_float else x


def _private(there: Tensor, given: Tensor) -> Tensor:
    """The tensor, or a copy if it is still that of the batch, which the data may use again."""
    return copied(there, there.device) if there is given else there


def _split(whole: Any, parts: int) -> list[Any]:
    """Micro-batches in the form of the whole: a tensor, or a tuple of tensors."""
    if not isinstance(whole, tuple):
        return list(whole.tensor_split(parts))
    return list(zip(*[t.tensor_split(parts) for t in whole], strict=True))
