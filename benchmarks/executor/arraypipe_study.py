"""The ArrayPipe paper's simulation study: 64 sibling jobs as an array, and one after another.

python -m benchmarks.executor.arraypipe_study run --json FILE [--seconds 3] [--processes 2]
        [--quick]
python -m benchmarks.executor.arraypipe_study report FILE

`run` goes on where a file ends. Times are those of one iteration of every job, in the cost model of
`optsched.pipelines.profiles`. `--seconds` is the limit of one solve on one core; an array takes
up to eight (1, 2, 4 micro-batches a job; rolling from nothing and from the barrier's schedule).
Every schedule is verified. `report` prints the tables.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.executor.study_arrays import Search, as_published, in_groups, solved
from benchmarks.executor.study_baselines import (
    ARRAYS,
    ROLLING,
    SINGLE,
    Run,
    array_in_groups,
    one_after_another,
)
from benchmarks.executor.study_cases import MODELS, Case, sweeps
from benchmarks.executor.study_tables import Study, tables
from benchmarks.machine import machine
from optsched.io.files import write_atomic
from optsched.kernels.background import all_entries, compile_all

if TYPE_CHECKING:
    from collections.abc import Iterator

OBJECTIVES: Final = {"barrier": "makespan", "rolling": "period"}
GROUPS: Final = (4, 8, 16, 32)
QUICK: Final = (("gpipe", "zb_h1"), ("published",), ("barrier", "rolling"))


def main() -> None:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run_options = commands.add_parser("run", help="solve, and add rows to a JSON file")
    run_options.add_argument("--json", type=Path, required=True, help="rows there are kept")
    run_options.add_argument("--seconds", type=float, default=3.0, help="limit of one solve")
    run_options.add_argument("--processes", type=int, default=2)
    run_options.add_argument("--seed", type=int, default=1, help="of the jobs' order and solvers")
    run_options.add_argument(
        "--quick", action="store_true", help="one model, a few rows: a smoke test"
    )
    report_options = commands.add_parser("report", help="tables of a JSON file")
    report_options.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        run(given)
        return
    study = Study.of(json.loads(given.file.read_text()))
    print("\n\n".join(f"## {name}\n\n{text}" for name, text in tables(study).items()))


def run(given: argparse.Namespace) -> None:
    """Solve what the file does not hold; it is written anew after every row."""
    search = Search(given.seconds, 1, given.seed)
    settings = {"seconds": given.seconds, "seed": given.seed}
    rows: list[dict[str, Any]] = []
    if given.json.exists():
        kept = json.loads(given.json.read_text())
        if {key: kept[key] for key in settings} != settings:
            raise SystemExit(f"{given.json}: made with other --seconds or --seed")
        rows = kept["rows"]
    done = {(json.dumps(row["case"]), row["method"]) for row in rows}
    todo = []
    for case, group in tasks(given.quick):
        key = json.dumps(asdict(case))
        if left := tuple(method for method in group if (key, method) not in done):
            todo.append((case, left))
    print(machine("numpy", "numba", "ortools"))
    print(f"# {sum(len(group) for _, group in todo)} runs to do", flush=True)
    if not todo:
        return
    with ProcessPoolExecutor(given.processes, get_context("spawn"), load_kernels) as pool:
        futures = {pool.submit(measured, case, group, search): case for case, group in todo}
        for future in as_completed(futures):
            case = futures[future]
            for method, found in future.result().items():
                part = None if found is None else asdict(found)
                rows.append({"case": asdict(case), "method": method, "run": part})
                told = "-" if found is None else f"{found.time / 1e6:.3f} s  {found.how}"
                print(f"{case.words:38} {method:20} {told}", flush=True)
            document = {"machine": machine("numpy", "numba"), **settings, "rows": rows}
            write_atomic(given.json, json.dumps(document, indent=0))


def load_kernels() -> None:
    """Load everything compiled in a new process, so that no solve pays for it."""
    compile_all(all_entries()[0], 1)


def tasks(quick: bool) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Every case with methods that are run together, the base first; nothing twice."""
    if quick:
        yield from ((Case("bert_large"), group) for group in QUICK)
        return
    seen: set[tuple[Case, str]] = set()
    for name, cases in sweeps().items():
        for case in cases.values():
            for model in MODELS:
                one = replace(case, model=model)
                for group in methods(name):
                    new = tuple(method for method in group if (one, method) not in seen)
                    seen.update((one, method) for method in new)
                    if new and one.exists:
                        yield one, new


def methods(sweep: str) -> list[tuple[str, ...]]:
    """How the cases of a sweep are run; an array with barrier and rolling together."""
    if sweep == "assumptions":
        return [SINGLE, ("published",), ("barrier",)]
    found = [SINGLE, ("published",), ("barrier", "rolling")]
    if sweep == "base":
        found.append(tuple(f"{name} rolling" for name in ROLLING))
        found.append(tuple(f"array {name}" for name in ARRAYS))
        found += [(f"barrier {k}", f"rolling {k}") for k in GROUPS]
    return found


def measured(case: Case, group: tuple[str, ...], search: Search) -> dict[str, Run | None]:
    """Some numbers of the study; None if nothing fits into memory, or there is no such pipeline."""
    name, _, which = group[0].partition(" ")
    if name not in OBJECTIVES:
        return {method: _fixed(case, method, search) for method in group}
    objectives = [OBJECTIVES[method.split()[0]] for method in group]
    found = in_groups(case, int(which), search) if which else solved(case, search, objectives)
    return {m: found[o] for m, o in zip(group, objectives, strict=True)}


def _fixed(case: Case, method: str, search: Search) -> Run | None:
    name, _, which = method.partition(" ")
    if method == "published":
        return as_published(case, search)
    if name == "array":
        return array_in_groups(case, which, search.seed)
    return one_after_another(case, name, "period" if which else "makespan")


if __name__ == "__main__":
    main()
