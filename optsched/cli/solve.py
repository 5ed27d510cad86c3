"""``optsched solve``."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated, Any

import typer

import optsched
from optsched.cli import options
from optsched.cli.options import option
from optsched.cli.output import facts
from optsched.cli.progress import Bar
from optsched.formats.read_problem import read_problem
from optsched.io.files import check_outputs
from optsched.model.schedule import Schedule
from optsched.solving.stop import AnyOf, Gap, NoImprovement

if TYPE_CHECKING:
    from optsched.model.schedule import Problem
    from optsched.solving.progress import Criterion
    from optsched.solving.result import Result


_BY_ORDERS = ("jobshop", "jobarray", "periodic")
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

    Example: optsched solve ta01 --time-limit 10 -o plan.schedule.json
    """
    check_outputs([output], [file])
    problem = options.with_objective(read_problem(file), objective)
    start = None if warm_start is None else Schedule.read(warm_start)
    with Bar(quiet=quiet) as bar:
        result = optsched.solve(
            problem, solver, time_limit=time_limit, iterations=iterations, target=target,
            stop=_criterion(stop_gap, stop_no_improvement), workers=workers, seed=seed,
            warm_start=start, on_progress=bar, options=options.parse_options(option),
        )  # fmt: skip
    if output is not None and result.schedule is not None:
        result.schedule.write(output)
    if as_json:
        print(json.dumps(_summary(problem, file, result)))
    elif not quiet:
        facts(_rows(problem, file, result, output), max(12, len(problem.objective_name) + 2))
    if result.schedule is None and result.interrupted:
        raise KeyboardInterrupt
    if result.schedule is None:
        raise typer.Exit(1)


def _criterion(gap: float | None, no_improvement: float | None) -> Criterion | None:
    """Combine the ``--stop-...`` options; None if there are none."""
    found: list[Criterion] = [] if gap is None else [Gap(gap)]
    if no_improvement is not None:
        found.append(NoImprovement(seconds=no_improvement))
    return AnyOf(*found) if found else None


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
            {"seconds": round(step.elapsed, 6)} | {key: getattr(step, key) for key in _HISTORY}
            for step in result.history
        ],
        **_chosen(problem, result),
        **({"reason": result.reason} if result.reason else {}),
        **({"missing": result.missing} if result.missing else {}),
    }


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
        ("lower bound" if problem.problem_kind in _BY_ORDERS else "bound",
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
