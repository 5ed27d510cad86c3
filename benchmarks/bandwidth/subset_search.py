"""How much of the best bandwidth the searches and baselines find, how fast they evaluate.

Under contention the truth is the formula of `optsched.bandwidth.contention` over standalone
bandwidths: nobody has measured that. With measured data (``--data``) these are published runs, else
made-up ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import optsched
from benchmarks.machine import machine
from optsched.bandwidth import Contention, synthetic
from optsched.bandwidth.measured import MeasuredBandwidth
from optsched.bandwidth.measured_data import VARIABLE, load_measured
from optsched.bandwidth.metrics import bandwidth_loss, gbe
from optsched.bandwidth.model import CountModel, alone, unlimited
from optsched.bandwidth.rates import KILOBYTES
from optsched.bandwidth.scenarios import packed, uniform
from optsched_solvers.gpus.counts import Counts
from optsched_solvers.gpus.eha import Eha
from optsched_solvers.gpus.hybrid import Hybrid
from optsched_solvers.gpus.judge import TableJudge
from optsched_solvers.gpus.pts import Pts
from optsched_solvers.literature.baselines import Proximity, RandomSubset, Topo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.bandwidth import BandwidthModel, Cluster, ClusterState
    from optsched.bandwidth.measurements import MeasurementTable
    from optsched.bandwidth.model import Which
    from optsched.model.schedule import IntArray

SOLVERS = (Counts(), Hybrid(), Eha(), Pts(), Topo(), Proximity(), RandomSubset())
TRAFFIC = ("heavy", "moderate", "idle")
CONTENTION = {
    "default": Contention(), "printed": Contention.as_printed(),
    "published": Contention.published(),
}  # fmt: skip


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
                problem = optsched.GpuPlacement(
                    state, model, k, traffic=traffic, seed=i,
                    contention=CONTENTION[args.contention],
                )  # fmt: skip
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
                    lost = bandwidth_loss(got.standalone, got.value) / KILOBYTES
                    loss[solver.name].append(lost)
            yield Cell(cluster, scenario, traffic, [k for _, k in requests], share, seconds, loss)


def show(cell: Cell, by_k: bool) -> None:
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
    if by_k:
        print("k" + "".join(f"{name:>14}" for name in cell.share))
        for k in sorted(set(cell.asked)):
            print(f"{k:<2}" + "".join(f"{mean:14.1%}" for mean in means_of(cell, k).values()))


def means_of(cell: Cell, k: int) -> dict[str, float]:
    """Mean part of the optimum for requests of k GPUs, by solver."""
    at = [i for i, asked in enumerate(cell.asked) if asked == k]
    return {name: float(np.mean([parts[i] for i in at])) for name, parts in cell.share.items()}


def kernels(clusters: dict[str, BandwidthModel]) -> None:
    """Print evaluations per CPU second of the two kernels, calls included."""
    print("\nevaluations per CPU second, median of 9")
    wide = synthetic.cluster("nvswitch", 8)
    wider = {**clusters, "synthetic 8 x nvswitch": MeasuredBandwidth(wide, synthetic.network(wide))}
    for name, model in wider.items():
        for scenario in ("idle", "pooled", "tenants"):
            state, k = _busy(model.cluster, scenario)
            print(
                f"{name:24} {scenario:8} {len(state.jobs):2} jobs"
                f"   pts {_prunings(model, state, k):12,.0f}/s"
                f"   eha {_spreads(model, state, k):12,.0f}/s a request,"
                f" {_spreads(model, state, k, 100):12,.0f}/s on its candidates 100 times",
                flush=True,
            )


def _busy(cluster: Cluster, scenario: str) -> tuple[ClusterState, int]:
    from optsched.bandwidth import ClusterState

    k = cluster.n_gpus // 3
    if scenario == "idle":
        return ClusterState.idle(cluster), k
    states = uniform(
        cluster, busy="pooled" if scenario == "pooled" else "tenants", repeats=200, wanted=[k]
    )
    wanted = 3 * cluster.n_gpus // 4
    return min((s for s, _ in states), key=lambda s: abs(len(s.free) - wanted)), k


def _judge(model: BandwidthModel, state: ClusterState, k: int) -> TableJudge:
    problem = optsched.GpuPlacement(state, model, k, traffic="heavy")
    assert problem.tables is not None
    return TableJudge(problem, problem.tables)


def _prunings(model: BandwidthModel, state: ClusterState, k: int) -> float:
    from optsched_solvers.gpus.judge_kernels import prune

    judge = _judge(model, state, k)
    ids, cluster = np.array(state.free), model.cluster
    host = cluster.host_of[ids]
    bit = 1 << (ids - cluster.first[host])

    def run() -> int:
        left, now, out = np.arange(len(ids)), state.masks.copy(), np.array([len(ids), 0])
        words = judge.tables.words
        return int(prune(words, judge.rule, judge.jobs, host, bit, left, now, k, out))

    return _rate(run)


def _spreads(model: BandwidthModel, state: ClusterState, k: int, times: int = 1) -> float:
    from optsched_solvers.gpus.eha import candidates, fewest
    from optsched_solvers.gpus.judge_kernels import first_best

    judge, room = _judge(model, state, k), state.room
    there = np.flatnonzero(room)
    m = max(2, fewest(room, k))
    at, counts = candidates(room[there], there.tolist(), k, m, 200)
    hosts, many = np.tile(there[at].reshape(-1), times), np.tile(counts.reshape(-1), times)
    out, words = np.zeros(1, np.int64), judge.tables.words

    def run() -> int:
        first_best(words, judge.rule, judge.jobs, state.masks, hosts, many, m, out)
        return len(at) * times

    return _rate(run)


def _rate(run: Callable[[], int]) -> float:
    run()
    rates = []
    for _ in range(9):
        begin, done = time.thread_time(), 0
        while time.thread_time() - begin < 0.05:
            done += sum(run() for _ in range(10))
        rates.append(done / (time.thread_time() - begin))
    return statistics.median(rates)


def plot(cells: list[Cell], path: str) -> None:
    """Mean part of the optimum by k: clusters and scenarios in rows, traffic in columns."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = list(dict.fromkeys((cell.cluster, cell.scenario) for cell in cells))
    figure, axes = plt.subplots(
        len(rows), len(TRAFFIC), figsize=(12, 2.4 * len(rows)), sharex="row", sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for cell in cells:
        axis = axes[rows.index((cell.cluster, cell.scenario))][TRAFFIC.index(cell.traffic)]
        ks = sorted(set(cell.asked))
        means = [means_of(cell, k) for k in ks]
        for name in cell.share:
            axis.plot(ks, [100 * mean[name] for mean in means], label=name, linewidth=1.2)
        axis.set_title(f"{cell.cluster}, {cell.scenario}, {cell.traffic}", fontsize=9)
        axis.grid(alpha=0.3)
    for row in axes:
        row[0].set_ylabel("% of optimum")
    for axis in axes[-1]:
        axis.set_xlabel("GPUs asked")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=os.environ.get(VARIABLE), help="folder of measurements")
    parser.add_argument("--repeats", type=int, default=4, help="states for every k")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contention", choices=CONTENTION, default="default")
    parser.add_argument("--by-k", action="store_true", help="print the means by k too")
    parser.add_argument("--plot", help="file for a figure of the means by k")
    args = parser.parse_args()
    print(machine("numba"))
    clusters = models(args.data)
    kernels(clusters)
    cells = []
    for name, model in clusters.items():
        for cell in measure(args, name, model):
            show(cell, args.by_k)
            cells.append(cell)
    if args.plot:
        plot(cells, args.plot)


if __name__ == "__main__":
    main()
