"""Make the subset choices of this folder, with their optimal values beside them.

    python make.py            # rewrite the *.json files and optima.csv beside this script

Clusters, bandwidths and tenants are made up by `optsched.bandwidth.synthetic`, by seed: same seed,
same bytes. The optima are proved: by `counts` and again by `cpsat`.
"""

from __future__ import annotations

from pathlib import Path

import optsched
from optsched.bandwidth import (
    BottleneckBandwidth,
    MeasuredBandwidth,
    Policy,
    synthetic,
    write_model,
)

HERE = Path(__file__).parent
SEED = 7
KINDS = ("nvswitch", "cube_mesh", "nvlink_pairs", "pcie")


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
    return found


def main() -> None:
    """Write models, problems and optima."""
    rows = ["name,gpus,free,kilobytes,proved_by"]
    for name, choices in problems().items():
        write_model(choices[0].model, HERE / f"{name}.model.json")
        for problem in choices:
            problem.write(HERE / f"{problem.name}.subset.json", HERE / f"{name}.model.json")
            solvers = ["counts", "cpsat"]
            results = [optsched.solve(problem, solver, time_limit=60) for solver in solvers]
            assert len({result.objective for result in results}) == 1, problem.name
            assert all(result.status == "optimal" for result in results), problem.name
            value, free = -results[0].objective, len(problem.state.free)
            rows.append(f"{problem.name},{problem.k},{free},{value},{' '.join(solvers)}")
    (HERE / "optima.csv").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
