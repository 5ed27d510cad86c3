"""``optsched show``: what is in a schedule or an instance, on the terminal or drawn."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

import optsched
from optsched.cli.options import AsJson, Objective, argument, option, with_objective
from optsched.cli.output import facts, wrote
from optsched.cli.solve import BY_ORDERS
from optsched.cli.tables import display, table
from optsched.errors import InputError
from optsched.formats.read_problem import read_problem
from optsched.io.files import check_outputs
from optsched.io.text import bytes_text, one_line, readable_unit, share_text, time_in, time_text
from optsched.model.objectives import LATENESS
from optsched.model.schedule import Schedule
from optsched.solving.solver import KINDS, support_by_name

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from optsched.analysis.iterations import JobReport
    from optsched.analysis.report import CriticalStep, Report
    from optsched.model.schedule import Problem

_MOST_LINES = 24  # of the critical path
_MOST_JOBS = 64


def show(
    file: Annotated[
        Path | None, argument("A schedule, or an instance [default: lists the solvers].")
    ] = None,
    output: Annotated[
        Path | None,
        option("Drawing: .png, .svg, .pdf, .html, or .json (Perfetto).", "-o", "--output"),
    ] = None,
    cycles: Annotated[int | None, option("Cycles to draw if it is periodic [default: 3].")] = None,
    objective: Objective = None,
    as_json: AsJson = False,
) -> None:
    """Describe a schedule, or draw it with -o; print size, bounds and solvers of an instance.

    None of the bounds needs a search; `optsched solve --solver cpsat` proves higher ones. Exit
    code 1 if the instance has no schedule.

    Example: optsched show plan.schedule.json -o plan.html
    """
    check_outputs([output], [file])
    if file is None:
        if any((output, cycles, objective)):
            raise InputError("file: missing; options of an instance or a schedule need it")
        found = {kind: optsched.solvers(kind) for kind in KINDS}
        if as_json:
            print(json.dumps(found))
        else:
            facts((kind, ", ".join(names)) for kind, names in found.items())
        return
    problem = read_problem(file)
    schedule = Schedule.read(file) if isinstance(problem, Schedule) else None
    if schedule is None or not schedule.is_scheduled:
        if output is not None or cycles is not None:
            solved = f"optsched solve {file} -o {file.name.partition('.')[0]}.schedule.json"
            raise InputError(f"{file}: an instance, only schedules are drawn: {solved}")
        _show_problem(with_objective(problem, objective), file, as_json)
        return
    if objective is not None:
        raise InputError(f"objective: {file} is a schedule, it has the objective it was made for")
    if cycles is not None and (output is None or schedule.period is None):
        raise InputError("cycles: only to draw a schedule with a period, with -o")
    if output is not None and as_json:
        raise InputError("json: prints, and -o draws; give one of them")
    if output is not None:
        _draw(schedule, output, 3 if cycles is None else cycles)
        return
    from optsched.analysis.report import report

    found_report = report(schedule)
    if as_json:
        print(msgspec.json.encode(found_report).decode())
    else:
        display(render(found_report))


def _draw(schedule: Schedule, output: Path, cycles: int) -> None:
    """Write a picture, a page or a trace, as the name of the file ends."""
    ending = output.suffix.lower()
    if ending == ".json":
        from optsched.formats import perfetto

        wrote(output, lambda path: perfetto.write(schedule, path, cycles=cycles))
        return
    from optsched.plots import gantt, html
    from optsched.plots.picture import PICTURES, check_suffix

    check_suffix(output, (*PICTURES, ".html", ".json"))
    draw: Any = html.write if ending == ".html" else gantt
    wrote(output, lambda path: draw(schedule, path, cycles=cycles))


def _show_problem(problem: Problem, file: Path, as_json: bool) -> None:
    """Print size, bounds and solvers of an instance."""
    begin = perf_counter()
    reason = problem.infeasibility()
    bounds = {} if reason else named_bounds(problem)
    lower_bound = None if reason else max(bounds.values())
    seconds = perf_counter() - begin
    kind = problem.problem_kind
    supports = {name: support_by_name(name, problem) for name in optsched.solvers(kind)}
    if as_json:
        summary = {
            "instance": problem.name or file.name, "kind": kind, "size": _size(problem),
            "bounds": bounds, "lower_bound": lower_bound, "seconds": round(seconds, 6),
            "solvers": [name for name, one in supports.items() if one],
            **({"reason": reason} if reason else {}),
        }  # fmt: skip
        print(json.dumps(summary))
    else:
        label = "lower bound" if kind in BY_ORDERS else "bound"
        best = {} if lower_bound is None else {label: lower_bound}
        values = [(name, problem.describe(value)) for name, value in {**bounds, **best}.items()]
        rows = [
            ("instance", problem.name or file.name), ("kind", kind), ("size", _size(problem)),
            ("infeasible", reason or None), *values,
            ("solvers", ", ".join(name for name, one in supports.items() if one)),
            *((f"not {name}", one.reason) for name, one in supports.items() if not one),
        ]  # fmt: skip
        facts(rows, max(18, *(len(name) + 2 for name, _ in rows)))
    if reason:
        raise typer.Exit(1)


def _size(problem: Problem) -> str:
    """Describe the size of an instance."""
    if isinstance(problem, optsched.GpuPlacement):
        return f"{problem.k} of {len(problem.state.free)} free GPUs"
    if isinstance(problem, optsched.QuotaPlan):
        return f"{len(problem.jobs)} jobs, {problem.n_gpus} GPUs"
    graph = problem.graph()
    return (
        f"{len({*graph.job.tolist()})} jobs, {graph.n_operations} operations on "
        f"{graph.n_resources} resources"
    )


def named_bounds(problem: Problem) -> dict[str, int]:
    """Return every bound that needs no search; ``carlier`` is exact for each single machine."""
    if problem.problem_kind == "gpus":
        return {"best pattern": problem.lower_bound()}
    if problem.problem_kind == "quota":
        return {"hull or level": problem.lower_bound()}
    from optsched.model.objective_bounds import objective_bounds
    from optsched.model.objectives import LATENESS, MAKESPAN, as_makespan
    from optsched_solvers.shop.proof.one_machine import one_machine_bound

    bounds = getattr(problem, "bounds", None)
    found = dict(bounds()) if bounds is not None else objective_bounds(problem)
    if problem.objective_name not in (MAKESPAN, LATENESS):
        return found
    reduced, shift = as_makespan(problem)
    return {**found, "carlier": one_machine_bound(reduced.graph()) - shift}


def render(report: Report) -> Group:
    """Return the headline, the resources, the jobs and the critical path; names are data."""
    from rich.console import Group

    parts: list[RenderableType] = [_headline(report), "", _resources(report), ""]
    if report.iterations:
        rows = _alike(report.iterations)
        parts.append(_jobs(report, rows[:_MOST_JOBS]))
        if len(rows) > _MOST_JOBS:
            last = rows[_MOST_JOBS - 1][1].job
            parts.append(Text(f"… and the jobs after {last}", style="dim"))
        parts.append("")
    if report.completions:
        parts += [_completions(report), ""]
    return Group(*parts, *_path(report))


def _completions(report: Report) -> Table:
    """Return the ends of jobs, those first that count most."""
    unit = readable_unit(report.time_unit, report.span)
    late = report.objective_name == LATENESS
    heads = ["job", "end", *(["due", "lateness"] if late else ["weight", "weight x end"])]
    rows: list[list[str | Text]] = []
    counts = [
        job.end - job.counted if late else job.end * job.counted for job in report.completions
    ]
    for count, job in sorted(zip(counts, report.completions, strict=True), reverse=True):
        counted = time_in(unit, job.counted) if late else str(job.counted)
        name = Text(one_line(job.name, 40))
        rows.append([name, time_in(unit, job.end), counted, time_in(unit, count)])
    return table(heads, rows[:_MOST_JOBS])


def _headline(report: Report) -> Text:
    from optsched.plots.look import worth

    text = Text(one_line(report.name) or "schedule", style="bold")
    parts = [*worth(report), *([] if report.status == "optimal" else [report.status])]
    if report.solver:
        parts.append(f"by {one_line(report.solver, 40)}")
    text.append("\n" + ", ".join(parts), "green" if report.status == "optimal" else "default")
    size = f"\n{report.operations} operations of {report.jobs} jobs"
    text.append(f"{size} on {len(report.resources)} resources", "dim")
    if report.throughput is not None:
        number = sum(job.iterations for job in report.iterations)
        when = "" if report.period is None else " a cycle"
        rate = f"{report.throughput:.4g} a second"
        text.append(f"\n{number} iteration{'s' * (number != 1)}{when}, {rate}")
    return text


def _resources(report: Report) -> Table:
    memory = any(row.peak_memory or row.memory for row in report.resources)
    setups = any(row.setup for row in report.resources)
    heads = ["busy", "busy %", *(["setup", "setup %"] if setups else []), "bubble %"]
    heads = ["resource", *heads, *(["peak bytes", "capacity"] if memory else [])]
    rows: list[list[str | Text]] = []
    unit = readable_unit(report.time_unit, report.span)
    for row in report.resources:
        name = Text(one_line(row.name, 40))
        cells: list[str | Text] = [name, time_in(unit, row.busy), share_text(row.busy_share)]
        if setups:
            cells += [time_in(unit, row.setup), share_text(row.setup_share)]
        cells.append(share_text(row.bubble_share))
        if memory:
            over = 0 < row.memory < row.peak_memory
            cells.append(Text(bytes_text(row.peak_memory), style="bold red" if over else ""))
            cells.append(bytes_text(row.memory) if row.memory else "unlimited")
        rows.append(cells)
    return table(heads, rows)


def _alike(jobs: tuple[JobReport, ...]) -> list[tuple[JobReport, JobReport]]:
    """Return the first and last of every run of neighbors that differ only in their number."""
    alike = itertools.groupby(jobs, key=lambda job: replace(job, job=0, name=""))
    runs = [list(run) for _, run in alike]
    return [(run[0], run[-1]) for run in runs]


def _jobs(report: Report, rows: list[tuple[JobReport, JobReport]]) -> Table:
    rolls = report.period is not None
    recompute = report.iterations[0].recompute is not None
    heads = ["job", "iterations", "latency", *(["cycles"] if rolls else []), "wait", "wait %"]
    unit = readable_unit(report.time_unit, report.span)
    found: list[list[str | Text]] = []
    for first, last in rows:
        ends = [one_line(row.name, 40) or str(row.job) for row in (first, last)]
        name = " … ".join(ends[: 1 + (first is not last)])
        cells: list[str | Text] = [name, str(first.iterations), time_in(unit, first.latency)]
        if first.cycles is not None:
            cells.append(f"{first.cycles:.2f}")
        share = first.wait / first.latency if first.latency else 0.0
        cells += [time_in(unit, first.wait), share_text(share)]
        if recompute:
            cells.append({True: "yes", False: "no", None: ""}[first.recompute])
        found.append(cells)
    return table([*heads, *(["recompute"] if recompute else [])], found)


def _path(report: Report) -> list[RenderableType]:
    steps = report.critical_path
    if not steps:
        return [Text("no critical path: nothing runs, or no cycle of operations is tight")]
    what = "critical path" if report.period is None else "critical cycle"
    title = f"{what}, {len(steps)} operations"
    if report.least_period is not None and report.least_period < report.span:
        least = time_text(report.least_period, report.time_unit)
        title += f"; these orders allow a period of {least}"
    grid = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="ellipsis")
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    runs = [list(run) for _, run in itertools.groupby(steps, key=lambda step: step.resources)]
    for run in runs[:_MOST_LINES]:
        grid.add_row(*_run_cells(run, report.time_unit))
    lines: list[RenderableType] = [Text(f"{title}:", style="bold"), grid]
    if len(runs) > _MOST_LINES:
        more = sum(len(run) for run in runs[_MOST_LINES:])
        lines.append(Text(f"  … and {more} operations more", style="dim"))
    if not report.path_is_complete:
        lines.append(Text("  it does not reach time 0: see its first line", style="yellow"))
    return lines


def _run_cells(run: list[CriticalStep], time_unit: str) -> list[Text]:
    """Return time, resource, operations and reason of steps on the same resources."""
    first, last = run[0], run[-1]
    what = Text(one_line(first.name))
    if len(run) > 1:
        what.append((" … " if len(run) > 2 else ", ") + one_line(last.name))
        what.append(f" ({len(run)} operations)", "dim")
    return [
        Text(time_text(first.start, time_unit), "dim"),
        Text(one_line(" + ".join(first.resources), 40), "cyan"),
        what,
        Text(one_line(first.reason, 120), "dim"),
    ]
