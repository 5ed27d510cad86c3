"""``optsched verify``, ``plot`` and ``trace`` of finished schedules."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003
from typing import Annotated

import typer

import optsched
from optsched.cli import say
from optsched.cli.options import (
    Objective,
    OptionalOutput,
    ScheduleFile,
    argument,
    option,
    with_objective,
)
from optsched.cli.output import wrote
from optsched.errors import InputError
from optsched.formats import perfetto
from optsched.formats.read_problem import read_problem
from optsched.io.files import check_outputs
from optsched.io.text import one_line
from optsched.model.objectives import objective_name, objective_value
from optsched.model.schedule import Schedule
from optsched.problems.jobshop import published

Cycles = Annotated[
    int | None, option("Cycles of a periodic schedule [default: 3].", show_default=False)
]


def verify(
    files: Annotated[list[Path], argument("*.schedule.json documents.", metavar="FILES")],
    instance: Annotated[Path | None, option("Instance that all should solve.", "--problem")] = None,
    objective: Objective = None,
) -> None:
    """Check schedules independently of every solver; list all violations of a single file.

    Without --problem only the consistency of each is checked. Exit code 1 if one of them has
    violations, 2 if one cannot be read; the others are checked nevertheless.

    Example: optsched verify plan.schedule.json --problem shop.txt
    """
    if instance is None and objective is not None:
        raise InputError("objective: belongs to the problem, give --problem FILE too")
    problem = None if instance is None else with_objective(read_problem(instance), objective)
    codes = {0}
    for file in files:
        try:
            schedule = scheduled(file)
        except InputError as error:
            say(f"error: {error}")
            codes.add(2)
            continue
        violations = optsched.verify(schedule, problem)
        if violations:
            codes.add(1)
        if len(files) == 1:
            for violation in violations:
                print(f"{violation.kind}: {one_line(violation.message, 1000)}")
        print(f"{file}: {_verdict(schedule, len(violations), instance)}")
    if code := max(codes):
        raise typer.Exit(code)


def plot(
    file: ScheduleFile,
    output: Annotated[Path | None, option(".png, .svg or .pdf.", "-o", "--output")] = None,
    html: Annotated[Path | None, option("Self-contained interactive page.")] = None,
    cycles: Cycles = None,
    pareto: Annotated[str | None, option("Of serve-bench, by measures accuracy,p99_ms.")] = None,
) -> None:
    """Draw a Gantt chart, or the Pareto front of routers [default: FILE with the suffix .png].

    Example: optsched plot plan.schedule.json -o plan.svg --html plan.html
    """
    from optsched.plots.picture import suffix_of

    if output is None and html is None:
        output = _beside(file, ".png")
    check_outputs([output, html], [file])
    if output is not None:
        suffix_of(output)
    if pareto is not None:
        from optsched.plots import front

        if cycles is not None:
            raise InputError("cycles: goes with a schedule, not with --pareto")
        points, (x, _, y) = front.read_points(file), pareto.partition(",")
        wrote(output, lambda path: front.pareto(points, path, x=x, y=y))
        wrote(html, lambda path: front.pareto(points, path, x=x, y=y))
        return
    from optsched.plots import gantt
    from optsched.plots.html import write as write_html

    schedule = scheduled(file)
    number = _cycles(file, schedule, cycles)
    wrote(output, lambda path: gantt(schedule, path, cycles=number))
    wrote(html, lambda path: write_html(schedule, path, cycles=number))


def trace(file: ScheduleFile, output: OptionalOutput = None, cycles: Cycles = None) -> None:
    """Write a trace for ui.perfetto.dev or chrome://tracing [default: FILE with .trace.json].

    Example: optsched trace plan.schedule.json -o plan.trace.json
    """
    path = output or _beside(file, ".trace.json")
    check_outputs([path], [file])
    schedule = scheduled(file)
    number = _cycles(file, schedule, cycles)
    wrote(path, lambda path: perfetto.write(schedule, path, cycles=number))


def scheduled(file: Path) -> Schedule:
    """Read a schedule; `InputError` for an instance without orders and starts."""
    if published.is_name(str(file)):
        raise InputError(
            f"{file}: an instance, expected a schedule: optsched solve {file} -o "
            f"{file}.schedule.json"
        )
    schedule = Schedule.read(file)
    if not schedule.is_scheduled:
        raise InputError(
            f"{file}: sequences, starts: missing, this graph is not scheduled: solve it first"
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


def _cycles(file: Path, schedule: Schedule, cycles: int | None) -> int:
    """Return the number of cycles to draw; `InputError` for a schedule without a period."""
    if cycles is not None and schedule.period is None:
        raise InputError(f"cycles: {file} has no period, it is drawn whole: leave --cycles out")
    return 3 if cycles is None else cycles


def _beside(file: Path, suffix: str) -> Path:
    """Return the file's name with another ending: x.schedule.json -> x.png."""
    name = file.name or "schedule"  # a folder is refused by the reader
    name = name.removesuffix(".json").removesuffix(".schedule")
    return file.parent / (name + suffix)
