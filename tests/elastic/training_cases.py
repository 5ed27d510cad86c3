"""Models, data and jobs that worker processes of tests import."""

from __future__ import annotations

import os
import random
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from simulated_pool import Replay as Replay
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset, default_collate

from optsched.arraypipe.model.inputs import same as same
from optsched.elastic import StepPlan, TrainingJob, VariableBatchLoader, read_checkpoint
from optsched.elastic.checkpoint import seed_all
from optsched.elastic.training import Member
from optsched.elastic.workers import Join

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLES = 203


def data(samples: int = SAMPLES, seed: int = 0, dtype: str = "float64") -> Any:
    """Three noisy clusters, (training, validation)."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (samples + 60,), generator=generator)
    x = torch.randn(samples + 60, 6, generator=generator, dtype=getattr(torch, dtype)) + y[:, None]
    return TensorDataset(x[:samples], y[:samples]), TensorDataset(x[samples:], y[samples:])


def net(dropout: float = 0.0, norm: bool = False, dtype: str = "float64") -> nn.Module:
    """A small network."""
    layers: list[nn.Module] = [nn.Linear(6, 8)]
    layers += [nn.BatchNorm1d(8)] if norm else []
    layers += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(getattr(torch, dtype))


def adam(parameters: Any) -> Any:
    """An optimizer with a state."""
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: Any) -> Any:
    """An optimizer whose steps are proportional to the gradients."""
    return torch.optim.SGD(parameters, lr=0.5)


def cosine(optimizer: Any) -> Any:
    """A cosine by NumPy, over all passes."""
    return schedulers.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 20)))


def warm_up(optimizer: Any) -> Any:
    """Two schedules, one after the other, which changes in the middle of a pass."""
    first = schedulers.LinearLR(optimizer, 0.1, total_iters=6)
    return schedulers.SequentialLR(optimizer, [first, schedulers.StepLR(optimizer, 3, 0.5)], [6])


def plateau(optimizer: Any) -> Any:
    """Looks at the loss of every batch."""
    return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.1)


def bare(optimizer: Any) -> Any:
    """A schedule without a state."""
    return object()


def nested(optimizer: Any) -> Any:
    """A schedule with an object in its state."""
    found = schedulers.StepLR(optimizer, 2)
    found.after = schedulers.StepLR(optimizer, 2)  # type: ignore[attr-defined]
    return found


def made(kind: Any, settings: dict[str, Any], parameters: Any) -> Any:
    """An optimizer."""
    return kind(parameters, **settings)


class Late(torch.optim.SGD):
    """An object comes into its state with the first step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        super().step()
        self.state[self.param_groups[0]["params"][0]]["odd"] = deque()


def slow_data(seconds: float) -> Any:
    """Data whose samples take some time."""
    train, validation = data()
    return Slow(train, seconds), validation


class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Reading a sample takes some time."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self.inner, self.seconds = inner, seconds

    def __len__(self) -> int:
        """As many as there are inside."""
        return len(self.inner)

    def __getitem__(self, i: int) -> Any:
        """A sample, slowly."""
        time.sleep(self.seconds)
        return self.inner[i]


def dies_once(place: str, after: int) -> Any:
    """A network whose process is killed at its n-th training step, once."""
    inner = net(dropout=0.3)
    inner.register_forward_hook(partial(_die, place, after, [0]))
    return inner


def _die(place: str, after: int, count: list[int], module: Any, *_: Any) -> None:
    count[0] += module.training
    if count[0] == after:
        try:
            Path(place).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), 9)


def raises() -> Any:
    """A network that cannot be made."""
    raise ValueError("no such layer")


def still(parameters: Any) -> Any:
    """An optimizer that does not move."""
    return torch.optim.Adam(parameters, lr=0.0)


def drawn() -> Any:
    """Data that are drawn and split without a seed."""
    x = torch.randn(260, 6, dtype=torch.float64)
    return torch.utils.data.random_split(TensorDataset(x, (x[:, 0] > 0).long()), [200, 60])


def images() -> Any:
    """A class for every pixel."""
    x = torch.randn(60, 1, 4, 4, dtype=torch.float64)
    return (TensorDataset(x, (x[:, 0] > 0).long()),) * 2


