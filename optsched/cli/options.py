"""Options shared by several commands, and parsers of their values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_OPTION = "KEY=VALUE of the solver, VALUE as JSON or plain text; may be repeated."
_DEVICES = "Such as cpu,cpu or cuda:0 [default: one GPU a worker if there are enough, else cpu]."


def option(text: str, *names: str, **more: Any) -> Any:
    """Declare an option with its help; by default its name is the parameter's."""
    return typer.Option(*names, help=text, **more)


def argument(text: str, **more: Any) -> Any:
    """Declare a positional argument with its help."""
    return typer.Argument(help=text, show_default=False, **more)


InstanceFile = Annotated[Path, argument("Instance: JSON, job-shop text, or a name: ta01.")]
ScheduleFile = Annotated[Path, argument("A *.schedule.json document.")]
Output = Annotated[Path, option("Write it here.", "-o", "--output")]
OptionalOutput = Annotated[Path | None, option("Write it here.", "-o", "--output")]
Objective = Annotated[
    str | None, option("makespan, total_weighted_completion, maximum_lateness or period.")
]
TimeLimit = Annotated[float | None, option("Seconds [default: 10 without any limit].", "--time")]
Iterations = Annotated[int | None, option("Steps of the solver: reproducible anywhere.")]
Workers = Annotated[int | None, option("Cores to keep busy [default: 2].")]
Options = Annotated[list[str] | None, option(_OPTION, "--option")]
Seed = Annotated[int, option("Random seed.")]
EngineName = Annotated[str, option("loky: this machine; a cluster: dask or ray.", "--engine")]
Jobs = Annotated[int | None, option("Runs at once [default: 1, or a cluster's cores].", min=1)]
AsJson = Annotated[bool, option("Print one JSON object.", "--json")]
Quiet = Annotated[bool, option("Print nothing but errors.", "--quiet")]
History = Annotated[
    Path | None, option("History: *.schedule.json, one a policy.", "-o", "--output")
]
Metrics = Annotated[Path | None, option("All metrics: optsched.metrics/1.")]
ReportFile = Annotated[Path | None, option("Report: .html, .png, .svg or .pdf.", "--plot")]
Devices = Annotated[str | None, option(_DEVICES)]


def parse_options(given: Sequence[str] | None) -> dict[str, Any]:
    """Parse ``["tenure=8", "rule=insertion"]``; values are JSON or text, keys occur once."""
    return {key: _value(text) for key, text in pairs("option", given or (), "KEY=VALUE").items()}


def options_of(
    names: Sequence[str], given: Sequence[str] | None, what: str
) -> dict[str, dict[str, Any]]:
    """Parse options of several solvers or policies: ``genetic.population=9`` is for one alone."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in parse_options(given).items():
        prefix, dot, short = key.partition(".")
        if dot and prefix not in found:
            raise InputError(f"option: {prefix!r:.60} is none of the {what} {', '.join(names)}")
        for name in [prefix] if dot else names:
            found[name][short if dot else key] = value
    return found


def pairs(option: str, given: Sequence[str], form: str) -> dict[str, str]:
    """Parse ``["a=b"]``; no key twice."""
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals or (not value and option != "option"):
            raise InputError(f"{option}: expected {form}, got {text!r:.60}")
        if key in found:
            raise InputError(f"{option}: {key!r:.60} is given twice")
        found[key] = value
    return found


def split_names(option: str, given: Sequence[str]) -> list[str]:
    """Parse names separated by commas, each once, at least one."""
    found = [name.strip() for text in given for name in text.split(",")]
    if not any(found):
        raise InputError(f"{option}: expected names, separated by commas")
    return list(dict.fromkeys(filter(None, found)))


def only(given: Mapping[str, object], possible: bool, where: str) -> None:
    """Refuse options that would have no effect."""
    for name, value in given.items():
        if value is not None and not possible:
            raise InputError(f"{name}: expected only {where}")


def numbers(option: str, text: str) -> list[int]:
    """Parse ``1,2,4``."""
    if not re.fullmatch(r"[0-9]{1,16}(,[0-9]{1,16})*", text, re.ASCII):
        raise InputError(f"{option}: expected numbers such as 1,2,4, got {text!r:.60}")
    return [int(number) for number in text.split(",")]


def quantity(text: str, units: Mapping[str, int]) -> float | None:
    """Parse ``16 MB`` with ``{"MB": 10**6}``; None if it is not a number in one of the units."""
    match = re.fullmatch(r"([0-9]{1,16}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", text, re.ASCII)
    return None if match is None or match[2] not in units else float(match[1]) * units[match[2]]


def with_objective(problem: Any, objective: str | None) -> Any:
    """Return the problem, a job shop or a job array with the named objective.

    Raises
    ------
    InputError
        The problem has one objective only, or not this one.
    """
    from optsched.problems.jobarray.problem import JobArray
    from optsched.problems.jobshop.problem import JobShop

    if objective is None:
        return problem
    if not isinstance(problem, (JobArray, JobShop)):
        raise InputError("objective: only job shops and job arrays have a choice")
    return problem.with_objective(objective)


def _value(text: str) -> Any:
    """Parse JSON; other texts, NaN included, stay texts."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError:
        return text
