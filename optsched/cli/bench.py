"""``optsched bench``: solvers against each other, and a file of results that can be resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli.options import HELP, parse_options
from optsched.errors import InputError, UnsupportedProblem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bench.instances import Instance
    from optsched.bench.rows import Results, Row
    from optsched.bench.run import Task


def bench(
    files: Annotated[
        list[str], typer.Argument(metavar="FILES", help="Instances: files, or ta01 to ta80.")
    ],
    solvers: Annotated[str, typer.Option(help="Names, separated by commas.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Results (CSV); what is there is not run again.")
    ],
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", "--time", help="Seconds each [default: 10].")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="Steps of the solver, instead of a time limit.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each, with seeds 0, 1, ...", min=1)] = 1,
    workers: Annotated[
        int | None, typer.Option(help="Cores that each solve may keep busy [default: 2].")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help=f"{HELP} SOLVER.KEY=VALUE for one of several.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Solves at once; more than cores / workers spoils times.", min=1)
    ] = 1,
    bounds: Annotated[
        Path | None,
        typer.Option(
            envvar="OPTSCHED_JSSP_BOUNDS",
            help="CSV of known bounds (instance, lb, ub) to measure gaps against.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of the gaps over time: .png, .svg or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Compare solvers: every solve in its own process, every schedule verified.

    Prints the gaps per instance (medians over seeds) and means per family and solver of the whole
    results file. Exit code 1 if a solve failed or results contradict each other or the bounds.
    """
    from optsched.bench.instances import check_sizes, load_all, read_bounds
    from optsched.bench.rows import Results
    from optsched.bench.summary import curves, summarise

    _check_picture(plot)
    instances = load_all(files)
    known = {} if bounds is None else read_bounds(bounds)
    check_sizes(instances, known, str(bounds))
    tasks, refusals = _tasks(
        instances, solvers, option or [], seeds, workers, time_limit, iterations
    )
    results = Results(output)
    _run(tasks, results, jobs, refusals, quiet)
    summary = summarise(results.rows, known)
    drawn = curves(results.rows, known) if plot is not None else {}
    drawn = {name: runs for name, runs in drawn.items() if runs[0]}
    if plot is not None and drawn:
        from optsched.plots.anytime import anytime

        horizon = max(row.time_limit or row.seconds or 0.0 for row in results.rows)
        anytime(drawn, plot, horizon=horizon)
    if as_json:
        from optsched.bench.table import as_json as summary_json

        print(json.dumps(summary_json(summary)))
    else:
        from rich.console import Console

        from optsched.bench.table import render

        render(summary, Console(width=None if sys.stdout.isatty() else 200))
        print(f"{len(results.rows)} rows in {output}")
        if plot is not None:
            print(f"wrote {plot}" if drawn else f"no {plot}: there is no schedule to draw")
    if summary.contradictions or summary.errors:
        raise typer.Exit(1)


def _check_picture(plot: Path | None) -> None:
    if plot is None:
        return
    from optsched.io.files import check_writable
    from optsched.plots.picture import picture_style, suffix_of

    suffix_of(plot)
    check_writable(plot)
    with picture_style():
        pass


def _tasks(
    instances: Sequence[Instance],
    solvers: str,
    option: Sequence[str],
    seeds: int,
    workers: int | None,
    time_limit: float | None,
    iterations: int | None,
) -> tuple[list[Task], list[str]]:
    """All solves, seed by seed, and why some solvers leave out some instances.

    Raises
    ------
    InputError
        An unknown solver or option, or a limit out of range.
    UnsupportedProblem
        No solver takes any of the instances.
    """
    from optsched.bench.run import Task
    from optsched.solving.limits import Limits
    from optsched.solving.limits import default_workers as usual
    from optsched.solving.solver import solver as find_solver
    from optsched.solving.solver import solvers as of_kind
    from optsched.solving.solver import support_by_name

    names = list(dict.fromkeys(name.strip() for name in solvers.split(",") if name.strip()))
    if not names:
        raise InputError("solvers: expected names, separated by commas")
    given = _options_of(names, parse_options(option))
    limits = Limits(
        time_limit, iterations, workers=usual() if workers is None else workers, seed=seeds - 1
    )
    for name, options in given.items():
        kinds = {instance.problem.problem_kind for instance in instances}
        able = [find_solver(name, kind) for kind in kinds if name in of_kind(kind)]
        unknown = set(options).difference(*(getattr(one, "options", {}) for one in able))
        if unknown:
            raise InputError(f"option: {name} has no option {min(unknown)!r:.60}")
    refusals = []
    pairs = []
    for instance in instances:
        for name in names:
            found = support_by_name(name, instance.problem)
            if found:
                pairs.append((instance, name))
            else:
                reason = found.reason or "refused"
                refusals.append(f"{instance.name}: not for {name}: {reason}")
    if not pairs:
        raise UnsupportedProblem(refusals[0])
    tasks = [
        Task(instance, name, given[name], seed, limits.workers, limits.time_limit, iterations)
        for seed in range(seeds)
        for instance, name in pairs
    ]
    return tasks, refusals


def _options_of(names: Sequence[str], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Options by solver: ``cpsat.threads`` is for cpsat alone."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in options.items():
        owner, dot, rest = key.partition(".")
        for name in [owner] if dot and owner in names else names:
            found[name][rest if dot and owner in names else key] = value
    return found


def _run(
    tasks: Sequence[Task], results: Results, jobs: int, refusals: Sequence[str], quiet: bool
) -> None:
    """Run what is not done yet, appending row by row."""
    from contextlib import closing

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from optsched.bench.run import run_all, warm_up
    from optsched.plots.look import plain

    done = results.done
    left = [task for task in tasks if task.row.key not in done]
    console = Console(stderr=True, quiet=quiet, highlight=False, markup=False)
    for sentence in refusals:
        console.print(plain(sentence, 300))
    if not left:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    shown = not quiet and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        bar = progress.add_task("bench", total=len(tasks), completed=len(tasks) - len(left))
        warm_up()
        try:
            with closing(run_all(left, jobs)) as rows:
                for row in rows:
                    results.append(row)
                    progress.advance(bar)
                    console.print(plain(_line(row), 300))
        except KeyboardInterrupt:
            progress.stop()
            left = [task for task in tasks if task.row.key not in results.done]
            ready = f"{len(tasks) - len(left)} of {len(tasks)} are done"
            console.print(f"interrupted: {ready}, the same command goes on with the rest")
            raise typer.Exit(130) from None


def _line(row: Row) -> str:
    """What is said of a finished solve."""
    if row.error:
        return f"{row.instance}  {row.solver}  seed {row.seed}  {row.error}"
    value = "-" if row.objective is None else str(row.objective)
    bound = "-" if row.lower_bound is None else str(row.lower_bound)
    return (
        f"{row.instance}  {row.solver}  seed {row.seed}  {value}  bound {bound}  {row.status}  "
        f"{row.wall_seconds:.1f} s"
    )
