"""Check best-known values of GPU placements. Standard library only; no code of optsched.

    python instances/check_gpus.py FILE...

FILE is a table (best-known.csv) or a certificate (NAME.solution.json). The bound is the best of all
sets of GPUs. The rules are those of `instances/subset/README.md`. Exit code 1: a fault.
"""

import hashlib
import json
from itertools import combinations
from pathlib import Path

from check import main

HERE = Path(__file__).parent / "subset"


def gpus_of(text):
    """Numbers within each host of a text such as ``n01:0-3,6 n02:1``."""
    found = {}
    for part in text.split():
        host, _, ranges = part.partition(":")
        ends = [piece.split("-") for piece in ranges.split(",")]
        found[host] = sorted(g for ab in ends for g in range(int(ab[0]), int(ab[-1]) + 1))
    return found


def read_model(link):
    """Function from a set, as numbers by host, to its bandwidth in kB/s (None: not measured)."""
    data = (HERE / link["file"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != link["sha256"]:
        raise ValueError(f"{link['file']} has changed")
    model = json.loads(data)
    types = {kind["name"]: kind for kind in model["cluster"]["types"]}
    of = {host["name"]: types[host["type"]] for host in model["cluster"]["hosts"]}
    table = {row["pattern"]: row["kilobytes"] for row in reversed(model["measurements"])}
    if table and model.get("kind") != "measured":
        raise ValueError(f"{link['file']}: a model that learns is not read by this script")

    def card_rate(count):
        """kB/s that a host brings to the network with so many GPUs, the best type of host."""
        cards = {
            name: max(1.0, count * kind["nics"] / kind["gpus"]) for name, kind in types.items()
        }
        return max(round(kind["nic_rate"] * 1e6) * min(kind["nics"], cards[name])
                   for name, kind in types.items() if count <= kind["gpus"])  # fmt: skip

    def bandwidth(chosen):
        counts = sorted(map(len, chosen.values()), reverse=True)
        n, m = sum(counts), len(counts)
        if n < 2:
            return 0
        if table:
            return table.get("+".join(map(str, counts)))
        limits = [round(of[host]["intra"][",".join(map(str, ids))] * 1e6)
                  for host, ids in chosen.items() if len(ids) > 1]  # fmt: skip
        if m > 1:
            limits.append(round(min(map(card_rate, counts)) * ((n - 1) / n) * (m / (m - 1))))
        return min(limits)

    return bandwidth


def shared(chosen, jobs, bandwidth):
    """Bandwidth of a set beside the running jobs; None if a bandwidth is not measured.

    A job with a demand on several hosts, one of them a host of the set, interferes. Both together
    reach what as many GPUs on all their hosts reach; the least of that is divided by demand.
    """
    alone, capacities, demands = bandwidth(chosen), [], 0
    for held, demand in jobs:
        if demand and len(chosen) > 1 and len(held) > 1 and chosen.keys() & held.keys():
            sizes = {h: len(chosen.get(h, ())) + len(held.get(h, ())) for h in chosen | held}
            capacities.append(bandwidth({h: [*range(n)] for h, n in sizes.items()}))
            demands += demand
    if alone is None or None in capacities:
        return None
    least = min(capacities, default=alone + demands)
    return alone if alone + demands <= least else alone * least // (alone + demands)


def check(path, _):
    """Name, value and exact bound of a certificate; both are negative bandwidths."""
    solution = json.loads(path.read_text())
    problem = json.loads((HERE / f"{solution['instance']}.subset.json").read_text())
    bandwidth, policy = read_model(problem["model"]), problem.get("policy", {})
    traffic, jobs = problem.get("traffic", "given"), []
    for job in problem["state"]["jobs"]:
        held = gpus_of(job["gpus"])
        demand = round(job["demand"] * 1e6) if "demand" in job else bandwidth(held)
        demand = {"idle": 0, "heavy": bandwidth(held), "given": demand}.get(traffic)
        if demand is None and len(held) > 1:
            raise ValueError("demands are drawn at random: this script cannot know them")
        jobs.append((held, demand))
    if policy.keys() - {"balance"}:
        raise ValueError(f"policy: this script does not know {', '.join(policy)}")
    spread = {"free": 10**9, "even": 1, "exact": 0}[policy.get("balance", "free")]
    free = [(h, g) for h, ids in gpus_of(problem["state"]["free"]).items() for g in ids]

    def value(pairs):
        """Bandwidth of pairs of host and number; None if they are no answer."""
        chosen = {}
        for host, gpu in pairs:
            chosen.setdefault(host, []).append(gpu)
        counts = [*map(len, chosen.values())]
        return None if max(counts) - min(counts) > spread else shared(chosen, jobs, bandwidth)

    given = sorted((host, gpu) for host, ids in solution["gpus"].items() for gpu in ids)
    numbers = all(type(gpu) is int for _, gpu in given)
    if not numbers or len(given) != problem["gpus"] or len({*given} & {*free}) != len(given):
        raise ValueError(f"expected {problem['gpus']} free GPUs, each once")
    if (found := value(given)) is None:
        raise ValueError("counts that the policy forbids, or that are not measured")
    values = map(value, combinations(free, problem["gpus"]))
    return solution["instance"], -found, -max(v for v in values if v is not None)


if __name__ == "__main__":
    main(check)
