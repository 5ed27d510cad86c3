"""The commands; each reads, calls the library, and prints or writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli import arraypipe, bandwidth, generate, topology
from optsched.cli.bench import bench
from optsched.cli.bound import bound
from optsched.cli.convert import convert
from optsched.cli.decide import decide
from optsched.cli.dispatch import dispatch
from optsched.cli.elastic import elastic
from optsched.cli.manifest import manifest
from optsched.cli.options import HELP, criterion, parse_options, with_objective
from optsched.cli.pipeline import pipeline
from optsched.cli.serve import COMMANDS as SERVE
from optsched.cli.serve_learn import COMMANDS as LEARN
from optsched.cli.serve_run import COMMANDS as RUN
from optsched.cli.simulate import simulate
from optsched.cli.warmup import warmup

if TYPE_CHECKING:
    from optsched.model.schedule import Problem, Schedule
    from optsched.solving.result import Result

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Decide what runs where and in which order on a GPU cluster, and run it.",
)
app.add_typer(arraypipe.app, name="arraypipe")
app.add_typer(bandwidth.app, name="bandwidth")
app.add_typer(generate.app, name="generate")
app.add_typer(topology.app, name="topology")

ScheduleFile = Annotated[
    Path, typer.Argument(help="A *.schedule.json document.", show_default=False)
]

Cycles = Annotated[
    int | None,
    typer.Option(help="Cycles of a periodic schedule [default: 3].", show_default=False),
]


@app.command()
def solve(
    file: Annotated[Path, typer.Argument(help="Instance: JSON or job-shop text.")],
    solver: Annotated[str, typer.Option(help="See `optsched solvers`.")] = "auto",
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", "--time", help="Seconds [default: 10 without any limit]."),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="Steps of the solver: reproducible on any machine.")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(help="Of a job array: makespan or period [default: as the file says]."),
    ] = None,
    target: Annotated[int | None, typer.Option(help="Stop at this value.")] = None,
    stop_gap: Annotated[
        float | None, typer.Option(help="Stop at this gap to the bound: 0.01 is one percent.")
    ] = None,
    stop_no_improvement: Annotated[
        float | None, typer.Option(help="Stop so many seconds after the last better schedule.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help=HELP)] = None,
    workers: Annotated[int | None, typer.Option(help="Cores to keep busy [default: 2].")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    warm_start: Annotated[
        Path | None, typer.Option(help="Start from this schedule; never returns worse.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the schedule here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Solve an instance; Ctrl-C keeps the best schedule so far."""
    import optsched
    from optsched.cli.progress import ProgressLine
    from optsched.formats.read_problem import read_problem
    from optsched.io.files import check_not_input, check_writable
    from optsched.model.schedule import Schedule

    if output is not None:
        check_writable(output)
        check_not_input(output, file)
    problem = with_objective(read_problem(file), objective)
    start = None if warm_start is None else Schedule.read(warm_start)
    with ProgressLine(enabled=not quiet) as line:
        result = optsched.solve(
            problem, solver, time_limit=time_limit, iterations=iterations, target=target,
            stop=criterion(stop_gap, stop_no_improvement), workers=workers, seed=seed,
            warm_start=start, on_progress=line, options=parse_options(option or []),
        )  # fmt: skip
    if output is not None and result.schedule is not None:
        result.schedule.write(output)
    if as_json:
        print(json.dumps(_summary(problem, file, result)))
    elif not quiet:
        _print_result(problem, file, result, output)
    if result.schedule is None and result.interrupted:
        raise KeyboardInterrupt
    if result.schedule is None:
        raise typer.Exit(1)


@app.command()
def verify(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="*.schedule.json documents.", show_default=False),
    ],
    instance: Annotated[
        Path | None, typer.Option("--problem", help="The instance that all of them should solve.")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(help="Of a job array: makespan or period [default: as the file says]."),
    ] = None,
) -> None:
    """Check schedules independently of every solver; of a single file all violations are listed.

    Without --problem only whether each agrees with itself. Exit code 1 if one of them has
    violations, 2 if one cannot be read; the others are checked all the same.
    """
    import optsched
    from optsched.cli import say
    from optsched.errors import InputError
    from optsched.formats.read_problem import read_problem
    from optsched.plots.look import plain

    if instance is None and objective is not None:
        raise InputError("objective: it is that of the problem, give --problem FILE too")
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
                print(f"{violation.kind}: {plain(violation.message, 1000)}")
        print(f"{file}: {_verdict(schedule, len(violations), instance)}")
    if code := max(codes):
        raise typer.Exit(code)


@app.command()
def show(file: ScheduleFile) -> None:
    """Objective, bound, gap; load and peak bytes per device; latency per job; critical path."""
    from rich.console import Console

    from optsched.analysis.report import report
    from optsched.analysis.report_table import render

    Console().print(render(report(_scheduled(file))), crop=False)


