"""Efficiency of choices by models that were learnt from random samples, and by none.

python -m benchmarks.bandwidth.subset_learnt [--data DIR] [--sizes 0,250] [--seeds 5] [--repeats 10]

The samples are those of BandPilot's protocol (half balanced splits over 2 to 4 hosts, half
uniform sets). Every request is answered exactly under the learnt model, and judged by the measured
table: GBE is what the choice gets over the best that any choice gets. `h100 16m>2g` learns at
16 MiB and is judged at 2 GiB. Nobody measured contention: under `moderate` and `heavy` the truth is
the formula.
"""

from __future__ import annotations

import argparse
import os

import numpy as np

from benchmarks.bandwidth.subset_planner import efficiencies, requests
from benchmarks.bandwidth.subset_surrogate import Truth, runs, truth
from benchmarks.machine import machine
from optsched.bandwidth.bottleneck import BottleneckBandwidth
from optsched.bandwidth.measured_data import VARIABLE
from optsched.bandwidth.samples import training_samples

CASES = {
    "h100 2g": ("h100-2g", "h100-2g"),
    "h100 16m>2g": ("h100-16m", "h100-2g"),
    "het-4mix": ("het-4mix", "het-4mix"),
}


def main() -> None:
    """Print mean, least mean of a seed, and worst GBE by samples, kind of request and traffic."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--data", default=os.environ.get(VARIABLE))
    options.add_argument("--sizes", default="0,250")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--repeats", type=int, default=10)
    given = options.parse_args()
    cases = CASES if given.data else {"synthetic": ("synthetic", "synthetic")}
    print(machine("numpy", "numba"))
    for name, (seen, scored) in cases.items():
        teacher, judge = truth(seen, given.data), truth(scored, given.data)
        asked = requests(judge, given.repeats)
        print(f"# {name}: {len(asked)} requests; mean GBE % (least of a seed, worst)")
        for n in map(int, given.sizes.split(",")):
            found: dict[tuple[str, str], list[list[float]]] = {}
            for seed in range(given.seeds if n else 1):
                for key, values in efficiencies(judge, learnt(teacher, n, seed), asked).items():
                    found.setdefault(key, []).append(values)
            for (kind, traffic), values in found.items():
                means = [100 * float(np.mean(of)) for of in values]
                worst = 100 * min(map(min, values))
                print(f"{name:12} {n:5} {kind:8} {traffic:9} {np.mean(means):8.3f} "
                      f"({min(means):.3f}, {worst:.1f})", flush=True)  # fmt: skip


def learnt(teacher: Truth, n: int, seed: int) -> BottleneckBandwidth:
    """The model after n random samples."""
    model = BottleneckBandwidth(teacher.cluster)
    if not n:
        return model
    return model.fit(runs(teacher, training_samples(teacher.cluster, n, seed)))


if __name__ == "__main__":
    main()
