"""The batches of one job, in order and ahead of nobody: iteration t exists while it is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optsched.arraypipe.blocks import tensors_of
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.arraypipe.job import Data, Job, Tensors


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
        self.shares: list[float] = []

    def draw(self, iteration: int) -> None:
        """Make the batch of an iteration the current one (nothing happens if it is)."""
        if iteration == self.iteration:
            return
        assert iteration == self.iteration + 1, "batches are drawn in order"
        try:
            pair = next(self.batches)
        except StopIteration:
            raise InputError(
                f"data: job {self.title} has no batch for iteration {iteration}"
            ) from None
        self._cut(pair, iteration)
        self.iteration = iteration

    def peek(self) -> Any:
        """Input of the first batch, whole."""
        self.draw(self.iteration + 1)
        return self.whole

    def _cut(self, pair: Any, iteration: int) -> None:
        parts = self.job.microbatches
        place = f"data: job {self.title}, iteration {iteration}"
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(f"{place}: expected a pair (input, target), got {type(pair).__name__}")
        x, target = pair
        self.whole = x
        inputs = tensors_of(x, f"{place}: the input")
        if parts == 1:
            self.inputs, self.targets, self.shares = [x], [target], [1.0]
            return
        targets = tensors_of(target, f"{place}: the target")
        size = _length(inputs[0])
        if any(_length(t) != size for t in (*inputs, *targets)):
            raise InputError(f"{place}: inputs and targets differ in their first dimension")
        if size < parts:
            raise InputError(f"{place}: {size} samples cannot be cut into {parts} micro-batches")
        self.inputs, self.targets = _split(x, inputs, parts), _split(target, targets, parts)
        lengths = [_length(t) for t in torch.tensor_split(inputs[0], parts)]
        self.shares = [length / size for length in lengths]


def _length(t: Tensor) -> int:
    return t.shape[0] if t.dim() else 0


def _split(whole: Any, tensors: Tensors, parts: int) -> list[Any]:
    """Micro-batches in the form of the whole: a tensor, or a tuple of tensors."""
    pieces = list(zip(*(torch.tensor_split(t, parts) for t in tensors), strict=True))
    return pieces if isinstance(whole, tuple) else [piece[0] for piece in pieces]
