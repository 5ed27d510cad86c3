"""A tiny model with dropout, batch normalisation and in-place layers, and data for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from runs import array_trainer
from torch import Tensor, nn

from optsched.arraypipe.train_alone import Trained, differences

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe import ArrayTrainer, Job
    from optsched.arraypipe.trainer import RunResult

loss = nn.functional.cross_entropy
CUTS = [4, 6]


def build_model(width: int = 12) -> nn.Sequential:
    """Three stages; the second begins with a layer that changes its input in place."""
    return nn.Sequential(
        nn.Linear(6, width),
        nn.BatchNorm1d(width),
        nn.Dropout(0.3),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.Dropout(0.5),
        nn.Linear(width, 4),
    )


def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches that depend on the seed and the iteration alone."""
    for iteration in range(start, 10**6):
        draw = torch.Generator().manual_seed(job.seed * 1000 + iteration)
        x = torch.randn(job.batch_size, 6, generator=draw)
        yield x, torch.randint(0, 4, (job.batch_size,), generator=draw)


def adamw(named: Any) -> torch.optim.Optimizer:
    """AdamW with weight decay."""
    return torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1)


def sgd(named: Any) -> torch.optim.Optimizer:
    """Momentum SGD."""
    return torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True)


def trainer(jobs: Sequence[Job], **changes: Any) -> ArrayTrainer:
    """An `ArrayTrainer` of the tiny model."""
    changes["model"] = changes.pop("build_model", build_model)
    given: dict[str, Any] = {"stages": CUTS, "loss": loss, "data": data}
    return array_trainer(jobs=jobs, **{**given, **changes})


def exact(array: ArrayTrainer, result: RunResult) -> bool:
    """Whether jobs that have not failed have the bits of training alone for as many iterations."""
    return not any(
        differences(got, array.train_alone(j, len(got.losses)))
        for j, got in enumerate(result.trained)
        if array.jobs[j].status != "failed"
    )


def model_alone(trained: Trained) -> nn.Module:
    """The tiny model after training alone, to be evaluated."""
    model = build_model()
    model.load_state_dict({**trained.parameters, **trained.buffers}, strict=False)
    return model.eval()
