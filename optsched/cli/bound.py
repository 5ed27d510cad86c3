"""``optsched bound``: how good a schedule can be at best."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli.options import HELP, with_objective

if TYPE_CHECKING:
    from optsched.model.schedule import Problem

PROVERS = ("branch_and_bound", "cpsat")
"""Solvers for a better bound, in order of preference."""


def bound(
    file: Annotated[Path, typer.Argument(help="Instance: JSON or job-shop text.")],
    objective: Annotated[
        str | None,
        typer.Option(help="Of a job array: makespan or period [default: as the file says]."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit", "--time", help="Let a solver raise the bound so many seconds."
        ),
    ] = None,
    solver: Annotated[
        str | None, typer.Option(help="Which [default: branch_and_bound, or cpsat].")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Cores to keep busy [default: 2].")] = None,
    option: Annotated[list[str] | None, typer.Option(help=HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Lower bounds by name, and the best of them; exit code 1 if no schedule can exist."""
    from optsched.errors import InputError
    from optsched.formats.read_problem import read_problem

    if time_limit is None and (solver is not None or workers is not None or option):
        raise InputError("time-limit: missing, and without it no solver is asked")
    problem = with_objective(read_problem(file), objective)
    begin = perf_counter()
    reason = problem.infeasibility()
    found = {} if reason else named_bounds(problem)
    if time_limit is not None and not reason:
        name, value, reason = _solved(problem, solver, time_limit, workers, option or [])
        if value is not None and not reason:
            found[name] = value
    best = None if reason else max(found.values(), default=0)
    summary: dict[str, Any] = {
        "instance": problem.name or file.name,
        "bounds": {} if reason else found,
        "lower_bound": best,
        "seconds": round(perf_counter() - begin, 6),
        **({"reason": reason} if reason else {}),
    }
    if as_json:
        print(json.dumps(summary))
    else:
        _print(summary, problem)
    if reason:
        raise typer.Exit(1)


def named_bounds(problem: Problem) -> dict[str, int]:
    """Every bound that needs no search, by name; ``carlier`` is exact for each machine alone."""
    if problem.problem_kind == "gpus":
        return {"best pattern": problem.lower_bound()}
    if problem.problem_kind == "quota":
        return {"hull or level": problem.lower_bound()}
    from optsched.model.bounds import makespan_bounds
    from optsched_solvers.shop.proof.one_machine import one_machine_bound

    own = getattr(problem, "bounds", None)
    found = dict(own()) if own is not None else makespan_bounds(problem.graph())
    if problem.objective_name == "period":
        return found
    return {**found, "carlier": one_machine_bound(problem.graph())}


def _solved(
    problem: Problem, solver: str | None, time_limit: float, workers: int | None, option: list[str]
) -> tuple[str, int | None, str]:
    """The solver's name, its bound, and why nothing is feasible if it proved that."""
    import optsched
    from optsched.cli.options import parse_options
    from optsched.solving.solver import support_by_name

    if solver is None:
        able = [name for name in PROVERS if name in optsched.solvers(problem.problem_kind)]
        taken = (name for name in able if support_by_name(name, problem))
        solver = next(taken, able[-1] if able else "auto")
    result = optsched.solve(
        problem, solver, time_limit=time_limit, workers=workers, options=parse_options(option)
    )
    reason = result.reason if result.status == "infeasible" else ""
    return solver, result.lower_bound, reason


def _print(summary: dict[str, Any], problem: Problem) -> None:
    from optsched.plots.look import plain

    print(f"{'instance':18}{plain(summary['instance'], 1000)}")
    if summary["lower_bound"] is None:
        print(f"{'infeasible':18}{plain(summary['reason'], 1000)}")
        return
    for name, value in summary["bounds"].items():
        print(f"{plain(name, 16):18}{problem.describe(value)}")
    what = "lower bound" if problem.problem_kind in ("jobshop", "jobarray", "periodic") else "bound"
    print(f"{what:18}{problem.describe(summary['lower_bound'])}")
