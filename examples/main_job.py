"""
Order 30 GPT-2 XL jobs on 8 devices
===================================

Solve a job array, compare the schedule with the orders in common use, and draw it::

    python examples/main_job.py --out out --time-limit 10
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

import optsched
from optsched import pipelines
from optsched.cli.progress import Bar
from optsched.formats import perfetto
from optsched.pipelines.generator import BATCH_SIZES
from optsched.plots import gantt
from optsched.plots.html import write as write_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECKOUT = Path(sys.argv[0]).resolve().parent.parent
INSTANCE = CHECKOUT / "instances" / "jobarray" / "gpt2_xl-30x8-80GB.jobarray.json"
MICRO_BATCHES = 8


def main() -> Figure:
    """Solve, compare, draw."""
    options = argparse.ArgumentParser(description="Solve, compare, draw.")
    options.add_argument("--out", type=Path, default=Path("out"))
    options.add_argument("--time-limit", type=float, help="default: 10 s, and what compiling takes")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)

    array = optsched.JobArray.read(INSTANCE)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{array.name}[/bold]: {array.n_jobs} sibling GPT-2 XL jobs on {array.n_devices} "
        f"devices of 80 GB, activations recomputed"
    )
    with Bar() as bar:
        result = optsched.solve(array, time_limit=given.time_limit, on_progress=bar)
    schedule = result.schedule
    assert schedule is not None
    console.print(
        f"makespan {result.objective} us   lower bound {result.lower_bound} us   "
        f"gap {result.gap:.2%}   status {result.status}   {result.seconds:.1f} s"
    )
    console.print(compare(array, schedule))

    schedule.write(given.out / "plan.schedule.json")
    figure = gantt(schedule, given.out / "plan.png")
    write_html(schedule, given.out / "plan.html")
    perfetto.write(schedule, given.out / "plan.trace.json")
    console.print(f"wrote plan.schedule.json, plan.png, plan.html, plan.trace.json in {given.out}/")
    return figure


def compare(array: optsched.JobArray, ours: optsched.Schedule) -> Table:
    """The same cost model under other orders: one iteration of all jobs."""
    table = Table("order of blocks", "seconds", "idle", "against ours", "memory")
    others = {
        "ours (auto)": ours,
        "1F1B, jobs as micro-batches": pipelines.one_f_one_b(array),
        "GPipe, jobs as micro-batches": pipelines.gpipe(array),
        "one job at a time": pipelines.vanilla(array),
    }
    for name, schedule in others.items():
        bad = [v for v in optsched.verify(schedule) if v.kind != "objective"]
        idle = float(pipelines.idle_share(schedule))
        row(table, name, schedule.makespan, ours.makespan, idle, not bad)
    for name, order in (("GPipe", pipelines.gpipe), ("1F1B", pipelines.one_f_one_b)):
        seconds, busy = alone(array, order)
        label = f"{name}, one job at a time, cut in {MICRO_BATCHES}"
        row(table, label, seconds, ours.makespan, 1 - busy / (seconds * array.n_devices), True)
    return table


def row(table: Table, name: str, makespan: int, ours: int, idle: float, fits: bool) -> None:
    """One line of the comparison."""
    memory = "fits" if fits else "does not fit"
    table.add_row(name, f"{makespan / 1e6:.2f}", f"{idle:.1%}", f"{makespan / ours:.2f}x", memory)


def alone(array: optsched.JobArray, order: object) -> tuple[int, int]:
    """Each job by itself, its batch cut into micro-batches: total time and busy device time."""
    sizes = Counter(int(name.rpartition("-b")[2]) for name in array.names)
    total = busy = 0
    for size, jobs in sizes.items():
        assert size in BATCH_SIZES["gpt2_xl"]
        single = optsched.JobArray.from_profile(
            "gpt2_xl", array.n_stages, [size], micro_batches=MICRO_BATCHES, memory="80GB",
            recompute_mode="always",
        )  # fmt: skip
        schedule = order(single)  # type: ignore[operator]
        total += jobs * schedule.makespan
        busy += jobs * int(schedule.duration.sum())
    return total, busy


if __name__ == "__main__":
    figure = main()
