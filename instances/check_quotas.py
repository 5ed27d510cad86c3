"""Check best-known values of quota plans. Standard library only; no code of optsched.

    python instances/check_quotas.py FILE...

FILE is a table (best-known.csv) or a certificate (NAME.solution.json). The bound is a dynamic
program over the GPUs of every type: the exact optimum, but for localities. The rules are those of
`instances/quota/README.md`. Exit code 1: a fault.
"""

import json
import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

from check import main


def options_of(plan):
    """Per job its options (cost, GPUs, type), and the GPUs of every type."""
    goal, unit = plan["objective"], plan.get("resolution", 10**6)
    budget = {node.get("type", ""): 0 for node in plan["nodes"]}
    for node in plan["nodes"]:
        budget[node.get("type", "")] += node["gpus"]
    rows = []
    for job in plan["jobs"]:
        rows.append([])
        for kind, most in budget.items():
            one = {k: v[kind] if isinstance(v, dict) else v for k, v in job.items()}
            sizes = one.get("sizes") or range(one.get("minimum", 1), one.get("maximum", most) + 1)
            sizes, weight = [g for g in sizes if g <= most], one.get("weight", 1.0)
            worth = one.get("utility", sizes)
            if goal == "sum":
                costs = [-round(u * (weight * unit)) for u in worth]
            elif goal == "max_min":
                costs = [-math.floor(unit * u / weight) for u in worth]
            elif goal == "makespan":
                costs = [-(-one["work"] * unit // round(unit * rate)) for rate in one["rates"]]
            else:
                costs = [0] * len(sizes)
            rows[-1] += [(cost, g, kind) for cost, g in zip(costs, sizes, strict=False)]
        if not job.get("must_run"):
            rows[-1].append((-round(job.get("idle", 0) * job.get("weight", 1.0) * unit), 0, ""))
    if goal == "proportional":
        share = shares(plan["jobs"], rows, sum(budget.values()), unit)
        rows = [[(abs(unit * g - share[j]), g, k) for _, g, k in row] for j, row in enumerate(rows)]
    return rows, budget


def shares(jobs, rows, total, unit):
    """Shares in proportion to scores, within the least and most GPUs of every job."""
    exponent = 32 - (math.frexp(max(job["score"] for job in jobs))[1])
    exponent += math.frexp(max(job["score"] for job in jobs))[0] == 0.5
    weights = [math.floor(math.ldexp(job["score"], exponent) + 0.5) for job in jobs]
    ends = [(w, min(g for _, g, _ in row), max(g for _, g, _ in row))
            for w, row in zip(weights, rows, strict=True)]  # fmt: skip

    def taken(price):
        return [min(max(price * w, low), high) for w, low, high in ends]

    total = min(total, sum(high for *_, high in ends))
    marks = sorted({Fraction(g, w) for w, *bounds in ends for g in bounds})
    for a, b in pairwise(marks):
        if sum(taken(b)) >= total:
            part = (total - sum(taken(a))) / (sum(taken(b)) - sum(taken(a)))
            return [math.floor(unit * g) for g in taken(a + (b - a) * part)]
    raise ValueError("the scores do not share all GPUs")


def check_quota(plan, given):
    """Value of the quotas of a certificate, and the least value without localities."""
    rows, budget = options_of(plan)
    nodes = {node["name"]: node for node in plan["nodes"]}
    costs, used = [], dict.fromkeys(nodes, 0)
    if extra := given.keys() - {job["name"] for job in plan["jobs"]}:
        raise ValueError(f"job {min(extra)} may not have GPUs: the plan lacks it")
    for job, row in zip(plan["jobs"], rows, strict=True):
        here = given.get(job["name"], {})
        kinds = {nodes[n].get("type", "") for n in here} or {""}
        gpus = sum(here.values())
        found = [cost for cost, g, k in row if g == gpus and (k in kinds or not g)]
        if len(kinds) > 1 or not found or any(type(g) is not int or g < 1 for g in here.values()):
            raise ValueError(f"job {job['name']} may not have {here}")
        costs.append(found[0])
        for n, g in here.items():
            used[n] += g
        rule = job.get("locality", "any")
        largest = max(node["gpus"] * (node.get("type", "") in kinds) for node in nodes.values())
        if rule == "single" and len(here) > 1 and gpus <= largest:
            raise ValueError(f"job {job['name']} must be on one node")
        if rule == "whole" and sum(g < nodes[n]["gpus"] for n, g in here.items()) > 1:
            raise ValueError(f"job {job['name']} must hold its nodes wholly, but for one")
    if over := [n for n in nodes if used[n] > nodes[n]["gpus"]]:
        raise ValueError(f"node {over[0]} does not have {used[over[0]]} GPUs")
    join = max if plan["objective"] in ("max_min", "makespan") else lambda a, b: a + b
    exact = plan["objective"] == "proportional"
    total = min(sum(budget.values()), sum(max(g for _, g, _ in row) for row in rows))
    if exact and sum(used.values()) != total:
        raise ValueError(f"{sum(used.values())} GPUs are handed out, not {total}")
    kinds, best = [*budget], {(0,) * len(budget): None}
    for row in rows:
        new = {}
        for state, value in best.items():
            for cost, g, k in row:
                to = tuple(n + g * (k == kind) for n, kind in zip(state, kinds, strict=True))
                if all(n <= budget[kind] for n, kind in zip(to, kinds, strict=True)):
                    reached = cost if value is None else join(value, cost)
                    new[to] = min(new.get(to, reached), reached)
        best = new
    value = costs[0]
    for cost in costs[1:]:
        value = join(value, cost)
    return value, min(v for to, v in best.items() if not exact or sum(to) == total)


def check(path, _):
    """Name, value and bound of a certificate."""
    solution = json.loads(path.read_text())
    plan = Path(__file__).parent / "quota" / f"{solution['instance']}.quota.json"
    return solution["instance"], *check_quota(json.loads(plan.read_text()), solution["gpus"])


if __name__ == "__main__":
    main(check)
