"""Our engines on job arrays: the published ArrayPipe files, model profiles, long and wide arrays.

    python -m benchmarks.shop.jobarray run --out FILE.csv [--set profiles]
        [--solvers auto,cpsat-raw]
    python -m benchmarks.shop.jobarray report FILE.csv [--data DIR]
    python -m benchmarks.shop.jobarray speed

DIR holds ArrayPipe's instances as JSON and ga_logs.csv (OPTSCHED_ARRAYPIPE_DATA). Processes, checks
and rows as in jobshop.py; the certified gap is objective / bound - 1 of the same row. The report
fails if a schedule is worse than the logged GA's, or if `auto` does not prove an array of four
stages and 25 jobs or more in less than a second, the whole process.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import machine
from benchmarks.shop import measure
from benchmarks.shop.commands import (
    add_report_options,
    add_run_options,
    folder_from,
    rows_of,
    seeds,
)
from benchmarks.shop.engines import engines
from benchmarks.shop.named_instances import SHIPPED, Instance, chosen, of_file
from benchmarks.shop.report import BEST_OF_RAW, report
from benchmarks.shop.rows import Known
from benchmarks.shop.speed import milliseconds, rates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.shop.rows import Row
    from optsched import JobArray

OPTIMA = {
    "ExplPipe": 4983,
    **{
        f"S4_J{jobs}_{kind}": value
        for kind, values in {
            "homo_F1.3": (25872, 37238, 48075, 58489, 71024, 84548, 93336),
            "homo_F1": (20099, 29014, 37452, 45565, 51699, 65815, 72677),
            "mach4": (19471, 27796, 35897, 43673, 53079, 63246, 69771),
        }.items()
        for jobs, value in zip(range(10, 41, 5), values, strict=True)
    },
    **{f"S4_J10_mach4/{j}": value for j, value in enumerate(
        (4811, 6168, 7769, 10224, 13436, 17385), 2)},
}  # fmt: skip
"""Proved by two exact solvers; ``/6`` means the first six jobs."""

MODELS = ("vgg19", "resnet152", "bert_large", "gpt2_xl")
SETS: dict[str, tuple[str, ...]] = {
    "s4": tuple(name for name in OPTIMA if "/" not in name),
    "s10": tuple(f"S{stages}_J30_homo_F1" for stages in (10, 12, 14, 16)),
    "prefixes": (*tuple(name for name in OPTIMA if "/" in name), "S4_J10_mach4"),
    "plain": tuple(f"{model}-30x8" for model in MODELS),
    "switches": tuple(f"{model}-30x8-switches" for model in MODELS),
    "caps": tuple(f"{model}-30x8-{cap}" for model in MODELS for cap in ("80GB", "flight")),
    "long": tuple(f"{model}-1000x{stages}" for model in MODELS for stages in (4, 8)),
    "wide": tuple(f"{model}-64x24" for model in MODELS[2:]),
}
SETS["published"] = SETS["s4"] + SETS["s10"]
SETS["profiles"] = SETS["plain"] + SETS["switches"] + SETS["caps"]


def main() -> None:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run_options = commands.add_parser("run", help="measure, and append rows to a CSV file")
    add_run_options(run_options, "auto,dispatch,tabu,cpsat,cpsat-raw", "published", 10.0)
    report_options = commands.add_parser("report", help="print the tables of a CSV file")
    add_report_options(report_options)
    speed_options = commands.add_parser("speed", help="milliseconds of rule and bound; steps/s")
    speed_options.add_argument("--solvers", default="tabu,branch_and_bound,genetic")
    speed_options.add_argument("--set", default="gpt2_xl-30x8,gpt2_xl-30x8-80GB,S10_J30_homo_F1")
    speed_options.add_argument("--time", type=float, default=2.0, help="CPU seconds a row")
    for options in (run_options, report_options, speed_options):
        options.add_argument("--data", type=Path, default=folder_from("OPTSCHED_ARRAYPIPE_DATA"),
                             help="ArrayPipe's files (OPTSCHED_ARRAYPIPE_DATA)")  # fmt: skip
    given = parser.parse_args()
    if given.command == "report":
        print_report(given)
        return
    with tempfile.TemporaryDirectory() as made:
        names = chosen(given.set, SETS)
        if given.command == "run":
            arrays = [instance(name, given.data, Path(made)) for name in names]
            engines_ = engines(given.solvers, given.workers, given.peers)
            measure.solve_all(
                given.out, engines_, arrays, given.time, given.clock, seeds(given.seeds)
            )
            return
        print(machine("numba"))
        rule_and_bound()
        here = [name for name in names if given.data or not name.startswith(("S", "E"))]
        arrays = [instance(name, given.data, Path(made)) for name in here]
        rates(engines(given.solvers, 1, None), arrays, given.time)


def instance(name: str, folder: Path | None, made: Path) -> Instance:
    """A published file, the first jobs of one, a shipped file, or a generated array."""
    whole, _, first = name.partition("/")
    if re.match(r"S\d+_J|ExplPipe", name):
        if folder is None or not (folder / f"{whole}.json").is_file():
            raise SystemExit(f"{name}: not found; give --data DIR with {whole}.json")
        if not first:
            return of_file(folder / f"{name}.json", name)
        from optsched.formats import arraypipe

        array = arraypipe.read(folder / f"{whole}.json").subset(range(int(first)))
        return _written(array, name, made)
    shipped = SHIPPED / "jobarray" / f"{name}.jobarray.json"
    if shipped.is_file():
        return of_file(shipped, name)
    size = re.fullmatch(r"(\w+)-(\d+)x(\d+)", name)
    if size is None or size[1] not in MODELS:
        raise SystemExit(f"{name}: not found; sets are {', '.join(SETS)}")
    return _written(_generated(size[1], int(size[2]), int(size[3])), name, made)


def print_report(given: argparse.Namespace) -> None:
    """Print the tables and the comparison with the logged GA; exit code 1 if a claim fails."""
    rows = rows_of(given.file)
    known = {name: Known(value, value) for name, value in OPTIMA.items()}
    text, possible = report(rows, known, given.base or BEST_OF_RAW, given.keep_invalid)
    print(text)
    logs = {} if given.data is None else ga_logs(given.data / "ga_logs.csv")
    lines, failures = against_ga(rows, logs), failed_claims(rows, logs)
    print("\n".join(["", *lines, *(f"FAILED: {line}" for line in failures)]))
    sys.exit(not possible or bool(failures))


def ga_logs(path: Path) -> dict[str, int]:
    """Final makespans that ArrayPipe's GA logged, by instance."""
    with path.open(newline="") as stream:
        return {
            line["instance"]: int(float(line["final_best"]))
            for line in csv.DictReader(stream)
            if line["final_best"]
        }


