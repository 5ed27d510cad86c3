"""Whether a job that goes on has the data of before: a sample of the last batch is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from optsched.arraypipe.job import Data, Job


_VALUES: Final = 64  # of a tensor that are compared
_PLAIN: Final = (str, int, float, bool, type(None))


@dataclass
class Seen:
    """The newest batch of a job, and the one that its checkpoint was trained on last."""

    start: int  # iteration that the job goes on with
    title: str
    expected: Mapping[str, Any] = field(default_factory=dict)  # `batch` of the checkpoint
    iteration: int = -1  # of the newest batch
    parts: list[dict[str, Any]] = field(default_factory=list)  # its sample

    def batch(self, iteration: int) -> dict[str, Any]:
        """What a checkpoint notes of the batch of its last iteration; nothing if that is gone."""
        return {"iteration": iteration, "parts": self.parts} if self.iteration == iteration else {}

    def check(self, pair: Any) -> None:
        """Refuse data that give another batch than before for the last iteration."""
        what, t = difference(self.expected["parts"], sample_of(pair)), self.start - 1
        if what:
            raise InputError(
                f"data: job {self.title}: data(job, {t}) begins with another batch than the one of "
                f"iteration {t} that the checkpoint was trained on ({what}); data(job, start) must "
                f"begin with the batch of iteration start and depend on nothing else, such as the "
                f"global random state; to train on other data begin a new job with init=model.pt"
            )


def watched(data: Data, seen: Seen, samples: Callable[[], bool]) -> Data:
    """Data that begin one batch earlier, which is compared, and of which samples are taken.

    So data that ignore `start` are found, unless all their batches are equal.
    """

    def batches(job: Job, start: int) -> Iterator[Any]:
        first = start - bool(seen.expected)
        return _followed(iter(data(job, first)), first, seen, samples)

    return batches


def _followed(
    source: Iterator[Any], first: int, seen: Seen, samples: Callable[[], bool]
) -> Iterator[Any]:
    for iteration, pair in enumerate(source, first):
        if iteration < seen.start:
            seen.check(pair)
            continue
        if samples():  # before a forward can change the batch in place
            seen.iteration, seen.parts = iteration, sample_of(pair)
        yield pair


def sample_of(value: Any) -> list[dict[str, Any]]:
    """Shapes, types and a few values of all tensors of a batch, wherever they are in it."""
    if isinstance(value, dict):
        return [part for key in value for part in sample_of(value[key])]
    if isinstance(value, (list, tuple)):
        return [part for inner in value for part in sample_of(inner)]
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        return [{"kind": kind, "shape": repr(value) if isinstance(value, _PLAIN) else ""}]
    found: dict[str, Any] = {"kind": str(value.dtype), "shape": str(tuple(value.shape))}
    if value.device.type == "cpu" and value.layout == torch.strided:  # a GPU is not waited for
        places = torch.arange(0, value.numel(), max(1, value.numel() // _VALUES))
        found["values"] = value.detach().take(places)
    return [found]


def difference(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """The first one, in words; values may differ as much as another processor rounds them."""
    if len(before) != len(now):
        return f"it has {len(now)} parts, not {len(before)}"
    for k, (a, b) in enumerate(zip(before, now, strict=True)):
        for key in ("kind", "shape"):
            if a[key] != b[key]:
                return f"part {k} has {key} {b[key]}, not {a[key]}"
        x, y = a.get("values"), b.get("values")
        if x is None or y is None:
            continue
        floats = x.is_floating_point()
        equal = torch.isclose(x, y, rtol=1e-3, atol=1e-5, equal_nan=True) if floats else x == y
        if not equal.all():
            place = int(equal.logical_not().nonzero()[0])
            return f"part {k} has {y[place].item():.6g} where it had {x[place].item():.6g}"
    return ""
