"""Datasets and DataLoaders as `ArrayTrainer` takes them: batches by seed and iteration alone."""

from __future__ import annotations

import random
from collections import UserDict
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from arraypipe_models import adamw, sgd, trainer
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from optsched import InputError
from optsched.arraypipe import Job
from optsched.arraypipe.runtime.data import DataEnded, Feed, batches_of, cut_batch, target_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Rows(Dataset[Any]):
    """Numbered rows; with noise of every generator that transforms use."""

    def __init__(self, n: int, noise: bool = False) -> None:
        self.n, self.noise = n, noise

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        row = torch.full((6,), float(k))
        if self.noise:
            row = row + torch.rand(6) + random.random() + np.random.random()  # noqa: NPY002
        return row, k % 4


class Stream(IterableDataset[Any]):
    """The same rows, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter([Rows(10)[k] for k in range(10)])


def job(size: int = 4, seed: int = 3) -> Job:
    """Of a batch size and a seed."""
    return Job(seed, size, adamw)


def numbers(data: Any, given: Job, count: int, start: int = 0) -> list[list[int]]:
    """Numbers of the rows in the first batches."""
    return [x[:, 0].int().tolist() for x, _ in islice(batches_of(data)(given, start), count)]


def test_epochs_follow_each_other() -> None:
    """Every sample once an epoch, in another order each, also across batches; by the seed."""
    found = [k for row in numbers(Rows(10), job(), 15) for k in row]
    epochs = [found[k : k + 10] for k in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert numbers(Rows(10), job(seed=4), 15) != numbers(Rows(10), job(), 15)
    assert [len(row) for row in numbers(Rows(3), job(8), 2)] == [8, 8]  # more than the dataset has
    in_order = DataLoader(Rows(10), batch_size=2)
    assert numbers(in_order, job(), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_any_iteration(workers: int) -> None:
    """From iteration 7 on the batches are those that come seventh, noise and all, and no others."""
    plain = batches_of(Rows(10, noise=True))
    loader = DataLoader(Rows(10, noise=True), batch_size=5, shuffle=True, num_workers=workers)
    whole = list(islice(plain(job(), 0), 12))
    states: Any = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()]  # type: ignore[index, union-attr]  # noqa: NPY002
    later = list(islice(batches_of(loader)(job(), 7), 5))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(whole[7:], later, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()  # type: ignore[index]  # noqa: NPY002


def test_exact() -> None:
    """Training by an array ends with the bits of training alone."""
    data = DataLoader(Rows(21, noise=True), shuffle=True, num_workers=1)
    jobs = [Job(0, 8, adamw), Job(1, 6, sgd, microbatches=2)]
    assert trainer(jobs, data=data).check_exact(4) == []


def test_refusals() -> None:
    """What would not give the same batches again is refused in one sentence."""
    rows = Rows(6)
    weighted = WeightedRandomSampler([1.0] * 6, 6)
    x = torch.ones(6, 6)
    for data, sentence in (
        (7, "data: expected a dataset, a DataLoader or a function"),
        (
            sgd([torch.ones(1, requires_grad=True)]),
            r"function data\(job, start\), got SGD \( Param",
        ),
        ((x, x), r"did you mean TensorDataset\(inputs, targets\)\?"),
        ([job()], r"did you mean jobs=\[...\], or fit\?"),
        (DataLoader(rows, sampler=weighted), "chosen by its WeightedRandomSampler"),
        (DataLoader(rows, sampler=RandomSampler(rows, num_samples=3)), "by its RandomSampler"),
        (DataLoader(rows, batch_sampler=[[0, 1]]), "the job's seed; give its dataset"),
        (DataLoader(rows, batch_size=None), "chosen by its DataLoader"),
        (Stream(), "an iterable dataset has no batch of a given number"),
        (DataLoader(Stream(), batch_size=2), "an iterable dataset has no batch of a given number"),
        (Rows(0), "the dataset is empty"),
        (
            [torch.ones(k) for k in range(6)],
            "cannot be stacked .*; give a DataLoader with a collate",
        ),
        (
            DataLoader([{"x": None}] * 6),
            "cannot be stacked .*; give a DataLoader with a collate_fn",
        ),
    ):
        with pytest.raises(InputError, match=sentence) as caught:
            next(iter(batches_of(data)(job(), 0)))
        assert "\n" not in str(caught.value)


# forms of batches, and how they are cut


X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)
CPU = torch.device("cpu")


class Pair(NamedTuple):
    """Fields of an input."""

    a: Any
    b: Any


FORMS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = {
    "pair": ((X, Y), (X,), {}, Y),
    "list": ([X, Y], (X,), {}, Y),
    "tensor": (X, (X,), {}, X),
    "one": ((X,), (X,), {}, X),
    "three": ((X, Y, Y + 1), (X, Y), {}, Y + 1),
    "nested": (((X, (Y, X)), Y), ((X, (Y, X)),), {}, Y),
    "named": ((Pair(X, Y), Y), (Pair(X, Y),), {}, Y),
    "dict": ({"x": X, "y": Y}, (), {"x": X, "y": Y}, {"x": X, "y": Y}),
    "mapping": (UserDict(x=X, n=3), (), {"x": X, "n": 3}, {"x": X, "n": 3}),
    "dict and target": (({"x": X, "scale": torch.tensor(2.0)}, Y), (),
                        {"x": X, "scale": torch.tensor(2.0)}, Y),
}  # fmt: skip


def parts_of(value: Any, rows: slice) -> Any:
    """Some rows of everything that has rows."""
    if isinstance(value, torch.Tensor):
        return value[rows].tolist() if value.dim() else value.tolist()
    if isinstance(value, dict):
        return {key: parts_of(part, rows) for key, part in value.items()}
    if isinstance(value, tuple):
        return [parts_of(part, rows) for part in value]
    return value


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    """Arguments of the model and target, whole and in parts of 2, 2, 1 and 1 samples."""
    batch, arguments, options, target = FORMS[form]
    for count, bounds in ((1, (0, 6)), (4, (0, 2, 4, 5, 6))):
        inputs, parts = cut_batch(batch, count)
        assert len(inputs) == len(parts) == count
        for k, (given, part) in enumerate(zip(inputs, parts, strict=True)):
            rows = slice(bounds[k], bounds[k + 1])
            assert parts_of(given.arguments, rows=slice(None)) == parts_of(arguments, rows)
            assert parts_of(dict(given.options), rows=slice(None)) == parts_of(options, rows)
            assert parts_of(target_of(part), rows=slice(None)) == parts_of(target, rows)
            assert type(given.arguments[0]) is type(arguments[0]) if arguments else True


@pytest.mark.parametrize(
    ("batch", "count", "sentence"),
    [
        (7, 1, "data: expected a pair .*, got int"),
        ((), 1, "expected a pair .*, got tuple"),
        ((X, Y[:3]), 2, "the target has 3 rows and the input 6"),
        ({"x": X, "positions": Y.view(1, 6)}, 2, r"\['positions'\] has 1 rows and \['x'\] 6"),
        ({"x": X, "words": {"a", "b"}}, 2, r"\['words'\] is a set, which cannot be cut"),
        ((X, Y), 7, "6 samples cannot be cut into 7"),
        ((3, "a"), 2, "no tensor that could be cut into 2"),
    ],
)
def test_refusals_of_batches(batch: Any, count: int, sentence: str) -> None:
    """The entry is named, and a way out."""
    with pytest.raises(InputError, match=sentence):
        cut_batch(batch, count)


def test_a_feed_gives_copies_in_order() -> None:
    """A model may change its inputs in place; the batch, and what other stages get, stay."""
    given = {"x": X.clone(), "y": Y}
    feed = Feed(lambda job, start: iter([given]), Job(0, 6, adamw, microbatches=2), "a", 0)
    feed.draw(0)
    for _ in range(2):
        inputs, target = feed.microbatch(1, CPU)
        assert torch.equal(inputs.options["x"], X[3:])
        assert torch.equal(target["x"], X[3:])
        inputs.options["x"].zero_()
    feed.draw(0)
    with pytest.raises(DataEnded, match="job a has no batch for iteration 1"):
        feed.draw(1)
