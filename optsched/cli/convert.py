"""``optsched convert``: the same problem in another format, or a sentence why not."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.model.schedule import Problem, Schedule

SOURCES = ("auto", "standard", "taillard", "json", "csv")
TARGETS = ("auto", "standard", "taillard", "jobshop", "jobarray", "schedule", "csv")
_ENDINGS = {".txt": "standard", ".jobshop.json": "jobshop", ".jobarray.json": "jobarray",
            ".schedule.json": "schedule", ".json": "own", ".csv": "csv"}  # fmt: skip


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Any instance or schedule.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    from_: Annotated[
        str, typer.Option("--from", help=f"Format of IN: {', '.join(SOURCES)}.")
    ] = "auto",
    to: Annotated[
        str, typer.Option(help=f"Format of OUT: {', '.join(TARGETS)} (by its ending).")
    ] = "auto",
    reentrant: Annotated[
        bool, typer.Option(help="Standard text whose rows repeat or skip machines.")
    ] = False,
    lossy: Annotated[
        bool, typer.Option(help="Drop what the format has no place for, and say what.")
    ] = False,
    job: Annotated[
        Path | None,
        typer.Option("--problem", help="Job array whose blocks a pipelining CSV orders."),
    ] = None,
    compact: Annotated[
        bool, typer.Option(help="CSV without idle cells (wrong for PipelineScheduleMulti).")
    ] = False,
) -> None:
    """Write a problem, or a schedule, in another format; refuses to lose anything.

    A CSV is that of PyTorch's pipelining: orders only, no times.
    """
    from optsched.io.files import check_not_input, check_writable, write_atomic

    check_writable(output)
    check_not_input(output, source)
    if job is not None:
        check_not_input(output, job)
    target = target_of(output, to)
    if from_ not in SOURCES:
        raise InputError(f"from: expected one of {', '.join(SOURCES)}, got {from_!r:.40}")
    if compact and target != "csv":
        raise InputError(f"compact: {output} is no CSV")
    if from_ == "csv" or (from_ == "auto" and source.name.lower().endswith(".csv")):
        problem: Problem = _read_orders(source, job)
    elif job is not None:
        raise InputError(f"problem: only a CSV needs one, {source} is none")
    else:
        problem = _read(source, from_, reentrant)
    if target == "csv":
        _write_csv(problem, output, compact, str(source))
        return
    content, lost = converted(problem, target, str(source))
    if lost and not lossy:
        raise InputError(
            f"{source}: {output.name} would lose {' and '.join(lost)} (--lossy drops them)"
        )
    write_atomic(output, content)
    dropped = f", without {' and '.join(lost)}" if lost else ""
    print(f"wrote {output}{dropped}")


def target_of(output: Path, to: str) -> str:
    """The format to write, given by name or by the ending of the file."""
    if to not in TARGETS:
        raise InputError(f"to: expected one of {', '.join(TARGETS)}, got {to!r:.40}")
    if to != "auto":
        return to
    for ending, name in _ENDINGS.items():
        if output.name.lower().endswith(ending):
            return name
    raise InputError(f"{output}: its ending tells no format; choose one with --to")


def converted(problem: Problem, target: str, name: str) -> tuple[bytes, list[str]]:
    """The content of the new file, and what it has lost.

    Raises
    ------
    InputError
        The format cannot hold such a problem at all.
    """
    from optsched.formats import jobarray_json, jobshop_json, standard, taillard
    from optsched.model import document
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray
    from optsched.problems.jobshop.problem import JobShop

    if problem.problem_kind == "gpus":
        raise InputError(f"{name}: a choice of GPUs has one format only, optsched.subset/1")
    if problem.problem_kind == "quota":
        raise InputError(f"{name}: a quota plan has one format only, optsched.quota/1")
    scheduled = isinstance(problem, Schedule) and problem.is_scheduled
    if target == "own":
        kinds: dict[type, str] = {JobShop: "jobshop", JobArray: "jobarray", Schedule: "schedule"}
        target = kinds[type(problem)]
    if target == "schedule":
        graph = problem if isinstance(problem, Schedule) else problem.graph()
        content = document.write(graph)
        return content, _differences(problem, document.read(content.decode(), name))
    lost = ["its orders and starts (it is solved)"] if scheduled else []
    if target == "jobarray":
        if not isinstance(problem, JobArray):
            raise InputError(
                f"{name}: only job arrays can be written as one, this is a {_kind(problem)}"
            )
        content = jobarray_json.write(problem)
        return content, _differences(problem, jobarray_json.read(content.decode(), name))
    graph = problem.graph()
    shop = problem if isinstance(problem, JobShop) else jobshop_json.from_graph(graph, name)
    back: JobShop
    if target == "jobshop":
        content = jobshop_json.to_json(shop)
        from optsched.io.strict_json import parse

        back = jobshop_json.from_tree(parse(content.decode(), name), name)
    elif target == "taillard":
        content = taillard.to_text(shop).encode()
        back = taillard.from_text(content.decode(), name)
    else:
        content = standard.to_text(shop).encode()
        whole = shop.visits_every_machine_once
        back = standard.from_text(content.decode(), name, reentrant=not whole)
    return content, lost + _differences(shop, back)


def _read(path: Path, format: str, reentrant: bool) -> Problem:
    from optsched.formats.read_problem import read_problem
    from optsched.model.schedule import Schedule

    problem = read_problem(path, format, reentrant)  # type: ignore[arg-type]
    if isinstance(problem, Schedule):
        return Schedule.read(path)  # with its orders, if it has any
    return problem


def _read_orders(path: Path, job: Path | None) -> Schedule:
    from optsched.formats import pipelining_csv
    from optsched.formats.read_problem import read_problem
    from optsched.problems.jobarray.problem import JobArray

    if job is None:
        raise InputError(f"problem: missing; {path} holds orders only (--problem X.jobarray.json)")
    array = read_problem(job)
    if not isinstance(array, JobArray):
        raise InputError(f"problem: expected a job array, {job} is a {type(array).__name__}")
    return pipelining_csv.read(path, array)


def _write_csv(problem: Problem, output: Path, compact: bool, name: str) -> None:
    from optsched.formats import pipelining_csv
    from optsched.io.files import write_atomic
    from optsched.model.schedule import Schedule

    if not isinstance(problem, Schedule):
        raise InputError(f"{name}: a CSV holds the orders of a schedule: solve it first")
    try:
        content = pipelining_csv.to_csv(problem, compact=compact)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    write_atomic(output, content)
    print(f"wrote {output}, orders only")


def _differences(before: Problem, after: Problem) -> list[str]:
    """What the file, read again, does not say: the writers and readers are the judges."""
    old, new = before.graph(), after.graph()
    found = []
    if before.objective_name != after.objective_name:
        found.append(f"its objective ({before.objective_name})")
    if [r.name for r in old.resources] != [r.name for r in new.resources]:
        found.append("the names of its machines")
    if old.time_unit != new.time_unit:
        found.append(f"its time unit ({old.time_unit})")
    facts: dict[str, Any] = dict(getattr(before, "metadata", {}))
    kept: dict[str, Any] = dict(getattr(after, "metadata", {}))
    gone = [key for key, value in facts.items() if kept.get(key) != value]
    if gone:
        found.append(f"its metadata ({', '.join(gone):.100})")
    if not found and not old.same_graph(new):
        raise InputError("the file would hold another problem: please report this instance")
    return found


def _kind(problem: Problem) -> str:
    from optsched.problems.jobshop.problem import JobShop

    return "job shop" if isinstance(problem, JobShop) else "bare graph"
