"""Our engines, PyJobShop, job_shop_lib and raw CP-SAT on published job shops and job arrays.

    python -m benchmarks.shop.jobshop peers install --into DIR
    python -m benchmarks.shop.jobshop run --out FILE.csv [--set short]
        [--solvers auto,tabu,cpsat-raw]
    python -m benchmarks.shop.jobshop report FILE.csv [--bounds CSV]
    python -m benchmarks.shop.jobshop logs FILE.csv
    python -m benchmarks.shop.jobshop speed [--solvers tabu,branch_and_bound,genetic]

Every solve is a process of its own; wall and CPU time are those of the whole process, imports
included, and its cores are as many as its workers. Schedules are checked again from their start
times. A solve that did not get its CPU time within 10 % is an error, unless it ended before its
limit. Results are those of `optsched bench`: a run that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.shop import measure, report, speed
from benchmarks.shop.engines import engines, install
from benchmarks.shop.instances import KNOWN, chosen, instance
from optsched.bench.instances import published_bounds, read_bounds
from optsched.bench.rows import Results


def main() -> None:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and append rows to a CSV file")
    run.add_argument("--out", type=Path, required=True, help="CSV file; rows there are kept")
    run.add_argument("--set", default="short", help="sets, names, ranges such as ta01-10")
    run.add_argument("--solvers", default="auto,tabu,branch_and_bound,cpsat,cpsat-raw",
                     help="NAME[@WORKERS][:KEY=VALUE], peers, cpsat-raw")  # fmt: skip
    run.add_argument("--time", type=float, default=10.0, help="seconds a solve")
    run.add_argument("--workers", type=int, default=2)
    run.add_argument("--seeds", type=int, default=5, help="how many")
    run.add_argument("--begin", type=int, default=0, help="first seed")
    run.add_argument("--peers", type=Path, default=folder_from("OPTSCHED_PEERS"),
                     help="folder of the peers' environments (OPTSCHED_PEERS)")  # fmt: skip
    tables = commands.add_parser("report", help="print the tables of a CSV file")
    tables.add_argument("file", type=Path)
    tables.add_argument("--bounds", type=Path, default=folder_from("OPTSCHED_JSSP_BOUNDS"),
                        help="CSV of best known bounds (OPTSCHED_JSSP_BOUNDS)")  # fmt: skip
    rates = commands.add_parser("speed", help="moves, nodes, individuals per second; kernels")
    rates.add_argument("--solvers", default="tabu,branch_and_bound,genetic")
    rates.add_argument("--set", default="ft10,la19,ta41,ta71")
    rates.add_argument("--time", type=float, default=2.0, help="CPU seconds a row")
    for command in (run, rates):
        command.add_argument("--data", type=Path, default=folder_from("OPTSCHED_JSSP_DATA"),
                             help="folder of instance files (OPTSCHED_JSSP_DATA)")  # fmt: skip
    logged = commands.add_parser("logs", help="the authors' logs of ArrayPipe beside optima")
    logged.add_argument("file", type=Path, help="ga_logs.csv")
    peers = commands.add_parser("peers", help="environments of the peers")
    peers.add_argument("action", choices=["install"])
    peers.add_argument("--into", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "peers":
        install(given.into)
    elif given.command == "logs":
        report.logs(given.file)
    elif given.command == "speed":
        print(machine("numba"))
        instances = [instance(name, given.data) for name in chosen(given.set)]
        speed.rates(engines(given.solvers, 1, None), instances, given.time)
        speed.kernels()
    elif given.command == "run":
        instances = [instance(name, given.data) for name in chosen(given.set)]
        measured = engines(given.solvers, given.workers, given.peers)
        seeds = range(given.begin, given.begin + given.seeds)
        measure.solve_all(Results(given.out), measured, instances, given.time, seeds)
    else:
        rows = Results(given.file).rows
        known = KNOWN | (
            published_bounds((row.instance, row.sha256) for row in rows)
            if given.bounds is None
            else read_bounds(given.bounds)
        )
        sys.exit(not report.show(rows, known))


def folder_from(variable: str) -> Path | None:
    """The path in an environment variable."""
    return Path(os.environ[variable]) if variable in os.environ else None


if __name__ == "__main__":
    main()
