"""``optsched verify``, ``plot``, ``trace``: what can be done with a finished schedule."""

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
from optsched.model.schedule import Schedule
from optsched.problems.jobshop import published

Cycles = Annotated[
    int | None, option("Cycles of a periodic schedule [default: 3].", show_default=False)
]


def verify(
    files: Annotated[list[Path], argument("*.schedule.json documents.", metavar="FILES")],
    instance: Annotated[
        Path | None, option("The instance that all of them should solve.", "--problem")
    ] = None,
    objective: Objective = None,
) -> None:
    """Check schedules independently of every solver; of a single file all violations are listed.

    Without --problem only whether each agrees with itself. Exit code 1 if one of them has
    violations, 2 if one cannot be read; the others are checked all the same.
    """
    if instance is None and objective is not None:
        raise InputError("objective: it is that of the problem, give --problem FILE too")
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
    """Draw a Gantt chart, or the Pareto front of routers [default: FILE with the suffix .png]."""
    from optsched.plots.picture import suffix_of

    if output is None and html is None:
        output = _beside(file, ".png")
    check_outputs([output, html], [file])
    if output is not None:
        suffix_of(output)
    if pareto is not None:
        from optsched.plots.front import draw

        for path in draw(file, pareto, [path for path in (output, html) if path is not None]):
            print(f"wrote {path}")
        return
    from optsched.plots import gantt
    from optsched.plots.html import write as write_html

    schedule = scheduled(file)
    shown = _cycles(file, schedule, cycles)
    wrote(output, lambda path: gantt(schedule, path, cycles=shown))
    wrote(html, lambda path: write_html(schedule, path, cycles=shown))


def trace(file: ScheduleFile, output: OptionalOutput = None, cycles: Cycles = None) -> None:
    """Write a trace for ui.perfetto.dev or chrome://tracing [default: FILE with .trace.json]."""
    path = output or _beside(file, ".trace.json")
    check_outputs([path], [file])
    schedule = scheduled(file)
    shown = _cycles(file, schedule, cycles)
    wrote(path, lambda path: perfetto.write(schedule, path, cycles=shown))


def scheduled(file: Path) -> Schedule:
    """The schedule in a file; `InputError` for an instance without orders and starts."""
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
    """Whether a schedule is right, of which instance, and what it is."""
    if violations:
        wrong = "not consistent" if instance is None else f"does not solve {instance}"
        return f"{wrong}, {violations} violation{'s' * (violations > 1)}"
    kind = "period" if schedule.period is not None else "makespan"
    value = schedule.period if schedule.period is not None else schedule.makespan
    right = "consistent" if instance is None else f"solves {instance}"
    unknown = " (instance not given: --problem FILE)" if instance is None else ""
    return (
        f"{right}, {schedule.n_operations} operations on {schedule.n_resources} "
        f"resources, {kind} {f'{value} {schedule.time_unit}'.rstrip()}{unknown}"
    )


def _cycles(file: Path, schedule: Schedule, cycles: int | None) -> int:
    """How many cycles to show; `InputError` where there are none to count."""
    if cycles is not None and schedule.period is None:
        raise InputError(f"cycles: {file} has no period, it is drawn whole: leave --cycles out")
    return 3 if cycles is None else cycles


def _beside(file: Path, suffix: str) -> Path:
    """The file's name with another ending: x.schedule.json -> x.png."""
    name = file.name or "schedule"  # of a folder, which reading will refuse
    name = name.removesuffix(".json").removesuffix(".schedule")
    return file.parent / (name + suffix)
