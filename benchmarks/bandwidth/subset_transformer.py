"""The learned surrogate on measured bandwidths: accuracy, time of training, predictions a second.

python -m benchmarks.bandwidth.subset_transformer [--data DIR] [--payload 16MiB]
        [--sizes 50,100,250]
    [--seeds 1-5] [--epochs N] [--validation 0] [--naive]

DIR (by default OPTSCHED_BANDPILOT_DATA) holds the published measurements of four H100 hosts. A set
of GPUs has the value of its counts. Training: n sets, half of them balanced splits over two to four
hosts, half uniform; test: 5n uniform sets across hosts. `unseen` are the test sets whose pattern no
training set has. Times are CPU seconds of one thread; the best of three for predictions.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.machine import machine
from optsched.bandwidth.measured import MeasuredBandwidth
from optsched.bandwidth.measured_data import load_measured
from optsched.bandwidth.measurements import Measurement, MeasurementTable
from optsched.bandwidth.metrics import mape, r_squared
from optsched.bandwidth.naive_surrogate import NaiveSurrogate
from optsched.bandwidth.samples import TEST, held_out_samples, training_samples
from optsched.bandwidth.surrogate import EPOCHS, HierarchicalTransformer
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.bandwidth.cluster import Cluster
    from optsched.bandwidth.model import BandwidthModel, Selection

PAYLOADS = {"16MiB": 1 << 24, "2GiB": 1 << 31}
BATCH = 100_000


class Row(NamedTuple):
    """Figures of one model."""

    r_squared: float
    mape: float
    unseen: float
    fit: float
    rate: float


def main() -> None:
    """Print one line per model and their means per number of samples."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--data")
    options.add_argument("--payload", choices=PAYLOADS, default="16MiB")
    options.add_argument("--sizes", default="50,100,250")
    options.add_argument("--seeds", default="1-5")
    options.add_argument("--epochs", type=int, default=EPOCHS)
    options.add_argument("--validation", type=float, default=0.0)
    options.add_argument("--naive", action="store_true", help="the ablation without hosts")
    given = options.parse_args()
    try:
        data = load_measured(given.data)
        payload = PAYLOADS[given.payload]
        cluster = data.h100(payload)
        truth = MeasuredBandwidth(cluster, data.table(payload))
    except InputError as error:
        options.error(str(error))
    first, _, last = given.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    print(machine("numpy", "torch"))
    print(f"# {given.payload}, seeds {given.seeds}, validation {given.validation}")
    print(f"{'n':>5} {'seed':>5} {'R2':>7} {'MAPE %':>7} {'unseen %':>9} {'fit s':>7} {'1/s':>9}")
    for n in map(int, given.sizes.split(",")):
        rows = []
        for seed in seeds:
            learn, test = (
                training_samples(cluster, n, seed),
                held_out_samples(cluster, TEST * n, seed),
            )
            table = measured(cluster, truth, learn, payload)
            began = time.process_time()
            model: BandwidthModel
            if given.naive:
                model = NaiveSurrogate.fit(cluster, table, seed=seed)
            else:
                model = HierarchicalTransformer.fit(
                    cluster, table, seed=seed, epochs=given.epochs, validation=given.validation
                )
            took = time.process_time() - began
            rows.append(figures(model, truth, learn, test, took))
            show(n, str(seed), rows[-1])
        show(n, "mean", Row(*np.mean(rows, axis=0).tolist()))


def measured(
    cluster: Cluster, truth: BandwidthModel, selection: Selection, payload: int
) -> MeasurementTable:
    """What runs on these sets would give."""
    rows = []
    for row, value in zip(selection, truth.predict(selection).tolist(), strict=True):
        gpus = []
        for h, host in enumerate(cluster.hosts):
            local = np.flatnonzero(row[cluster.first[h] : cluster.first[h + 1]])
            if len(local):
                gpus.append((host.name, tuple(local.tolist())))
        rows.append(Measurement(tuple(len(ids) for _, ids in gpus), value, tuple(gpus)))
    return MeasurementTable(tuple(rows), payload=payload)


def figures(
    model: BandwidthModel,
    truth: BandwidthModel,
    learn: Selection,
    test: Selection,
    took: float,
) -> Row:
    """Accuracy on test sets, and predictions a CPU second on random sets of any size."""
    true, predicted = truth.predict(test), model.predict(test)
    known = {pattern(model.cluster, row) for row in learn}
    unseen = np.array([pattern(model.cluster, row) not in known for row in test])
    draw = np.random.default_rng(0)
    many = draw.random((BATCH, model.cluster.n_gpus)) < draw.uniform(0.1, 0.9, (BATCH, 1))
    times = []
    for _ in range(3):
        began = time.process_time()
        model.predict(many)
        times.append(time.process_time() - began)
    return Row(
        r_squared(true, predicted),
        100 * mape(true, predicted),
        100 * mape(true[unseen], predicted[unseen]),
        took,
        BATCH / min(times),
    )


def pattern(cluster: Cluster, row: Selection) -> tuple[int, ...]:
    """Counts, falling."""
    return tuple(np.sort(np.bincount(cluster.host_of[row], minlength=cluster.n_hosts))[::-1])


def show(n: int, seed: str, row: Row) -> None:
    """One line."""
    print(
        f"{n:5} {seed:>5} {row.r_squared:7.4f} {row.mape:7.2f} {row.unseen:9.2f} {row.fit:7.1f} "
        f"{row.rate:9,.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
