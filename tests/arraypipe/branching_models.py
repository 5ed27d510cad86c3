"""Models whose stages decide in every micro-batch anew what is trained and what is changed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from arraypipe_models import adamw, data, loss, sgd
from runs import array_trainer
from torch import Tensor, nn

from optsched.arraypipe import ArrayTrainer, Job, random_schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.model.schedule import Schedule

_WIDTH: Final = 6


def _drawn(count: int) -> int:
    """A number below `count`; of the seed of the block, so the same alone and when recomputed."""
    return int(torch.randint(count, ()))


class Depth(nn.Module):
    """Stochastic depth: the layer, or its input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """With probability 1/2."""
        return x if _drawn(2) else x + torch.tanh(self.inner(x))


class Expert(nn.Module):
    """One of two layers, none, or one whose input gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """By lot."""
        k = _drawn(4)
        if k < 2:
            return torch.relu(self.experts[k](x))
        return self.experts[0](x.detach()) if k == 2 else x.detach()


class InPlace(nn.Module):
    """Changes its input in place, or passes it on, with a layer before or behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH)
        self.norm = nn.BatchNorm1d(_WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        """By lot, after a buffer has been updated."""
        k = _drawn(4)
        if k == 0:
            return x
        if k == 1:
            return self.norm(x.mul_(0.5))
        return self.inner(x.add_(1)) if k == 2 else self.inner(x)


class Pair(nn.Module):
    """Two tensors of which each needs a gradient now and then; in between halves of one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """A tensor or a pair to a pair."""
        a, b = x if isinstance(x, tuple) else (x, x.detach().clone())
        k = _drawn(5)
        if k == 0:
            return b, a
        if k == 1:
            return self.inner(b), a.detach()
        if k == 2:
            return torch.cat((self.inner(a), b), 1).chunk(2, 1)
        return (a, self.inner(a) + b) if k == 3 else (b * 2, self.inner(a))


class Joined(nn.Module):
    """The end of pairs; does not always look at both."""

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """A pair to a tensor."""
        return x[_drawn(2)] if _drawn(2) else x[0] * x[1]


class Toggled(nn.Linear):
    """A layer whose weight is trained, or not, by what the batch is."""

    def forward(self, x: Tensor) -> Tensor:
        """As its base."""
        self.weight.requires_grad_(bool(_drawn(2)))
        return super().forward(x)


def _chain(kind: Callable[[], nn.Module], *end: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(kind() for _ in range(3)), *(made() for made in end), nn.Linear(6, 4))


KINDS: Final[dict[str, tuple[Callable[[], nn.Module], Any]]] = {
    "depth": (partial(_chain, Depth), [1, 2]),
    "experts": (partial(_chain, Expert), [1, 2]),
    "in place": (partial(_chain, InPlace), [1, 2]),
    "pairs": (partial(_chain, Pair, Joined), [1, 2]),
}
"""Model of three stages, and how to cut it."""


def branching(kind: str, seed: int, **options: Any) -> tuple[ArrayTrainer, Schedule]:
    """Two jobs, one of which recomputes, and an order; the seed says when branches are taken."""
    build, stages = KINDS[kind]
    parts = (2, 1 + seed % 3)
    jobs = [
        Job(2 * seed, 6, sgd, microbatches=parts[0], recompute=bool(seed % 2)),
        Job(2 * seed + 1, 7, adamw, microbatches=parts[1], recompute=not seed % 2),
    ]
    array = array_trainer(build, data, jobs=jobs, stages=stages, loss=loss, **options)
    order = random_schedule(
        [job.microbatches for job in jobs], 3, place=[0, 1, seed % 2], seed=seed
    )
    return array, order
