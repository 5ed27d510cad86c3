"""``optsched bench``: solvers against each other, and a file of results that can be resumed."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.bench.instances import load_all, published_bounds, read_bounds
from optsched.bench.run import Task
from optsched.bench.summary import summarise
from optsched.cli import options
from optsched.cli.options import argument, option
from optsched.cli.output import console
from optsched.cli.progress import Bar
from optsched.errors import InputError, UnsupportedProblem
from optsched.solving.limits import Limits, available_cores, default_workers
from optsched.solving.solver import solver as find_solver
from optsched.solving.solver import solvers as of_kind
from optsched.solving.solver import support_by_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bench.instances import Instance
    from optsched.bench.rows import Results, Row


def bench(
    files: Annotated[list[str], argument("Files, or names such as ta01.", metavar="FILES")],
    solvers: Annotated[str, option("Names, separated by commas.")],
    output: Annotated[Path, option("Results (CSV), to be continued.", "-o", "--output")],
    time_limit: options.TimeLimit = None,
    iterations: options.Iterations = None,
    seeds: Annotated[int, option("Runs of each, with seeds 0, 1, ...", min=1)] = 1,
    workers: options.Workers = None,
    option: options.Options = None,
    jobs: Annotated[int, option("Solves at once, <= cores / workers.", min=1)] = 1,
    bounds: Annotated[
        Path | None,
        option(
            "CSV of known bounds (instance, lb, ub) [default: of published job shops].",
            envvar="OPTSCHED_JSSP_BOUNDS",
        ),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare solvers: every solve in its own process, every schedule verified.

    An --option SOLVER.KEY=VALUE is for one of several. Prints the gaps per instance (medians over
    seeds) and means per family and solver of the whole results file. Exit code 1 if a solve failed
    or results contradict each other or the bounds.
    """
    from optsched.bench.rows import Results

    instances = load_all(files)
    known = None if bounds is None else read_bounds(bounds)
    limits = Limits(
        time_limit, iterations, workers=default_workers() if workers is None else workers,
        seed=seeds - 1,
    )  # fmt: skip
    names = options.words("solvers", [solvers])
    tasks, refusals = _tasks(instances, options.options_of(names, option, "solvers"), limits)
    results = Results(output)
    _run(tasks, results, jobs, refusals, quiet)
    if known is None:
        known = published_bounds((row.instance, row.sha256) for row in results.rows)
    summary = summarise(results.rows, known)
    if as_json:
        from optsched.bench.table import as_json as summary_json

        print(json.dumps(summary_json(summary)))
    else:
        from optsched.bench.table import render

        render(summary, console())
        print(f"{len(results.rows)} rows in {output}")
    if summary.contradictions or summary.errors:
        raise typer.Exit(1)


def _tasks(
    instances: Sequence[Instance], options: dict[str, dict[str, Any]], limits: Limits
) -> tuple[list[Task], list[str]]:
    """All solves, seed by seed, and why some solvers leave out some instances.

    Raises
    ------
    InputError
        An unknown solver or option.
    UnsupportedProblem
        No solver takes any of the instances.
    """
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
    tasks: Sequence[Task], results: Results, jobs: int, refusals: Sequence[str], quiet: bool
) -> None:
    """Run what is not done yet, appending row by row."""
    from optsched.bench.run import missing_kernels, run_all
    from optsched.kernels.background import compile_all

    def left() -> list[Task]:
        return [task for task in tasks if task.row.key not in results.done]

    with Bar(quiet=quiet) as bar:
        for sentence in refusals:
            bar.say(sentence)
        if not left():
            return
        tell = bar.task("bench", len(tasks))
        tell(len(tasks) - len(left()))
        if missing := missing_kernels(left()):
            bar.say(f"compiling {len(missing)} kernels, some seconds once on this machine")
            compile_all(missing, available_cores(), bar.task("compiling", len(missing)))
        try:
            with closing(run_all(left(), jobs)) as rows:
                for row in rows:
                    results.append(row)
                    tell(len(tasks) - len(left()))
                    bar.say(_line(row))
        except KeyboardInterrupt:
            bar.stop()
            ready = f"{len(tasks) - len(left())} of {len(tasks)} are done"
            bar.say(f"interrupted: {ready}, the same command goes on with the rest")
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
