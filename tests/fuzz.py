"""Random tiny instances of every problem, solved by every solver and judged by brute force.

``make fuzz`` runs it, `test_fuzz` a small part of it. A failure names what repeats it.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections import Counter
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from oracles.best_gpus import optimum as best_choice
from oracles.best_gpus import random_subset
from oracles.best_quota import best_quota, random_plan
from random_shops import random_choice, random_shop
from rolling_problems import awkward_array

import optsched
from optsched import JobArray
from optsched.problems.jobarray.recompute import choice_of
from optsched.solving.solver import support_by_name
from optsched.testing.brute_force import TooLarge, best_makespan, best_period, machine_orders
from optsched.testing.common import against
from optsched.testing.random_problems import random_array, random_graph, random_rolling, with_goal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched import Schedule
    from optsched.model.schedule import Problem

ORDERS = 3000
"""Combinations of machine orders that brute force may try."""

PAIRS = 30
"""Pairs of operations that share a resource, of a cycle that brute force may try."""

PARTIAL_ORDERS = 1000
"""The same: orders of some of these pairs."""


class Run(NamedTuple):
    """A solver and its limits."""

    solver: str
    settings: dict[str, Any]
    must_answer: bool = False
    """Whether a feasible instance may not be left without a schedule."""

    def __str__(self) -> str:
        given = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.solver}({given})"


ORDER_RUNS = (
    Run("auto", {"iterations": 1000}, True),
    Run("auto", {"iterations": 1}, True),
    Run("auto", {"time_limit": 2.0}, True),
    Run("auto", {"time_limit": 0.05}),
    Run("cpsat", {"iterations": 20_000}),
    Run("branch_and_bound", {"iterations": 500}),
    Run("tabu", {"iterations": 200}),
    Run("genetic", {"iterations": 2}),
    Run("dispatch", {"iterations": 50}),
)
QUOTA_RUNS = (
    Run("auto", {"iterations": 1000}, True),
    Run("auto", {"iterations": 1}, True),
    Run("auto", {"time_limit": 2.0}, True),
    Run("cpsat", {"iterations": 20_000}),
    Run("branch_and_bound", {"iterations": 500}),
    Run("quota", {"iterations": 500}),
    Run("greedy_quota", {"iterations": 500}),
    Run("genetic", {"iterations": 2}),
)
GPU_RUNS = (
    Run("auto", {"iterations": 1000}, True),
    Run("auto", {"iterations": 1}, True),
    Run("auto", {"time_limit": 2.0}, True),
    Run("cpsat", {"iterations": 20_000}),
    Run("branch_and_bound", {"iterations": 500}),
    *(
        Run(solver, {"iterations": 100})
        for solver in ("counts", "hybrid", "eha", "pts", "genetic", "proximity", "topo")
    ),
)


class Kind(NamedTuple):
    """One kind of problem: how to draw it, how to solve it by brute force, who solves it."""

    draw: Callable[[Random], Any]
    truth: Callable[[Any], int | None]
    runs: tuple[Run, ...]


def best_order(problem: Problem) -> int | None:
    """The least makespan, or objective of jobs."""
    graph = problem.graph()
    if graph.n_operations > 16 or max(map(len, graph.users.to_lists()), default=0) > 8:
        raise TooLarge
    if math.prod(len(orders) for orders in machine_orders(graph)) > ORDERS:
        raise TooLarge
    return best_makespan(graph)


def best_cycle(problem: Problem) -> int | None:
    """The least period."""
    graph = problem.graph()
    if _pairs(graph) > PAIRS:
        raise TooLarge
    return best_period(graph, PARTIAL_ORDERS)


def best_recomputation(array: JobArray) -> int | None:
    """The least makespan or period over all choices of jobs that recompute."""
    best = best_cycle if array.objective_name == "period" else best_order
    found = [
        best(array.replace(recompute_mode=choice))
        for choice in product((False, True), repeat=array.n_jobs)
    ]
    return min((value for value in found if value is not None), default=None)


def array_of(rng: Random) -> JobArray:
    """Any job array; of a third of them all times are 0 or 1, so that there are many ties."""
    return _tied(rng, random_array(rng, rng.choice([1, 2, 2, 2, 3]), rng.choice([1, 2, 2])))


def rolling_of(rng: Random) -> JobArray:
    """Any periodic job array that brute force takes; half of them have blocks of no time."""
    if rng.random() < 0.5:
        return awkward_array(rng, PAIRS)
    while True:
        array = random_rolling(rng, rng.choice([2, 2, 3]), rng.choice([1, 2, 2, 3]))
        array = _tied(rng, array)
        if _pairs(array.graph()) <= PAIRS:
            return array


def _pairs(graph: Schedule) -> int:
    """Pairs of operations that share a resource."""
    users = np.diff(graph.users.indptr)
    return int((users * (users - 1)).sum()) // 2


def _tied(rng: Random, array: JobArray) -> JobArray:
    if rng.random() > 1 / 3:
        return array
    keys = ("forward", "backward", "weight", "lag_forward", "lag_backward", "update", "switch")
    times = {key: getattr(array, key) for key in keys}
    tied = {key: table.clip(-1, 1) for key, table in times.items() if table is not None}
    if rng.random() < 0.5:  # updates of no length tie with whatever begins and ends there
        tied["update"], mode = 0, rng.choice(["block", "global"])
        return array.replace(update_mode=mode, microbatch_order="fixed", **tied)
    return array.replace(**tied)


def choosing_of(rng: Random) -> JobArray:
    """An array that leaves open which jobs recompute."""
    array = random_choice(rng, rng.choice([1, 2, 2]), rng.choice([1, 1, 2]))
    return array.with_objective("period") if rng.random() < 0.3 else array


def any_goal(draw: Callable[[Random], Any]) -> Callable[[Random], Any]:
    """A third of the problems with an objective that counts the ends of single jobs."""

    def drawn(rng: Random) -> Any:
        problem = draw(rng)
        return with_goal(rng, problem) if rng.random() < 1 / 3 else problem

    return drawn


KINDS = {
    "shop": Kind(any_goal(random_shop), best_order, ORDER_RUNS),
    "graph": Kind(any_goal(random_graph), best_order, ORDER_RUNS),
    "array": Kind(any_goal(array_of), best_order, ORDER_RUNS),
    "period": Kind(rolling_of, best_cycle, ORDER_RUNS),
    "recompute": Kind(choosing_of, best_recomputation, ORDER_RUNS),
    "quota": Kind(random_plan, best_quota, QUOTA_RUNS),
    "gpus": Kind(random_subset, best_choice.__wrapped__, GPU_RUNS),
}


ROUND = ("graph", "array", "period", "shop", "quota", "gpus") * 30 + ("recompute",)
"""Kinds in turn; a choice of recomputation takes twenty times as long as the others."""

AT_ONCE = 3
"""Solvers that an instance is given to."""


def draw(kind: str, seed: int) -> Any:
    """The instance of a kind and a seed."""
    return KINDS[kind].draw(Random(f"{kind} {seed}"))


def fault(problem: Any, run: Run, best: int | None) -> str:
    """What is wrong with a solver's answer; empty if nothing is."""
    try:
        result = optsched.solve(problem, run.solver, workers=1, **run.settings)
        if problem.problem_kind in ("quota", "gpus"):
            against(problem, result, best)
        else:
            chosen = problem
            if getattr(problem, "chooses", False) and result.schedule is not None:
                chosen = problem.replace(recompute_mode=choice_of(problem, result.schedule))
            against(chosen, result, best)
    except optsched.UnsupportedProblem:
        return ""
    except AssertionError as error:
        return f"{error}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    if not run.must_answer or best is None or result.schedule is not None:
        return ""
    if run.settings.get("time_limit", 60) < 60:  # kernels are not compiled, or the machine is busy
        patient = run._replace(settings={**run.settings, "time_limit": 60})
        return fault(problem, patient, best)
    return f"no answer ({result.reason or 'no reason'}), but {best} is possible"


