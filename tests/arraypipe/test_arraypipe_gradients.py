"""What needs a gradient, and what is changed in place, may differ from batch to batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from arraypipe_models import sgd
from branching_models import KINDS, Toggled, branching
from runs import array_trainer, run
from torch import Tensor, nn

from optsched.arraypipe import Job, JobFailed, random_schedule
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from collections.abc import Iterator


STEPS = 3
SEEDS = {"depth": 8}


def all_differences(kind: str, seed: int) -> list[str]:
    """Train in an order of the seed, and compare every job with training alone."""
    array, order = branching(kind, seed)
    result = run(array, order, STEPS, on_error="raise")
    return [
        f"{kind} {seed}: {line}"
        for j, trained in enumerate(result.trained)
        for line in differences(trained, array.train_alone(j, STEPS))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_decides_anew(kind: str) -> None:
    """No bit differs, whatever the first batch has trained, changed or left out."""
    for seed in range(SEEDS.get(kind, 2)):
        assert all_differences(kind, seed) == []


def noticed(kind: str) -> bool:
    """Whether one of a few seeds differs, or stops the run."""
    try:
        return any(all_differences(kind, seed) for seed in range(4))
    except JobFailed:
        return True


def test_noticed_flags_of_another_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward with the parameters trained as a later forward left them loses gradients."""
    monkeypatch.setattr(blocks, "_train", lambda stage, now, flags: None)
    assert noticed("unfrozen")


# what a callback changes, and what is refused


def numbered(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches whose first value is their number."""
    for k in range(start, 9):
        x = torch.arange(24.0).view(4, 6).sin()
        x[0, 0] = k
        yield x, torch.ones(4, 6) * k


def layers(*made: nn.Module) -> nn.Sequential:
    """Two linear layers around others."""
    return nn.Sequential(nn.Linear(6, 6), *made, nn.Linear(6, 6))


def momentum(named: Any) -> torch.optim.Optimizer:
    """All parameters, also those that are not trained yet."""
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_callback_may_unfreeze_layers(recompute: bool, tied: bool) -> None:
    """From the iteration after the loss that it was called with, as in a loop by hand."""

    def build(seed: int) -> nn.Module:  # jobs share frozen weights that are equal
        torch.manual_seed(seed)
        model = layers(nn.Tanh())
        model[:1].requires_grad_(False)
        if tied:
            model[2].weight = model[0].weight
        return model

    def by_hand(seed: int) -> dict[str, Tensor]:
        model = build(seed)
        optimizer = momentum(model.named_parameters())
        batches = numbered(Job(0, 4, momentum), 0)
        for k in range(5):
            x, y = next(batches)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.requires_grad_(k >= 1)
            model[2].bias.requires_grad_(True)
        return model.state_dict()

    models: dict[int, nn.Module] = {}

    def noted(seed: int) -> nn.Module:
        models[seed] = build(seed)
        return models[seed]

    jobs = [Job(k, 4, momentum, recompute=recompute, model={"seed": k}) for k in range(4)]
    array = array_trainer(noted, numbered, stages=[1, 2], jobs=jobs, loss=nn.functional.mse_loss)

    def on_step(job: Job, step: int, value: float) -> None:
        models[job.seed].requires_grad_(step >= 1)
        models[job.seed][2].bias.requires_grad_(True)  # type: ignore[index]

    result = run(array, random_schedule([1] * 4, 3), 5, on_step=on_step, on_error="raise")
    for k, got in enumerate(result.models):
        wanted = by_hand(k)
        assert all(torch.equal(got.state_dict()[name], wanted[name]) for name in wanted)


class Forms(nn.Module):
    """A tensor in the first batch, a tuple later."""

    def forward(self, x: Tensor) -> Any:
        """By the number of the batch."""
        return x if not x[0, 0] else (x,)


class Second(nn.Module):
    """A part of a model with the weight of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Toggled(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        found: Tensor = self.last(self.first(x))
        return found


class Late(nn.Module):
    """Makes a buffer in the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        """By the number of the batch."""
        self.late = torch.ones(6) if x[0, 0] else None
        return x


REFUSED: dict[str, tuple[Any, Any, Any, int, str]] = {
    "output": (lambda: nn.Sequential(Forms(), nn.Linear(6, 6)), [1], numbered, 1,
               "job0, stage 0, iteration 1: stages: the output of stage 0 is a tuple, in the first "
               "batch a tensor"),
    "buffer": (lambda: nn.Sequential(Late(), nn.Linear(6, 6)), [1], numbered, 1,
               "stage 0, iteration 1: stages: the forward of stage 0 makes the buffer 'late'"),
    "tied": (Second, ["last"], numbered, 4,
             "stage 0, iteration 0: stages: the forward of stage 0 changes requires_grad of "
             "'first.weight', which stages share, in micro-batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    """Job, stage, iteration, tensor and way out are named; nothing is trained silently."""
    build, stages, batches, parts, sentence = REFUSED[name]
    jobs = [Job(0, 4, sgd, microbatches=parts)]
    array = array_trainer(build, batches, jobs=jobs, stages=stages, loss=nn.functional.mse_loss)
    with pytest.raises(JobFailed) as caught:
        run(array, random_schedule([parts], array.n_stages), 3, on_error="raise")
    assert sentence in str(caught.value)
