"""`optsched.plan.clear` against brute force on random tiny clusters.

Run: python benchmarks/plan/brute.py [--cases 2000]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from optsched import plan
from optsched.errors import Infeasible

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "plan"))

from move_oracle import cheapest, random_snapshot


def main() -> None:
    """Count clusters with equal answers; stop at a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    begin, none, free = time.perf_counter(), 0, 0
    cases = parser.parse_args().cases
    for seed in range(cases):
        snapshot, request = random_snapshot(seed)
        best = cheapest(snapshot, request, lambda job, place: True)
        try:
            found = plan.clear(snapshot, "gang")
            cost = None if found is None else found.cost
            if found is not None:
                found.after()
        except Infeasible:
            cost, none = None, none + 1
        free += cost == 0
        if cost != best:
            raise SystemExit(f"seed {seed}: {cost}, by brute force {best}")
    seconds = time.perf_counter() - begin
    print(f"{cases} clusters equal to brute force in {seconds:.0f} s; {none} cannot hold the "
          f"request, {free} need no change")  # fmt: skip


if __name__ == "__main__":
    main()
