"""The published ArrayPipe instances: whole-command time of `auto`, proofs, and the logged GA.

    python benchmarks/arraypipe_published.py --data DIR [--time-limit 10] [--repeat 3]

DIR holds the instances as JSON and ga_logs.csv (environment variable OPTSCHED_ARRAYPIPE_DATA).
Exit code 1 if a schedule is worse than the GA's, or an S4 instance with 25 jobs or more is not
proved optimal in less than a second (warm cache, the command as a process of its own).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import machine


def main() -> None:
    """Run all instances and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", type=Path, default=os.environ.get("OPTSCHED_ARRAYPIPE_DATA"))
    options.add_argument("--time-limit", type=float, default=10.0)
    options.add_argument("--repeat", type=int, default=3)
    given = options.parse_args()
    if given.data is None:
        options.error("--data is required (or OPTSCHED_ARRAYPIPE_DATA)")
    folder = Path(given.data)
    logged = {
        row["instance"]: float(row["final_best"])
        for row in csv.DictReader((folder / "ga_logs.csv").open())
    }
    print(machine("numba", "ortools"))
    print(
        f"{'instance':20} {'objective':>9} {'bound':>7} {'gap':>7} {'GA':>7} {'wall s':>7}  status"
    )
    failed = False
    for path in [*sorted(folder.glob("*_J*.json")), folder / "ExplPipe.json"]:
        runs = [solve(path, given.time_limit) for _ in range(given.repeat)]
        answer = runs[0][1]
        wall = statistics.median(seconds for seconds, _ in runs)
        ga = logged.get(path.stem)
        long = path.stem.startswith("S4") and answer["jobs"] >= 25
        bad = (ga is not None and answer["objective"] > ga) or (
            long and not (answer["status"] == "optimal" and wall < 1.0)
        )
        failed |= bad
        print(
            f"{path.stem:20} {answer['objective']:9} {answer['lower_bound']:7} "
            f"{answer['gap']:7.2%} {'-' if ga is None else int(ga):>7} {wall:7.2f}  "
            f"{answer['status']}{'   FAILED' if bad else ''}",
            flush=True,
        )
    sys.exit(failed)


def solve(path: Path, time_limit: float) -> tuple[float, dict]:
    """One run of the command; wall-clock seconds and its JSON."""
    script = Path(sys.executable).parent / "optsched"
    begin = time.perf_counter()
    done = subprocess.run(
        [str(script), "solve", str(path), "--json", "--quiet", "--time-limit", str(time_limit)],
        capture_output=True,
        check=True,
    )
    seconds = time.perf_counter() - begin
    answer = json.loads(done.stdout)
    answer["jobs"] = len(json.loads(path.read_text())["jobs"])
    return seconds, answer


if __name__ == "__main__":
    main()
