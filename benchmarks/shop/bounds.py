"""How strong each lower bound is, and Algorithm 1 beside the other exact engines.

    python -m benchmarks.shop.bounds gaps [--time 5] [--seeds 2]
    python -m benchmarks.shop.bounds trees [--seeds 8] [--nodes 50000]

`gaps`: per family of instances (with their number) and bound the mean and the worst of
1 - bound / best known value. Best known: the published optimum of job shops;
else what `auto` finds in `--time` seconds. `trees`: random job shops, durations 1 to
99; nodes, proofs and seconds of `giffler_thompson` with exact and with preemptive one-machine
bounds, and of `branch_and_bound` and `cpsat`; and how far Algorithm 1 as printed ends above.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import optsched
from benchmarks.machine import machine
from benchmarks.shop import rolling
from benchmarks.shop.instances import FAMILIES, MODELS
from optsched import JobArray, JobShop
from optsched.model.bounds import jackson_preemptive, makespan_bounds
from optsched.pipelines.generator import job_array
from optsched.problems.jobshop import published
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.solving.solver import solver
from optsched_solvers.literature import giffler_thompson
from optsched_solvers.shop.proof import one_machine, pipeline_bounds
from optsched_solvers.shop.proof.destructive import Climb
from optsched_solvers.shop.proof.tree import DisjunctiveTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.model.schedule import Schedule

Bounds = dict[str, int]

SHAVES = 3000
"""Nodes and probes of the destructive bound."""

CLASSIC = (*FAMILIES["ft"], *FAMILIES["la"], *FAMILIES["abz"], *FAMILIES["orb"])


def of_graph(graph: Schedule, best: int) -> Bounds:
    """All bounds of the makespan of one iteration."""
    found = makespan_bounds(graph)
    found["carlier"] = one_machine.one_machine_bound(graph)
    lower = max(found.values())
    monitor = Monitor(Limits(iterations=10**9))
    monitor.bound(lower)
    pipeline_bounds.improve(graph, monitor, iterations=40)
    found["pipeline"] = monitor.lower_bound or 0
    climb = Climb(DisjunctiveTree(graph), lower, best)
    climb.work(SHAVES)
    found["destructive"] = climb.lower
    return found


def shops() -> Iterator[tuple[str, int, Bounds]]:
    """Published job shops whose optimum is known."""
    known = published.bounds()
    for name in CLASSIC:
        lower, best = known[name]
        if lower == best:
            yield name, best, of_graph(published.instance(name).graph(), best)


def arrays(options: dict[str, Any]) -> Callable[[float, int], Iterator[tuple[str, int, Bounds]]]:
    """Job arrays of the four models: 30 jobs on 8 devices, 12 on 4."""

    def found(seconds: float, seeds: int) -> Iterator[tuple[str, int, Bounds]]:
        for seed in range(seeds):
            for model in MODELS:
                for jobs, stages in ((30, 8), (12, 4)):
                    array = job_array(model, stages, jobs, seed=seed, **options)
                    best = optsched.solve(array, time_limit=seconds, seed=seed).objective
                    if best is not None:
                        yield array.name, best, of_graph(array.graph(), best)

    return found


def periods(sets: tuple[str, ...]) -> Callable[[float, int], Iterator[tuple[str, int, Bounds]]]:
    """Rolling arrays of `benchmarks.shop.rolling`; `cpsat`: what a solve raises the bound to."""

    def found(seconds: float, seeds: int) -> Iterator[tuple[str, int, Bounds]]:
        for seed in range(seeds):
            for make in (make for name in sets for make in rolling.SETS[name]):
                array: JobArray = make(seed)
                result = optsched.solve(array, time_limit=seconds, seed=seed)
                if result.objective is not None and result.lower_bound is not None:
                    bounds = array.bounds() | {"cpsat": result.lower_bound}
                    yield array.name, result.objective, bounds

    return found


GROUPS: dict[str, Callable[[float, int], Iterator[tuple[str, int, Bounds]]]] = {
    "job shops ft, la, abz, orb": lambda seconds, seeds: shops(),
    "job arrays": arrays({}),
    "job arrays, switch times": arrays({"switch": True}),
    "job arrays, memory of 1F1B": arrays({"in_flight": True}),
    "rolling": periods(("plain", "square")),
    "rolling, memory of 1F1B": periods(("flight",)),
    "rolling, one job": periods(("one",)),
}


def gaps(seconds: float, seeds: int) -> None:
    """Print tables: a row a group, a column a bound, cells with mean and worst gap."""
    header: list[str] = []
    for group, instances in GROUPS.items():
        columns: dict[str, list[float]] = {}
        for _, best, bounds in instances(seconds, seeds):
            for name, value in bounds.items():
                assert value <= best, (group, name, value, best)
                columns.setdefault(name, []).append(1 - value / best)
        if list(columns) != header:
            header = list(columns)
            print(f"\n| instances | {' | '.join(header)} |\n|---|{'--:|' * len(header)}")
        cells = [
            "-" if min(gap) == 1 else f"{statistics.mean(gap):.2%}, {max(gap):.1%}"
            for gap in columns.values()
        ]
        count = len(columns[header[0]])
        print(f"| {group} ({count}) | {' | '.join(cells)} |", flush=True)


def random_shop(jobs: int, machines: int, seed: int) -> JobShop:
    """A classic shop: every job visits every machine once."""
    rng = random.Random(seed)
    routes = [rng.sample(range(machines), machines) for _ in range(jobs)]
    return JobShop([[(k, rng.randint(1, 99)) for k in route] for route in routes])


def trees(seeds: int, nodes: int) -> None:
    """Print a table: one row a size."""
    exact = giffler_thompson.one_machine_value
    engines = {
        "exact": ("giffler_thompson", {"iterations": nodes}, exact),
        "preemptive": ("giffler_thompson", {"iterations": nodes}, jackson_preemptive),
        "branch_and_bound": ("branch_and_bound", {"iterations": nodes}, exact),
        "cpsat": ("cpsat", {"time_limit": 20.0, "workers": 1}, exact),
    }
    print(f"| shop | {' | '.join(engines)} | as printed |\n|---|{'--:|' * (len(engines) + 1)}")
    for jobs, machines in ((5, 5), (6, 6), (8, 5), (10, 5), (7, 7), (8, 8)):
        cells: dict[str, list[tuple[bool, int, float]]] = {name: [] for name in engines}
        above = []
        for seed in range(seeds):
            shop, best = random_shop(jobs, machines, seed), 0
            for name, (engine, given, bound) in engines.items():
                giffler_thompson.one_machine_value = bound
                limits = Limits(**given)
                monitor, begun = Monitor(limits), time.perf_counter()
                solver(engine).solve(shop, limits, monitor)
                took = time.perf_counter() - begun
                cells[name].append((monitor.proved, monitor.iteration, took))
                best = monitor.objective if monitor.proved and monitor.objective else best
            giffler_thompson.one_machine_value = exact
            printed = optsched.solve(shop, "giffler_thompson", options={"children": 1}).objective
            above.append((printed or 0) / best - 1 if best else 0.0)
        row = [
            f"{sum(proved for proved, _, _ in cell)} of {seeds}, "
            + (f"{statistics.median(count for _, count, _ in cell):.0f} nodes, "
               if name != "cpsat" else "")
            + f"{statistics.median(took for *_, took in cell):.2f} s"
            for name, cell in cells.items()
        ]  # fmt: skip
        print(
            f"| {jobs}x{machines} | {' | '.join(row)} | +{statistics.mean(above):.1%} |", flush=True
        )


def main() -> None:
    """Parse the command line and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["gaps", "trees"])
    parser.add_argument("--time", type=float, default=5.0, help="seconds a solve (gaps)")
    parser.add_argument("--nodes", type=int, default=50_000, help="of a tree")
    parser.add_argument("--seeds", type=int, default=2, help="how many from 0")
    given = parser.parse_args()
    print(machine("numba", "ortools"))
    if given.command == "gaps":
        gaps(given.time, given.seeds)
    else:
        trees(given.seeds, given.nodes)


if __name__ == "__main__":
    main()
