"""The engine `branch_and_bound`: options, both modes, limits, and living with other engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from random_problems import random_array, random_graph, random_shop
from state_oracle import best_by_states

import optsched
from optsched import JobArray, JobShop
from optsched.errors import InputError, UnsupportedProblem
from optsched.model import bounds
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing import SolverTests
from optsched_solvers.shop.branch_and_bound import GIFFLER_THOMPSON, MODES, BranchAndBound

if TYPE_CHECKING:
    from optsched.model.schedule import Problem
    from optsched.solving.result import Result

INSTANCES = Path(__file__).parents[3] / "instances" / "jobshop"
FT06 = JobShop.read(INSTANCES / "ft06.txt")


def solve(problem: Problem, mode: str = GIFFLER_THOMPSON, **given: Any) -> Result:
    """`optsched.solve` with this engine; keywords that are no limits are options."""
    limits = {k: v for k, v in given.items() if k in ("iterations", "time_limit", "target", "seed")}
    options = {k: v for k, v in given.items() if k not in limits}
    limits = limits or {"iterations": 10**6}
    return optsched.solve(problem, BranchAndBound(), options={"mode": mode, **options}, **limits)


class _Teaching(BranchAndBound):
    """The mode that is not the default one, for the conformance suite."""

    def __init__(self, **fixed: Any) -> None:
        self.fixed = {"mode": GIFFLER_THOMPSON, **fixed}

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        options = {**self.fixed, **limits.options}
        return super().solve(problem, replace(limits, options=options), monitor)


@pytest.mark.slow
class TestGifflerThompson(SolverTests):
    """Conformance of the tree."""

    solver = _Teaching()
    time_limit = 0.3


@pytest.mark.slow
class TestAlgorithm1(SolverTests):
    """Conformance of the beam of width 1."""

    solver = _Teaching(width=1, as_printed=True)
    time_limit = 0.3


@pytest.mark.parametrize("mode", MODES)
def test_proofs(mode: str) -> None:
    """Status, objective and bound of ft06, and of an array with everything."""
    for problem, optimum in ((FT06, 55), (capped(), best_by_states(capped().graph()))):
        result = solve(problem, mode)
        assert (result.status, result.objective, result.lower_bound) == (
            "optimal", optimum, optimum,
        )  # fmt: skip
        assert result.solver == "branch_and_bound"


def capped() -> JobArray:
    """Three jobs with switches, lags and room for two activations."""
    return JobArray(
        [[2, 3], [4, 1], [1, 5]], [[3, 4], [2, 2], [4, 3]], switch=2, lag_forward=1,
        activation=4, memory=[8, 5],
    )  # fmt: skip


def test_both_modes_and_brute_force_agree() -> None:
    """On random graphs, arrays and shops: one optimum, or all say infeasible."""
    problems: list[Problem] = [random_graph(Random(s), 6, gangs=False) for s in range(60)]
    problems += [random_array(Random(s), 2, 2) for s in range(25)]
    problems += [random_shop(Random(s), 3, 3) for s in range(25)]
    for problem in problems:
        check_modes(problem)


@pytest.mark.slow
def test_both_modes_and_brute_force_agree_in_depth() -> None:
    """Hundreds more."""
    for seed in range(100, 450):
        check_modes(random_graph(Random(seed), 7, gangs=False))


def check_modes(problem: Problem) -> None:
    """Each mode gives the optimum with proof, or proves that there is nothing."""
    optimum = best_by_states(problem.graph())
    for mode in MODES:
        result = solve(problem, mode, iterations=10**5)
        if optimum is None:
            assert result.status == "infeasible" and result.reason
        else:
            assert (result.status, result.objective) == ("optimal", optimum)


@pytest.mark.slow
def test_agrees_with_cp_sat() -> None:
    """On problems beyond brute force, where both prove."""
    compared = 0
    for seed in range(40):
        problem: Problem = random_array(Random(seed), 4, 3)
        if seed % 2:
            problem = random_shop(Random(seed), 5, 4)
        ours = solve(problem, iterations=60_000)
        theirs = optsched.solve(problem, "cpsat", iterations=2 * 10**6)
        if "unknown" not in (ours.status, theirs.status):
            assert (ours.lower_bound or 0) <= (theirs.objective or 2**62)
            assert (theirs.lower_bound or 0) <= (ours.objective or 2**62)
        if ours.status == theirs.status == "optimal":
            compared += 1
            assert ours.objective == theirs.objective
    assert compared > 20


def test_searches_of_the_tree() -> None:
    """Depth and best first prove the same; neither symmetry nor its absence changes it."""
    shop = JobShop.read(INSTANCES / "zeros-6x6.jobshop.json")
    values = {
        (solve(shop, search=search, symmetry=symmetry).status, solve(shop).objective)
        for search in ("depth", "best")
        for symmetry in (True, False)
    }
    assert values == {("optimal", 49)}


def test_a_beam_claims_no_bound_beyond_the_root() -> None:
    """Algorithm 1: a schedule, and the root's bound; optimal only if they meet."""
    greedy = solve(FT06, width=1)
    assert (greedy.status, greedy.lower_bound) == ("feasible", 52) and greedy.objective == 57
    assert {event.source for event in greedy.history} == {"bounds", "giffler-thompson"}
    wide = solve(FT06, width=500)
    assert (wide.status, wide.objective, wide.lower_bound) == ("feasible", 55, 52)
    met = JobShop([[(0, 2)], [(0, 3)]])
    assert solve(met, width=1).status == "optimal"


