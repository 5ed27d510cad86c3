"""Synthetic quota plans for tests, tutorials and benchmarks, by seed."""

from __future__ import annotations

import random
from typing import Any, Final

from optsched.errors import InputError
from optsched.io.values import integer, one_of
from optsched.problems.quota.job import QuotaJob
from optsched.problems.quota.problem import OBJECTIVES, Node, QuotaPlan

PASS: Final = 60
"""Time units of a typical pass on one GPU."""


def synthetic(
    jobs: int, nodes: int, seed: int = 0, *, gpus: int = 8, types: int = 1,
    objective: str = "sum", gaps: bool = True, locality: str = "any", name: str = "",
) -> QuotaPlan:  # fmt: skip
    """Return a plan of jobs that scale by Amdahl's law, f(g) = g / (1 + c (g - 1)), on equal nodes.

    Parameters
    ----------
    jobs, nodes, gpus
        How many; GPUs of each node.
    seed
        Of everything: the same arguments give the same plan on every machine.
    types
        Types of node, in turn; jobs are the slower the later the type.
    objective
        Of the plan; under all but ``"sum"`` every job must run.
    gaps
        Sizes 1, 2, 4, ... up to 4 nodes; else all up to one node.
    locality
        Of all jobs.
    """
    integer("jobs", jobs, 0, 10**6)
    integer("nodes", nodes, 1, 10**6)
    integer("gpus", gpus, 1, 10**4)
    integer("types", types, 1, min(nodes, 26))
    one_of("objective", objective, OBJECTIVES)
    if objective != "sum" and jobs > nodes * gpus:
        raise InputError(f"jobs: {jobs} cannot all run on {nodes * gpus} GPUs")
    rng = random.Random(repr((jobs, nodes, seed, gpus, types, objective, gaps, locality)))
    kinds = [""] if types == 1 else [f"t{k}" for k in range(types)]
    machines = [Node(gpus, kinds[n % types]) for n in range(nodes)]
    gaps = gaps and objective != "proportional"
    most = min(4 * gpus if gaps else gpus, nodes * gpus // types)
    sizes = [2**k for k in range(20) if 2**k <= most] if gaps else list(range(1, most + 1))
    made = [
        QuotaJob(f"j{j}", locality=locality, **_fields(rng, sizes, kinds, objective, gaps))
        for j in range(jobs)
    ]
    return QuotaPlan(made, nodes=machines, objective=objective, name=name)  # type: ignore[arg-type]


def _fields(
    rng: random.Random, sizes: list[int], kinds: list[str], objective: str, gaps: bool
) -> dict[str, Any]:
    """Draw the fields of a job."""
    serial = rng.choice([0.02, 0.05, 0.1, 0.3, 0.522])
    some = sizes[: rng.randint(max(1, len(sizes) // 2), len(sizes))]
    rates = [round(g / (1 + serial * (g - 1)), 6) for g in some]
    fields: dict[str, Any] = {
        "weight": rng.choice([1.0, 1.0, 1.0, 2.0, 4.0]),
        "must_run": objective != "sum" or rng.random() < 0.1,
        "pass_work": rng.randint(PASS // 2, 2 * PASS), "rates": rates,
        "sizes" if gaps else "maximum": some if gaps else some[-1],
    }  # fmt: skip
    if objective in ("sum", "max_min"):
        fields["utility"] = rates
    elif objective == "proportional":
        fields["score"] = round(rng.paretovariate(1.2), 4)
    else:
        fields["work"] = round(fields["pass_work"] * rng.paretovariate(1.2))
    for key in {"rates", "utility", "sizes", "maximum"} & set(fields) if len(kinds) > 1 else ():
        fields[key] = {
            kind: [round(v / (1 + k), 6) for v in rates] if fields[key] is rates else fields[key]
            for k, kind in enumerate(kinds)
        }
    return fields
