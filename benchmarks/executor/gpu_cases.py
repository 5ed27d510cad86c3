"""Models, data and sizes of `gpu_check.py`, and the row that every check returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from optsched.arraypipe import ArrayTrainer, Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

loss = nn.functional.cross_entropy
CLASSES = 10


class Row(NamedTuple):
    """One line of the table."""

    name: str
    value: str
    wanted: str = ""  # the criterion in words; none: only reported
    holds: bool | None = None  # None: not judged, because it says something about GPUs only


@dataclass(frozen=True)
class Sizes:
    """How large the models of the checks are.

    Parameters
    ----------
    device
        Where everything runs.
    channels, side
        Of the images of the exactness checks.
    width, layers, batch
        Of the stacks of linear layers that are timed; layers per stage.
    stages, jobs, steps
        Of the timed arrays.
    orders
        Random orders per exactness case.
    repeats
        Of what is timed.
    copied
        Bytes of a copy whose bandwidth is measured.
    """

    device: torch.device
    channels: int = 32
    side: int = 16
    width: int = 4096
    layers: int = 2
    batch: int = 4096
    stages: int = 4
    jobs: int = 4
    steps: int = 8
    orders: int = 3
    repeats: int = 5
    copied: int = 2**30

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"


def judged(sizes: Sizes, holds: bool) -> bool | None:
    """A criterion that means something on GPUs only."""
    return holds if sizes.cuda else None


def small(device: torch.device) -> Sizes:
    """Sizes with which the checks themselves are tested."""
    return Sizes(device, 4, 6, 32, 1, 16, 3, 3, 3, 1, 2, 2**20)


def images(sizes: Sizes) -> nn.Sequential:
    """Convolutions, both kinds of normalisation, dropout and layers that work in place."""
    c, flat = sizes.channels, sizes.channels * sizes.side**2
    return nn.Sequential(
        nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.Dropout(0.2),
        nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.GELU(), nn.Flatten(),
        nn.Linear(flat, 4 * c), nn.LayerNorm(4 * c), nn.ReLU(inplace=True), nn.Dropout(0.5),
        nn.Dropout(0.1), nn.Linear(4 * c, CLASSES),
    )  # fmt: skip


IMAGE_CUTS = [4, 8, 12]  # the last stage begins with a layer without parameters


def image_batches(sizes: Sizes) -> Any:
    """Random images by (seed, iteration) alone."""

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for iteration in range(start, 10**6):
            draw = torch.Generator().manual_seed(1000 * job.seed + iteration)
            x = torch.randn(job.batch_size, 3, sizes.side, sizes.side, generator=draw)
            yield x, torch.randint(0, CLASSES, (job.batch_size,), generator=draw)

    return data


def image_array(sizes: Sizes, jobs: Sequence[Job], memory: int | None = None) -> ArrayTrainer:
    """Four logical stages on the device."""
    return ArrayTrainer(
        lambda: images(sizes), jobs, IMAGE_CUTS, loss, image_batches(sizes),
        devices=[sizes.device] * 4, memory=memory,
    )  # fmt: skip


def stack(sizes: Sizes) -> nn.Sequential:
    """Equal stages of linear layers."""
    row: list[nn.Module] = []
    for _ in range(sizes.stages * sizes.layers):
        row += [_linear(sizes.width), nn.ReLU()]
    return nn.Sequential(*row)


def _linear(width: int) -> nn.Linear:
    """Random rows, repeated: drawing all of them takes longer than the training that is timed."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, width, width)  # type: ignore[no-untyped-call]
    rows = min(32, width)
    with torch.no_grad():
        drawn = torch.randn(rows, width) * (2 / width) ** 0.5
        layer.weight.copy_(drawn.repeat(width // rows, 1))
        layer.bias.zero_()
    return layer


def stack_cuts(sizes: Sizes) -> list[int]:
    """Where the stages after the first begin."""
    return [2 * sizes.layers * s for s in range(1, sizes.stages)]


def stack_batches(sizes: Sizes) -> Any:
    """The same batch for ever, on the device: data costs nothing here."""
    made: dict[tuple[int, int], Tensor] = {}

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        place = (job.seed, job.batch_size)
        if place not in made:
            draw = torch.Generator().manual_seed(job.seed)
            x = torch.randn(job.batch_size, sizes.width, generator=draw)
            made[place] = x.to(sizes.device)
        while True:
            yield made[place], made[place]

    return data


def stack_array(sizes: Sizes, jobs: Sequence[Job], **how: Any) -> ArrayTrainer:
    """A logical device per stage."""
    return ArrayTrainer(
        lambda: stack(sizes), jobs, stack_cuts(sizes), nn.functional.mse_loss,
        stack_batches(sizes), devices=[sizes.device] * sizes.stages, **how,
    )  # fmt: skip


def adamw(named: Any) -> torch.optim.Optimizer:
    """AdamW as torch has it by default on the device."""
    return torch.optim.AdamW(named, lr=1e-3, weight_decay=0.01)


def sgd(named: Any) -> torch.optim.Optimizer:
    """Momentum SGD."""
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)
