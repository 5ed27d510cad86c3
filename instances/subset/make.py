"""Make the subset choices of this folder, with their optimal values as facts beside them.

    python make.py            # rewrite the *.subset.json files and optima.csv beside this script

Clusters, bandwidths and tenants are made up by `optsched.bandwidth.synthetic`, by seed: same seed,
same bytes. The optima are proved: by `counts` and again by `cpsat` on four hosts, by `pods` above.
"""

from __future__ import annotations

from pathlib import Path

import optsched
from optsched.bandwidth import BottleneckBandwidth, PodBandwidth, Policy, synthetic

HERE = Path(__file__).parent


def problems() -> list[optsched.SubsetChoice]:
    """All of them."""
    found = []
    for name, kinds in (
        ("homogeneous", ["nvswitch"]),
        ("mixed", ["nvswitch", "cube_mesh", "nvlink_pairs", "pcie"]),
    ):
        cluster = synthetic.cluster(kinds, 4, 7, name=name)
        model = BottleneckBandwidth(cluster).fit(synthetic.network(cluster, 7))
        for seed, k, traffic, policy in (
            (1, 4, "idle", Policy()),
            (2, 8, "heavy", Policy()),
            (3, 10, "moderate", Policy()),
            (4, 8, "heavy", Policy(balance="even")),
        ):
            found.append(
                optsched.SubsetChoice(
                    synthetic.tenants(cluster, seed),
                    model,
                    k,
                    traffic=traffic,
                    policy=policy,
                    name=f"{name}-4x8-k{k}-{seed}",
                )
            )
    return found


def pods() -> list[optsched.SubsetChoice]:
    """Pods of four hosts, 64 to 1,024 GPUs, idle and with tenants."""
    found = []
    for hosts in (8, 32, 128):
        cluster = synthetic.cluster("nvswitch", hosts, 7, hosts_per_pod=4, name="pods")
        model = PodBandwidth(BottleneckBandwidth, cluster, 0.7)
        for traffic in ("idle", "heavy"):
            n = cluster.n_gpus
            found.append(
                optsched.SubsetChoice(
                    synthetic.tenants(cluster, 7, 0.7),
                    model,
                    n // 16,
                    traffic=traffic,
                    name=f"pods-{n}-{traffic}",
                )
            )
    return found


def main() -> None:
    """Write the files of four hosts, and the optima of all."""
    rows = ["name,gpus,free,kilobytes,proved_by"]
    for problem in problems():
        problem.write(HERE / f"{problem.name}.subset.json")
        values = {
            name: optsched.solve(problem, name, time_limit=60) for name in ("counts", "cpsat")
        }
        assert len({result.objective for result in values.values()}) == 1, problem.name
        assert all(result.status == "optimal" for result in values.values()), problem.name
        rows.append(_row(problem, values["counts"], "counts cpsat"))
    for problem in pods():
        result = optsched.solve(problem, "pods", time_limit=60)
        rows.append(_row(problem, result, "pods" if result.status == "optimal" else ""))
    (HERE / "optima.csv").write_text("\n".join(rows) + "\n")


def _row(problem: optsched.SubsetChoice, result: optsched.Result, proved: str) -> str:
    assert result.objective is not None
    return f"{problem.name},{problem.k},{len(problem.state.free)},{-result.objective},{proved}"


if __name__ == "__main__":
    main()
