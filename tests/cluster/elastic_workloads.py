"""Small random workloads of elastic jobs, for the tests of policies."""

from __future__ import annotations

from typing import Any

import numpy as np

from optsched.cluster.workload.job import WORK, Curve, Job
from optsched.cluster.workload.nodes import Nodes
from optsched.cluster.workload.speedup import Amdahl, Linear
from optsched.cluster.workload.workload import Group, Workload
from optsched.cluster.world.settings import Settings

SIZES = [(1,), (2,), (1, 2), (1, 2, 3, 4), (2, 3), (1, 2, 4), (2, 4), (3,)]
GANGS = [(1,), (2,), (3,)]


def workload(seed: int, jobs: int = 12, choices: Any = SIZES, **fixed: Any) -> Workload:
    """Jobs that differ in all that a policy may look at; `fixed` sets fields of every job."""
    random = np.random.default_rng(seed)
    made = []
    for i in range(jobs):
        kind = int(random.integers(3))
        passes = int(random.integers(1, 6))
        curve = None
        if kind == 0:
            curve = Curve(1.0, 0.1, float(random.uniform(0.2, 0.8)), 0.3, 0.02)
        elif kind == 1:
            curve = Curve(0.9, 0.2, 0.3, None, 0.02)
        fields = {
            "name": f"j{i}",
            "submit": int(random.integers(0, 40)) if random.random() < 0.7 else 0,
            "sizes": choices[int(random.integers(len(choices)))],
            "work": int(random.integers(2, 60)) * WORK * passes // int(random.integers(1, 4)),
            "speedup": Amdahl(float(random.choice([0.1, 0.5]))) if i % 2 else Linear(),
            "passes": passes,
            "curve": curve,
            "weight": float(random.choice([1.0, 1.0, 2.0])),
            "preemptible": bool(random.random() < 0.85),
            "template": str(random.choice(["", "a", "b"])),
            "restart_cost": [None, 0, 3][int(random.integers(3))],
            "group": f"g{int(random.integers(2))}",
        }
        fields["estimate"] = max(1, round(fields["work"] * float(np.exp(random.normal(0, 0.5)))))
        made.append(Job(**(fields | fixed)))
    limit = None if random.random() < 0.5 else int(random.integers(1, 5))
    groups = [Group("g0", max_concurrent=limit), Group("g1")]
    return Workload.of(made, groups=groups, seed=seed)


def settings(seed: int) -> dict[str, Any]:
    """Keywords of `simulate`."""
    random = np.random.default_rng(seed)
    return {
        "restart_cost": int(random.integers(0, 6)),
        "resize": str(random.choice(["pass", "pass", "anytime"])),
        "checkpoint": str(random.choice(["immediate", "immediate", "pass"])),
        "round": int(random.choice([0, 0, 7])),
    }


def nodes(seed: int) -> Nodes:
    """Three to eight GPUs on one to three nodes."""
    return [Nodes(1, 4), Nodes(2, 2), Nodes(3, 1), Nodes.of([4, 2, 2])][seed % 4]


__all__ = ["Settings", "nodes", "settings", "workload"]
