"""Loss, metric and predictions of a job for one batch, by its functions or by the defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from optsched.arraypipe.model.inputs import Inputs, mapped
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.elastic.job import TrainingJob

IGNORED: Final = -100  # label of a position that is no target, as in torch's cross entropy
_NEAR: Final = 1e-4  # relative difference of two computations of a mean loss


class Batch(NamedTuple):
    """A batch on its device: arguments of the model, and the target of its output."""

    inputs: Inputs
    target: Any
    labels: Tensor | None
    samples: int
    keyed: bool  # whether its samples are dictionaries


def batch_on(device: torch.device, batch: Any, samples: int) -> Batch:
    """Move a batch of pairs or dictionaries to a device and separate inputs and targets."""
    if isinstance(batch, Mapping):
        rows = mapped(dict(batch), lambda tensor: tensor.to(device))
        return Batch(Inputs((), rows), rows, rows.get("labels"), samples, True)
    if not isinstance(batch, (list, tuple)) or len(batch) != 2:
        kind = type(batch).__name__
        raise InputError(f"data: expected pairs (input, class) or dictionaries, got a {kind}")
    x, y = mapped(list(batch), lambda tensor: tensor.to(device))
    inputs = Inputs((), dict(x)) if isinstance(x, Mapping) else Inputs((x,))
    return Batch(inputs, y, y, samples, False)


class Objective:
    """Compute loss, metric and predictions of a job from outputs of its model.

    Labels of dictionaries belong to the logits at the same position, or at the one before (causal
    language models): a comparison with the model's first loss decides.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.loss, self.metric = job.loss, job.metric
        self.shifted: bool | None = None  # None: not known yet

    def total(self, batch: Batch, out: Any) -> tuple[Tensor, Tensor | None]:
        """Return the sum of the loss, and the number of targets if it is not that of samples."""
        if self.loss is not None:
            found = self.loss(out, batch.target)
            total, count = found if isinstance(found, tuple) else (found, None)
            count = None if count is None else torch.as_tensor(count, dtype=torch.float64)
        elif not batch.keyed:
            return cross_entropy(logits_of(out), batch.target, reduction="sum"), None
        else:
            mean = _part(out, "loss")
            if mean is None:
                raise InputError("loss: the output of the model has none; give the job a `loss`")
            logits, labels, _ = self.predictions(batch, out)
            valid = int((labels != IGNORED).sum()) if batch.samples else 0
            total = mean * valid if valid else logits.sum() * 0.0  # a mean of nothing is NaN
            count = torch.tensor(float(valid), dtype=torch.float64)
        if batch.keyed and not batch.samples:  # the batch is a stand-in, see `steps`
            total, count = total * 0.0, None if count is None else count * 0.0
        return total, count

    def predictions(self, batch: Batch, out: Any) -> tuple[Tensor, Tensor, int]:
        """Logits, the labels that they predict (`IGNORED`: none), and the axis of the classes."""
        logits, labels = logits_of(out), batch.labels
        if not batch.keyed:
            return logits, batch.target, 1
        if labels is None or labels.shape != logits.shape[:-1]:
            got = None if labels is None else tuple(labels.shape)
            raise InputError(f"labels: expected {tuple(logits.shape[:-1])} classes, got {got}")
        pairs = [(logits, labels)]
        if labels.dim() == 2:
            pairs.append((logits[:, :-1], labels[:, 1:]))
        if self.shifted is None and not (labels == IGNORED).all():
            self.shifted = self._is_shifted(pairs, _part(out, "loss"))
        return *pairs[bool(self.shifted)], -1

    def _is_shifted(self, pairs: list[tuple[Tensor, Tensor]], loss: Tensor | None) -> bool:
        """Compare the model's loss with the cross entropy of labels in place and shifted."""
        value = math.inf if loss is None else float(loss.detach())
        means = [
            float(cross_entropy(z.detach().flatten(0, -2).float(), y.flatten())) for z, y in pairs
        ]
        off = [abs(mean - value) if math.isfinite(mean) else math.inf for mean in means]
        best = min(reversed(range(len(off))), key=off.__getitem__)
        near = off[best] <= _NEAR * max(1.0, abs(value)) and math.isfinite(value)
        if not near and self.loss is None:
            raise InputError(
                f"loss: that of the model, {value:g}, is not the mean cross entropy of its logits "
                "and labels: give the job a `loss` that returns (sum, number of targets)"
            )
        return near and best == 1

    def score(self, batch: Batch, out: Any) -> tuple[Tensor, int]:
        """Sum of the metric and its number of targets."""
        if self.metric is not None:
            found = self.metric(out, batch.target)
        else:
            logits, labels, axis = self.predictions(batch, out)
            found = logits.argmax(axis) == labels
            if batch.keyed:
                found = found.sum(), (labels != IGNORED).sum()
        if isinstance(found, tuple):
            return torch.as_tensor(found[0], dtype=torch.float64), int(found[1])
        if found.shape[:1] != (batch.samples,):
            got = tuple(found.shape)
            raise InputError(f"metric: expected a number for each of {batch.samples}, got {got}")
        return found.sum(dtype=torch.float64) / max(found[:1].numel(), 1), batch.samples


def logits_of(out: Any) -> Tensor:
    """Return the logits of an output: a tensor, or an object or mapping with ``logits``."""
    found = out if isinstance(out, Tensor) else _part(out, "logits")
    if found is None:
        kind = type(out).__name__
        raise InputError(f"model: expected a tensor or an output with `logits`, got a {kind}")
    return found


def _part(out: Any, name: str) -> Tensor | None:
    found = out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)
    return found if isinstance(found, Tensor) else None
