"""Compiled modules, gradients in a forward, shared frozen weights, outputs of other types."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from arraypipe_models import adamw, sgd
from branching_models import KINDS, Toggled, branching
from depth import depth
from runs import array_trainer, run
from torch import Tensor, nn

from optsched import InputError
from optsched.arraypipe import ArrayTrainer, Job, JobFailed, RunConfig, random_schedule
from optsched.arraypipe.train_alone import NotIdentical
from optsched.arraypipe.train_alone import differences as all_differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches that depend on the seed and the iteration alone."""
    for iteration in range(start, 10**6):
        draw = torch.Generator().manual_seed(job.seed * 1000 + iteration)
        yield torch.randn(4, 3, generator=draw), torch.randn(4, 3, generator=draw)


def differences(build: Callable[[], Any], stages: Any, **options: Any) -> list[str]:
    """All in which two jobs differ from training alone."""
    jobs = [Job(0, 4, sgd, microbatches=2, **options), Job(1, 4, adamw, recompute=True, **options)]
    loss = nn.functional.mse_loss
    return array_trainer(build, data, jobs=jobs, stages=stages, loss=loss).check_exact(2)


class Block(nn.Module):
    """A layer and a function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor to a tensor."""
        return torch.tanh(self.inner(x))


class Own(nn.Module):
    """A forward of its own."""

    def __init__(self, kind: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.a, self.b = kind(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        """One after the other."""
        return self.b(self.a(x))


def compiled(model: nn.Module, *names: str) -> nn.Module:
    """The model with some of its modules compiled in place."""
    for name in names:
        model.get_submodule(name).compile(backend="eager", fullgraph=True)
    return model


COMPILED: dict[str, tuple[Callable[[], Any], Any]] = {
    "both": (lambda: compiled(nn.Sequential(Block(), Block()), "0", "1"), [1]),
    "named": (lambda: compiled(Own(), "a"), ["b"]),
    "wrapped": (lambda: nn.Sequential(torch.compile(Block(), backend="eager"), Block()), [1]),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_modules_are_exact(case: str) -> None:
    """`Module.compile` and `torch.compile` of modules inside of a stage."""
    assert differences(*COMPILED[case]) == []


def test_a_compiled_whole_is_refused() -> None:
    """No stage calls it, so that compiling it had no effect: before anything is trained."""
    for build, stages in (
        (lambda: compiled(Own(), ""), 2),
        (lambda: torch.compile(Own(), backend="eager"), ["_orig_mod.b"]),
    ):
        with pytest.raises(InputError, match=r"compile.* modules inside of a stage"):
            differences(build, stages)


class Forces(nn.Module):
    """The gradient of an energy by the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Positions to forces."""
        x = x.detach().requires_grad_(True)
        (found,) = torch.autograd.grad(self.energy(x).pow(2).sum(), x, create_graph=True)
        return found


class Penalty(nn.Module):
    """A layer plus the gradient of its sum by its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor to a tensor."""
        x = x if x.requires_grad else x.requires_grad_()
        y = torch.tanh(self.inner(x))
        (found,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + found


@pytest.mark.parametrize("kind", [Forces, Penalty])
def test_gradients_inside_of_a_forward(kind: Callable[[], nn.Module]) -> None:
    """The work of stages is counted on the same forward."""
    assert differences(lambda: nn.Sequential(kind(), Penalty(), nn.Linear(3, 3)), 2) == []
    assert differences(lambda: Own(kind), 2) == []


class Backward(nn.Module):
    """Accumulates gradients in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """What it is given."""
        with torch.enable_grad():
            self.inner(x.detach()).sum().backward()
        return x


def test_a_forward_that_calls_backward_is_refused() -> None:
    """Its gradients would be added in another order."""
    with pytest.raises(InputError, match=r"stage 0 calls backward.*use torch.autograd.grad"):
        differences(lambda: nn.Sequential(Backward(), nn.Linear(3, 3)), [1])


class Positions(nn.Module):
    """A frozen layer and a buffer that no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("positions", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """A tensor to a tensor."""
        found: Tensor = self.inner(x) + self.positions
        return found


def normed() -> nn.Module:
    """A frozen layer with statistics."""
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_frozen_base_may_be_shared(precision: str) -> None:
    """With its buffers, in a stage of its own or with others."""
    for base, stages in ((Positions(), [1]), (normed().eval(), [2])):
        build = partial(nn.Sequential, base)
        make = lambda build=build: build(nn.Linear(3, 3), nn.Linear(3, 3))  # noqa: E731
        assert differences(make, stages, precision=precision) == []


def test_a_shared_base_that_changes_is_refused() -> None:
    """Statistics are found before the training, a layer that is unfrozen later when it is met."""
    base = normed()
    with pytest.raises(
        InputError, match=r"have the same '0\.1\.num_batches_tracked', which is changed"
    ):
        differences(lambda: nn.Sequential(base, nn.Linear(3, 3)), [1])
    frozen = Positions()
    jobs = [Job(0, 4, sgd), Job(1, 4, sgd)]
    array = array_trainer(
        lambda: nn.Sequential(frozen, nn.Linear(3, 3)), data, jobs=jobs, stages=[1],
        loss=nn.functional.mse_loss,
    )  # fmt: skip
    run(array, 
        random_schedule([1, 1], 2), 4,
        on_step=lambda job, step, loss: frozen.inner.requires_grad_(step >= 1),
    )  # fmt: skip
    assert [job.status for job in jobs] == ["failed", "failed"]
    for job in jobs:
        assert "requires_grad of '0.inner.weight' (stage 0) has changed" in str(job.error)


class Normed(torch.optim.SGD):
    """Scales all gradients by their common norm: looks across tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        rows = [p for g in self.param_groups for p in g["params"]]
        norm = torch.stack([p.grad.norm() for p in rows if p.grad is not None]).norm()
        for p in rows:
            p.grad = None if p.grad is None else p.grad / norm
        super().step()


def test_an_optimizer_across_tensors_is_found() -> None:
    """By the comparison with training alone, before the training."""
    trainer = ArrayTrainer(Own, data, ["b"], nn.functional.mse_loss)
    jobs = [Job(0, 4, lambda named: Normed([p for _, p in named], lr=0.1))]
    with pytest.raises(NotIdentical, match="an optimizer that looks across tensors"):
        trainer.fit(jobs, 2, schedule=random_schedule([1], 2), config=RunConfig(verbose=False))
    jobs = [Job(0, 4, lambda named: torch.optim.LBFGS([p for _, p in named]))]
    with pytest.raises(InputError, match="LBFGS evaluates the model several times"):
        trainer.fit(jobs, 2, schedule=random_schedule([1], 2), config=RunConfig(verbose=False))


# models that decide anew in every batch


STEPS = 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_decides_anew(kind: str) -> None:
    """No bit differs, whatever the first batch has trained, changed or left out."""
    for seed in range(depth(4 if kind == "depth" else 2)):
        array, order = branching(kind, seed)
        result = run(array, order, STEPS, on_error="raise")
        for j, trained in enumerate(result.trained):
            assert all_differences(trained, array.train_alone(j, STEPS)) == [], (kind, seed)


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
