"""How much of the best bandwidth the searches and baselines find.

Under contention the truth is the formula of `optsched.bandwidth.models.contention` over standalone
bandwidths, which is not measured. With measured data (``--data``) these are published runs, else
synthetic ones. ``--surrogate`` adds BandPilot as a whole: `hybrid` on a Transformer trained on 250
samples (a minute each), its choices judged by the truth.
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
from benchmarks.bandwidth.samples import training_samples
from benchmarks.bandwidth.scenarios import packed, uniform
from benchmarks.bandwidth.subset_surrogate import Truth, runs
from benchmarks.machine import machine
from optsched.bandwidth import synthetic
from optsched.bandwidth.models.measured import MeasuredBandwidth
from optsched.bandwidth.models.measurements import MeasurementTable
from optsched.bandwidth.models.model import CountModel, alone, unlimited
from optsched.bandwidth.topology.rates import KILOBYTES
from optsched_solvers.gpus.bandpilot import Eha, Hybrid, Proximity, Pts, RandomSubset, Topo
from optsched_solvers.gpus.counts import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.bandwidth import BandwidthModel, Cluster, ClusterState
    from optsched.bandwidth.models.model import Which
    from optsched.model.schedule import IntArray

SOLVERS = (Counts(), Hybrid(), Eha(), Pts(), Topo(), Proximity(), RandomSubset())
TRAFFIC = ("heavy", "moderate", "idle")
SAMPLES = 250
"""Measurements that a surrogate is trained on."""


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
        measured = load_measured(data)
        return {
            "H100": MeasuredBandwidth(measured.h100(), measured.table()),
            "Het-4Mix": Capped(measured.het_4mix(), measured.table(mixed=True)),
        }
    same = synthetic.cluster("nvswitch", 4)
    mixed = synthetic.cluster(["pcie", "cube_mesh", "nvlink_pairs", "nvswitch"], 4)
    return {
        "synthetic 4 x nvswitch": MeasuredBandwidth(same, synthetic.network(same)),
        "synthetic mix": Capped(mixed, synthetic.network(mixed)),
    }


class Learnt(NamedTuple):
    """Search on a surrogate; like a solver for `measure`."""

    name: str
    model: BandwidthModel

    def choose(self, problem: optsched.GpuPlacement, seed: int) -> tuple[list[int], float]:
        """GPUs that the search picks when it knows the surrogate only, and its seconds."""
        predicted = problem.changed(model=self.model)
        result = optsched.solve(predicted, Hybrid(), seed=seed)
        assert result.schedule is not None
        return predicted.chosen(result.schedule), result.seconds


def learn(model: BandwidthModel, variant: str, seed: int) -> Learnt:
    """Train a Transformer on 250 samples of the truth."""
    from optsched.bandwidth.models.surrogate import HierarchicalTransformer

    table = MeasurementTable((), model.op, model.payload, model.mixed)
    truth = Truth("", model.cluster, table, model)
    samples = runs(truth, training_samples(model.cluster, SAMPLES, seed))
    learnt = HierarchicalTransformer.fit(model.cluster, samples, seed=seed, variant=variant)
    return Learnt(f"{variant[:6]}+hybrid", learnt)


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
    learnt = [learn(model, variant, args.seed) for variant in args.surrogate]
    names = [*(solver.name for solver in SOLVERS), *(one.name for one in learnt)]
    for scenario, make in scenarios(model.cluster, args.repeats, args.seed).items():
        requests = list(make())
        for traffic in TRAFFIC:
            share: dict[str, list[float]] = {name: [] for name in names}
            seconds: dict[str, list[float]] = {name: [] for name in names}
            loss: dict[str, list[float]] = {name: [] for name in names}
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
                    got = problem.share(problem.chosen(result.schedule))
                    loss[solver.name].append((got.standalone - got.value) / KILOBYTES)
                for one in learnt:
                    gpus, took = one.choose(problem, i)
                    got = problem.share(gpus)
                    assert best is not None
                    share[one.name].append(gbe(got.value, best))
                    seconds[one.name].append(took)
                    loss[one.name].append((got.standalone - got.value) / KILOBYTES)
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
    parser.add_argument(
        "--surrogate", nargs="*", choices=["hierarchical", "naive"], default=[],
        help="variants of the Transformer to train and to search with hybrid",
    )  # fmt: skip
    args = parser.parse_args()
    print(machine("numba"))
    clusters = models(args.data)
    for name, model in clusters.items():
        for cell in measure(args, name, model):
            show(cell)


if __name__ == "__main__":
    main()