def pixels() -> nn.Module:
    """A class for every pixel."""
    return nn.Conv2d(1, 3, 1, dtype=torch.float64)


def mean(out: Any, target: Any) -> Any:
    """A mean over the batch, which is not what is wanted."""
    return (out.argmax(1) == target).double().mean()


def job(name: str, **given: Any) -> TrainingJob:
    """A small job."""
    fields: dict[str, Any] = {"model": partial(net, dropout=0.3), "data": data, "optimizer": adam}
    return TrainingJob(
        name=name, **fields | {"batch_size": 20, "passes": 4, "sizes": (1, 2)} | given
    )


class Noisy(Slow):
    """Samples get noise of all three random generators."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, 0.0)

    def __getitem__(self, i: int) -> Any:
        """A sample with noise."""
        x, y = self.inner[i]
        return x + random.random() + np.random.random() + torch.rand(()), y  # noqa: NPY002


def states(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Checkpoints of jobs."""
    return [read_checkpoint(folder / name / "checkpoint.pt", name) for name in names]


def member(one: TrainingJob, folder: Path, done: int = 0) -> Member:
    """The only worker of a job, in this process."""
    folder.mkdir(exist_ok=True)
    seed_all(0)
    return Member(one, Join(0, 1, "cpu", "", str(folder), done), one.data())


def alone(
    one: TrainingJob, quotas: Sequence[int], factors: Sequence[float] = ()
) -> tuple[nn.Module, Any, list[float]]:
    """The oracle: a plain loop in one process on whole global batches; also its mean losses."""
    seed_all(one.seed, 0, 0)
    model, (train, _) = one.model(), one.data()
    optimizer: Any = one.optimizer(model.parameters())
    scheduler: Any = None if one.scheduler is None else one.scheduler(optimizer)
    model.train()
    losses = []
    for number, workers in enumerate(quotas):
        factor = factors[number] if factors else 1.0
        plan = StepPlan(*(
            tuple(total // workers + (r < total % workers) for r in range(workers))
            for total in (len(train), one.batch_size)
        ))  # fmt: skip
        loaders = [
            VariableBatchLoader(range(len(train)), plan, r, epoch=number, seed=one.seed)
            for r in range(workers)
        ]
        total, targets = 0.0, 0
        for step in zip(*loaders, strict=True):
            batch = (one.collate or default_collate)([train[i] for part, _ in step for i in part])
            if isinstance(batch, dict):
                loss, count = model(**batch).loss, int((batch["labels"][:, 1:] >= 0).sum())
            else:
                count = len(batch[1])
                summed = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
                loss = summed * (1 / count)
            optimizer.zero_grad()
            loss.backward()
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            if scheduler is not None:
                mean = [float(loss.detach())] * isinstance(scheduler, schedulers.ReduceLROnPlateau)
                scheduler.step(*mean)
            total, targets = total + float(loss.detach()) * count, targets + count
        losses.append(total / targets)
    return model, optimizer, losses


VOCABULARY = 23


def gpt2(dropout: float = 0.1) -> nn.Module:
    """A small causal language model."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def texts() -> Any:
    """Sequences of 3 to 9 tokens, to train and to validate."""
    some = np.random.default_rng(0)
    rows = [some.integers(1, 9, some.integers(3, 10)).cumsum() % VOCABULARY for _ in range(48)]
    samples = [{"input_ids": torch.tensor(row)} for row in rows]
    return samples[:37], samples[37:]


def padded(samples: list[Any]) -> dict[str, Any]:
    """Pad sequences to the longest of the batch."""
    rows = [sample["input_ids"] for sample in samples]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True)
    labels = pad(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (labels >= 0).long(), "labels": labels}


def token_loss(out: Any, batch: Any) -> Any:
    """Sum over the next tokens, and their number."""
    labels = batch["labels"][:, 1:]
    total = nn.functional.cross_entropy(
        out.logits[:, :-1].transpose(1, 2), labels, ignore_index=-100, reduction="sum"
    )
    return total, (labels >= 0).sum()


LANGUAGE: dict[str, Any] = {
    "model": gpt2, "data": texts, "collate": padded, "batch_size": 8,
}  # fmt: skip
