"""Destructive bounds: never above the optimum, exact with time, better with more work."""

from __future__ import annotations

from math import factorial, prod
from pathlib import Path
from random import Random

from depth import seeds
from random_shops import random_shop

from optsched import JobShop, Schedule
from optsched.model.bounds import makespan_bound
from optsched.testing.brute_force import best_makespan
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.shop.proof.destructive import Climb
from optsched_solvers.shop.proof.tree import DisjunctiveTree

INSTANCES = Path(__file__).parents[3] / "instances" / "jobshop"


def small_graph(seed: int) -> Schedule | None:
    """A random problem of every kind, if brute force can do it."""
    rng = Random(seed)
    make = [lambda: random_graph(rng), lambda: random_array(rng, 3, 2), lambda: random_shop(rng)]
    graph = make[seed % 3]().graph()
    orders = prod(factorial(min(20, len(on))) for on in graph.users.to_lists())
    return graph if orders <= 6000 else None


def climbed(graph: Schedule, upper: int, nodes: int | None = None) -> int:
    """The bound of a climb towards `upper`."""
    lower = makespan_bound(graph)
    if lower >= upper:
        return upper
    climb = Climb(DisjunctiveTree(graph), lower, upper)
    climb.work(nodes)
    return climb.lower


@seeds(30, 150)
def test_never_above_the_optimum_and_exact_in_the_end(seed: int) -> None:
    """Any limit gives a bound, no limit the optimum, `upper` never matters from above."""
    graph = small_graph(seed)
    if graph is None:
        return
    best = best_makespan(graph)
    if best is None:
        assert climbed(graph, 60) == 60  # nothing is feasible
        return
    for nodes in (0, 7, 50):
        assert makespan_bound(graph) <= climbed(graph, best + 5, nodes) <= best
    assert climbed(graph, best + 5) == best
    assert climbed(graph, best - 1) == best - 1 or best == 0


def test_bounds_rise_until_stopped() -> None:
    """Every new bound is reported once, ascending; `stop` is called between slices."""
    bounds: list[int] = []
    graph = JobShop.read(INSTANCES / "ft06.txt").graph()
    climb = Climb(DisjunctiveTree(graph), 0, 70, on_bound=bounds.append)
    assert climb.work() and climb.lower == 55
    assert bounds == sorted(set(bounds)) and bounds[-1] == 55
    calls: list[int] = []
    graph = JobShop.read(INSTANCES / "ft10.txt").graph()
    tree = DisjunctiveTree(graph, stop=lambda: len(calls) > 9 or bool(calls.append(1)))
    assert not Climb(tree, makespan_bound(graph), 930).work()
    assert len(calls) == 10
