"""The instances that benchmarks run, by name, and the named sets of them."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.shop.plain import PER_OPERATION, Graph, Jobs, graph_of_jobs
from optsched.bench.instances import Instance as Named
from optsched.bench.instances import Known
from optsched.formats.read_problem import read_problem
from optsched.problems.jobshop import published

if TYPE_CHECKING:
    from optsched import JobArray
    from optsched.model.schedule import Schedule

SHIPPED = Path(__file__).resolve().parents[2] / "instances"

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
"""Of ArrayPipe's files, proved by two exact solvers; ``/6`` means the first six jobs."""

KNOWN = {name: Known(value, value) for name, value in OPTIMA.items()}

MODELS = ("vgg19", "resnet152", "bert_large", "gpt2_xl")

FAMILIES = {
    family: tuple(name for name in published.bounds() if name.rstrip("0123456789") == family)
    for family in ("ft", "la", "abz", "orb", "swv", "yn", "ta")
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
    "s4": tuple(name for name in OPTIMA if "/" not in name),
    "s10": tuple(f"S{stages}_J30_homo_F1" for stages in (10, 12, 14, 16)),
    "prefixes": (*tuple(name for name in OPTIMA if "/" in name), "S4_J10_mach4"),
    "plain": tuple(f"{model}-30x8" for model in MODELS),
    "switches": tuple(f"{model}-30x8-switches" for model in MODELS),
    "caps": tuple(f"{model}-30x8-{cap}" for model in MODELS for cap in ("80GB", "flight")),
    "rooms": tuple(
        f"{name}-room{room}"
        for room in ("1", "1.5", "2")
        for name in (
            "gpt2_xl-20x8",
            "gpt2_xl-12x4",
            "bert_large-16x8",
            "bert_large-30x4",
            "resnet152-20x8",
            "vgg19-15x6",
        )
    ),
    "long": tuple(f"{model}-1000x{stages}" for model in MODELS for stages in (4, 8)),
    "wide": tuple(f"{model}-64x24" for model in MODELS[2:]),
}
SETS["published"] = SETS["s4"] + SETS["s10"]
SETS["profiles"] = SETS["plain"] + SETS["switches"] + SETS["caps"]


class Instance(NamedTuple):
    """What is solved: a file or chains of a job shop, and the graph that answers are checked by."""

    of: Named
    graph: Graph
    jobs: Jobs | None = None

    @property
    def name(self) -> str:
        """As on the command line."""
        return self.of.name


def chosen(text: str) -> list[str]:
    """Names from a comma-separated list of sets, names and ranges such as ``ta01-10``."""
    names: list[str] = []
    for part in text.split(","):
        span = re.fullmatch(r"([a-z]+)(\d+)-(\d+)", part)
        if part in SETS:
            names += SETS[part]
        elif span:
            family, first, last = span.groups()
            names += [f"{family}{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
        else:
            names.append(part)
    return list(dict.fromkeys(names))


def instance(name: str, folder: Path | None) -> Instance:
    """A published job shop or job array, or a generated one.

    From ``folder/NAME.txt`` or ``folder/NAME.json``, the published ones, the generators, or the
    files shipped, whichever has it first.
    """
    if re.match(r"S\d+_J|ExplPipe|\w+-\d+x\d+", name):
        return job_array(name, folder)
    given = None if folder is None else folder / f"{name}.txt"
    if given is not None and given.is_file():
        shop: Any = read_problem(given)
    elif name in published.bounds():
        shop = published.instance(name)
    else:
        raise SystemExit(
            f"{name}: not found; give --data DIR with {name}.txt; sets are {', '.join(SETS)}"
        )
    jobs = [[[int(k), int(p)] for k, p in job] for job in shop.jobs]
    return Instance(Named(name, name, shop), graph_of_jobs(jobs), jobs)


def job_array(name: str, folder: Path | None) -> Instance:
    """A published file, the first jobs of one, a shipped file, or a generated array."""
    whole, _, first = name.partition("/")
    published_file = re.match(r"S\d+_J|ExplPipe", name)
    shipped = SHIPPED / "jobarray" / f"{name}.jobarray.json"
    if published_file:
        if folder is None or not (folder / f"{whole}.json").is_file():
            raise SystemExit(f"{name}: not found; give --data DIR with {whole}.json")
        path = folder / f"{whole}.json"
        if first:
            path = _written(read_problem(path).subset(range(int(first))), name)
    elif shipped.is_file():
        path = shipped
    else:
        size = re.fullmatch(r"(\w+)-(\d+)x(\d+)(?:-room([\d.]+))?", name)
        if size is None or size[1] not in MODELS:
            raise SystemExit(f"{name}: not found; sets are {', '.join(SETS)}")
        array = generated(size[1], int(size[2]), int(size[3]))
        if size[4]:  # every device has room for so many of the largest jobs
            memory = np.ceil(np.max(array.activation, axis=0) * float(size[4])).astype(int)
            array = array.replace(memory=memory.tolist(), name=name)
        path = _written(array, name)
    problem = read_problem(path)
    return Instance(Named(str(path), name, problem), graph_of_schedule(problem.graph()))


def generated(model: str, jobs: int, stages: int) -> JobArray:
    """An array of a published model profile."""
    from optsched.pipelines.generator import job_array

    return job_array(model, stages, jobs, seed=1, name=f"{model}-{jobs}x{stages}")


@cache
def _folder() -> Any:
    return tempfile.TemporaryDirectory()  # until the end of this process


def _written(array: JobArray, name: str) -> Path:
    path = Path(_folder().name) / f"{name.replace('/', '-first-')}.jobarray.json"
    array.write(path)
    return path


def graph_of_schedule(graph: Schedule) -> Graph:
    """The disjunctive graph of any problem of ours as plain lists."""
    from optsched.model import memory_bounds

    duration = graph.duration.tolist()
    tails, heads, lags = (column.tolist() for column in graph.arcs[:3])
    return {
        "duration": duration,
        "machine": graph.single_resource.tolist(),
        "arcs": [[i, j, duration[i] + lag] for i, j, lag in zip(tails, heads, lags, strict=True)],
        "memory": graph.memory.tolist(),
        "holdings": [list(holding) for holding in memory_bounds.holdings(graph)],
        **{name: getattr(graph, name).tolist() for name in PER_OPERATION},
    }
