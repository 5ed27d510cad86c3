"""How much of the best bandwidth the searches and baselines find.

Under contention the truth is the formula of `optsched.bandwidth.models.contention` over standalone
bandwidths: nobody has measured that. With measured data (``--data``) these are published runs, else
made-up ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import optsched
from benchmarks.bandwidth.measured_data import VARIABLE, load_measured
from benchmarks.bandwidth.metrics import gbe
from benchmarks.bandwidth.scenarios import packed, uniform
from benchmarks.machine import machine
from optsched.bandwidth import synthetic
from optsched.bandwidth.models.measured import MeasuredBandwidth
from optsched.bandwidth.models.model import CountModel, alone, unlimited
from optsched.bandwidth.topology.rates import KILOBYTES
from optsched_solvers.gpus.counts import Counts
from optsched_solvers.gpus.eha import Eha
from optsched_solvers.gpus.hybrid import Hybrid
from optsched_solvers.gpus.pts import Pts
from optsched_solvers.literature.baselines import Proximity, RandomSubset, Topo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.bandwidth import BandwidthModel, Cluster, ClusterState
    from optsched.bandwidth.models.measurements import MeasurementTable
    from optsched.bandwidth.models.model import Which
    from optsched.model.schedule import IntArray

SOLVERS = (Counts(), Hybrid(), Eha(), Pts(), Topo(), Proximity(), RandomSubset())
TRAFFIC = ("heavy", "moderate", "idle")


class Capped(CountModel):
    """A table for sets across hosts, and the hosts' own bandwidths within them."""

    def __init__(self, cluster: Cluster, table: MeasurementTable) -> None:
        self.cluster, self.payload, self.op = cluster, table.payload, table.op
        self._table = MeasuredBandwidth(cluster, table)

    def network(self, patterns: IntArray, which: Which = "value") -> IntArray:
        """The table where there are several hosts."""
        limit = self._table.network(patterns)
        one = alone(patterns)
        limit[one] = unlimited(patterns[one])
        return limit

    def intra_of(self, kind: int, which: Which = "value") -> IntArray | None:
        """The table of the type."""
        intra = self.cluster.types[kind].intra
        return None if intra is None else intra.values


class Cell(NamedTuple):
    """Results of all solvers on the scenarios of a kind under a traffic profile."""

    cluster: str
    scenario: str
    traffic: str
    asked: list[int]
    """k of every request."""
    share: dict[str, list[float]]
    """Solver to its part of the optimum, by request."""
    seconds: dict[str, list[float]]
    loss: dict[str, list[float]]
    """What traffic costs the choice, GB/s."""


def models(data: str | None) -> dict[str, BandwidthModel]:
    """What is taken for the truth, by name of the cluster."""
    if data:
        there = load_measured(data)
        return {
            "H100": MeasuredBandwidth(there.h100(), there.table()),
            "Het-4Mix": Capped(there.het_4mix(), there.table(mixed=True)),
        }
    same = synthetic.cluster("nvswitch", 4)
    mixed = synthetic.cluster(["pcie", "cube_mesh", "nvlink_pairs", "nvswitch"], 4)
    return {
        "synthetic 4 x nvswitch": MeasuredBandwidth(same, synthetic.network(same)),
        "synthetic mix": Capped(mixed, synthetic.network(mixed)),
    }


def scenarios(
    cluster: Cluster, repeats: int, seed: int
) -> dict[str, Callable[[], Iterator[tuple[ClusterState, int]]]]:
    """States and requests, by kind."""
    return {
        "pooled": lambda: uniform(cluster, repeats=repeats, seed=seed),
        "tenants": lambda: uniform(cluster, busy="tenants", repeats=repeats, seed=seed),
        "packed": lambda: packed(cluster, repeats=repeats, seed=seed),
    }


def measure(args: argparse.Namespace, cluster: str, model: BandwidthModel) -> Iterator[Cell]:
    """Solve every request with every solver."""
    for scenario, make in scenarios(model.cluster, args.repeats, args.seed).items():
        requests = list(make())
        for traffic in TRAFFIC:
            share: dict[str, list[float]] = {solver.name: [] for solver in SOLVERS}
            seconds: dict[str, list[float]] = {solver.name: [] for solver in SOLVERS}
            loss: dict[str, list[float]] = {solver.name: [] for solver in SOLVERS}
            for i, (state, k) in enumerate(requests):
                problem = optsched.GpuPlacement(state, model, k, traffic=traffic, seed=i)
                best = None
                for solver in SOLVERS:
                    result = optsched.solve(problem, solver, seed=i)
                    assert result.objective is not None, (solver.name, k)
                    if best is None:
                        assert result.status == "optimal", result.status
                        best = -result.objective
                    share[solver.name].append(gbe(-result.objective, best))
                    seconds[solver.name].append(result.seconds)
                    got = problem.shares(problem.chosen(result.schedule))[0]
                    lost = (got.standalone - got.value) / KILOBYTES
                    loss[solver.name].append(lost)
            yield Cell(cluster, scenario, traffic, [k for _, k in requests], share, seconds, loss)


def show(cell: Cell) -> None:
    """Print a cell's table."""
    print(f"\n{cell.cluster}, {cell.scenario}, {cell.traffic}: {len(cell.asked)} requests")
    print(f"{'':14}{'mean':>8}{'median':>8}{'worst':>8}{'optimal':>9}{'loss GB/s':>11}{'ms':>8}")
    for name, parts in cell.share.items():
        best = sum(part == 1 for part in parts) / len(parts)
        print(
            f"{name:14}{np.mean(parts):8.1%}{np.median(parts):8.1%}{min(parts):8.1%}{best:9.1%}"
            f"{np.mean(cell.loss[name]):11.2f}{1e3 * statistics.median(cell.seconds[name]):8.2f}",
            flush=True,
        )


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=os.environ.get(VARIABLE), help="folder of measurements")
    parser.add_argument("--repeats", type=int, default=4, help="states for every k")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(machine("numba"))
    clusters = models(args.data)
    for name, model in clusters.items():
        for cell in measure(args, name, model):
            show(cell)


if __name__ == "__main__":
    main()
