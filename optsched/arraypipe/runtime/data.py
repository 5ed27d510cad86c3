"""Batches of a job: of datasets by seed and iteration alone, and cut into micro-batches."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from optsched.arraypipe.job import PRECISIONS, Job
from optsched.arraypipe.model.inputs import Inputs, mapped
from optsched.arraypipe.runtime.cuda_streams import uploaded
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.errors import InputError
from optsched.io.values import format_value

if TYPE_CHECKING:
    from optsched.arraypipe.job import Data


class DataEnded(InputError):
    """The iterator of a job has no batch for an iteration."""


class Feed:
    """Draws the batches of a job from an iterator and cuts them into micro-batches.

    A batch is a mapping, for ``model(**batch)`` (its target is the batch itself); a pair
    ``(input, target)``, for ``model(input)``, or ``model(**input)`` of a mapping; a longer tuple,
    with the target last and other arguments of the model before it; or a tensor, which
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
        self.factors: list[float] = []  # of their losses, once known
        self.weigh: Callable[[list[Any]], list[float]] | None = None  # what makes these

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
        place = f"data: job {self.title}, iteration {iteration}"
        self.inputs, self.parts = cut_batch(batch, self.job.microbatches, place)
        self.iteration, self.factors = iteration, []

    def microbatch(self, number: int, device: torch.device) -> tuple[Inputs, Any]:
        """Return inputs, in memory that the model may change, and target of a micro-batch."""
        given = self.inputs[number]
        known = {id(t) for t in given.tensors()}  # of the batch, which the data may use again
        inputs = brought(cast(given, self.job.precision), device)  # after the cut, as alone
        inputs = mapped(inputs, lambda t: t.clone() if id(t) in known else t)
        return inputs, self.target(number, device)

    def target(self, number: int, device: torch.device) -> Any:
        """Return what the loss of a micro-batch compares the output with."""
        return brought(target_of(self.parts[number]), device)

    def peek(self, device: torch.device) -> tuple[Inputs, Any]:
        """Return inputs and target of the first micro-batch."""
        self.draw(self.iteration + 1)
        return self.microbatch(0, device)


def target_of(part: Any) -> Any:
    """Return what a loss function gets beside the output; of a dict the whole of it."""
    return part if isinstance(part, dict) else part[1]


