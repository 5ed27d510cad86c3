"""What all parts of `gpu_check` share: rows, sizes, flags, models with their data, orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.utils.deterministic
from torch import Tensor, nn
from torch.nn import functional

from optsched.arraypipe import ArrayTrainer, Job, random_schedule
from optsched.arraypipe.runtime import cuda_streams, environment
from optsched.arraypipe.runtime.stages import waits_for_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optsched.model.schedule import Schedule

T = TypeVar("T")
CLASSES = 10
STAGES = 4


class Row(NamedTuple):
    """One line of the table."""

    name: str
    value: str
    wanted: str = ""  # the criterion in words; none: only reported
    holds: bool | None = None  # None: not judged


Check = tuple[str, "Callable[[], Iterable[Row]]"]
"""A name, and what gives rows; if that raises, a row of this name fails and the next check runs."""


@dataclass(frozen=True)
class Sizes:
    """How large the checks are.

    Parameters
    ----------
    device, gpus
        Where everything runs, and how many GPUs there are.
    tiny
        Whether the checks themselves are tested.
    width, batch
        Of stacks of linear layers. The states of a stage are a little smaller than a power of two
        in MiB, to which page-locked memory is rounded.
    """

    device: torch.device
    gpus: int = 1
    tiny: bool = False
    width: int = 1984
    batch: int = 8192

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return environment.on_gpu(self.device)

    def of(self, large: T, tiny: T) -> T:
        """One of two sizes."""
        return tiny if self.tiny else large

    def row(self, name: str, value: str, wanted: str, holds: bool) -> Row:
        """A criterion that means something on GPUs only."""
        return Row(name, value, wanted, holds if self.cuda else None)


def small(device: torch.device, gpus: int = 1) -> Sizes:
    """Sizes with which the checks themselves are tested."""
    return Sizes(device, gpus, True, 32, 16)


def kernels(exact: bool, tf32: bool = False, filled: bool = False) -> None:
    """Choose kernels that give the same bits twice, or leave the choice to torch.

    With `filled` all new memory is filled, so that a kernel that reads it unwritten shows.
    """
    torch.use_deterministic_algorithms(exact)
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = exact
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32


class Model(NamedTuple):
    """A model with its cuts, its loss, and its batches."""

    build: Callable[[], nn.Module]
    cuts: list[int]
    loss: Callable[[Any, Any], Tensor]
    data: Any


def images(sizes: Sizes, place: str = "pageable") -> Model:
    """Convolutions, both kinds of normalisation, dropout and layers that work in place.

    `place` is the memory that batches come from.
    """
    c, side = sizes.of((32, 16), (4, 6))

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU(inplace=True),
            nn.Dropout(0.2), nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.GELU(),
            nn.Flatten(), nn.Linear(c * side**2, 4 * c), nn.LayerNorm(4 * c),
            nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Dropout(0.1), nn.Linear(4 * c, CLASSES),
        )  # fmt: skip

    # the last stage begins with a layer without parameters
    return Model(
        build, [4, 8, 12], functional.cross_entropy, _labelled(sizes, place, 3, side, side)
    )


def sliced(sizes: Sizes) -> Model:
    """A boundary with gaps before dropout, and one whose gradient is expanded."""
    w = sizes.of(512, 16)

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(w, 4 * w), _Apply(lambda x: x.view(-1, 4, w)[:, 0]), nn.Dropout(0.3),
            nn.Linear(w, 4 * w), nn.Unflatten(1, (4, w)), _Apply(lambda x: x.sum(1)),
            nn.Linear(w, w), nn.ReLU(), nn.Dropout(0.3), nn.Linear(w, CLASSES),
        )  # fmt: skip

    return Model(build, [2, 5, 8], functional.cross_entropy, _labelled(sizes, "pageable", w))


def language(sizes: Sizes) -> Model:
    """A GPT: embeddings, causal attention with dropout, and a head that shares its weight."""
    width, tokens, words = sizes.of((768, 128, 2048), (16, 6, 11))

    def build() -> nn.Module:
        first, head = _Embedding(words, tokens, width), nn.Linear(width, words, bias=False)
        head.weight = first.words.weight
        made = width, max(2, width // 64), 4 * width, 0.1, "gelu"
        blocks = (_Block(*made, batch_first=True, norm_first=True) for _ in range(STAGES))
        return nn.Sequential(first, *blocks, nn.LayerNorm(width), head)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def batch(n: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        text = torch.randint(0, words, (n, tokens + 1), generator=draw)
        return text[:, :-1], text[:, 1:]

    return Model(build, [2, 3, 4], loss, _batches(batch))


def stack(sizes: Sizes, place: str = "on the GPU") -> Model:
    """Two linear layers a stage; the same batch for ever, so that data cost nothing."""
    made: dict[int, Tensor] = {}

    def build() -> nn.Module:
        pairs = ((nn.Linear(sizes.width, sizes.width), nn.ReLU()) for _ in range(2 * STAGES))
        return nn.Sequential(*(layer for pair in pairs for layer in pair))

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        if job.seed not in made:
            draw = torch.Generator().manual_seed(job.seed)
            x = torch.randn(job.batch_size, sizes.width, generator=draw)
            made[job.seed] = _put(x, place, sizes)
        while True:
            yield made[job.seed], made[job.seed]

    return Model(build, [4, 8, 12], functional.mse_loss, data)


def trainer(sizes: Sizes, model: Model, jobs: Sequence[Job], **how: Any) -> ArrayTrainer:
    """A logical device per stage, unless told otherwise."""
    how = {"devices": [sizes.device] * STAGES, **how}
    return ArrayTrainer(
        model.build, model.data, jobs=jobs, stages=model.cuts, loss=model.loss, **how
    )


def order(jobs: Sequence[Job], seed: int, place: Sequence[int] | None = None) -> Schedule:
    """A random order; in every second one recomputes have blocks of their own."""
    together = [j for j, job in enumerate(jobs) if waits_for_all(job)]
    apart = [j for j, job in enumerate(jobs) if job.recompute and seed % 2 == 0]
    return random_schedule(
        [job.microbatches for job in jobs], STAGES, place=place, update=together,
        together=together, recompute=apart, seed=seed,
    )  # fmt: skip


def adamw(named: Any) -> torch.optim.Optimizer:
    """AdamW as torch has it by default on the device."""
    return torch.optim.AdamW(named, lr=1e-3, weight_decay=0.01)


def sgd(named: Any) -> torch.optim.Optimizer:
    """Momentum SGD."""
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


def _batches(make: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]) -> Any:
    """Batches by (seed, iteration) alone."""

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for iteration in range(start, 10**6):
            draw = torch.Generator().manual_seed(1000 * job.seed + iteration)
            yield make(job.batch_size, draw)

    return data


def _labelled(sizes: Sizes, place: str, *shape: int) -> Any:
    def batch(n: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, *shape, generator=draw)
        labels = torch.randint(0, CLASSES, (n,), generator=draw)
        return _put(x, place, sizes), _put(labels, place, sizes)

    return _batches(batch)


def _put(t: Tensor, place: str, sizes: Sizes) -> Tensor:
    if place == "page-locked" and sizes.cuda:
        return cuda_streams.page_locked_like(t).copy_(t)
    return t.to(sizes.device) if place == "on the GPU" else t


class _Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _Embedding(nn.Module):
    def __init__(self, words: int, tokens: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return functional.dropout(self.words(x) + self.places(places), 0.1, self.training)


class _Block(nn.TransformerEncoderLayer):
    """Its attention, to what came before, is `scaled_dot_product_attention`."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        return super().forward(x, mask, is_causal=True)
