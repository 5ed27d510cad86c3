"""What needs a gradient, and what is changed in place, may differ from batch to batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from arraypipe_models import sgd
from branching_models import KINDS, Toggled, branching
from depth import depth
from runs import array_trainer, run
from torch import Tensor, nn

from optsched.arraypipe import Job, JobFailed, random_schedule
from optsched.arraypipe.train_alone import differences
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_decides_anew(kind: str) -> None:
    """No bit differs, whatever the first batch has trained, changed or left out."""
    for seed in range(depth(4 if kind == "depth" else 2)):
        array, order = branching(kind, seed)
        result = run(array, order, STEPS, on_error="raise")
        for j, trained in enumerate(result.trained):
            assert differences(trained, array.train_alone(j, STEPS)) == [], (kind, seed)


def numbered(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches whose first value is their number."""
    for k in range(start, 9):
        x = torch.arange(24.0).view(4, 6).sin()
        x[0, 0] = k
        yield x, torch.ones(4, 6) * k


class Forms(nn.Module):
    """A tensor in the first batch, a tuple later."""

    def forward(self, x: Tensor) -> Any:
        """By the number of the batch."""
        return x if not x[0, 0] else (x,)


class Late(nn.Module):
    """Makes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        self.late = torch.ones(6)
        return x


def trained_by(build: Any, **options: Any) -> None:
    """Train a job of a model and a linear layer behind it, three iterations."""
    jobs = [Job(0, 4, sgd)]
    array = array_trainer(
        lambda: nn.Sequential(build(), nn.Linear(6, 6)), numbered, jobs=jobs, stages=[1],
        loss=nn.functional.mse_loss,
    )  # fmt: skip
    run(array, random_schedule([1], 2), STEPS, on_error="raise", **options)


def test_what_cannot_be_exact_is_refused() -> None:
    """Stage, tensor and way out are named; nothing is trained silently."""
    models: list[nn.Module] = []

    def build() -> nn.Module:
        models.append(nn.Linear(6, 6))
        return models[-1]

    def freeze(job: Job, step: int, value: float) -> None:
        for model in models:
            model.requires_grad_(False)

    changed = r"requires_grad of '0\.weight' \(stage 0\) has changed"
    for model, options, error, sentence in (
        (Forms, {}, JobFailed, "iteration 1: stages: the output of stage 0 is a tuple, in the "
         "first batch a tensor"),
        (Late, {}, InputError, "the forward of stage 0 makes the buffer 'late'"),
        (lambda: Toggled(6, 6), {}, (InputError, JobFailed), changed),
        (build, {"on_step": freeze}, JobFailed, changed),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence):
            trained_by(model, **options)
