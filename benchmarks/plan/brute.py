"""`optsched.plan` against brute force on random tiny clusters.

Run: python benchmarks/plan/brute.py [--clears 2000] [--plans 500]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from optsched import plan
from optsched.errors import Infeasible

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS / "plan"), str(TESTS)]

import move_oracle  # noqa: E402
import test_cluster_plan  # noqa: E402


def main() -> None:
    """Count clusters with equal answers; stop at a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clears", type=int, default=2000)
    parser.add_argument("--plans", type=int, default=500)
    args = parser.parse_args()
    begin, none, free = time.perf_counter(), 0, 0
    for seed in range(args.clears):
        snapshot, request = move_oracle.random_snapshot(seed)
        best = move_oracle.cheapest(snapshot, request, lambda job, place: True)
        try:
            found = plan.clear(snapshot, "gang")
            cost = None if found is None else found.cost
            if found is not None:
                found.after()
        except Infeasible:
            cost, none = None, none + 1
        free += cost == 0
        if cost != best:
            raise SystemExit(f"clear, seed {seed}: {cost}, by brute force {best}")
    print(f"clear: {args.clears} clusters equal to brute force in "
          f"{time.perf_counter() - begin:.0f} s; {none} cannot hold the request, "
          f"{free} need no change", flush=True)  # fmt: skip
    begin, reasons, starts = time.perf_counter(), 0, 0
    for seed in range(args.plans):
        snapshot = test_cluster_plan.random_snapshot(seed)
        made, fast = plan.plan(snapshot, sigma=0), test_cluster_plan.fast_enough(snapshot)
        test_cluster_plan.check_rules(made)
        best = {job.name for same in move_oracle.starts(snapshot, fast) for job in same}
        if made.starts.keys() != best or made.gap:
            raise SystemExit(f"plan, seed {seed}: {set(made.starts)}, by brute force {best}")
        starts += len(best)
        for one in made.verdicts:
            if not one.gpus:
                reasons += 1
                why = move_oracle.reason(snapshot, one.job, fast)
                if one.why != why:
                    raise SystemExit(f"plan, seed {seed}, {one.job.name}: {one.why}, not {why}")
    print(f"plan: {args.plans} snapshots equal to brute force in "
          f"{time.perf_counter() - begin:.0f} s; {starts} starts, {reasons} reasons")  # fmt: skip


if __name__ == "__main__":
    main()