def cut_batch(batch: Any, count: int, place: str = "data") -> tuple[list[Inputs], list[Any]]:
    """Return inputs of the micro-batches of a batch, and the micro-batches: dicts or pairs."""
    whole, entries = _formed(batch, place)
    parts = [whole]
    if count > 1:
        names = list(_named(whole, ""))
        sizes = {name: t.shape[0] for name, t in names if isinstance(t, Tensor) and t.dim()}
        if not sizes:
            raise InputError(f"{place}: no tensor that could be cut into {count} micro-batches")
        first, size = next(iter(sizes.items()))
        for name, value in names:
            if sizes.get(name, size) != size:
                raise InputError(
                    f"{place}: {name} has {sizes[name]} rows and {first} {size}, so it cannot be "
                    f"cut into micro-batches; give tensors with samples first, or set "
                    f"microbatches=1"
                )
            if not isinstance(value, (Tensor, bool, int, float, str, type(None))):
                raise InputError(
                    f"{place}: {name} is a {type(value).__name__}, which cannot be cut into "
                    f"micro-batches; give a tensor, or set microbatches=1"
                )
        if size < count:
            raise InputError(f"{place}: {size} samples cannot be cut into {count} micro-batches")
        ends = [int(rows[-1]) + 1 for rows in torch.arange(size).tensor_split(count)]
        parts = [
            mapped(whole, partial(_rows, rows=slice(begin, end)))
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
    return [_inputs_of(part, entries) for part in parts], parts


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


def _inputs_of(part: Any, entries: bool) -> Inputs:
    """Return arguments of the model; `entries`: those of the input are several."""
    x = part if isinstance(part, dict) else part[0]
    if isinstance(x, dict):
        return Inputs((), x)
    return Inputs(x if entries else (x,), {})


def _named(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield entries of a batch with their places."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(part, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for k, part in enumerate(value):
            yield from _named(part, f"{name}[{k}]" if name else ("the input", "the target")[k])
    else:
        yield name or "the batch", value


def brought(value: Any, device: torch.device) -> Any:
    """Return tensors of an input or a target on a device."""
    return mapped(value, lambda t: uploaded(t, device) if on_gpu(device) else t.to(device))


def cast(x: Any, precision: str) -> Any:
    """Floating point inputs in the precision of the weights; float32 leaves them as they are."""
    if precision not in ("fp64", "bf16"):
        return x
    dtype = PRECISIONS[precision]
    return mapped(x, lambda t: t.to(dtype) if t.is_floating_point() else t)


def batches_of(data: Any) -> Data:
    """``data(job, start)`` from what `ArrayTrainer` takes: a function, a dataset, a DataLoader."""
    if isinstance(data, DataLoader):
        return _of_loader(data)
    if isinstance(data, IterableDataset):
        raise InputError(
            "data: an iterable dataset has no batch of a given number; give a dataset with "
            "indices, or a function data(job, start) that skips the first batches"
        )
    if isinstance(data, tuple) or (
        isinstance(data, Sequence) and any(isinstance(entry, Job) for entry in data)
    ):
        what = "TensorDataset(inputs, targets)" if isinstance(data, tuple) else "jobs=[...], or fit"
        raise InputError(
            f"data: expected a dataset, got {format_value(data)}; did you mean {what}?"
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Shuffled(data)
    if not callable(data):
        raise InputError(
            f"data: expected a dataset, a DataLoader or a function data(job, start), got "
            f"{format_value(data)}"
        )
    return data  # type: ignore[no-any-return]


def stacked(samples: list[Any]) -> Any:
    """Return the batch of `default_collate`; samples that it cannot stack need another function."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"data: the samples of a batch cannot be stacked ({reason:.200}); "
            f"give a DataLoader with a collate_fn, such as one that pads"
        ) from error


@dataclass(frozen=True, eq=False)
class Shuffled:
    """Batches of a dataset with indices; epochs follow each other, also in the midst of a batch."""

    dataset: Any
    collate: Callable[[list[Any]], Any] = stacked
    shuffle: bool = True
    workers: Mapping[str, Any] = field(default_factory=dict)  # arguments of a DataLoader

    def __call__(self, job: Job, start: int) -> Iterator[Any]:
        """Yield the batches of a job from an iteration on, without end."""
        if len(self.dataset) < 1:
            raise InputError("data: the dataset is empty")
        order = _order(len(self.dataset), job.batch_size, job.seed if self.shuffle else None, start)
        loader: DataLoader[Any] = DataLoader(
            _Batches(self.dataset, self.collate, job.seed), batch_size=None, sampler=order,
            collate_fn=as_tuples, generator=torch.Generator(), **self.workers,
        )  # fmt: skip
        return iter(loader)


@dataclass(frozen=True, eq=False)
class _Batches(Dataset[Any]):
    """Whole batches as a dataset: in every process they have the random numbers of their number."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    seed: int

    def __getitem__(self, key: tuple[int, list[int]]) -> Any:
        iteration, numbers = key
        with _seeded(self.seed, iteration):
            if hasattr(self.dataset, "__getitems__"):
                return self.collate(self.dataset.__getitems__(numbers))
            return self.collate([self.dataset[k] for k in numbers])


def _order(
    samples: int, batch_size: int, seed: int | None, start: int
) -> Iterator[tuple[int, list[int]]]:
    """Numbers of the samples of every batch, shuffled by a seed; a sampler for a DataLoader."""
    epoch, order, position = -1, torch.arange(samples), start * batch_size
    for iteration in count(start):
        numbers: list[int] = []
        while len(numbers) < batch_size:
            if epoch != position // samples:
                epoch = position // samples
                if seed is not None:
                    draw = torch.Generator().manual_seed(_hash(seed, epoch, b"epoch"))
                    order = torch.randperm(samples, generator=draw)
            first = position % samples
            taken = order[first : first + batch_size - len(numbers)].tolist()
            numbers += taken
            position += len(taken)
        yield iteration, numbers


def as_tuples(batch: Any) -> Any:
    """Return a batch with tuples for lists, which `default_collate` makes of tuples."""
    if not isinstance(batch, (list, tuple)):
        return batch
    return tuple(tuple(part) if isinstance(part, list) else part for part in batch)


@contextmanager
def _seeded(seed: int, iteration: int) -> Iterator[None]:
    """Global random numbers of an iteration (transforms draw them), as before afterwards."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    key = _hash(seed, iteration, b"batch")
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002


def _hash(seed: int, number: int, what: bytes) -> int:
    packed = struct.pack("<2q", seed, number)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=7, person=what).digest(), "little")


def _of_loader(loader: DataLoader[Any]) -> Data:
    """Its dataset, collate function and workers; the order is ours, by the job's seed."""
    if isinstance(loader.dataset, IterableDataset):
        return batches_of(loader.dataset)
    sampler = loader.sampler
    if (
        type(loader.batch_sampler) is not BatchSampler
        or type(sampler) not in (SequentialSampler, RandomSampler)
        or getattr(sampler, "replacement", False)
        or getattr(sampler, "_num_samples", None) is not None
    ):
        name = type(sampler if loader.batch_sampler else loader).__name__
        raise InputError(
            f"data: the samples of the DataLoader are chosen by its {name}: its batches depend "
            f"on more than the job's seed; give its dataset, or a function data(job, start)"
        )
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
             "prefetch_factor")  # fmt: skip
    workers = {name: getattr(loader, name) for name in names} if loader.num_workers else {}
    collate = stacked if loader.collate_fn is default_collate else loader.collate_fn
    return Shuffled(loader.dataset, collate, type(sampler) is RandomSampler, workers)
