"""``optsched solvers``: the problem x solver matrix, asked of the solvers themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import optsched
from optsched.solving.solver import solvers, support_by_name

if TYPE_CHECKING:
    from pathlib import Path

    from optsched.model.schedule import Problem


def solver_table(file: Path | None) -> None:
    """Print who takes which kind of problem, or who takes the instance in a file, and why not."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if file is not None:
        from optsched.formats.read_problem import read_problem

        problem = read_problem(file)
        for name in solvers():
            found = support_by_name(name, problem)
            console.print(f"{name:18}{'yes' if found else f'no: {found.reason}'}", highlight=False)
        return
    orders = sorted({*solvers("jobshop"), *solvers("jobarray"), *solvers("periodic")})
    table = Table("problem", *orders, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for text, problem in _graphs().items():
        able = _able(problem)
        table.add_row(text, *("yes" if name in able else "-" for name in orders))
    console.print(table)
    for text, kind in (("SubsetChoice", "gpus"), ("Routing", "routing")):
        console.print(f"{text}: {', '.join(solvers(kind))}", highlight=False)
    for text, problem in _plans().items():
        console.print(f"{text}: {', '.join(_able(problem))}", highlight=False)
    console.print("`optsched solvers FILE` says why a solver refuses an instance.", highlight=False)


def _able(problem: Problem) -> list[str]:
    """Names of the solvers that take it."""
    return [name for name in solvers(problem.problem_kind) if support_by_name(name, problem)]


def _graphs() -> dict[str, Problem]:
    """The smallest problem of each kind."""
    blocks = [[1, 1], [1, 1]]
    gang = optsched.Schedule(
        resources=(optsched.Resource("a"), optsched.Resource("b")),
        duration=[1, 1],  # type: ignore[arg-type]
        op_resources=optsched.Rows.of([[0, 1], [0]]),
    )
    return {
        "JobShop": optsched.JobShop([[(0, 1), (1, 1)]]),
        "JobShop, deadlines": optsched.JobShop([[(0, 1), (1, 1)]], deadline=[9]),
        "JobArray": optsched.JobArray(blocks, blocks),
        "JobArray, memory": optsched.JobArray(blocks, blocks, activation=1, memory=1),
        "JobArray, switches": optsched.JobArray(blocks, blocks, switch=1),
        "JobArray, period": optsched.JobArray(blocks, blocks, objective="period"),
        "graph with gangs": gang,
    }


def _plans() -> dict[str, Problem]:
    """The smallest quota plans."""
    jobs = [optsched.QuotaJob("a", [1, 2], utility=[1, 2])]
    tight = [optsched.QuotaJob("a", [1, 2], utility=[1, 2], locality="single")]
    return {
        "QuotaPlan": optsched.QuotaPlan(jobs, budget=2),
        "QuotaPlan, types": optsched.QuotaPlan(jobs, budget={"x": 1, "y": 1}),
        "QuotaPlan, locality": optsched.QuotaPlan(tight, nodes=[2]),
    }
