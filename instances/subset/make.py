"""Make the GPU placements of this folder.

    python make.py            # rewrite the *.json files beside this script

Clusters and bandwidths are made up by `optsched.bandwidth.synthetic`, by seed: same seed, same
bytes. So are the tenants, but for those of the contended ones.
"""

from __future__ import annotations

from pathlib import Path

import optsched
from optsched.bandwidth import (
    BottleneckBandwidth,
    ClusterState,
    MeasuredBandwidth,
    Policy,
    synthetic,
    write_model,
)

HERE = Path(__file__).parent
SEED = 7
KINDS = ("nvswitch", "cube_mesh", "nvlink_pairs", "pcie")
CONTENDED = (
    (6, {"a": "n01:0-3 n02:0-3", "b": "n03:0-5 n04:0-5"}),
    (8, {"a": "n01:0-1 n02:0-1", "b": "n01:2-3 n03:0-3", "c": "n04:0-7"}),
    (10, {"a": "n01:0-2 n02:0-2 n03:0-2", "b": "n04:0-5"}),
)
"""GPUs of the request and of jobs on several hosts, where every choice of several hosts shares."""


def problems() -> dict[str, list[optsched.GpuPlacement]]:
    """All of them, by name of their model."""
    found: dict[str, list[optsched.GpuPlacement]] = {}
    homogeneous = synthetic.cluster("nvswitch", 4, SEED, name="homogeneous")
    mixed = synthetic.cluster(KINDS, 4, SEED, name="mixed")
    for name, model in (
        ("homogeneous", MeasuredBandwidth(homogeneous, synthetic.network(homogeneous, SEED))),
        ("mixed", BottleneckBandwidth(mixed)),
    ):
        found[name] = [
            optsched.GpuPlacement(
                synthetic.tenants(model.cluster, seed),
                model,
                k,
                traffic=traffic,
                policy=policy,
                name=f"{name}-4x8-{seed}",
            )
            for seed, k, traffic, policy in (
                (1, 4, "idle", Policy()),
                (2, 8, "heavy", Policy()),
                (3, 10, "moderate", Policy()),
                (4, 8, "heavy", Policy(balance="even")),
            )
        ]
        for number, (k, jobs) in enumerate(CONTENDED, 1):
            state = ClusterState.idle(model.cluster)
            for job, gpus in jobs.items():
                state = state.take(gpus, job, 40_000_000 if job == "b" else None)
            label = f"contended-{name}-{number}"
            found[name].append(optsched.GpuPlacement(state, model, k, name=label))
    return found


def main() -> None:
    """Write models and problems."""
    for name, choices in problems().items():
        write_model(choices[0].model, HERE / f"{name}.model.json")
        for problem in choices:
            problem.write(HERE / f"{problem.name}.subset.json", HERE / f"{name}.model.json")


if __name__ == "__main__":
    main()
