"""Random graphs and job arrays with every feature, drawn from a `random.Random`.

Hypothesis draws from them through ``st.randoms()``; the deep runs through seeds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.model.objectives import LATENESS, TOTAL
from optsched.model.schedule import NO_DEADLINE, Arcs, Csr, Goal, Resource, Schedule
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from random import Random


def random_graph(
    rng: Random, most: int = 6, *, gangs: bool = True, memory: bool = True, deadlines: bool = True
) -> Schedule:
    """Up to `most` operations on up to three resources; some of these graphs are infeasible.

    Gangs, operations without resource, zero durations, lags down to minus the duration, releases,
    deadlines, setups that need not be triangular, bytes that another operation frees, or none.
    """
    n, machines = rng.randint(1, most), rng.randint(1, 3)
    duration = [rng.choice([0, 1, 2, 3, 5]) for _ in range(n)]
    if rng.random() < 0.3:
        duration = [max(1, p) for p in duration]
    needs = []
    for _ in range(n):
        held = rng.choice([1, 1, 1, 1, 0, 2]) if gangs else rng.choice([1, 1, 1, 1, 0])
        needs.append(rng.sample(range(machines), min(held, machines)))
    density = rng.choice([0.0, 0.2, 0.4])
    arcs = [
        (i, k, rng.choice([0, 0, 1, 4, -duration[i], rng.randint(-duration[i], 2)]))
        for i in range(n) for k in range(i + 1, n) if rng.random() < density
    ]  # fmt: skip
    columns: dict[str, list[int]] = {"duration": duration}
    columns["job"] = [rng.randint(0, 2) for _ in range(n)]
    columns["stage"] = [rng.randint(0, 1) for _ in range(n)]
    columns["family"] = columns["job"] if rng.random() < 0.5 else [rng.randint(0, 2) for _ in needs]
    if rng.random() < 0.5:
        top = rng.choice([1, 3, 8])
        columns["setup_out"] = [rng.randint(0, top) for _ in range(n)]
        if rng.random() < 0.5:
            columns["setup_in"] = [rng.randint(0, top) for _ in range(n)]
    if rng.random() < 0.3:
        columns["release"] = [rng.choice([0, 0, 2, 6]) for _ in range(n)]
    if deadlines and rng.random() < 0.2:
        columns["deadline"] = [rng.choice([NO_DEADLINE, NO_DEADLINE, 8, 14]) for _ in range(n)]
    caps = [0] * machines
    if memory and rng.random() < 0.6:
        caps = [rng.choice([0, 3, 4, 6, 9]) for _ in range(machines)]
        _bytes(rng, columns, needs, arcs)
    return Schedule(
        resources=tuple(Resource(f"gpu{r}", cap) for r, cap in enumerate(caps)),
        op_resources=Csr.of(needs),
        arcs=Arcs.of(arcs),
        kind=np.array([rng.choice(["F", "B", "U", ""]) for _ in range(n)], np.str_),
        **{key: np.array(column, np.int64) for key, column in columns.items()},  # type: ignore[arg-type]
    )


def with_goal(rng: Random, problem: Any) -> Any:
    """The same job shop, array or graph with another objective of one iteration."""
    n = int(problem.graph().job.max()) + 1
    fields: dict[str, Any] = {
        "objective": rng.choice([TOTAL, LATENESS]),
        "job_weight": tuple(rng.choice([0, 1, 1, 2, 5]) for _ in range(n)),
        "due": tuple(rng.choice([1, 4, 9, 16, 25]) for _ in range(n)),
    }
    if isinstance(problem, JobArray):
        return problem.replace(**fields)
    if isinstance(problem, Schedule):
        return replace(problem, goal=Goal(**fields))
    build, chains = problem.__reduce__()
    return build(*chains, **fields)


def _bytes(
    rng: Random, columns: dict[str, list[int]], needs: list[list[int]], arcs: list[Any]
) -> None:
    """Held bytes: mostly in pairs with an arc between, sometimes without, sometimes for ever."""
    n = len(needs)
    acquire, free = [0] * n, [0] * n
    columns["workspace"] = [rng.choice([0, 0, 0, 1, 2]) if row else 0 for row in needs]
    tidy = rng.random() < 0.6
    for i in range(n):
        partners = [k for k in range(i, n) if needs[i] and needs[k] == needs[i]]
        if not partners or rng.random() < 0.4:
            continue
        k, size = rng.choice(partners), rng.randint(1, 4)
        acquire[i] += size
        if tidy or rng.random() < 0.8:
            free[k] += size
            columns["stage"][k], columns["job"][k] = columns["stage"][i], columns["job"][i]
            if i != k and (tidy or rng.random() < 0.5):
                arcs.append((i, k, 0))
    columns["acquire"], columns["free"] = acquire, free


def random_array(rng: Random, jobs: int = 3, stages: int = 3) -> JobArray:
    """A job array of tiny blocks with a random choice of every option of its graph."""
    k, v = rng.randint(1, jobs), rng.randint(1, stages)
    alike = rng.random() < 0.3  # identical jobs: symmetry

    def table(low: int, high: int, width: int = v) -> Any:
        rows = [[rng.randint(low, high) for _ in range(width)] for _ in range(k)]
        return [rows[0]] * k if alike else rows

    fields: dict[str, Any] = {}
    low = rng.choice([0, 1])
    fields["forward"], fields["backward"] = table(low, 5), table(low, 5)
    split = rng.random() < 0.25 and v < 3
    if split:
        fields["weight"] = table(0, 3)
    chunks = v > 1 and rng.random() < 0.2
    if chunks:
        fields["place"] = [s % 2 for s in range(v)]
    elif rng.random() < 0.15 and v > 1:
        fields["place"] = [[rng.sample(range(v), v)] for _ in range(k)]
    if rng.random() < 0.5:
        if "place" in fields:
            fields["switch"] = [[rng.randint(0, 6)] * v for _ in range(1 if alike else k)]
            fields["switch"] = fields["switch"] * k if alike else fields["switch"]
        elif rng.random() < 0.5:
            fields["switch"] = table(0, 6)
        else:  # one stage only: where symmetry breaks
            where = rng.randrange(v)
            fields["switch"] = [[rng.choice([2, 9]) if s == where else 0 for s in range(v)]] * k
        fields["trailing_switch"] = rng.random() < 0.2
    if v > 1 and rng.random() < 0.5:
        fields["lag_forward"], fields["lag_backward"] = table(0, 4, v - 1), table(0, 4, v - 1)
        if rng.random() < 0.3:
            first = fields["forward"]
            fields["lag_forward"] = [
                [-rng.randint(0, row[c]) for c in range(v - 1)] for row in first
            ]
            if alike:
                fields["lag_forward"] = [fields["lag_forward"][0]] * k
    if rng.random() < 0.4:
        fields["update"] = table(0, 3)
        fields["update_mode"] = rng.choice(["fused", "block", "global", "none"])
        if k * v > 6 and fields["update_mode"] != "none":
            fields["update_mode"] = "fused"
        fields["update_blocks_gradient"] = rng.random() < 0.3
    if rng.random() < 0.6:
        _capped(rng, fields, k, v, table, split)
    if rng.random() < 0.2:
        fields["release"] = [rng.choice([0, 3, 7])] * k if alike else [
            rng.choice([0, 3, 7]) for _ in range(k)
        ]  # fmt: skip
    if k * v <= 4 and rng.random() < 0.4 and not isinstance(fields.get("place", [0])[0], list):
        fields["micro_batches"] = 2
        free = fields.get("update_mode", "fused") != "fused" or "update" not in fields
        fields["microbatch_order"] = rng.choice(["fixed", "free"]) if free else "fixed"
    return JobArray(**fields)


def _capped(rng: Random, fields: dict[str, Any], k: int, v: int, table: Any, split: bool) -> None:
    fields["activation"] = table(1, 4)
    if rng.random() < 0.4:
        fields["recompute"], fields["recompute_workspace"] = table(0, 3), table(0, 3)
        fields["checkpoint"] = table(1, 2)
        fields["recompute_as_block"] = k * v <= 6 and rng.random() < 0.5
        fields["recompute_mode"] = rng.choice(
            ["always", "never", [rng.random() < 0.5 for _ in range(k)]]
        )
    if split:
        fields["weight_memory"] = table(0, 1)
    devices = 2 if isinstance(fields.get("place", [[]])[0], int) else v
    most = 4 * v if devices == 2 and v > 1 else 8
    fields["memory"] = [rng.choice([0, 4, 5, 6, most]) for _ in range(devices)]


def random_rolling(rng: Random, jobs: int = 2, stages: int = 2) -> JobArray:
    """A tiny periodic array with every option of job arrays, some jobs twice a cycle."""
    array = random_array(rng, jobs, stages)
    copies = [rng.choice([1, 1, 1, 2]) for _ in range(array.n_jobs)]
    if array.graph().n_operations > 8:
        copies = [1] * array.n_jobs
    return array.replace(release=0, objective="period", multiplicity=copies)
