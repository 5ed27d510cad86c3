"""Search for better values and bounds of a folder's instances, and keep those that hold.

    python instances/improve.py instances/jobarray --time 10 --missing
    python instances/improve.py instances/jobarray --time 60 --seed 1

Runs one solve after another on one core, without those that are proved optimal: first instances
without a value, then by gap, the largest first. A search begins with the best-known answer. Every
answer is checked by the folder's checker before its certificate and the table are written; a worse
one changes nothing. It can be stopped and started again at any time.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import optsched
from optsched.formats.read_problem import read_problem
from optsched.io.csv_rows import csv_text
from optsched.io.files import write_atomic
from optsched.model.schedule import Csr
from optsched.solving.result import Orders, PeriodicOrders
from optsched.version import __version__

if TYPE_CHECKING:
    from optsched.model.schedule import Problem, Schedule
    from optsched.solving.result import Result

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import check  # noqa: E402
import check_gpus  # noqa: E402
import check_quotas  # noqa: E402

COLUMNS = (
    "name", "family", "objective", "value", "bound", "status", "found_by", "seconds", "seed",
    "version", "date", "proof",
)  # fmt: skip
CHECKERS = {"jobarray": check, "quota": check_quotas, "subset": check_gpus}
"""By folder; the folder's name is the ending of its instance files too."""

PUBLISHED = (
    "ExplPipe",
    *(f"S4_J{n}_{kind}" for kind in ("homo_F1", "homo_F1.3", "mach4") for n in range(10, 41, 5)),
    *(f"S{stages}_J30_homo_F1" for stages in (10, 12, 14, 16)),
)


def files_of(folder: Path, published: Path | None) -> dict[str, Path]:
    """Instance files by name."""
    ending = f".{folder.name}.json"
    found = {path.name.removesuffix(ending): path for path in sorted(folder.glob(f"*{ending}"))}
    if published is not None:
        found |= {name: published / f"{name}.json" for name in PUBLISHED}
    return found


def family_of(name: str, folder: Path) -> str:
    """Family of an instance; of job arrays as the generator has it."""
    if folder.name != "jobarray":
        return name.split("-4x8")[0].rstrip("-0123456789")
    if name in PUBLISHED:
        return "published"
    sys.path.insert(0, str(folder))
    from make_jobarray import families

    return next(family for family, array in families() if array.name == name)


# certificates


