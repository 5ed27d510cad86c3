"""``optsched bench``: compare solvers; the results file can be continued."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optsched.bench import run, table
from optsched.bench.instances import load_all, published_bounds, read_bounds
from optsched.bench.rows import Results
from optsched.bench.run import Task
from optsched.bench.summary import summarise
from optsched.cli import options, say
from optsched.cli.options import argument, option
from optsched.cli.output import check_picture, console, wrote
from optsched.cli.progress import Bar
from optsched.errors import InputError, UnsupportedProblem
from optsched.io.files import check_outputs
from optsched.solving.fan_out import Engine
from optsched.solving.limits import Limits, available_cores, default_workers
from optsched.solving.solver import solver as find_solver
from optsched.solving.solver import solvers as of_kind
from optsched.solving.solver import support_by_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from optsched.bench.instances import Instance
    from optsched.bench.rows import Row


def bench(
    files: Annotated[list[str], argument("Files, or names such as ta01.", metavar="FILES")],
    solvers: Annotated[str, option("Names, separated by commas.")],
    output: Annotated[Path, option("Results (CSV); continued if it exists.", "-o", "--output")],
    time_limit: options.TimeLimit = None,
    iterations: options.Iterations = None,
    seeds: Annotated[int, option("Runs of each, with seeds 0, 1, ...", min=1)] = 1,
    workers: options.Workers = None,
    option: Annotated[list[str] | None, option("KEY=VALUE, or SOLVER.KEY=VALUE; repeat.")] = None,
    jobs: options.Jobs = None,
    engine: options.EngineName = "loky",
    best_known: Annotated[
        Path | None,
        option(
            "CSV: name, value, bound, or instance, lb, ub [default: published job shops].",
            envvar="OPTSCHED_JSSP_BOUNDS",
        ),
    ] = None,
    plot: Annotated[Path | None, option("Picture of gaps: .png, .svg or .pdf.")] = None,
    latex: Annotated[Path | None, option("Table of gaps for LaTeX (booktabs).")] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare solvers: every solve in its own process, every schedule verified.

    Prints gaps per instance (medians over seeds) and means per family and solver of the whole
    results file. Exit code 1 if a solve failed, or results contradict each other or the bounds.

    Example: optsched bench ft06 la01 --solvers auto,cpsat --time 5 -o results.csv --plot gaps.png
    """
    check_picture(plot)
    check_outputs([plot, latex], [*map(Path, files), best_known, output])
    instances = load_all(files)
    known = None if best_known is None else read_bounds(best_known)
    limits = Limits(
        time_limit, iterations, workers=default_workers() if workers is None else workers,
        seed=seeds - 1,
    )  # fmt: skip
    names = options.split_names("solvers", [solvers])
    tasks, refusals = _tasks(instances, options.options_of(names, option, "solvers"), limits)
    results = Results(output)
    _run(tasks, results, Engine(engine, jobs), refusals, quiet)
    if known is None:
        known = published_bounds((row.instance, row.sha256) for row in results.rows)
    summary = summarise(results.rows, known)
    if as_json:
        print(json.dumps(table.as_json(summary)))
    elif not quiet:
        table.render(summary, console())
        print(f"{len(results.rows)} rows in {output}")
    else:
        for text in (*summary.contradictions, *summary.errors):
            say(f"failed: {text}")
    if plot is not None:
        from optsched.plots.benchmark import bench_report

        bench_report(summary, plot)
    if latex is not None:
        wrote(latex, table.latex(summary), quiet=True)
    if summary.contradictions or summary.errors:
        raise typer.Exit(1)


def _tasks(
    instances: Sequence[Instance], options: dict[str, dict[str, Any]], limits: Limits
) -> tuple[list[Task], list[str]]:
    """Return all solves, seed by seed, and the reasons of refused pairs; refuse if all are."""
    for name, given in options.items():
        kinds = {instance.problem.problem_kind for instance in instances}
        able = [find_solver(name, kind) for kind in kinds if name in of_kind(kind)]
        unknown = set(given).difference(*(getattr(one, "options", {}) for one in able))
        if unknown:
            raise InputError(f"option: {name} has no option {min(unknown)!r:.60}")
    refusals, pairs = [], []
    for instance in instances:
        for name in options:
            if found := support_by_name(name, instance.problem):
                pairs.append((instance, name))
            else:
                reason = found.reason or "refused"
                refusals.append(f"{instance.name}: not for {name}: {reason}")
    if not pairs:
        raise UnsupportedProblem(refusals[0])
    tasks = [
        Task(instance, name, options[name], seed, limits.workers, limits.time_limit,
             limits.iterations)
        for seed in range(limits.seed + 1)
        for instance, name in pairs
    ]  # fmt: skip
    return tasks, refusals


def _run(
    tasks: Sequence[Task], results: Results, engine: Engine, refusals: Sequence[str], quiet: bool
) -> None:
    """Run the tasks without a row, appending row by row."""
    from optsched.kernels.background import compile_all

    done = results.done
    left = [task for task in tasks if task.row.key not in done]
    finished = len(tasks) - len(left)
    with Bar(quiet=quiet) as bar:
        for sentence in refusals:
            bar.print(sentence)
        if not left:
            return
        if missing := run.missing_kernels(left):
            bar.print(f"compiling {len(missing)} kernels, some seconds once on this machine")
            compile_all(missing, available_cores(), bar.task("compiling", len(missing)))
        update = bar.task("bench", len(tasks))
        update(finished)
        try:
            with closing(run.run_all(left, engine)) as rows:
                for row in rows:
                    results.append(row)
                    finished += not row.error
                    bar.print(_line(row))
                    update(finished)
        except KeyboardInterrupt:
            bar.stop()
            say(f"interrupted: {finished} of {len(tasks)} are done, the same command continues")
            raise SystemExit(130) from None


def _line(row: Row) -> str:
    """Format a finished solve."""
    value = "-" if row.objective is None else str(row.objective)
    bound = "-" if row.lower_bound is None else str(row.lower_bound)
    result = f"{value}  bound {bound}  {row.status}  {row.wall_seconds:.1f} s"
    return f"{row.instance}  {row.solver}  seed {row.seed}  {row.error or result}"
