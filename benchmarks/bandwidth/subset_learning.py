"""Efficiency of choices by learnt models: by number of planned runs, or of random samples.

python -m benchmarks.bandwidth.subset_learning [--data DIR] [--ways planned,samples]
    [--sizes 0,25,100,250] [--cases "h100 2g,h100 16m>2g,het-4mix"] [--seeds 5] [--begin 0]
    [--repeats 10]

Every request is answered exactly under the learnt table, and judged by the full table: GBE is what
the choice gets over the best that any choice gets. Requests are those of BandPilot's evaluation
(uniform free sets, all busy GPUs one job) and packed ones, for every k; nobody measured contention:
under `moderate` and `heavy` the truth is the formula over standalone bandwidths. The planner
sees no requests. Random samples are those of BandPilot's protocol
(half balanced splits over 2 to 4 hosts, half uniform sets); `h100 16m>2g` learns at 16 MiB and is
judged at 2 GiB.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.bandwidth.measured_data import VARIABLE
from benchmarks.bandwidth.metrics import gbe
from benchmarks.bandwidth.samples import training_samples
from benchmarks.bandwidth.scenarios import packed, uniform
from benchmarks.bandwidth.subset_surrogate import Truth, runs, truth
from benchmarks.machine import machine
from optsched.bandwidth.measure.planner import plan_measurements
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.contention import demands, share
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable
from optsched.bandwidth.search.by_counts import best_by_counts

if TYPE_CHECKING:
    from optsched.bandwidth.models.contention import Traffic
    from optsched.bandwidth.topology.state import ClusterState

CASES = {
    "h100 2g": ("h100-2g", "h100-2g"),
    "h100 16m>2g": ("h100-16m", "h100-2g"),
    "het-4mix": ("het-4mix", "het-4mix"),
}
"""What is learnt from, and what judges."""
PROFILES: tuple[Traffic, ...] = ("idle", "moderate", "heavy")


class Request(NamedTuple):
    """A request with what its best answer gets."""

    kind: str
    state: ClusterState
    gpus: int
    traffic: Traffic
    demands: tuple[int, ...]
    best: int


def main() -> None:
    """Print mean and worst GBE by budget, kind of request and traffic; means over the seeds."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--data", default=os.environ.get(VARIABLE))
    options.add_argument("--ways", default="planned,samples")
    options.add_argument("--sizes", default="0,25,100,250")
    options.add_argument("--cases", default=",".join(CASES))
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--begin", type=int, default=0, help="first seed, also of requests")
    options.add_argument("--repeats", type=int, default=10)
    given = options.parse_args()
    cases = {"synthetic": ("synthetic", "synthetic")}
    if given.data:
        cases = {name: CASES[name] for name in given.cases.split(",")}
    print(machine("numpy", "numba"))
    for name, (seen, scored) in cases.items():
        teacher, judge = truth(seen, given.data), truth(scored, given.data)
        asked = requests(judge, given.repeats, given.begin + 1)
        print(f"# {name}: {len(asked)} requests; mean GBE % (least of a seed, worst)")
        for way in given.ways.split(","):
            for n in map(int, given.sizes.split(",")):
                show(f"{name:12} {way:8} {n:5}", judge, asked, [
                    WAYS[way](teacher, n, given.begin + i) for i in range(given.seeds if n else 1)
                ])  # fmt: skip


def show(what: str, judge: Truth, asked: list[Request], models: list[BottleneckBandwidth]) -> None:
    """One line for every kind of request and traffic, over the models of all seeds."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for model in models:
        for key, values in efficiencies(judge, model, asked).items():
            found.setdefault(key, []).append(values)
    for (kind, traffic), values in found.items():
        means = [100 * float(np.mean(of)) for of in values]
        worst = 100 * min(map(min, values))
        print(f"{what} {kind:8} {traffic:9} {np.mean(means):8.3f} "
              f"({min(means):.3f}, {worst:.1f})", flush=True)  # fmt: skip


def requests(known: Truth, repeats: int, seed: int) -> list[Request]:
    """Uniform and packed states for every k, under every traffic."""
    tables = known.model.tables()
    assert tables is not None
    found = []
    kinds = {
        "uniform": uniform(known.cluster, repeats=repeats, seed=seed),
        "packed": packed(known.cluster, repeats=repeats, seed=seed),
    }
    for kind, states in kinds.items():
        for state, k in states:
            for traffic in PROFILES:
                wants = demands(known.model, state, traffic)
                best = best_by_counts(tables, state, wants, k)
                assert best is not None
                found.append(Request(kind, state, k, traffic, wants, best.value))
    return found


def planned(known: Truth, budget: int, _: int) -> BottleneckBandwidth:
    """The model after the runs that one script makes."""
    model = BottleneckBandwidth(known.cluster)
    values = {row.pattern: row.value for row in reversed(known.table.rows)}  # the first counts
    patterns = plan_measurements(model, budget).patterns
    rows = tuple(Measurement(pattern, values[pattern]) for pattern in patterns)
    table = MeasurementTable(rows, known.table.op, known.table.payload, known.table.mixed)
    return model.fit(table)


def sampled(known: Truth, n: int, seed: int) -> BottleneckBandwidth:
    """The model after so many random samples."""
    model = BottleneckBandwidth(known.cluster)
    return model.fit(runs(known, training_samples(known.cluster, n, seed))) if n else model


WAYS = {"planned": planned, "samples": sampled}


def efficiencies(
    known: Truth, model: BottleneckBandwidth, asked: list[Request]
) -> dict[tuple[str, str], list[float]]:
    """GBE by kind and traffic."""
    tables = model.tables()
    assert tables is not None
    found: dict[tuple[str, str], list[float]] = {}
    for request in asked:
        state = request.state
        thought = demands(model, state, request.traffic)
        choice = best_by_counts(tables, state, thought, request.gpus)
        assert choice is not None
        real = share(known.model, state, choice.gpus, request.demands)
        value = gbe(real.value, request.best)
        found.setdefault((request.kind, request.traffic), []).append(value)
    return found


if __name__ == "__main__":
    main()