@app.command()
def plot(
    file: ScheduleFile,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Picture: .png, .svg or .pdf.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Self-contained interactive page.")] = None,
    cycles: Cycles = None,
    pareto: Annotated[
        str | None,
        typer.Option(help="Of serve-bench: routers by two measures, such as accuracy,p99_ms."),
    ] = None,
) -> None:
    """Draw a Gantt chart, or the Pareto front of routers [default: FILE with the suffix .png]."""
    from optsched.io.files import check_outputs
    from optsched.plots.gantt import gantt
    from optsched.plots.html import write as write_html
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
    schedule = _scheduled(file)
    shown = _cycles(file, schedule, cycles)
    if output is not None:
        gantt(schedule, output, cycles=shown)
        print(f"wrote {output}")
    if html is not None:
        write_html(schedule, html, cycles=shown)
        print(f"wrote {html}")


@app.command()
def trace(
    file: ScheduleFile,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="[default: FILE with .trace.json]")
    ] = None,
    cycles: Cycles = None,
) -> None:
    """Write a trace for ui.perfetto.dev or chrome://tracing."""
    from optsched.formats import perfetto
    from optsched.io.files import check_outputs

    path = output or _beside(file, ".trace.json")
    check_outputs([path], [file])
    schedule = _scheduled(file)
    perfetto.write(schedule, path, cycles=_cycles(file, schedule, cycles))
    print(f"wrote {path}")


@app.command()
def solvers(
    file: Annotated[
        Path | None, typer.Argument(help="Say for this instance who takes it, and why not.")
    ] = None,
) -> None:
    """List the installed solvers and what they take."""
    from optsched.cli.solver_table import solver_table

    solver_table(file)


@app.command("train-demo")
def train_demo(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for demo., measured. and replay.schedule.json."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps per job.", min=1)] = 20,
    schedule: Annotated[
        Path | None, typer.Option(help="Train by this schedule of the demo's array.")
    ] = None,
) -> None:
    """Train four sibling jobs by a schedule, and each alone: the weights must be bit-identical."""
    from optsched.arraypipe import run_demo
    from optsched.model.schedule import Schedule

    plan = None if schedule is None else Schedule.read(schedule)
    print(run_demo(out, steps, schedule=plan, say=print))
    print("bit-identical")  # anything else has raised


@app.command()
def version() -> None:
    """Print the version."""
    from optsched.version import __version__

    print(__version__)


OTHERS = (bench, bound, convert, decide, dispatch, elastic, manifest, pipeline, simulate, warmup)
for command in (*OTHERS, *SERVE, *LEARN, *RUN):
    app.command()(command)


def _scheduled(file: Path) -> Schedule:
    """The schedule in a file; `InputError` for an instance without orders and starts."""
    from optsched.errors import InputError
    from optsched.model.schedule import Schedule

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
        f"resources, {kind} {value} {schedule.time_unit}{unknown}"
    )


def _cycles(file: Path, schedule: Schedule, cycles: int | None) -> int:
    """How many cycles to show; `InputError` where there are none to count."""
    from optsched.errors import InputError

    if cycles is not None and schedule.period is None:
        raise InputError(f"cycles: {file} has no period, it is drawn whole: leave --cycles out")
    return 3 if cycles is None else cycles


def _beside(file: Path, suffix: str) -> Path:
    """The file's name with another ending: x.schedule.json -> x.png."""
    name = file.name or "schedule"  # of a folder, which reading will refuse
    for ending in (".schedule.json", ".json"):
        if name.endswith(ending):
            name = name[: -len(ending)]
            break
    return file.parent / (name + suffix)


def _summary(problem: Problem, file: Path, result: Result) -> dict[str, Any]:
    return {
        "instance": problem.name or file.name,
        "solver": result.solver,
        "objective": result.objective,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "status": result.status,
        "seconds": round(result.seconds, 6),
        "history": [
            {
                "seconds": round(step.elapsed, 6),
                "objective": step.objective,
                "lower_bound": step.lower_bound,
                "event": step.event,
                "source": step.source,
            }
            for step in result.history
        ],
        **({"reason": result.reason} if result.reason else {}),
        **({"missing": result.missing} if result.missing else {}),
    }


def _print_result(problem: Problem, file: Path, result: Result, output: Path | None) -> None:
    from optsched.plots.look import plain

    rows = [("instance", problem.name or file.name), ("solver", result.solver)]
    if result.objective is not None:
        rows.append((problem.objective_name, problem.describe(result.objective)))
    if result.lower_bound is not None:
        bound = "lower bound" if problem.objective_name == "makespan" else "bound"
        rows.append((bound, problem.describe(result.lower_bound)))
    if result.gap is not None:
        rows.append(("gap", f"{result.gap:.2%}"))
    stopped = " (interrupted: best so far)" if result.interrupted else ""
    rows.append(("status", result.status + stopped))
    if result.reason:
        rows.append(("reason", result.reason))
    if result.missing:
        left = "" if result.gap is None else f", up to {result.gap:.2%} may be left"
        names = ", ".join(result.missing)
        rows.append(("missing", f"{names}: not compiled in time{left}; see `optsched warmup`"))
    rows.append(("time", f"{result.seconds:.2f} s"))
    if output is not None and result.schedule is not None:
        rows.append(("written", str(output)))
    for key, value in rows:
        print(f"{key:12}{plain(value, 1000)}")
