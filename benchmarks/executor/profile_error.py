"""Profiles: how far off predicted sizes are, and how long a profile takes.

python -m benchmarks.executor.profile_error [--models transformer,convolution,perceptron]
        [--repeats 10]
    [--threads 1]

Every model has four stages. One profile of eight sizes gives the truth: 4, 8, 16 and 32 predict 6,
12, 24 (between) and 48 (beyond). Errors are relative to the median that was measured, over all
kinds and stages; the same is done with minima, to show why they are not used. Then a profile of
four sizes is timed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from optsched.arraypipe.job import Job
from optsched.arraypipe.profile.curve import Curve
from optsched.arraypipe.trainer import ArrayTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.arraypipe.profile.document import Profile

KNOWN, BETWEEN, BEYOND = (4, 8, 16, 32), (6, 12, 24), (48,)
LENGTH, WIDTH, BYTES = 32, 128, 64


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        return self.layer(x)


def transformer() -> nn.Sequential:
    """A small language model."""
    return nn.Sequential(
        nn.Embedding(BYTES, WIDTH), Layer(), Layer(), Layer(), Layer(), nn.Linear(WIDTH, BYTES)
    )


def convolution() -> nn.Sequential:
    """Convolutions with batch normalisation."""

    def part(inner: int, outer: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
        ]  # fmt: skip

    return nn.Sequential(
        *part(3, 16, 1), *part(16, 32, 2), *part(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, BYTES),
    )  # fmt: skip


def perceptron() -> nn.Sequential:
    """Wide linear layers."""
    return nn.Sequential(
        nn.Linear(LENGTH, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512),
        nn.ReLU(), nn.Linear(512, BYTES),
    )  # fmt: skip


MODELS = {
    "transformer": (transformer, [2, 3, 4]),
    "convolution": (convolution, [3, 6, 9]),
    "perceptron": (perceptron, [2, 4, 6]),
}


def data(name: str, job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches."""
    for iteration in range(start, 10**6):
        draw = torch.Generator().manual_seed(iteration)
        n = job.batch_size
        if name == "transformer":
            text = torch.randint(0, BYTES, (n, LENGTH), generator=draw)
            yield text, text
        else:
            shape = (n, LENGTH) if name == "perceptron" else (n, 3, 32, 32)
            yield (
                torch.randn(shape, generator=draw),
                torch.randint(0, BYTES, (n,), generator=draw),
            )


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over the last dimension."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def profile_of(name: str, sizes: tuple[int, ...], repeats: int) -> Profile:
    """Measure a model at the given sizes."""
    build, cuts = MODELS[name]
    job = Job(seed=0, batch_size=8, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3))

    def batches(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        return data(name, job, start)

    return ArrayTrainer(build, batches, jobs=[job], stages=cuts, loss=loss).profile(sizes, repeats)


def errors(profile: Profile, field: str, sizes: tuple[int, ...]) -> list[float]:
    """Relative errors of predicting the sizes from `KNOWN`, over kinds and stages."""
    values: dict[tuple[str, int], dict[int, Any]] = {}
    for block in profile.blocks:
        for kind in ("forward", "backward", "recompute"):
            time = getattr(getattr(block, kind), field)
            values.setdefault((kind, block.stage), {})[block.batch] = time
    return [
        abs(float(Curve([(b, row[b]) for b in KNOWN])(size)) / row[size] - 1)
        for row in values.values()
        for size in sizes
    ]


def main() -> None:
    """Print one row a model."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--repeats", type=int, default=10)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    print(machine("torch") + f", {given.threads} threads, {given.repeats} repeats")
    print(
        "| model | medians, between: mean, median, max | beyond | minima, between: mean, max "
        "| largest block | 4 stages x 4 sizes |"
    )
    print("|---|---|---|---|---|---|")
    warnings.simplefilter("ignore")  # a busy machine is seen in the figures
    for name in given.models.split(","):
        profile = profile_of(name, tuple(sorted(KNOWN + BETWEEN + BEYOND)), given.repeats)
        inner = errors(profile, "median_ns", BETWEEN)
        outer = errors(profile, "median_ns", BEYOND)
        least = errors(profile, "minimum_ns", BETWEEN)
        began = time.perf_counter()
        quick = profile_of(name, KNOWN, given.repeats)
        took = time.perf_counter() - began
        assert quick.sizes() == list(KNOWN)
        largest = max(block.median_ns for block in profile.blocks) / 1e6
        print(
            f"| {name} | {mean(inner):.1%}, {median(inner):.1%}, {max(inner):.1%} "
            f"| {mean(outer):.1%}, max {max(outer):.1%} | {mean(least):.1%}, {max(least):.1%} "
            f"| {largest:.1f} ms | {took:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
