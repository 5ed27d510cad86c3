"""The batches of one job, in order; the batch of iteration t exists while t is trained."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optsched.arraypipe.job import PRECISIONS
from optsched.arraypipe.model.inputs import Inputs, mapped
from optsched.arraypipe.runtime.cuda_streams import uploaded
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.arraypipe.job import Data, Job


class DataEnded(InputError):
    """The iterator of a job has no batch for an iteration."""


class Feed:
    """Draws the batches of a job from an iterator and cuts them into micro-batches.

    A batch is a mapping, for ``model(**batch)`` (its target is the batch itself); a pair
    ``(input, target)``, for ``model(input)``, or ``model(**input)`` of a mapping; a longer tuple,
    whose last entry is the target and whose others are arguments of the model; or a tensor, which
    is input and target.
    """

    def __init__(self, data: Data, job: Job, title: str, start: int) -> None:
        self.job, self.title = job, title
        try:
            self.batches = iter(data(job, start))
        except TypeError as error:
            raise InputError(
                f"data: job {title}: expected an iterator of batches ({error})"
            ) from error
        self.iteration = start - 1
        self.parts: list[Any] = []  # micro-batches: dicts, or pairs (input, target)
        self.inputs: list[Inputs] = []

    def draw(self, iteration: int) -> None:
        """Make the batch of an iteration the current one (nothing happens if it is)."""
        if iteration == self.iteration:
            return
        assert iteration == self.iteration + 1, "batches are drawn in order"
        try:
            batch = next(self.batches)
        except StopIteration:
            raise DataEnded(
                f"data: job {self.title} has no batch for iteration {iteration}"
            ) from None
        count = self.job.microbatches
        place = f"data: job {self.title}, iteration {iteration}"
        self.inputs, self.parts = cut_batch(batch, count, place)
        self.iteration = iteration

    def microbatch(self, number: int, device: torch.device) -> tuple[Inputs, Any]:
        """Inputs, in memory that the model may change, and target of a micro-batch."""
        given = cast(self.inputs[number], self.job.precision)  # after the cut, as alone
        inputs = _apart(brought(given, device), self.inputs[number])
        return inputs, self.target(number, device)

    def target(self, number: int, device: torch.device) -> Any:
        """What the loss of a micro-batch compares the output with."""
        return brought(target_of(self.parts[number]), device)

    def peek(self, device: torch.device) -> tuple[Inputs, Any]:
        """Inputs and target of the first micro-batch."""
        self.draw(self.iteration + 1)
        return self.microbatch(0, device)


def _apart(inputs: Inputs, given: Inputs) -> Inputs:
    """Copies of tensors that are still those of the batch, which the data may use again."""
    known = {id(t) for t in given.tensors()}
    made: Inputs = mapped(inputs, lambda t: t.clone() if id(t) in known else t)
    return made


def target_of(part: Any) -> Any:
    """What a loss function gets beside the output; of a dict the whole of it."""
    return part if isinstance(part, dict) else part[1]


def cut_batch(batch: Any, count: int, place: str = "data") -> tuple[list[Inputs], list[Any]]:
    """Inputs of the micro-batches of a batch, and the micro-batches: dicts or pairs."""
    whole, entries = _formed(batch, place)
    if count == 1:
        return [inputs_of(whole, entries)], [whole]
    names = list(_named(whole, ""))
    sizes = {name: t.shape[0] for name, t in names if isinstance(t, Tensor) and t.dim()}
    if not sizes:
        raise InputError(f"{place}: no tensor that could be cut into {count} micro-batches")
    first, size = next(iter(sizes.items()))
    for name, value in names:
        if sizes.get(name, size) != size:
            raise InputError(
                f"{place}: {name} has {sizes[name]} rows and {first} {size}, so it cannot be cut "
                f"into micro-batches; give tensors with samples first, or set microbatches=1"
            )
        if not isinstance(value, (Tensor, bool, int, float, str, type(None))):
            raise InputError(
                f"{place}: {name} is a {type(value).__name__}, which cannot be cut into "
                f"micro-batches; give a tensor, or set microbatches=1"
            )
    if size < count:
        raise InputError(f"{place}: {size} samples cannot be cut into {count} micro-batches")
    parts = []
    for rows in torch.arange(size).tensor_split(count):
        here = slice(int(rows[0]), int(rows[-1]) + 1)
        parts.append(mapped(whole, partial(_rows, rows=here)))
    return [inputs_of(part, entries) for part in parts], parts


def _rows(t: Tensor, rows: slice) -> Tensor:
    return t[rows] if t.dim() else t


def _formed(batch: Any, place: str) -> tuple[Any, bool]:
    """A batch as a dict or a pair, and whether the input's entries are arguments of the model."""
    if isinstance(batch, Mapping):
        return dict(batch), False
    if isinstance(batch, Tensor):
        return (batch, batch), False
    if not isinstance(batch, (tuple, list)) or not batch:
        raise InputError(
            f"{place}: expected a pair (input, target), a mapping of arguments of the model, or a "
            f"tensor, got {type(batch).__name__}"
        )
    if len(batch) == 1:
        return (batch[0], batch[0]), False
    *given, target = batch
    x = tuple(given) if len(given) > 1 else given[0]
    return (dict(x) if isinstance(x, Mapping) else x, target), len(given) > 1


def inputs_of(part: Any, entries: bool) -> Inputs:
    """Arguments of the model; `entries`: those of the input are several."""
    if isinstance(part, dict):
        return Inputs((), part)
    x = part[0]
    if isinstance(x, dict):
        return Inputs((), x)
    return Inputs(x if entries else (x,), {})


def _named(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Entries of a batch with their places."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(part, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for k, part in enumerate(value):
            yield from _named(part, f"{name}[{k}]" if name else ("the input", "the target")[k])
    else:
        yield name or "the batch", value


def brought(value: Any, device: torch.device) -> Any:
    """Tensors of an input or a target on a device."""
    return mapped(value, lambda t: uploaded(t, device) if on_gpu(device) else t.to(device))


def cast(x: Any, precision: str) -> Any:
    """Floating point inputs in the precision of the weights; float32 leaves them as they are."""
    if precision not in ("fp64", "bf16"):
        return x
    dtype = PRECISIONS[precision]
    return mapped(x, lambda t: t.to(dtype) if t.is_floating_point() else t)
