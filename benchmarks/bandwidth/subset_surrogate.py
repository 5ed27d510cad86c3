"""Accuracy of learnt bandwidths by number of samples, on all test sets and on unseen patterns.

python -m benchmarks.bandwidth.subset_surrogate [--data DIR]
        [--sets h100-16m,h100-2g,het-4mix,synthetic]
    [--models prior,process,transformer] [--sizes 10,50,100,250] [--seeds 5] [--begin 0]

DIR (by default OPTSCHED_BANDPILOT_DATA) holds the published measurements; without it a synthetic
cluster is taken. Training: n sets, half of them balanced splits over two to four hosts, half
uniform; test: 5n uniform sets across hosts; a set is unseen if no training set has its counts.
`cover` is the share of unseen sets within their 95 % interval. Of het-4mix the values are the
published ones of two payloads. Times are wall
seconds of learning and compiling all patterns; set OPENBLAS_NUM_THREADS=1 on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.bandwidth.measured_data import LARGE, SMALL, VARIABLE, load_measured
from benchmarks.bandwidth.metrics import coverage, mape, r_squared
from benchmarks.bandwidth.samples import TEST, held_out_samples, training_samples
from benchmarks.machine import machine
from optsched.bandwidth import synthetic
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.measured import MeasuredBandwidth
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable

if TYPE_CHECKING:
    from optsched.bandwidth.models.model import BandwidthModel, CountModel, Selection
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray

SETS = ("h100-16m", "h100-2g", "het-4mix", "synthetic")
MODELS = ("prior", "process", "transformer")
SYNTHETIC = ("nvswitch", 4)


class Truth(NamedTuple):
    """Bandwidths that a learner is judged by."""

    name: str
    cluster: Cluster
    table: MeasurementTable
    """Every pattern."""
    model: CountModel


class Row(NamedTuple):
    """Figures of one model of one seed."""

    r_squared: float
    mape: float
    r_squared_unseen: float
    mape_unseen: float
    cover: float
    unseen: float
    seconds: float


def main() -> None:
    """Print the mean over seeds of every set, model and number of samples."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--data", default=os.environ.get(VARIABLE))
    options.add_argument("--sets", default="")
    options.add_argument("--models", default="prior,process")
    options.add_argument("--sizes", default="10,50,100,250")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--begin", type=int, default=0, help="first seed")
    given = options.parse_args()
    names = given.sets.split(",") if given.sets else SETS[:3] if given.data else SETS[3:]
    models = given.models.split(",")
    for word, known in [(name, SETS) for name in names] + [(name, MODELS) for name in models]:
        if word not in known:
            options.error(f"expected of {', '.join(known)}, got {word!r}")
    print(machine("numpy", *(["torch"] if "transformer" in models else [])))
    print(f"{'set':10} {'n':>5} {'model':12} {'R2':>8} {'MAPE %':>7}  {'unseen R2':>9} "
          f"{'MAPE %':>7} {'cover %':>7} {'share %':>7} {'fit s':>7}")  # fmt: skip
    for name in names:
        known = truth(name, given.data)
        for n in map(int, given.sizes.split(",")):
            for model in models:
                seeds = range(given.begin, given.begin + given.seeds)
                rows = [measure(known, model, n, seed) for seed in seeds]
                mean = Row(*np.mean(np.array(rows), axis=0).tolist())
                print(f"{name:10} {n:5} {model:12} {mean.r_squared:8.4f} {100 * mean.mape:7.3f}  "
                      f"{mean.r_squared_unseen:9.4f} {100 * mean.mape_unseen:7.3f} "
                      f"{100 * mean.cover:7.1f} {100 * mean.unseen:7.1f} {mean.seconds:7.3f}",
                      flush=True)  # fmt: skip


def truth(name: str, data: str | None) -> Truth:
    """The table that counts as the truth, and its cluster."""
    if name == "synthetic":
        cluster = synthetic.cluster(*SYNTHETIC)
        table = synthetic.network(cluster)
        return Truth(name, cluster, table, MeasuredBandwidth(cluster, table))
    measured = load_measured(data)
    if name == "het-4mix":
        cluster, table = measured.het_4mix(), measured.table(LARGE, mixed=True)
        return Truth(name, cluster, table, BottleneckBandwidth(cluster).fit(table))
    payload = SMALL if name == "h100-16m" else LARGE
    cluster, table = measured.h100(payload), measured.table(payload)
    return Truth(name, cluster, table, MeasuredBandwidth(cluster, table))


def measure(known: Truth, name: str, n: int, seed: int) -> Row:
    """Learn from n sets and predict 5n others."""
    cluster = known.cluster
    chosen, tested = training_samples(cluster, n, seed), held_out_samples(cluster, TEST * n, seed)
    table = runs(known, chosen)
    begin = time.perf_counter()
    model: BandwidthModel = BottleneckBandwidth(cluster)
    if name == "process":
        model = BottleneckBandwidth(cluster).fit(table)
    elif name == "transformer":
        from optsched.bandwidth.models.surrogate import HierarchicalTransformer

        model = HierarchicalTransformer.fit(cluster, table, seed=seed)
    model.tables()
    took = time.perf_counter() - begin
    seen = {tuple(row) for row in counts(cluster, chosen).tolist()}
    unseen = np.array([tuple(row) not in seen for row in counts(cluster, tested).tolist()])
    true, predicted = known.model.predict(tested), model.predict(tested)
    cover = float("nan")
    if name in ("prior", "process"):  # networks have no intervals
        cover = coverage(true[unseen], *model.interval(tested[unseen]))
    return Row(
        r_squared(true, predicted), mape(true, predicted),
        r_squared(true[unseen], predicted[unseen]), mape(true[unseen], predicted[unseen]),
        cover, float(unseen.mean()), took,
    )  # fmt: skip


def counts(cluster: Cluster, chosen: Selection) -> IntArray:
    """Patterns of sets, as falling counts."""
    found = np.add.reduceat(chosen, cluster.first[:-1], axis=1, dtype=np.int64)
    return np.asarray(-np.sort(-found, axis=1))


def runs(known: Truth, chosen: Selection) -> MeasurementTable:
    """Measurements of sets, which say whose GPUs they were."""
    cluster, rows = known.cluster, []
    for row, value in zip(chosen, known.model.predict(chosen).tolist(), strict=True):
        gpus = []
        for h, host in enumerate(cluster.hosts):
            ids = np.flatnonzero(row[cluster.first[h] : cluster.first[h + 1]]).tolist()
            if ids:
                gpus.append((host.name, tuple(ids)))
        rows.append(Measurement(tuple(len(ids) for _, ids in gpus), value, tuple(gpus)))
    return MeasurementTable(tuple(rows), known.table.op, known.table.payload, known.table.mixed)


if __name__ == "__main__":
    main()
