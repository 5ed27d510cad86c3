"""``optsched solve`` and ``verify``."""

from __future__ import annotations

import json
import re
import traceback
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated, Any

import typer

import optsched
from optsched.cli import options, say
from optsched.cli.options import argument, option
from optsched.cli.output import facts
from optsched.cli.progress import Bar
from optsched.errors import InputError
from optsched.formats.read_problem import read_problem
from optsched.io.csv_rows import csv_records
from optsched.io.files import check_outputs, read_text
from optsched.io.text import one_line
from optsched.model.objectives import objective_name, objective_value
from optsched.model.schedule import Schedule
from optsched.problems.jobshop import published
from optsched.solving.stop import AnyOf, Gap, NoImprovement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.model.schedule import Problem
    from optsched.solving.progress import Criterion
    from optsched.solving.result import Result


BY_ORDERS = ("jobshop", "jobarray", "periodic")
"""Kinds of problems whose bound is a lower bound of a time."""

_HISTORY = ("objective", "lower_bound", "event", "source")


def solve(
    file: options.InstanceFile,
    solver: Annotated[str, option("See `optsched show`.")] = "auto",
    time_limit: options.TimeLimit = None,
    iterations: options.Iterations = None,
    objective: options.Objective = None,
    target: Annotated[int | None, option("Stop at this value.")] = None,
    stop_gap: Annotated[float | None, option("Stop at this gap to the bound: 0.01 is 1 %.")] = None,
    stop_no_improvement: Annotated[float | None, option("Seconds without improvement.")] = None,
    option: options.Options = None,
    workers: options.Workers = None,
    seed: options.Seed = 0,
    warm_start: Annotated[Path | None, option("A schedule to start from.")] = None,
    output: options.OptionalOutput = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Solve an instance; Ctrl-C keeps the best schedule so far.

    Example: optsched solve ta01 --time 10 -o plan.schedule.json
    """
    check_outputs([output], [file])
    problem = options.with_objective(read_problem(file), objective)
    start = None if warm_start is None else Schedule.read(warm_start)
    given = options.parse_options(option)
    with Bar(quiet=quiet) as bar, _named(solver):
        result = optsched.solve(
            problem, solver, time_limit=time_limit, iterations=iterations, target=target,
            stop=_criterion(stop_gap, stop_no_improvement), workers=workers, seed=seed,
            warm_start=start, on_progress=bar, options=given,
        )  # fmt: skip
    if output is not None and result.schedule is not None:
        result.schedule.write(output)
    if as_json:
        print(json.dumps(_summary(problem, file, result)))
    elif not quiet:
        facts(_rows(problem, file, result, output), max(12, len(problem.objective_name) + 2))
    elif result.schedule is None and not result.interrupted:
        say(f"{result.status}: {result.reason or 'nothing found'}")
    if result.schedule is None and result.interrupted:
        raise KeyboardInterrupt
    if result.schedule is None:
        raise typer.Exit(1)


@contextmanager
def _named(solver: str) -> Iterator[None]:
    """Turn an exception inside a solver into one sentence with its name and the line."""
    try:
        yield
    except (optsched.OptschedError, MemoryError):
        raise
    except Exception as error:
        *_, at = traceback.extract_tb(error.__traceback__)
        what = f"solver {solver}: {type(error).__name__}: {error}"
        raise optsched.InternalError(f"{what} ({at.filename}:{at.lineno})") from error


def verify(
    files: Annotated[
        list[Path], argument("*.schedule.json, or CSV job,machine,start.", metavar="FILES")
    ],
    instance: Annotated[Path | None, option("Instance that all should solve.", "--problem")] = None,
    objective: options.Objective = None,
    as_json: options.AsJson = False,
) -> None:
    """Check schedules independently of every solver; list all violations of a single file.

    Without --problem only the consistency of each is checked. Exit code 1 if one of them has
    violations, 2 if one cannot be read; the others are checked nevertheless.

    Example: optsched verify plan.schedule.json --problem shop.txt
    """
    if instance is None and objective is not None:
        raise InputError("objective: belongs to the problem, give --problem FILE too")
    problem = options.with_objective(read_problem(instance), objective) if instance else None
    codes, found = {0}, list[dict[str, object]]()
    for file in files:
        try:
            schedule = _scheduled(file, problem)
        except InputError as error:
            text = str(error) if str(file) in str(error) else f"{file}: {error}"
            say(f"error: {text}")
            codes.add(2)
            found.append({"file": str(file), "error": text})
            continue
        if violations := optsched.verify(schedule, problem):
            codes.add(1)
        verdict, faults = _verdict(schedule, len(violations), instance), [*map(asdict, violations)]
        found.append({"file": str(file), "verdict": verdict, "violations": faults})
        if len(files) == 1 and not as_json:
            for violation in violations:
                print(f"{violation.kind}: {one_line(violation.message, 1000)}")
        if not as_json:
            print(f"{file}: {verdict}")
    if as_json:
        print(json.dumps({"files": found}))
    if code := max(codes):
        raise typer.Exit(code)


def _scheduled(file: Path, problem: Problem | None) -> Schedule:
    """Read a schedule; `InputError` for an instance without orders and starts."""
    if file.suffix.lower() == ".csv":
        if problem is None:
            raise InputError(f"{file}: start times belong to a problem, give --problem FILE too")
        names = [resource.name for resource in problem.graph().resources]
        table = csv_records(read_text(file), str(file), (), ("job", "machine", "start"))
        rows = [(row["job"], row["machine"], row["start"]) for _, row in table]
        cells = {cell for row in rows for cell in row}
        numbers = {cell: int(cell) for cell in cells if re.fullmatch("[0-9]{1,18}", cell)}
        found = [(j, m if m in names else numbers.get(m, m), numbers.get(s, s)) for j, m, s in rows]
        return Schedule.from_starts(problem, found)
    if published.is_name(str(file)):
        command = f"optsched solve {file} -o {file}.schedule.json"
        raise InputError(f"{file}: an instance, expected a schedule: {command}")
    schedule = Schedule.read(file)
    if not schedule.is_scheduled:
        raise InputError(
            f"{file}: sequences, starts: missing, the graph is unscheduled: solve it first"
        )
    return schedule


def _verdict(schedule: Schedule, violations: int, instance: Path | None) -> str:
    """Describe the result of the check."""
    if violations:
        wrong = "not consistent" if instance is None else f"does not solve {instance}"
        return f"{wrong}, {violations} violation{'s' * (violations > 1)}"
    kind = objective_name(schedule)
    value = schedule.period or objective_value(schedule, schedule.end)
    right = "consistent" if instance is None else f"solves {instance}"
    unknown = " (instance not given: --problem FILE)" if instance is None else ""
    return (
        f"{right}, {schedule.n_operations} operations on {schedule.n_resources} "
        f"resources, {kind} {f'{value} {schedule.time_unit}'.rstrip()}{unknown}"
    )


def _criterion(gap: float | None, no_improvement: float | None) -> Criterion | None:
    """Combine the ``--stop-...`` options; None if there are none."""
    found: list[Criterion] = [] if gap is None else [Gap(gap)]
    if no_improvement is not None:
        found.append(NoImprovement(seconds=no_improvement))
    return AnyOf(*found) if found else None


def _summary(problem: Problem, file: Path, result: Result) -> dict[str, Any]:
    return {
        "instance": problem.name or file.name, "solver": result.solver,
        "objective": result.objective, "lower_bound": result.lower_bound, "gap": result.gap,
        "status": result.status, "seconds": round(result.seconds, 6),
        "history": [
            {"seconds": round(step.elapsed, 6)} | {key: getattr(step, key) for key in _HISTORY}
            for step in result.history
        ],
        **_chosen(problem, result),
        **({"reason": result.reason} if result.reason else {}),
        **({"missing": result.missing} if result.missing else {}),
    }  # fmt: skip


def _chosen(problem: Problem, result: Result) -> dict[str, str]:
    """Return the GPUs of a placement."""
    if not isinstance(problem, optsched.GpuPlacement) or result.schedule is None:
        return {}
    return {"GPUs": problem.state.written(problem.chosen(result.schedule))}


def _rows(
    problem: Problem, file: Path, result: Result, output: Path | None
) -> list[tuple[str, object]]:
    def described(value: int | None) -> str | None:
        return None if value is None else problem.describe(value)

    gap = None if result.gap is None else f"{result.gap:.2%}"
    missing = None
    if result.missing:
        left = "" if gap is None else f", up to {gap} may be left"
        missing = f"{', '.join(result.missing)}: not compiled in time{left}; see `optsched warmup`"
    return [
        ("instance", problem.name or file.name),
        ("solver", result.solver),
        (problem.objective_name, described(result.objective)),
        ("lower bound" if problem.problem_kind in BY_ORDERS else "bound",
         described(result.lower_bound)),
        *_chosen(problem, result).items(),
        *(("assumed", text) for text in getattr(getattr(problem, "model", None), "assumed", ())),
        ("gap", gap),
        ("status", result.status + " (interrupted: best so far)" * result.interrupted),
        ("reason", result.reason or None),
        ("missing", missing),
        ("time", f"{result.seconds:.2f} s"),
        ("written", None if result.schedule is None else output),
    ]  # fmt: skip
