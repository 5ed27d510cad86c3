"""One job, many micro-batches: hand-made pipeline schedules beside ours under the same memory.

python -m benchmarks.shop.single_job [--models gpt2_xl,...] [--stages 4,8] [--micro-batches 8,16]
    [--partition naive] [--time 10] [--workers 2]

For every model and every hand-made schedule that its layout allows: makespan over our bound, most
bytes on a device, and what `auto` finds on the same graph when every device has (a) the bytes that
the schedule uses on it, (b) the bytes that it uses on the device where it uses most. Interleaved
and Hanayo have two chunks a device. Chimera brings a graph of its own (two directions); ours starts
from its schedule. The backward pass is split in halves for ZB-H1 and ZB-H2, and half of the kept
bytes stays until W. Samples per micro-batch: 32, 32, 8, 2. Exit code 1 if a schedule is better than
ours.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import optsched
from benchmarks.machine import machine
from optsched import JobArray, pipelines
from optsched.analysis.occupancy import peak_memory
from optsched.model.schedule import Resource

if TYPE_CHECKING:
    from optsched import Result, Schedule

SAMPLES = {"vgg19": 32, "resnet152": 32, "bert_large": 8, "gpt2_xl": 2}
LAYOUTS = {
    "vanilla": "plain", "gpipe": "plain", "one_f_one_b": "plain",
    "chimera": "plain", "interleaved": "wrapped", "hanayo": "zigzag", "zb_h1": "split",
    "zb_h2": "split",
}  # fmt: skip


class Row(NamedTuple):
    """A hand-made schedule and ours."""

    name: str
    made: Schedule
    peaks: list[int]
    same: Result
    equal: Result

    def line(self) -> str:
        """A row of the table; gaps are over the bound with the bytes of each device."""
        bound = self.same.lower_bound or 1

        def gap(value: int | None) -> str:
            return "-" if value is None else f"{value / bound - 1:.2%}"

        proved = " proved" if self.same.status == "optimal" else ""
        return (
            f"| {self.name} | {self.made.makespan} | {max(self.peaks) / 2**30:.2f} | "
            f"{gap(self.made.makespan)} | {gap(self.same.objective)}{proved} | "
            f"{gap(self.equal.objective)} |"
        )


def main() -> None:
    """Print one table a model, number of stages and number of micro-batches."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--models", default=",".join(SAMPLES))
    options.add_argument("--stages", default="4,8")
    options.add_argument("--micro-batches", default="8,16")
    options.add_argument("--partition", default="naive", choices=("naive", "balanced"))
    options.add_argument("--schedules", default=",".join(LAYOUTS))
    options.add_argument("--time", type=float, default=10.0)
    options.add_argument("--workers", type=int, default=2)
    given = options.parse_args()
    print(machine("numba", "ortools"))
    worse = []
    for model in given.models.split(","):
        for stages in map(int, given.stages.split(",")):
            for micro_batches in map(int, given.micro_batches.split(",")):
                title = f"{model}, {stages} devices, {micro_batches} micro-batches"
                print(f"\n{title}\n")
                print("| schedule | makespan, us | GiB | over the bound | ours, same bytes | ours, "
                      "equal bytes |")  # fmt: skip
                print("|---|--:|--:|--:|--:|--:|", flush=True)
                for name in given.schedules.split(","):
                    job = laid_out(LAYOUTS[name], model, stages, micro_batches, given.partition)
                    row = compared(name, job, given.time, given.workers)
                    print(row.line(), flush=True)
                    found = [row.same.objective, row.equal.objective]
                    if any(value is None or value > row.made.makespan for value in found):
                        worse.append(f"{title}: {name}")
    print("\n".join(f"WORSE: {line}" for line in worse))
    sys.exit(bool(worse))


def laid_out(layout: str, model: str, stages: int, micro_batches: int, partition: str) -> JobArray:
    """The job as a hand-made schedule wants it; memory unlimited."""
    chunks = 2 if layout in ("wrapped", "zigzag") else 1
    job = JobArray.from_profile(
        model, stages * chunks, [SAMPLES[model] * micro_batches], micro_batches=micro_batches,
        partition=partition,
    )  # fmt: skip
    if layout == "split":
        half = job.backward // 2
        return job.replace(
            backward=job.backward - half, weight=half, weight_memory=job.activation // 2
        )
    if chunks == 1:
        return job
    place = getattr(pipelines, layout)(stages, chunks)
    return job.replace(place=place, memory=None, devices=None, servers=None)


def compared(name: str, job: JobArray, seconds: float, workers: int) -> Row:
    """The hand-made schedule of a job, and ours with its bytes."""
    made = getattr(pipelines, name)(job)
    peaks = [peak_memory(made, r) for r in range(made.n_resources)]
    results = []
    for memory in (peaks, [max(peaks) if peak else 0 for peak in peaks]):
        problem: JobArray | Schedule
        start = None
        if job.graph().same_graph(made):
            problem = job.replace(memory=memory)
        else:  # Chimera brings a graph of its own, of which `auto` knows no hand-made order
            named = zip(made.resources, memory, strict=True)
            rooms = tuple(Resource(resource.name, there) for resource, there in named)
            start = replace(made, resources=rooms)
            problem = start.graph()
        results.append(
            optsched.solve(problem, "auto", time_limit=seconds, workers=workers, warm_start=start)
        )
    return Row(name, made, peaks, *results)


if __name__ == "__main__":
    main()