def certificate(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Return the solution of a schedule as the checkers read it."""
    found: dict[str, Any] = {"instance": problem.name, "value": problem.evaluate(schedule)}
    if isinstance(problem, optsched.JobArray):
        width = 2 * problem.n_stages
        assert schedule.start is not None
        found["starts"] = schedule.start.reshape(-1, width).tolist()
        if schedule.period is not None:
            found["offsets"] = schedule.offset.reshape(-1, width).tolist()
        if problem.chooses:
            found["recompute"] = list(schedule.provenance["recompute"])
    elif isinstance(problem, optsched.QuotaPlan):
        found["gpus"] = problem.placement(schedule)
    else:
        cluster = problem.cluster
        chosen: dict[str, list[int]] = {}
        for gpu in problem.chosen(schedule):
            host = int(cluster.host_of[gpu])
            chosen.setdefault(cluster.hosts[host].name, []).append(gpu - int(cluster.first[host]))
        found["gpus"] = chosen
    return found


def text_of(found: dict[str, Any]) -> str:
    """Return a certificate as JSON, one job a line."""

    def value(given: Any) -> str:
        if isinstance(given, list) and isinstance(given[0], list):
            return "[\n    " + ",\n    ".join(map(value, given)) + "\n  ]"
        return json.dumps(given, separators=(",", ":"))

    return "{\n  " + ",\n  ".join(f'"{key}": {value(v)}' for key, v in found.items()) + "\n}\n"


def schedule_of(problem: Problem, solution: dict[str, Any]) -> Schedule:
    """Return the schedule of a certificate of a job array, to begin a search with."""
    assert isinstance(problem, optsched.JobArray)
    choice = solution.get("recompute")
    graph = problem.graph(choice)
    start = np.concatenate(solution["starts"])
    order = np.lexsort((start + graph.duration, start))
    of = graph.single_resource[order]
    rows = Csr.of([order[of == r].tolist() for r in range(graph.n_resources)])
    if "offsets" in solution:
        return problem.scheduled(PeriodicOrders(rows, np.concatenate(solution["offsets"])))
    return problem.scheduled(rows if choice is None else Orders(rows, tuple(choice)))


# the table


def read_table(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows of the table by name; empty if there is none."""
    path = folder / "best-known.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as stream:
        return {row["name"]: row for row in csv.DictReader(stream)}


def gap(row: dict[str, Any] | None) -> float:
    """Gap of a row; infinite without one."""
    if row is None:
        return float("inf")
    value, bound = int(row["value"]), int(row["bound"])
    return abs(value - bound) / max(1, abs(bound))


def write_table(folder: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Write the rows, sorted by name."""
    table = csv_text(COLUMNS, ([rows[key][c] for c in COLUMNS] for key in sorted(rows)))
    write_atomic(folder / "best-known.csv", table)


def keep(
    folder: Path, answer: dict[str, Any], facts: dict[str, Any], bound: int, published: Path | None
) -> dict[str, Any]:
    """Check an answer; write its certificate and its row if the table has nothing better.

    Parameters
    ----------
    answer
        The certificate.
    facts
        Further columns of the row if the value is better; ``proof`` if the bound is.
    """
    rows, name = read_table(folder), answer["instance"]
    with tempfile.TemporaryDirectory() as trial:
        path = Path(trial) / f"{name}.solution.json"
        path.write_text(text_of(answer))
        _, value, simple = CHECKERS[folder.name].check(path, published)
    best = rows.get(name, {"bound": simple, "proof": CHECKERS[folder.name].__name__ + ".py"})
    if "value" not in best or value < int(best["value"]):
        best = {
            **facts,
            "name": name,
            "value": value,
            "bound": best["bound"],
            "proof": best["proof"],
        }
        best["family"] = family_of(name, folder)
        (folder / "solutions").mkdir(exist_ok=True)
        write_atomic(folder / "solutions" / f"{name}.solution.json", text_of(answer))
    if bound > int(best["bound"]):
        best |= {"bound": bound, "proof": facts["proof"]}
    best["status"] = "optimal" if int(best["bound"]) == int(best["value"]) else "open"
    rows[name] = best
    write_table(folder, rows)
    return best


# the runs


def improve(folder: Path, name: str, path: Path, given: argparse.Namespace) -> str:
    """Solve one instance and keep the result; returns a line about it."""
    problem = read_problem(path)
    file = folder / "solutions" / f"{name}.solution.json"
    start = None
    if folder.name == "jobarray" and file.exists():
        start = schedule_of(problem, json.loads(file.read_text()))
    begin = time.process_time()
    result = optsched.solve(
        problem, given.solver, time_limit=given.time, workers=1, seed=given.seed, warm_start=start
    )
    seconds = round(time.process_time() - begin, 2)
    if result.schedule is None or result.lower_bound is None or result.contradiction:
        return f"{name}: {result.status} {result.contradiction}"
    where = path.name if name in PUBLISHED else path.relative_to(HERE.parent)
    by, proved_by = sources(result)
    facts = {
        "objective": problem.objective_name, "found_by": by, "seconds": seconds,
        "seed": given.seed, "version": __version__, "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "proof": f"{proved_by}: optsched solve {where} --solver {given.solver} "
        f"--time {given.time:g} --workers 1 --seed {given.seed}",
    }  # fmt: skip
    if result.lower_bound == problem.lower_bound():
        facts["proof"] = f"optsched show {where}"
    row = keep(
        folder, certificate(problem, result.schedule), facts, result.lower_bound, given.published
    )
    return f"{name}: {row['value']} >= {row['bound']} {row['status']}, {seconds} s"


def sources(result: Result) -> tuple[str, str]:
    """Return the engines of the best schedule and of the best bound."""
    values = [step.source for step in result.history if step.objective == result.objective]
    bounds = [step.source for step in result.history if step.lower_bound == result.lower_bound]
    return (values or [result.solver])[0], (bounds or [result.solver])[0]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="instances [default: all]")
    parser.add_argument("--time", type=float, default=10, help="seconds of one solve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--missing", action="store_true", help="only instances without a value")
    parser.add_argument("--published", type=Path, help="folder of ArrayPipe's instances")
    given = parser.parse_args()
    folder = given.folder.resolve()
    files, rows = files_of(folder, given.published), read_table(folder)
    names = sorted(given.names or files, key=lambda name: -gap(rows.get(name)))
    for name in names:
        done = name in rows and (given.missing or rows[name]["status"] == "optimal")
        if not done:
            print(improve(folder, name, files[name], given), flush=True)


if __name__ == "__main__":
    main()
