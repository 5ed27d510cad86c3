"""``optsched verify``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003
from typing import Annotated

import typer

import optsched
from optsched.cli import say
from optsched.cli.options import (
    Objective,
    argument,
    option,
    with_objective,
)
from optsched.errors import InputError
from optsched.formats.read_problem import read_problem
from optsched.io.text import one_line
from optsched.model.objectives import objective_name, objective_value
from optsched.model.schedule import Schedule
from optsched.problems.jobshop import published


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
            schedule = _scheduled(file)
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


def _scheduled(file: Path) -> Schedule:
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