def failures(kind: str, seed: int, seconds: Counter[str]) -> Iterator[str]:
    """A line for every wrong answer to one instance; adds up the seconds of every solver.

    Raises
    ------
    TooLarge
        Brute force cannot judge the instance.
    """
    problem = draw(kind, seed)
    begin = time.perf_counter()
    best = KINDS[kind].truth(problem)
    seconds["brute force"] += time.perf_counter() - begin
    able = [run for run in KINDS[kind].runs if support_by_name(run.solver, problem)]
    for run in Random(seed).sample(able, min(AT_ONCE, len(able))):
        begin = time.perf_counter()
        said = fault(problem, run, best)
        seconds[str(run)] += time.perf_counter() - begin
        if said:
            yield f"{kind} {seed}: {run}: {said.removeprefix(f'{problem.name}: ')}"


def main() -> int:
    """Judge so many instances; 1 if any answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="instances in all (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default 0)")
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # contradictions are told below
    kinds = [given.kind] if given.kind else ROUND
    found, judged, seconds = 0, 0, Counter[str]()
    for number in range(given.count):
        if number and number % 1000 == 0:
            print(f"{number} drawn, {judged} judged, {found} wrong", file=sys.stderr)
        seed, kind = given.seed + number, kinds[number % len(kinds)]
        try:
            for line in failures(kind, seed, seconds):
                found += 1
                again = f"python tests/fuzz.py --kind {kind} --seed {seed} --count 1"
                print(f"{line}\n  {again}", flush=True)
            judged += 1
        except TooLarge:
            continue
    for name, spent in seconds.most_common():
        print(f"{spent:8.1f} s  {name}")
    print(f"{judged} of {given.count} instances judged, {found} wrong answers")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