def test_a_beam_in_a_dead_end_falls_back_on_the_rules() -> None:
    """Where memory stops every node of a level, there is a schedule all the same."""
    fallen = 0
    for seed in range(200):
        array = random_array(Random(seed), 3, 2)
        if array.memory.any() and not array.infeasibility():
            sources = [event.source for event in solve(array, width=1).history]
            fallen += any(source.startswith("dispatch") for source in sources)
    assert fallen > 0


def test_ties_as_published() -> None:
    """`as_printed` keeps the last of equal nodes: another schedule of ft06."""
    assert solve(FT06, width=1, as_printed=True).objective == 59


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "options.mode: expected one of failure-directed, giffler-thompson"),
        ({"mode": ["giffler-thompson"]}, "options.mode"),
        ({"width": 1}, 'options.width: belongs to mode "giffler-thompson"'),
        ({"mode": "giffler-thompson", "polish": False}, "options.polish: belongs to mode"),
        ({"mode": "giffler-thompson", "width": -1}, "options.width: expected an integer in 0.."),
        ({"mode": "giffler-thompson", "width": True}, "options.width"),
        ({"mode": "giffler-thompson", "search": "wide"}, "options.search: expected one of depth"),
        ({"mode": "giffler-thompson", "symmetry": 1}, "options.symmetry: expected true or false"),
        ({"mode": "giffler-thompson", "as_printed": True}, "options.as_printed: needs a width"),
        ({"polish": "no"}, "options.polish: expected true or false"),
        ({"depth": 3}, "has no option 'depth'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    """Refused by name, before any work."""
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        optsched.solve(FT06, BranchAndBound(), options=options, iterations=1)


def test_what_is_refused() -> None:
    """The period by `supports`; gangs by the mode that cannot."""
    with pytest.raises(UnsupportedProblem, match="it takes no problem of the kind periodic"):
        solve(JobArray([[1]], [[1]], objective="period"))
    gang = next(
        graph
        for seed in range(99)
        if len((graph := random_graph(Random(seed))).op_resources.ids) > graph.n_operations
        and not bounds.infeasibility(graph)
    )
    with pytest.raises(UnsupportedProblem, match='resources at once; mode "failure-directed" does'):
        solve(gang)


def test_one_iteration_is_one_node() -> None:
    """Or a rule tried before; counted exactly, whatever the slices; the same schedule always."""
    shop = JobShop.read(INSTANCES / "uniform-10x10.jobshop.json")
    for nodes in (1, 300, 4001):
        runs = [solve(shop, iterations=nodes) for _ in range(2)]
        assert runs[0].schedule == runs[1].schedule
        assert runs[0].lower_bound == runs[1].lower_bound
        monitor = run_beside(shop, Limits(iterations=nodes))
        assert monitor.iteration == nodes


def run_beside(shop: Problem, limits: Limits, before: Any = None) -> Monitor:
    """The engine on a monitor that others may have written on."""
    monitor = Monitor(replace(limits, options={"mode": GIFFLER_THOMPSON}))
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


def test_a_target_is_kept_to_the_node() -> None:
    """The first schedule at most as long as the target ends the search."""
    result = solve(JobShop.read(INSTANCES / "uniform-10x5.jobshop.json"), target=660)
    assert result.objective is not None and result.objective <= 660
    assert result.status == "feasible"
