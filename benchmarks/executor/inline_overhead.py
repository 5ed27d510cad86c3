"""CPU time of the inline backend beside a bare loop over the same blocks in the same order.

Three jobs on two stages. The bare loop has the split models, one optimizer a stage and nothing
else: no plan, no checks, no trace, no random states.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from optsched.arraypipe import ArrayTrainer, Callback, Job, RunConfig, random_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

JOBS = 3


def build_model(width: int) -> nn.Sequential:
    """Two stages of two square layers."""
    layers = (nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    return nn.Sequential(nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:]))


def array(width: int, batch: int, steps: int) -> float:
    """Seconds of CPU an iteration of all jobs."""

    def data(job: Job, start: int) -> Iterator[tuple[Any, Any]]:
        x = torch.randn(batch, width)
        while True:
            yield x, x

    jobs = [Job(k, batch, lambda p: torch.optim.SGD(p, lr=1e-3)) for k in range(JOBS)]
    trainer = ArrayTrainer(
        lambda: build_model(width), data, stages=[1], loss=nn.functional.mse_loss
    )
    marks: list[float] = []

    class Clock(Callback):
        def on_step(self, job: Job, iteration: int, loss: float) -> None:
            if iteration in (1, steps + 1):  # looking at this clock costs as much as a block
                marks.append(time.process_time())

    trainer.fit(
        jobs, steps + 2, schedule=random_schedule([1] * JOBS, 2, seed=1), callbacks=[Clock()],
        config=RunConfig(check=0, verbose=False),
    )  # fmt: skip
    return (marks[-1] - marks[JOBS - 1]) / steps


def bare(width: int, batch: int, steps: int) -> float:
    """The same without the executor."""
    models = [build_model(width) for _ in range(JOBS)]
    optimizers = [[torch.optim.SGD(s.parameters(), lr=1e-3) for s in model] for model in models]
    x, began = torch.randn(batch, width), 0.0
    for step in range(steps + 2):
        if step == 2:
            began = time.process_time()
        sent = [model[0](x) for model in models]
        received = [h.detach().requires_grad_() for h in sent]
        losses = []
        for model, h in zip(models, received, strict=True):
            losses.append(nn.functional.mse_loss(model[1](h), x))
            losses[-1].item()
        for j in range(JOBS):
            losses[j].backward()
            optimizers[j][1].step()
            optimizers[j][1].zero_grad()
        for j in range(JOBS):
            sent[j].backward(received[j].grad)
            optimizers[j][0].step()
            optimizers[j][0].zero_grad()
    return (time.process_time() - began) / steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    print("| width | batch | block, ms | inline / bare: median | quartiles |")
    print("|---|---|---|---|---|")
    for width, batch, steps in ((64, 8, 60), (256, 1024, 8), (512, 512, 8), (1024, 96, 6)):
        rows = [(array(width, batch, steps), bare(width, batch, steps)) for _ in range(pairs)]
        low, middle, high = statistics.quantiles((a / b for a, b in rows), n=4)
        block = statistics.median(b for _, b in rows) / (4 * JOBS) * 1e3
        print(
            f"| {width} | {batch} | {block:.2f} | {middle:.2f} | {low:.2f}-{high:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
