"""Sia's choice of configurations as its scheduler poses it to cvxpy, solved by CBC or HiGHS.

python run_sia.py REQUEST.json ANSWER.json; needs cvxpy, numpy, and cylp or highspy.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cvxpy
import numpy as np


def solve(cost: Any, sizes: Any, gpus: int, left_out: float, solver: str) -> tuple[float, Any]:
    """Minimise the costs of chosen configurations plus `left_out` a job without one.

    One integer variable in [0, 1] for every job and configuration, at most one a job, and one
    capacity; objective and constraints as sums of expressions, as in the published scheduler.
    """
    jobs, kinds = cost.shape
    chosen = cvxpy.Variable(shape=cost.shape, integer=True)
    weights = np.ones((1, jobs), dtype=np.float32)
    objective = cvxpy.sum(weights @ cvxpy.multiply(chosen, cost))
    objective += left_out * (jobs - cvxpy.sum(chosen))
    used = cvxpy.sum(chosen @ sizes.reshape(-1, 1), axis=0)
    rules = [
        chosen >= 0, chosen <= 1, used <= np.array([gpus]), used >= 0,
        chosen @ np.ones((kinds, 1)) <= np.ones((jobs, 1)),
    ]  # fmt: skip
    problem = cvxpy.Problem(cvxpy.Minimize(objective), constraints=rules)
    if solver == "CBC":
        problem.solve(solver=cvxpy.CBC, numberThreads=1, allowablePercentageGap=0)
    else:
        exact = {"threads": 1, "mip_rel_gap": 0.0, "mip_abs_gap": 1e-6}
        problem.solve(solver=cvxpy.HIGHS, highs_options=exact)
    if problem.status != "optimal":
        raise SystemExit(f"{solver}: {problem.status}")
    return float(problem.value), np.round(chosen.value).astype(int)


def main() -> None:
    """Answer one request: the instances are in an .npz file that it names."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    given = np.load(asked["instances"])
    answers = []
    # the first, small one pays for imports and is not counted
    solve(given["cost0"][:20], given["sizes"], 40, asked["left_out"], asked["solver"])
    for k in range(asked["count"]):
        cost = given[f"cost{k}"]
        begin, wall = time.process_time(), time.perf_counter()
        value, chosen = solve(
            cost, given["sizes"], asked["gpus"], asked["left_out"], asked["solver"]
        )
        cpu, wall = time.process_time() - begin, time.perf_counter() - wall
        row, kind = np.nonzero(chosen)
        quota = np.zeros(len(cost), int)
        quota[row] = given["sizes"][kind]
        answers.append({"cpu": cpu, "wall": wall, "value": value, "quota": quota.tolist()})
    solver = {"CBC": "cylp", "HIGHS": "highspy"}[asked["solver"]]
    versions = ", ".join(f"{name} {version(name)}" for name in ("cvxpy", solver, "numpy"))
    Path(sys.argv[2]).write_text(json.dumps({"answers": answers, "versions": versions}))


if __name__ == "__main__":
    main()
