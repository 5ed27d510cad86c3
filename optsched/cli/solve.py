"""``optsched solve``, ``bound``, ``solvers``: an answer, how good one can be, who can give one."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli.options import (
    AsJson,
    InstanceFile,
    Iterations,
    Objective,
    OptionalOutput,
    Options,
    Quiet,
    Seed,
    TimeLimit,
    Workers,
    parse_options,
    with_objective,
)

if TYPE_CHECKING:
    from optsched.model.schedule import Problem
    from optsched.solving.progress import Criterion
    from optsched.solving.result import Result

PROVERS = ("branch_and_bound", "cpsat")
"""Solvers for a better bound, in order of preference."""


def solve(
    file: InstanceFile,
    solver: Annotated[str, typer.Option(help="See `optsched solvers`.")] = "auto",
    time_limit: TimeLimit = None,
    iterations: Iterations = None,
    objective: Objective = None,
    target: Annotated[int | None, typer.Option(help="Stop at this value.")] = None,
    stop_gap: Annotated[
        float | None, typer.Option(help="Stop at this gap to the bound: 0.01 is one percent.")
    ] = None,
    stop_no_improvement: Annotated[
        float | None, typer.Option(help="Stop so many seconds after the last better schedule.")
    ] = None,
    option: Options = None,
    workers: Workers = None,
    seed: Seed = 0,
    warm_start: Annotated[
        Path | None, typer.Option(help="Start from this schedule; never returns worse.")
    ] = None,
    output: OptionalOutput = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Solve an instance; Ctrl-C keeps the best schedule so far."""
    import optsched
    from optsched.cli.output import facts
    from optsched.cli.progress import ProgressLine
    from optsched.formats.read_problem import read_problem
    from optsched.io.files import check_outputs
    from optsched.model.schedule import Schedule

    check_outputs([output], [file])
    problem = with_objective(read_problem(file), objective)
    start = None if warm_start is None else Schedule.read(warm_start)
    with ProgressLine(enabled=not quiet) as line:
        result = optsched.solve(
            problem, solver, time_limit=time_limit, iterations=iterations, target=target,
            stop=_criterion(stop_gap, stop_no_improvement), workers=workers, seed=seed,
            warm_start=start, on_progress=line, options=parse_options(option),
        )  # fmt: skip
    if output is not None and result.schedule is not None:
        result.schedule.write(output)
    if as_json:
        print(json.dumps(_summary(problem, file, result)))
    elif not quiet:
        facts(_rows(problem, file, result, output))
    if result.schedule is None and result.interrupted:
        raise KeyboardInterrupt
    if result.schedule is None:
        raise typer.Exit(1)


def bound(
    file: InstanceFile,
    objective: Objective = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", "--time", help="Let a solver raise it so many seconds."),
    ] = None,
    solver: Annotated[
        str | None, typer.Option(help="Which [default: branch_and_bound, or cpsat].")
    ] = None,
    workers: Workers = None,
    option: Options = None,
    as_json: AsJson = False,
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
        limits = {"time_limit": time_limit, "workers": workers, "options": parse_options(option)}
        name, value, reason = _solved(problem, solver, limits)
        if value is not None and not reason:
            found[name] = value
    summary: dict[str, Any] = {
        "instance": problem.name or file.name,
        "bounds": {} if reason else found,
        "lower_bound": None if reason else max(found.values(), default=0),
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


def solvers(
    file: Annotated[
        Path | None, typer.Argument(help="Say for this instance who takes it, and why not.")
    ] = None,
) -> None:
    """List the installed solvers and what they take."""
    from optsched.cli.output import console, table
    from optsched.solving.solver import solvers as of_kind
    from optsched.solving.solver import support_by_name

    out = console()
    if file is not None:
        from optsched.formats.read_problem import read_problem

        problem = read_problem(file)
        for name in of_kind():
            found = support_by_name(name, problem)
            out.print(f"{name:18}{'yes' if found else f'no: {found.reason}'}")
        return

    def able(problem: Problem) -> list[str]:
        return [name for name in of_kind(problem.problem_kind) if support_by_name(name, problem)]

    orders = sorted({*of_kind("jobshop"), *of_kind("jobarray"), *of_kind("periodic")})
    shown = table("problem", *orders, left=range(len(orders) + 1))
    for kind, problem in _smallest().items():
        taken = able(problem)
        shown.add_row(kind, *("yes" if name in taken else "-" for name in orders))
    out.print(shown)
    for text, kind in (("GpuPlacement", "gpus"), ("Routing", "routing")):
        out.print(f"{text}: {', '.join(of_kind(kind))}")
    for kind, problem in _smallest_plans().items():
        out.print(f"{kind}: {', '.join(able(problem))}")
    out.print("`optsched solvers FILE` says why a solver refuses an instance.")


def _criterion(gap: float | None, no_improvement: float | None) -> Criterion | None:
    """What the ``--stop-...`` options say; None if nothing."""
    from optsched.solving.stop import AnyOf, Gap, NoImprovement

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


def _rows(
    problem: Problem, file: Path, result: Result, output: Path | None
) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        ("instance", problem.name or file.name), ("solver", result.solver),
    ]  # fmt: skip
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
        rows.append(("written", output))
    return rows