def against_ga(rows: Sequence[Row], logs: dict[str, int]) -> list[str]:
    """A Markdown table: the logged makespan, the best of ours, and how much longer the GA's is."""
    lines = ["| instance | logged GA | best here | GA longer by |", "|---|--:|--:|--:|"]
    for name, logged in logs.items():
        mine = [row.objective for row in rows if row.instance == name and row.objective]
        if mine:
            lines.append(f"| {name} | {logged} | {min(mine)} | {logged / min(mine) - 1:.2%} |")
    return lines if len(lines) > 2 else []


def failed_claims(rows: Sequence[Row], logs: dict[str, int]) -> list[str]:
    """What `auto` promises and a row does not hold."""
    found = []
    for row in rows:
        if row.solver != "auto" or not row.valid:
            continue
        who = f"{row.instance}, seed {row.seed}"
        if row.objective is None or row.objective > logs.get(row.instance, row.objective):
            found.append(f"{who}: {row.objective} is worse than the logged GA")
        long = re.match(r"S4_J(25|30|35|40)_", row.instance)
        if long and row.clock == "wall" and not (row.status == "optimal" and row.wall < 1.0):
            found.append(f"{who}: {row.status} after {row.wall} s, expected a proof within 1 s")
    return found


def rule_and_bound() -> None:
    """Print CPU times of graph, one rule and all bounds, warm, in process."""
    from optsched_solvers.shop import dispatch

    for model, jobs, stages in (("gpt2_xl", 30, 8), ("bert_large", 1000, 4),
                                ("bert_large", 1000, 8), ("gpt2_xl", 64, 24)):  # fmt: skip
        array = _generated(model, jobs, stages)
        graph = array.graph()
        copies = [array.replace(name=f"copy {k}") for k in range(22)]  # graph, bounds are kept
        for copy in copies[:11]:
            copy.graph()
        fresh, built = iter(copies[11:]), iter(copies[:11])
        calls = {
            "graph": lambda fresh=fresh: next(fresh).graph(),
            "rule": lambda graph=graph: dispatch.run(graph, "valley"),
            "bounds": lambda built=built: next(built).lower_bound(),
        }
        times = [f"{what} {milliseconds(call, 10):8.3f} ms" for what, call in calls.items()]
        print(f"{array.name:24} {'   '.join(times)}", flush=True)


def _generated(model: str, jobs: int, stages: int) -> JobArray:
    from optsched.pipelines.generator import job_array

    return job_array(model, stages, jobs, seed=1, name=f"{model}-{jobs}x{stages}")


def _written(array: JobArray, name: str, folder: Path) -> Instance:
    path = folder / f"{name.replace('/', '-first-')}.jobarray.json"
    array.write(path)
    return of_file(path, name)


if __name__ == "__main__":
    main()
