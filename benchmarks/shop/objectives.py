"""Solvers on job shops whose jobs have weights and due dates.

    python -m benchmarks.shop.objectives [--time 8] [--solvers tabu,auto,cpsat]

Ten shops of 10 jobs, five on 5 and five on 10 machines: durations 1 to 99, weights 1 to 10, due
dates 1.3 times the work of the job. `auto` has two cores, the others one.
"""

from __future__ import annotations

import argparse
import random
from typing import TYPE_CHECKING

import optsched
from benchmarks.machine import machine
from optsched import JobShop
from optsched.model.objectives import LATENESS, TOTAL

if TYPE_CHECKING:
    from collections.abc import Iterator


def shops() -> Iterator[JobShop]:
    """The ten shops."""
    for machines in (5, 10):
        for k in range(5):
            rng = random.Random(100 * machines + k)
            jobs = [
                [(m, rng.randint(1, 99)) for m in rng.sample(range(machines), machines)]
                for _ in range(10)
            ]
            due = [int(1.3 * sum(duration for _, duration in job)) for job in jobs]
            weight = [rng.randint(1, 10) for _ in jobs]
            yield JobShop(jobs, job_weight=weight, due=due, name=f"10x{machines}-{k}")


def main() -> None:
    """Print value, bound and seconds of every run, and sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time", type=float, default=8)
    parser.add_argument("--solvers", default="tabu,auto,cpsat")
    given = parser.parse_args()
    print(machine())
    for objective in (TOTAL, LATENESS):
        sums = dict.fromkeys(given.solvers.split(","), 0)
        for shop in shops():
            line = f"{objective} {shop.name}"
            for name in sums:
                found = optsched.solve(
                    shop.with_objective(objective), name, time_limit=given.time, seed=1,
                    workers=2 if name == "auto" else 1,
                )  # fmt: skip
                sums[name] += found.objective or 0
                value = f"{found.objective} [{found.lower_bound}]"
                line += f"  {name} {value} {found.status} {found.seconds:.1f} s"
            print(line, flush=True)
        print(objective, sums, flush=True)


if __name__ == "__main__":
    main()
