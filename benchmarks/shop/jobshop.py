"""Our engines against PyJobShop, job_shop_lib and raw CP-SAT on the published job shops.

    python -m benchmarks.shop.jobshop peers install --into DIR
    python -m benchmarks.shop.jobshop run --out FILE.csv [--set short]
        [--solvers auto,tabu,cpsat-raw]
    python -m benchmarks.shop.jobshop report FILE.csv [--bounds CSV]
    python -m benchmarks.shop.jobshop speed [--solvers tabu,branch_and_bound,genetic]

Every solve is a process of its own; wall and CPU time are those of the whole process, imports
included, and its cores are as many as its workers. Schedules are checked again from their start
times. A row counts if the process got its CPU time within 10 %, or ended before its limit. On a
busy machine `--clock cpu` limits CPU time instead. A run that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.shop import measure
from benchmarks.shop.commands import (
    add_report_options,
    add_run_options,
    folder_from,
    rows_of,
    seeds,
)
from benchmarks.shop.engines import engines, install
from benchmarks.shop.named_instances import SETS, chosen, job_shop
from benchmarks.shop.report import BEST_OF_RAW, report
from benchmarks.shop.rows import known_bounds
from benchmarks.shop.speed import kernels, peer_speed, rates

SOLVERS = "auto,tabu,branch_and_bound,cpsat,cpsat-raw,pyjobshop,job_shop_lib"


def main() -> None:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run_options = commands.add_parser("run", help="measure, and append rows to a CSV file")
    add_run_options(run_options, SOLVERS, "short", 10.0)
    run_options.add_argument("--data", type=Path, default=folder_from("OPTSCHED_JSSP_DATA"),
                             help="folder of standard text files (OPTSCHED_JSSP_DATA)")  # fmt: skip
    report_options = commands.add_parser("report", help="print the tables of a CSV file")
    add_report_options(report_options)
    report_options.add_argument("--bounds", type=Path, default=folder_from("OPTSCHED_JSSP_BOUNDS"),
                                help="CSV of best known bounds (OPTSCHED_JSSP_BOUNDS)")  # fmt: skip
    speed_options = commands.add_parser("speed", help="moves, nodes and individuals per second")
    speed_options.add_argument("--solvers", default="tabu,branch_and_bound,genetic")
    speed_options.add_argument("--set", default="ft10,la19,ta41,ta71")
    speed_options.add_argument("--data", type=Path, default=folder_from("OPTSCHED_JSSP_DATA"))
    speed_options.add_argument("--time", type=float, default=2.0, help="CPU seconds a row")
    speed_options.add_argument("--peers", type=Path, help="also job_shop_lib, installed here")
    peers = commands.add_parser("peers", help="environments of the peers")
    peers.add_argument("action", choices=["install"])
    peers.add_argument("--into", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "peers":
        install(given.into)
    elif given.command == "speed":
        print(machine("numba"))
        names = chosen(given.set, SETS)
        rates(engines(given.solvers, 1, None), [job_shop(n, given.data) for n in names], given.time)
        kernels(job_shop("ta71", given.data))
        if given.peers is not None:
            peer_speed(engines("job_shop_lib", 1, given.peers)[0], job_shop("ta71", given.data))
    elif given.command == "run":
        shops = [job_shop(name, given.data) for name in chosen(given.set, SETS)]
        chosen_engines = engines(given.solvers, given.workers, given.peers)
        measure.solve_all(
            given.out, chosen_engines, shops, given.time, given.clock, seeds(given.seeds)
        )
    else:
        base, known = given.base or BEST_OF_RAW, known_bounds(given.bounds)
        text, possible = report(rows_of(given.file), known, base, given.keep_invalid)
        print(text)
        sys.exit(not possible)


if __name__ == "__main__":
    main()
