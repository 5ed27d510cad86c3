"""Check best-known values of job arrays. Standard library only; no code of optsched.

    python instances/check.py [--published DIR] FILE...

FILE is a table (best-known.csv) or a certificate (NAME.solution.json), DIR has the instances that
ArrayPipe published. The rules are those of `instances/jobarray/README.md`. Exit code 1: a fault.
"""

import argparse
import csv
import json
from itertools import accumulate, pairwise
from pathlib import Path

KNOWN = {"forward", "backward", "recompute", "update", "switch", "lag_forward", "lag_backward"}
KNOWN |= {"activation", "checkpoint", "name", "batch_size", "state"}


def read_instance(path):
    """Jobs, memory by device, whether it rolls, which jobs recompute (None: free choice)."""
    data = json.loads(path.read_text())
    if half := data.get("n_stages"):  # as ArrayPipe published it
        times = [job["dur"] for job in data["jobs"]]
        jobs = [{"forward": t[:half], "backward": t[: half - 1 : -1]} for t in times]
        data = {"jobs": jobs, "devices": [{}] * half}
    options = {"objective": "makespan", "recompute_mode": "never"} | data.get("options", {})
    if set().union(*data["jobs"]) - KNOWN or len(options) > 2 or "place" in data:
        raise ValueError(f"{path.name} has fields that this script does not read")
    memory = [device.get("memory", 0) for device in data["devices"]]
    jobs = [{key: [0] * len(memory) for key in KNOWN} | job for job in data["jobs"]]
    again = {"never": [False] * len(jobs), "always": [True] * len(jobs), "choose": None}
    return jobs, memory, options["objective"] == "period", again[options["recompute_mode"]]


def blocks(job, again):
    """Blocks of a job: device, duration, least time from the start of each to that of the next."""
    gradient = [p + r * again for p, r in zip(job["backward"], job["recompute"], strict=True)]
    away, home = [*job["lag_forward"], 0], [0, *job["lag_backward"]]
    there = [(d, p, p + away[d]) for d, p in enumerate(job["forward"])]
    back = [(d, p + job["update"][d], p + home[d]) for d, p in enumerate(gradient)]
    return there + back[::-1]


def value_of(instance, solution):
    """Makespan or period of a certificate; `ValueError` if it breaks a rule."""
    jobs, memory, rolls, again = instance
    again, starts = again or solution["recompute"], solution["starts"]
    offsets = solution["offsets"] if rolls else [[0] * len(row) for row in starts]
    on, last, period = [[] for _ in memory], 0, solution["value"] if rolls else 0
    for j, (job, row, late, choice) in enumerate(zip(jobs, starts, offsets, again, strict=True)):
        chain, half = blocks(job, choice), len(memory)
        sane = all(type(x) is int and x >= 0 for x in row + late) and type(choice) is bool
        if not sane or len(row) != len(chain) or (rolls and max(row) >= period):
            raise ValueError(f"job {j}: starts, offsets or recompute are out of range")
        begin = [s + k * period for s, k in zip(row, late, strict=True)]
        for b, (d, p, weight) in enumerate(chain):
            on[d].append((row[b], row[b] + p, j, b < half, late[b]))
            last = max(last, begin[b] + p)
            if b + 1 < len(chain) and begin[b + 1] < begin[b] + weight:
                raise ValueError(f"job {j}: block {b + 1} at {begin[b + 1]} is too early after {b}")
            if rolls and b >= half and begin[b] + p > begin[2 * half - 1 - b] + period:
                raise ValueError(f"job {j}: its iterations overlap on stage {d}")
    for d, row in enumerate(map(sorted, on)):
        for one, two in pairwise([*row, *[(row[0][0] + period, 0, row[0][2])] * rolls]):
            if two[0] < one[1] + jobs[one[2]]["switch"][d] * (one[2] != two[2]):
                raise ValueError(f"device {d}: the block at {two[0]} is too early after {one[0]}")
        kept = [jobs[j]["checkpoint" if x else "activation"][d] for j, x in enumerate(again)]
        held = sum(kept[j] * (-late if forward else late) for _, _, j, forward, late in row)
        for start, _, j, forward, _ in row:
            held += kept[j] * forward
            if memory[d] and held > memory[d]:
                raise ValueError(f"device {d}: {held} bytes at {start}, it has {memory[d]}")
            held -= kept[j] * (not forward)
    return period if rolls else last


def bound_of(instance):
    """A lower bound: every device alone, if blocks may be interrupted, and every job alone."""
    jobs, memory, rolls, again = instance
    work, found = [[] for _ in memory], []
    for j, job in enumerate(jobs):
        chain = blocks(job, bool(again and again[j]))
        heads = [*accumulate((w for *_, w in chain), initial=0)]
        ends = [heads[b] + p for b, (_, p, _) in enumerate(chain)]
        for b, (d, p, _) in enumerate(chain):
            work[d].append((heads[b], p, max(ends[b:]) - ends[b]))
        found += [ends[-1 - d] - heads[d] for d in range(len(memory))]
    for on in work:  # of blocks with heads and tails: least head + durations + least tail
        for least in {0} if rolls else {tail for *_, tail in on}:
            late = sorted((b for b in on if b[2] >= least), reverse=True)
            loads = accumulate(p for _, p, _ in late)
            found += [h * (not rolls) + p + least for (h, *_), p in zip(late, loads, strict=True)]
    return max(found)


def check(path, published):
    """Name, value and simple bound of a certificate."""
    solution = json.loads(path.read_text())
    name = solution["instance"]
    near = Path(__file__).parent / "jobarray" / f"{name}.jobarray.json"
    instance = read_instance(near if near.exists() else (published or Path()) / f"{name}.json")
    return name, value_of(instance, solution), bound_of(instance)


def check_row(row, name, found, simple):
    """Check a row of a table against its certificate and the simple bound."""
    value, bound = int(row["value"]), int(row["bound"])
    wrong = {"name": row["name"] != name, "value": value != found}
    wrong["bound"] = not simple <= bound <= value
    wrong["status"] = row["status"] != ("optimal" if bound == value else "open")
    wrong["proof"] = row["proof"].startswith("check") and bound != simple
    for column in filter(wrong.get, wrong):
        raise ValueError(f"{column} {row[column]}: {name} has value {found}, bound {simple}")


def main(check):
    """Check all files; exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--published", type=Path)
    given, wrong = parser.parse_args(), 0
    for path in given.files:
        if not path.is_file():
            parser.error(f"{path}: no such file")
        table, seen = path.suffix == ".csv", set()
        for row in csv.DictReader(path.open()) if table else [{"name": path}]:
            name, near = row.get("name"), path.parent / f"{row.get('name')}.jobarray.json"
            if row.get("family") == "published" and not (given.published or near.exists()):
                continue
            file = path.parent / "solutions" / f"{name}.solution.json" if table else path
            try:
                instance, value, bound = check(file, given.published)
                claim = json.loads(file.read_text())["value"]
                if type(claim) is not int or claim != value:
                    raise ValueError(f"the certificate claims the value {claim}, it has {value}")
                if name in seen:
                    raise ValueError("a second row")
                if table:
                    check_row(row, instance, value, bound)
                print(f"{instance}: value {value}, bound by itself {bound}")
            except Exception as error:  # a certificate may hold anything; the others are checked
                print(f"{name}: wrong: {type(error).__name__}: {error}")
                wrong += 1
            seen.add(name)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main(check)
