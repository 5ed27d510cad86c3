"""Jobs, models and random plans of runs on ranks, and what their results are compared with."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from arraypipe_models import adamw, data, loss, sgd
from arraypipe_plans import random_rolling
from runs import array_trainer
from test_arraypipe_settings import Language, plateau, token_loss, tokens
from torch import Tensor, nn

from optsched import JobArray, verify
from optsched.arraypipe import ArrayTrainer, Job, random_schedule
from optsched.arraypipe.train_alone import Trained, differences, train_alone

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from optsched.arraypipe import RunResult
    from optsched.model.schedule import Schedule


PROCESSES: Final[dict[str, Any]] = {"backend": "process", "timeout": 60.0}
STEPS = 3
CUTS = [2, 5, 7]
NAMES = ("2", "5", "7")
MAKERS = {"adamw": adamw, "sgd": sgd}


class Row(NamedTuple):
    """Settings of a job that change its bits, and whether it recomputes, which does not."""

    seed: int
    batch: int = 8
    optimizer: str = "sgd"
    microbatches: int = 1
    clip: bool = False
    precision: str = "fp32"
    adapts: bool = False
    recompute: bool = False

    @property
    def waits(self) -> bool:
        """Whether its updates wait for all stages."""
        return self.clip or self.adapts or self.precision == "amp-fp16"

    @property
    def job(self) -> Job:
        """The job with these settings."""
        return Job(
            self.seed, self.batch, MAKERS[self.optimizer], microbatches=self.microbatches,
            clip_norm=0.5 if self.clip else None, precision=self.precision,
            scheduler=plateau if self.adapts else None, recompute=self.recompute,
        )  # fmt: skip


class Turned(nn.Module):
    """A boundary of two tensors, one transposed and one expanded, and its inverse."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The batch last, and the mean repeated."""
        return x.t(), x.mean(1, keepdim=True).expand_as(x)


class Back(nn.Module):
    """Takes what `Turned` makes."""

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """As it was, less the mean."""
        return x[0].t() - x[1]


def build_model() -> nn.Sequential:
    """Four stages with dropout, batch normalisation, an in-place layer and odd boundaries."""
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(inplace=True), nn.Linear(12, 12), Turned(),
        Back(), nn.Dropout(0.3), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 4),
    )  # fmt: skip


CHECKPOINTED = (Row(0, microbatches=2, optimizer="adamw"), Row(1, 11))


@cache
def alone(row: Row, steps: int, tied: bool = False) -> Trained:
    """The reference."""
    model = (Language, ("middle", "third", "head"), token_loss, tokens)
    plain = (build_model, NAMES, loss, data)
    build, names, criterion, batches = model if tied else plain
    return train_alone(build, row._replace(recompute=False).job, names, criterion, batches, steps)


def trainer(rows: Sequence[Row], language: bool = False, **options: Any) -> ArrayTrainer:
    """An array of these jobs; `language`: with a tied weight."""
    jobs = [row.job for row in rows]
    if language:
        options = {"stages": ["middle", "third", "head"], "loss": token_loss, **options}
        return array_trainer(Language, options.pop("data", tokens), jobs=jobs, **options)
    return array_trainer(build_model, data, jobs=jobs, stages=CUTS, loss=loss, **options)


def random_rows(draw: random.Random, most: int) -> list[Row]:
    """A few jobs; few values make the references cheap to keep."""
    return [
        Row(
            seed=draw.randrange(3), batch=draw.choice([8, 11]), optimizer=draw.choice(list(MAKERS)),
            microbatches=draw.choice([1, 2, 4]), clip=draw.random() < 0.3,
            precision=draw.choice(["fp32", "fp32", "fp64", "bf16", "amp-bf16", "amp-fp16"]),
            adapts=draw.random() < 0.2, recompute=draw.random() < 0.3,
        )
        for _ in range(draw.randint(1, most))
    ]  # fmt: skip


def shape_of(rows: Sequence[Row], ranks: int, draw: random.Random, blocks: bool = True) -> JobArray:
    """Stages in random places, and `blocks` of their own for some recomputes and updates."""
    place = [*range(ranks), *(draw.randrange(ranks) for _ in range(4 - ranks))]
    draw.shuffle(place)
    waits = any(row.waits for row in rows)
    times = [[2] * 4 for _ in rows]
    return JobArray(
        times, times, recompute=times, update=1, place=place, objective="period",
        recompute_mode=[blocks and draw.random() < 0.3 for _ in rows], recompute_as_block=True,
        update_mode="global" if waits else draw.choice(["fused", "block"]),
        micro_batches=[row.microbatches for row in rows],
        multiplicity=[draw.choice([1, 1, 1, 2]) for _ in rows],
    )  # fmt: skip


def random_plan(array: JobArray, draw: random.Random) -> Schedule:
    """One iteration in a random order, or rolling with offsets and copies."""
    if draw.random() < 0.7:
        return random_rolling(array, spread=draw.randint(0, 2), seed=draw.randrange(10**6))
    jobs = range(array.n_jobs)
    updated = [] if array.update_mode == "fused" else jobs
    return random_schedule(
        array.micro_batches, 4, place=array.place,
        recompute={j for j in jobs if array.recompute_mode[j]}, update=updated,
        together=jobs if array.update_mode == "global" else [], seed=draw.randrange(10**6),
    )  # fmt: skip


def compared(
    result: RunResult, rows: Sequence[Row], steps: Sequence[int], tied: bool = False
) -> list[str]:
    """Everything in which jobs differ from training alone, on rank 0."""
    found = []
    for j, trained in enumerate(result.trained):
        found += [f"job {j}: {d}" for d in differences(trained, alone(rows[j], steps[j], tied))]
    return found + [str(violation) for violation in verify(result.trace)[:1]]
