"""Forms of batches, and how they are cut into micro-batches."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from arraypipe_models import adamw

from optsched import InputError
from optsched.arraypipe import Job
from optsched.arraypipe.runtime.data import DataEnded, Feed, cut_batch, target_of

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
def test_refusals(batch: Any, count: int, sentence: str) -> None:
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