def _smallest() -> dict[str, Problem]:
    """The smallest problem of each kind that is answered by orders."""
    from optsched import JobArray, JobShop, Resource, Rows, Schedule

    shop, blocks = [[(0, 1), (1, 1)]], [[1, 1], [1, 1]]
    gang = Schedule(
        resources=(Resource("a"), Resource("b")),
        duration=[1, 1],  # type: ignore[arg-type]
        op_resources=Rows.of([[0, 1], [0]]),
    )
    return {
        "JobShop": JobShop(shop),
        "JobShop, deadlines": JobShop(shop, deadline=[9]),
        "JobArray": JobArray(blocks, blocks),
        "JobArray, memory": JobArray(blocks, blocks, activation=1, memory=1),
        "JobArray, switches": JobArray(blocks, blocks, switch=1),
        "JobArray, period": JobArray(blocks, blocks, objective="period"),
        "graph with gangs": gang,
    }


def _smallest_plans() -> dict[str, Problem]:
    from optsched import QuotaJob, QuotaPlan

    jobs = [QuotaJob("a", [1, 2], utility=[1, 2])]
    tight = [QuotaJob("a", [1, 2], utility=[1, 2], locality="single")]
    return {
        "QuotaPlan": QuotaPlan(jobs, budget=2),
        "QuotaPlan, types": QuotaPlan(jobs, budget={"x": 1, "y": 1}),
        "QuotaPlan, locality": QuotaPlan(tight, nodes=[2]),
    }


def _solved(
    problem: Problem, solver: str | None, limits: dict[str, Any]
) -> tuple[str, int | None, str]:
    """The solver's name, its bound, and why nothing is feasible if it proved that."""
    import optsched
    from optsched.solving.solver import support_by_name

    if solver is None:
        able = [name for name in PROVERS if name in optsched.solvers(problem.problem_kind)]
        taken = (name for name in able if support_by_name(name, problem))
        solver = next(taken, able[-1] if able else "auto")
    result = optsched.solve(problem, solver, **limits)
    reason = result.reason if result.status == "infeasible" else ""
    return solver, result.lower_bound, reason


def _print(summary: dict[str, Any], problem: Problem) -> None:
    from optsched.cli.output import facts

    rows = [("instance", summary["instance"])]
    if summary["lower_bound"] is None:
        rows.append(("infeasible", summary["reason"]))
    else:
        rows += [(name, problem.describe(value)) for name, value in summary["bounds"].items()]
        orders = problem.problem_kind in ("jobshop", "jobarray", "periodic")
        what = "lower bound" if orders else "bound"
        rows.append((what, problem.describe(summary["lower_bound"])))
    facts(rows, 18)
