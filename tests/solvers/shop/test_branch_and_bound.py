"""The engine `branch_and_bound`: proofs, limits, and living with other engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import optsched
from optsched import JobShop
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched_solvers.shop.branch_and_bound import BranchAndBound

if TYPE_CHECKING:
    from optsched.model.schedule import Problem
    from optsched.solving.result import Result

INSTANCES = Path(__file__).parents[3] / "instances" / "jobshop"
FT06 = JobShop.read(INSTANCES / "ft06.txt")


def solve(problem: Problem, **limits: Any) -> Result:
    """`optsched.solve` with this engine."""
    return optsched.solve(problem, BranchAndBound(), **(limits or {"iterations": 10**6}))


def test_one_iteration_is_one_node() -> None:
    """Or a rule tried before; counted exactly, whatever the slices; the same schedule always."""
    shop = JobShop.read(INSTANCES / "uniform-10x10.jobshop.json")
    for nodes in (1, 300, 4001):
        runs = [solve(shop, iterations=nodes) for _ in range(2)]
        assert runs[0].schedule == runs[1].schedule
        assert runs[0].lower_bound == runs[1].lower_bound
        monitor = run_beside(shop, Limits(iterations=nodes))
        assert monitor.iteration == nodes or monitor.proved


def run_beside(shop: Problem, limits: Limits, before: Any = None) -> Monitor:
    """The engine on a monitor that others may have written on."""
    monitor = Monitor(limits)
    monitor.bound(shop.lower_bound(), "bounds")
    if before is not None:
        before(monitor)
    BranchAndBound().solve(shop, monitor.limits, monitor)
    return monitor


def test_other_engines_are_heard() -> None:
    """Their schedule cuts the tree, their bound ends it."""
    optimal = solve(FT06)
    assert optimal.schedule is not None and optimal.schedule.sequences is not None
    orders = optimal.schedule.sequences

    def schedule(monitor: Monitor) -> None:
        monitor.incumbent(orders, 55, "another")

    def both(monitor: Monitor) -> None:
        schedule(monitor)
        monitor.bound(55, "another")

    alone = run_beside(FT06, Limits(time_limit=600))
    helped = run_beside(FT06, Limits(time_limit=600), schedule)
    told = run_beside(FT06, Limits(time_limit=600), both)
    assert alone.proved and helped.proved and told.proved
    assert told.iteration == 0 < helped.iteration < alone.iteration
