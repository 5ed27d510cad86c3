"""Four small language models trained as a job array, compared with training each alone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

from optsched.arraypipe.job import Job
from optsched.arraypipe.options import RunConfig
from optsched.arraypipe.train_alone import NotIdentical, differences
from optsched.arraypipe.trainer import ArrayTrainer

if TYPE_CHECKING:
    from optsched.arraypipe.trainer import RunResult
    from optsched.model.schedule import Schedule

WIDTH, CONTEXT = 64, 48


def build_model() -> nn.Sequential:
    """Return an embedding of bytes, six Transformer blocks and a head."""
    blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True) for _ in range(6)]
    return nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.Linear(WIDTH, 256))


def dataset() -> TensorDataset:
    """Return windows of a text of sums, such as ``17+25=42``, and the byte after each of them."""
    text = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100))
    windows = torch.tensor(list(text.encode())).unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def last_byte_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of the byte after the window."""
    return nn.functional.cross_entropy(scores[:, -1], target)


def run_demo(steps: int, schedule: Schedule | None = None) -> RunResult:
    """Train four siblings by a schedule, then each alone; raise `NotIdentical` if a bit differs."""
    torch.set_num_threads(1)  # blocks this small gain nothing from a second one
    jobs = [
        Job(0, 4, partial(AdamW, lr=2e-3), name="adamw-2e-3"),
        Job(1, 8, partial(AdamW, lr=3e-3), name="adamw-3e-3", recompute=True),
        Job(2, 8, partial(SGD, lr=0.1, momentum=0.9), name="sgd-0.1"),
        Job(3, 16, partial(AdamW, lr=1e-3), name="adamw-1e-3", microbatches=2),
    ]
    trainer = ArrayTrainer(build_model, dataset(), stages=4, loss=last_byte_loss)
    result = trainer.fit(jobs, steps, schedule=schedule, config=RunConfig(check=0))
    for j, job in enumerate(jobs):
        if found := differences(result.trained[j], trainer.train_alone(j, len(result.losses[j]))):
            raise NotIdentical(f"{job.name} differs from training alone: {found[0]}")
    return result
