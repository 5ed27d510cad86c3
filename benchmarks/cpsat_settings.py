"""CP-SAT settings side by side on one model: time to proof, or objective and bound at the limit.

    python benchmarks/cpsat_settings.py [--time-limit 20] [FILE ...]

Without files: ft10, ta01 and a generated job array of ten jobs on four devices.
"""

from __future__ import annotations

import argparse
import random

from machine import machine

import optsched
from optsched.formats import taillard
from optsched.formats.read_problem import read_problem

WEAK = {
    "use_strong_propagation_in_disjunctive": False,
    "use_dynamic_precedence_in_disjunctive": False,
}
SETTINGS = {
    "as configured": (2, {}),
    "1 thread, strong": (1, {}),
    "2 threads, default": (1, {"num_workers": 2, **WEAK}),
    "8 threads, default": (1, {"num_workers": 8, **WEAK}),
}


def main() -> None:
    """Run every setting on every problem, one after another."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("files", nargs="*")
    options.add_argument("--time-limit", type=float, default=20.0)
    given = options.parse_args()
    problems = [read_problem(file) for file in given.files] or default_problems()
    print(machine("ortools"))
    for problem in problems:
        for name, (workers, parameters) in SETTINGS.items():
            result = optsched.solve(
                problem, "cpsat", time_limit=given.time_limit, workers=workers,
                options={"parameters": parameters},
            )  # fmt: skip
            print(
                f"{problem.name:16} {name:20} {result.status:9} {result.objective:9} "
                f"{result.lower_bound:9} {result.seconds:7.2f} s",
                flush=True,
            )


def default_problems() -> list:
    """Three problems on which the settings differ."""
    rng = random.Random(4)
    scale = [rng.choice((3, 4, 5, 6, 8, 10)) for _ in range(10)]
    array = optsched.JobArray(
        [[100 * s] * 4 for s in scale], [[200 * s - 7] * 4 for s in scale], name="10 jobs x 4"
    )
    return [array, optsched.JobShop.read("instances/jobshop/ft10.txt"), taillard.instance("ta01")]


if __name__ == "__main__":
    main()
