"""Command-line options that the benchmarks share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.shop.rows import Row, read

if TYPE_CHECKING:
    import argparse


def add_run_options(parser: argparse.ArgumentParser, solvers: str, which: str, time: float) -> None:
    """Options of `run` that all benchmarks share."""
    parser.add_argument("--out", type=Path, required=True, help="CSV file; rows there are kept")
    parser.add_argument("--set", default=which, help="sets, names, ranges such as ta01-10")
    parser.add_argument("--solvers", default=solvers,
                        help="NAME[@WORKERS][:KEY=VALUE], peers, cpsat-raw")  # fmt: skip
    parser.add_argument("--time", type=float, default=time, help="seconds a solve")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", default="5", help="how many from 0, or a range such as 3-4")
    parser.add_argument("--clock", choices=["wall", "cpu", "warm"], default="wall",
                        help="wall: whole process; cpu: CPU seconds divided by workers; "
                        "warm: without imports and compilation")  # fmt: skip
    parser.add_argument("--peers", type=Path, default=folder_from("OPTSCHED_PEERS"),
                        help="folder of the peers' environments (OPTSCHED_PEERS)")  # fmt: skip


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Options of `report` that all benchmarks share."""
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--base", help="solver that ratios refer to")
    parser.add_argument("--keep-invalid", action="store_true",
                        help="keep rows that did not get their CPU time")  # fmt: skip


def rows_of(files: list[Path]) -> list[Row]:
    """The rows of result files; an error if there are none."""
    rows = [row for file in files for row in read(file)]
    if not rows:
        raise SystemExit(f"{', '.join(map(str, files))}: no rows")
    return rows


def seeds(text: str) -> range:
    """The seeds of ``5`` (0 to 4) or ``3-4``."""
    first, _, last = text.partition("-")
    return range(int(first), int(last) + 1) if last else range(int(first))


def folder_from(variable: str) -> Path | None:
    """The path in an environment variable."""
    return Path(os.environ[variable]) if variable in os.environ else None
