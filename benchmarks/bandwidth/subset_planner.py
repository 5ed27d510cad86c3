"""Efficiency of choices by number of planned measurements across hosts.

python -m benchmarks.bandwidth.subset_planner [--data DIR] [--sets h100-2g,het-4mix,synthetic]
    [--budgets 0,25,50,100,250] [--seeds 5] [--repeats 10] [--random]

Every request is answered exactly under the learnt table, and judged by the full table: GBE is what
the choice gets over the best that any choice gets. Requests are those of BandPilot's evaluation
(uniform free sets, all busy GPUs one job) and packed ones, for every k; nobody measured contention:
under `heavy` the truth is the formula over standalone bandwidths. The planner simulates requests of
its own and never sees these. `--random` measures as many random patterns instead.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.bandwidth.subset_surrogate import Truth, truth
from benchmarks.machine import machine
from optsched.bandwidth.ask import ask, gpus_of
from optsched.bandwidth.bottleneck import BottleneckBandwidth
from optsched.bandwidth.contention import demands, share
from optsched.bandwidth.measured_data import VARIABLE
from optsched.bandwidth.measurements import Measurement, MeasurementTable
from optsched.bandwidth.metrics import gbe
from optsched.bandwidth.planner import learn
from optsched.bandwidth.scenarios import packed, uniform
from optsched.bandwidth.wanted import every_pattern

if TYPE_CHECKING:
    from optsched.bandwidth.contention import Traffic
    from optsched.bandwidth.state import ClusterState

SETS = ("h100-2g", "het-4mix", "synthetic")
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
    options.add_argument("--sets", default="")
    options.add_argument("--budgets", default="0,25,50,100,250")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--repeats", type=int, default=10)
    options.add_argument("--random", action="store_true")
    given = options.parse_args()
    names = given.sets.split(",") if given.sets else SETS[:2] if given.data else SETS[2:]
    if any(name not in SETS for name in names):
        options.error(f"expected of {', '.join(SETS)}, got {given.sets!r}")
    print(machine("numpy", "numba"))
    for name in names:
        known = truth(name, given.data)
        asked = requests(known, given.repeats)
        print(f"# {name}: {len(asked)} requests, {given.seeds} seeds; mean GBE % (worst), least "
              "mean of a seed")  # fmt: skip
        for budget in map(int, given.budgets.split(",")):
            begin = time.perf_counter()
            found: dict[tuple[str, str], list[list[float]]] = {}
            for seed in range(given.seeds if budget else 1):
                model = learnt(known, budget, seed, given.random)
                for key, values in efficiencies(known, model, asked).items():
                    found.setdefault(key, []).append(values)
            words = []
            for (kind, traffic), values in found.items():
                means = [100 * float(np.mean(of)) for of in values]
                worst = 100 * min(map(min, values))
                words.append(
                    f"{kind} {traffic} {np.mean(means):.3f} ({worst:.1f}) {min(means):.3f}"
                )
            took = (time.perf_counter() - begin) / (given.seeds if budget else 1)
            print(f"{name:10} {budget:4}  {'  '.join(words)}  {took:.1f} s", flush=True)


def requests(known: Truth, repeats: int) -> list[Request]:
    """Uniform and packed states for every k, under every traffic."""
    tables = known.model.tables()
    assert tables is not None
    found = []
    kinds = {
        "uniform": uniform(known.cluster, repeats=repeats, seed=1),
        "packed": packed(known.cluster, repeats=repeats, seed=1),
    }
    for kind, states in kinds.items():
        for state, k in states:
            for traffic in PROFILES:
                wants = demands(known.model, state, traffic)
                best = ask(tables, state.masks, state.held, wants, k)
                assert best is not None
                found.append(Request(kind, state, k, traffic, wants, best.value))
    return found


def learnt(known: Truth, budget: int, seed: int, at_random: bool) -> BottleneckBandwidth:
    """The model after so many measurements."""
    values = {row.pattern: row.value for row in reversed(known.table.rows)}  # the first counts

    def measure(patterns: tuple[tuple[int, ...], ...]) -> MeasurementTable:
        rows = tuple(Measurement(pattern, values[pattern]) for pattern in patterns)
        return MeasurementTable(rows, known.table.op, known.table.payload, known.table.mixed)

    model = BottleneckBandwidth(known.cluster)
    if not at_random:
        return learn(known.cluster, model, measure, budget, seed=seed)
    rows = every_pattern(known.cluster)
    some = np.random.default_rng(seed).permutation(len(rows))[:budget]
    return model.update(measure(tuple(tuple(c for c in row if c) for row in rows[some].tolist())))


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
        choice = ask(tables, state.masks, state.held, thought, request.gpus)
        assert choice is not None
        real = share(known.model, state, gpus_of(state, choice.parts), request.demands)
        value = gbe(real.value, request.best)
        found.setdefault((request.kind, request.traffic), []).append(value)
    return found


if __name__ == "__main__":
    main()
