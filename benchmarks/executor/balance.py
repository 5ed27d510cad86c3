"""What cuts by measured layers gain: an embedding, equal blocks, and a head of a large vocabulary.

    python -m benchmarks.executor.balance [--stages 4] [--blocks 12] [--width 128]
        [--vocabulary 8192]

The layers are measured alone in CPU time, twice: cuts are found with the first times and scheduled
with the second ones. One job of 8 micro-batches by 1F1B, and 12 jobs as a rolling array.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from time import thread_time_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from optsched import JobArray, solve
from optsched.arraypipe import ArrayTrainer, Job, measure
from optsched.pipelines import balanced, one_f_one_b, partition
from optsched.pipelines.cuts import naive
from optsched.problems.jobarray.derived import merged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SEQUENCE = 64
BATCHES = (2, 4)
JOBS = [0, 1] * 6


def main() -> None:
    """Measure the layers, cut in four ways, print times and gains."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=8192)
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure.perf_counter_ns = thread_time_ns  # type: ignore[attr-defined]  # others use the cores
    profile, again = measured(given), measured(given)
    print(machine("torch", "numpy"))
    times = profile.problem(jobs=[0])
    shown = (times.forward + times.backward)[0].tolist()
    print("F + B of the layers:", ", ".join(f"{t:,}" for t in shown), times.time_unit)
    n, stages = times.n_stages, given.stages
    array = profile.problem(jobs=JOBS)
    single = profile.problem(jobs=[0], objective="makespan").replace(micro_batches=8)
    cuts = {
        "equal counts": naive(n, stages),
        "parameters": balanced(parameters(given), stages),
        "partition, 1F1B": [0, *partition(single, stages, schedule=one_f_one_b).cuts, n],
        "partition, array": [0, *partition(array, stages).cuts, n],
    }
    array = again.problem(jobs=JOBS)
    single = again.problem(jobs=[0], objective="makespan").replace(micro_batches=8)
    rows = {
        name: (one_f_one_b(merged(single, cut)).makespan, period(merged(array, cut)))
        for name, cut in cuts.items()
    }
    first = rows["equal counts"]
    for name, row in rows.items():
        gains = [f"{1 - time / base:6.1%}" for time, base in zip(row, first, strict=True)]
        print(
            f"{name:18} {cuts[name][1:-1]!s:14} 1F1B {row[0]:10,} {single.time_unit} {gains[0]}   "
            f"array {row[1]:11,} {array.time_unit} {gains[1]}"
        )


def measured(given: argparse.Namespace) -> Any:
    """Profile of the layers, one stage each."""
    width, words = given.width, given.vocabulary

    def build_model() -> nn.Sequential:
        blocks = (
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(given.blocks)
        )
        return nn.Sequential(nn.Embedding(words, width), *blocks, nn.Linear(width, words))

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(job.seed)
        while True:
            yield (torch.randint(words, (job.batch_size, SEQUENCE), generator=draw),
                   torch.randint(words, (job.batch_size, SEQUENCE), generator=draw))  # fmt: skip

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    adam = partial(torch.optim.AdamW, lr=1e-3)
    jobs = [Job(k, size, adam) for k, size in enumerate(BATCHES)]
    stages = list(range(1, given.blocks + 2))
    trainer = ArrayTrainer(build_model, data, stages=stages, loss=loss).with_jobs(jobs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a busy machine
        return trainer.profile()


def parameters(given: argparse.Namespace) -> Sequence[int]:
    """Parameters of the layers, by which people cut by hand."""
    block = 12 * given.width**2
    ends = given.width * given.vocabulary
    return [ends, *([block] * given.blocks), ends]


def period(array: JobArray) -> int:
    """Period of a rolling array, by the quick solver."""
    schedule = solve(array, "dispatch").schedule
    assert schedule is not None and schedule.period is not None
    return schedule.period


if __name__ == "__main__":
    main()
