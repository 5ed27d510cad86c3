"""``optsched convert`` and ``workload``: problems in other formats, traces of logs."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any, Final

from optsched.cli.options import Output, argument, option
from optsched.errors import InputError
from optsched.formats import pipelining_csv
from optsched.formats.job_logs import import_trace
from optsched.formats.read_problem import from_tree, read_problem
from optsched.formats.registry import Source, readers, writable, written
from optsched.io.files import check_outputs, write_atomic
from optsched.io.strict_json import parse, placed
from optsched.io.values import one_of
from optsched.model import document
from optsched.model.difference import difference
from optsched.model.schedule import Schedule
from optsched.problems.jobarray import document as jobarray_json
from optsched.problems.jobarray.problem import JobArray
from optsched.problems.jobshop.document import shop_of, to_json
from optsched.problems.jobshop.problem import JobShop

if TYPE_CHECKING:
    from optsched.model.schedule import Problem

DOCUMENTS: Final = ("jobshop", "jobarray", "schedule")
"""Kinds of documents of this library; their files end in ``.jobshop.json``, and so on."""


def convert(
    source: Annotated[Path, argument("Any instance or schedule.", metavar="IN")],
    output: Annotated[Path, argument("File to write.", metavar="OUT")],
    from_: Annotated[str, option("Of IN: json, standard, csv, ...", "--from")] = "auto",
    to: Annotated[
        str, option(f"Format of OUT: {', '.join(DOCUMENTS)}, standard, taillard, csv, ...")
    ] = "auto",
    reentrant: Annotated[bool, option("Rows may repeat or skip machines.")] = False,
    lossy: Annotated[bool, option("Drop what the format cannot hold.")] = False,
    job: Annotated[Path | None, option("Job array of a pipelining CSV.", "--problem")] = None,
) -> None:
    """Write a problem, or a schedule, in another format; refuse to lose information.

    By default the content of IN and the ending of OUT select the formats. A CSV is that of
    PyTorch's pipelining: orders only, no times.

    Example: optsched convert ta01 ta01.jobshop.json
    """
    check_outputs([output], [source, job])
    target = target_of(output, to)
    one_of("from", from_, ["auto", "json", *readers()])
    problem = _read(source, from_, reentrant, job)
    content, lost = converted(problem, target, str(source))
    if lost and not lossy:
        raise InputError(
            f"{source}: {output.name} would lose {' and '.join(lost)} (--lossy drops them)"
        )
    write_atomic(output, content)
    reader = readers().get(target)
    kept = f", {reader.holds}" if reader is not None and reader.holds else ""
    dropped = f", without {' and '.join(lost)}" if lost else ""
    print(f"wrote {output}{kept}{dropped}")


def workload(
    log: Annotated[Path, argument("sacct -P, SWF, Helios, Philly, Alibaba, Tiresias, CSV.")],
    output: Output,
    from_: Annotated[str, option("Format [default: by content].", "--from")] = "auto",
    zero: Annotated[str, option("Jobs of 0 s: drop, or keep (as 1 s).")] = "drop",
    shares: Annotated[str, option("Parts of GPUs: up (to whole ones), drop, N (N-ths).")] = "up",
) -> None:
    """Write the log of a scheduler as a trace for `optsched cluster simulate`.

    Example: optsched cluster workload sacct.txt -o trace.csv
    """
    check_outputs([output], [log])
    for note in import_trace(log, output, from_, zero=zero, shares=shares):
        print(note)
    print(f"wrote {output}")


def target_of(output: Path, to: str) -> str:
    """Return the format to write, by name or by the ending of the file."""
    if to != "auto":
        return one_of("to", to, ["auto", *DOCUMENTS, *writable()])
    endings = {f".{kind}.json": kind for kind in DOCUMENTS} | {".json": "document"}
    endings |= {e: name for name in writable() for e in readers()[name].endings}
    for ending in sorted(endings, key=len, reverse=True):
        if output.name.lower().endswith(ending):
            return endings[ending]
    raise InputError(f"{output}: its ending names no format; choose one with --to")


def converted(problem: Problem, target: str, name: str) -> tuple[bytes, list[str]]:
    """Return the content of the new file, and the information that it lost."""
    if not isinstance(problem, (JobShop, JobArray, Schedule)):
        raise InputError(
            f"{name}: a {type(problem).__name__} has one format only, its own document"
        )
    if target == "document":
        target = type(problem).__name__.lower()
    with placed(f"{name}: "):
        native = target in DOCUMENTS
        content = _document(problem, target) if native else written(problem, target).encode()
    if native:
        again = from_tree(parse(content.decode(), name), name)
    elif readers()[target].holds:
        return content, []
    else:
        odd = target == "standard" and not shop_of(problem).visits_every_machine_once
        again = readers()[target].read(Source(name, content.decode(), reentrant=odd))
    if target == "schedule":
        return content, _differences(problem, again)
    scheduled = isinstance(problem, Schedule) and problem.is_scheduled
    before = shop_of(problem) if isinstance(again, JobShop) else problem
    lost = ["its orders and starts (it is solved)"] if scheduled else []
    return content, lost + _differences(before, again)


def _document(problem: Problem, target: str) -> bytes:
    """Write a problem as a document of this library."""
    if target == "jobshop":
        return to_json(shop_of(problem))
    if target == "schedule":
        return document.write(problem if isinstance(problem, Schedule) else problem.graph())
    if not isinstance(problem, JobArray):
        kind = "bare graph" if isinstance(problem, Schedule) else "job shop"
        raise InputError(f"only job arrays can be written as one, this is a {kind}")
    return jobarray_json.write(problem)


def _read(path: Path, format: str, reentrant: bool, job: Path | None) -> Problem:
    """Read a problem, a schedule with its orders."""
    if job is not None:
        if format != "csv" and not (format == "auto" and path.name.lower().endswith(".csv")):
            raise InputError(f"problem: only a CSV needs one, {path} is none")
        array = read_problem(job)
        if not isinstance(array, JobArray):
            raise InputError(f"problem: expected a job array, {job} is a {type(array).__name__}")
        return pipelining_csv.read(path, array)
    problem = read_problem(path, format, reentrant)
    return Schedule.read(path) if isinstance(problem, Schedule) else problem


def _differences(before: Problem, after: Problem) -> list[str]:
    """Describe what a file, read again, has lost."""
    old, new = before.graph(), after.graph()
    found = []
    rolling = [problem.problem_kind == "periodic" for problem in (before, after)]
    if before.objective_name != after.objective_name or rolling == [True, False]:
        found.append(f"its objective ({before.objective_name})")
    names, again = [r.name for r in old.resources], [r.name for r in new.resources]
    if names != again:
        moved = sorted(names) == sorted(again)
        found.append(f"the {'order' if moved else 'names'} of its machines")
    if list(before.job_names) != list(after.job_names):
        found.append("the names of its jobs")
    if old.time_unit != new.time_unit:
        found.append(f"its time unit ({old.time_unit})")
    facts: dict[str, Any] = dict(getattr(before, "metadata", {}))
    kept: dict[str, Any] = dict(getattr(after, "metadata", {}))
    if lost := [key for key, value in facts.items() if kept.get(key) != value]:
        found.append(f"its metadata ({', '.join(lost):.100})")
    if not found and not old.same_graph(new):
        raise InputError(f"the file, read again, is another problem: {difference(new, old)}")
    return found
