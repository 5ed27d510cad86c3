"""
A sweep over learning rates of a small GPT
==========================================

As one job array::

    python examples/sweep_gpt.py --check
    torchrun --nproc-per-node 4 examples/sweep_gpt.py
    optsched arraypipe run examples/sweep_gpt.py:make_trainer --steps 20

Every learning rate is a job of its own. The model is cut into stages, the blocks of all jobs are
measured and ordered by a solver, and every job ends with exactly the bits of training it alone.
Model, loss and data are plain PyTorch, in `tiny_gpt.py`.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tiny_gpt import Size, build_gpt, corpus, next_byte_loss, windows

from optsched.arraypipe import ArrayTrainer, Job
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe import RunResult

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
STAGES = 4
SIZE = Size()


def make_trainer(
    rates: Sequence[float] = LEARNING_RATES,
    size: Size = SIZE,
    *,
    stages: int = STAGES,
    batch_size: int = 8,
    text: str | None = None,
) -> ArrayTrainer:
    """One job per learning rate; all begin with the same weights and see the same batches."""
    jobs = [
        Job(
            seed=0,
            batch_size=batch_size,
            optimizer=lambda named, lr=lr: torch.optim.AdamW(named, lr=lr),
            name=f"lr{lr:g}",
            model={"size": size},
        )
        for lr in rates
    ]
    data = windows(corpus(text), size.context)
    return ArrayTrainer(build_gpt, data, stages, next_byte_loss).with_jobs(jobs)


def main() -> None:
    """Schedule, train, compare."""
    given = arguments()
    torch.set_num_threads(1)  # one process, one core: blocks this small gain nothing from more
    size = Size(given.width, given.depth, given.heads, given.context, not given.untied)
    trainer = make_trainer(
        given.lr, size, stages=given.stages, batch_size=given.batch_size, text=given.text
    )
    result = trainer.fit(trainer.jobs, given.steps)  # under torchrun: one stage per process
    if os.environ.get("RANK", "0") != "0":
        return
    print(table(trainer, result))
    print(result.report)
    if given.check:
        check(trainer, result)
    given.out.mkdir(parents=True, exist_ok=True)
    result.trace.write(given.out / "trace.schedule.json")
    print(f"wrote the trace in {given.out}/; see: optsched show FILE")


def table(trainer: ArrayTrainer, result: RunResult) -> str:
    """Losses of all jobs, the best one marked; the last is the mean of ten iterations."""
    last = [sum(row[-10:]) / len(row[-10:]) if row else math.nan for row in result.losses]
    width = max(len(title) for title in trainer.titles)
    lines = ["", f"{'job':{width}}  status   first loss  last loss"]
    for j, (job, title) in enumerate(zip(trainer.jobs, trainer.titles, strict=True)):
        best = "  <- best" if last[j] == min(last) else ""
        first = result.losses[j][0] if result.losses[j] else math.nan
        lines.append(f"{title:{width}}  {job.status:7}  {first:10.4f}  {last[j]:9.4f}{best}")
    return "\n".join([*lines, ""])


def check(trainer: ArrayTrainer, result: RunResult) -> None:
    """Train every job alone, by plain PyTorch, and compare everything bit by bit.

    For as many iterations as it did: Ctrl-C may have ended it early.
    """
    for j, title in enumerate(trainer.titles):
        found = differences(result.trained[j], trainer.train_alone(j, len(result.losses[j])))
        if found:
            raise SystemExit(f"job {title} differs from training it alone: {found[0]}")
    print("bit-identical to training every job alone: parameters, optimizer states, losses")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Sweep learning rates.")
    parser.add_argument("--lr", type=float, nargs="+", default=list(LEARNING_RATES))
    parser.add_argument("--steps", type=int, default=40, help="iterations of every job")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--stages", type=int, default=STAGES)
    for name in ("width", "depth", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Size, name))
    parser.add_argument("--untied", action="store_true", help="a head with weights of its own")
    parser.add_argument("--text", help="file to learn from [default: sums of numbers]")
    parser.add_argument("--check", action="store_true", help="compare with training alone")
    parser.add_argument("--out", type=Path, default=Path("out/sweep_gpt"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
