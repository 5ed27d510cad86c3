"""The Giffler-Thompson tree is exact, slice by slice; as a beam it is the published algorithm."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from depth import depth
from hypothesis import assume, given
from hypothesis import strategies as st
from random_problems import random_array, random_graph, random_shop
from state_oracle import best_by_states

from optsched import Arcs, JobArray, JobShop, Resource, Rows, Schedule, verify
from optsched.model import bounds
from optsched.model.graph import evaluate, scheduled
from optsched_solvers.literature import giffler_thompson
from optsched_solvers.literature import giffler_thompson_node as node
from optsched_solvers.literature.giffler_thompson import (
    INFINITE,
    Tree,
    is_triangular,
    with_symmetry_broken,
)
from optsched_solvers.shop.proof.one_machine import carlier
from optsched_solvers.shop.proof.symmetry import identical_jobs

INSTANCES = Path(__file__).parents[3] / "instances" / "jobshop"

WAYS: tuple[dict[str, Any], ...] = (
    {}, {"search": "best", "carlier": 0}, {"symmetry": False, "carlier": 2},
)  # fmt: skip


def finished(graph: Schedule, **how: Any) -> Tree:
    """A tree with nothing left to explore."""
    tree = Tree(graph, **how)
    tree.explore(10**7, goal=-1)
    assert tree.exhausted
    return tree


def check_exact(graph: Schedule, rng: Random, oracle: bool = True) -> None:
    """The value is the optimum, whatever the way; bounds on the way there never exceed it."""
    if bounds.infeasibility(graph):
        return
    optimum = best_by_states(graph) if oracle else finished(graph, symmetry=False).value
    optimum = INFINITE if optimum is None else optimum
    for how in WAYS:
        tree = Tree(graph, **how)
        while not tree.exhausted:
            tree.explore(rng.choice([1, 3, 40]), goal=-1)
            assert min(tree.lower_bound(), tree.value) <= optimum
        assert tree.value == optimum
        if optimum < INFINITE:
            schedule = scheduled(graph, tree.best())
            assert schedule.makespan == optimum and verify(schedule) == []


# exactness


@given(st.randoms(use_true_random=False))
def test_any_graph(rng: Random) -> None:
    """Lags, setups of any kind, memory of any kind, windows, zero durations, no resource."""
    check_exact(random_graph(rng, 7, gangs=False), rng)


@given(st.randoms(use_true_random=False))
def test_job_shops(rng: Random) -> None:
    """Classic and re-entrant, with releases and deadlines."""
    check_exact(random_shop(rng, 4, 3).graph(), rng)


@given(st.randoms(use_true_random=False))
def test_job_arrays(rng: Random) -> None:
    """Switches, lags, caps, workspaces, chunks, split backward, several micro-batches."""
    graph = random_array(rng, 3, 2).graph()
    assume(graph.n_operations <= 12)
    check_exact(graph, rng)


@pytest.mark.slow
def test_in_depth() -> None:
    """Hundreds more of each."""
    for seed in range(1200):
        check_exact(random_graph(Random(seed), 7, gangs=False), Random(seed))
    for seed in range(150):
        check_exact(random_shop(Random(seed)).graph(), Random(seed))
    for seed in range(300):
        graph = random_array(Random(seed), 3, 3).graph()
        if graph.n_operations <= 14:
            check_exact(graph, Random(seed))


def test_identical_jobs_are_ordered_at_no_loss() -> None:
    """With and without symmetry breaking the same optimum, in fewer nodes."""
    nodes, looked_at = [0, 0], 0
    for seed in range(250):
        graph = random_array(Random(seed), 4, 2).graph()
        if not identical_jobs(graph) or graph.n_operations > 16 or bounds.infeasibility(graph):
            continue
        looked_at += 1
        trees = [finished(graph, symmetry=symmetry) for symmetry in (True, False)]
        assert trees[0].value == trees[1].value
        nodes = [nodes[k] + trees[k].nodes for k in range(2)]
    assert looked_at > 20 and nodes[0] < 0.5 * nodes[1]


def test_the_arcs_of_symmetry_lie_on_machines() -> None:
    """Three equal jobs without setups: every block behind the same block of the job before."""
    array = JobArray([[1, 2]] * 3, [[2, 1]] * 3)
    graph = with_symmetry_broken(array.graph())
    assert len(graph.arcs.tail) == len(array.graph().arcs.tail) + 2 * 4
    assert with_symmetry_broken(JobArray([[1], [2]], [[1], [1]]).graph()).arcs.tail.size == 2


def test_known_optima() -> None:
    """ft06 and an instance of our own, 10 x 5, depth and best first."""
    for search in ("depth", "best"):
        assert finished(JobShop.read(INSTANCES / "ft06.txt").graph(), search=search).value == 55
        shop = JobShop.read(INSTANCES / "uniform-10x5.jobshop.json")
        assert finished(shop.graph(), search=search).value == 621


# traps


def textbook(graph: Schedule, with_setup: bool) -> int | None:
    """Giffler & Thompson's enumeration as printed: only what is available may be in conflict.

    The cut-off is the least end, plus the setup behind it if asked for; it is always applied.
    """
    duration = graph.duration.tolist()
    resource = graph.single_resource.tolist()
    best: list[int] = []

    def go_on(start: dict[int, int], last: list[int], level: list[int]) -> None:
        ready = []
        for i in range(graph.n_operations):
            before = graph.arcs.tail[graph.arcs.head == i].tolist()
            if i in start or any(k not in start for k in before):
                continue
            r, k = resource[i], last[resource[i]]
            lags = graph.arcs.lag[graph.arcs.head == i].tolist()
            head = max(
                [int(graph.release[i])]
                + [start[b] + duration[b] + lag for b, lag in zip(before, lags, strict=True)]
                + ([start[k] + duration[k] + graph.setup(k, i)] if k >= 0 else [])
            )
            if not graph.memory[r] or level[r] + graph.acquire[i] <= graph.memory[r]:
                ready.append((i, head))
        if not ready:
            if len(start) == graph.n_operations:
                best.append(max(s + duration[i] for i, s in start.items()))
            return
        star, head = min(ready, key=lambda pair: (pair[1] + duration[pair[0]], pair[0]))
        for y, r in ready:
            cut = head + duration[star] + (graph.setup(star, y) if with_setup else 0)
            if resource[y] == resource[star] and (y == star or r < cut):
                latest, held = list(last), list(level)
                latest[resource[y]] = y
                held[resource[y]] += int(graph.acquire[y] - graph.free[y])
                go_on({**start, y: r}, latest, held)

    go_on({}, [-1] * graph.n_resources, [0] * graph.n_resources)
    return min(best, default=None)


def test_setups_need_operations_that_are_not_available() -> None:
    """The conflict set must hold every operation with head < least end + setup, available or not.

    The textbook's loses the optimum, and so does one widened by the setup among what is available.
    """
    shop = JobShop(
        [[(2, 4), (0, 2), (1, 1)], [(2, 2), (1, 1), (0, 1)], [(1, 1), (2, 2), (0, 3)]]
    ).graph()
    graph = replace(shop, family=shop.job, setup_out=np.array([2, 1, 4])[shop.job])
    assert textbook(graph, False) == textbook(graph, True) == 15
    assert finished(graph).value == best_by_states(graph) == 14


def test_setups_that_are_not_triangular_allow_no_cut_off() -> None:
    """Another operation of a family in between may save its setup."""
    graph = Schedule(
        resources=(Resource("machine"),),
        duration=np.array([0, 3, 0]),
        op_resources=Rows.of([[0]] * 3),
        release=np.array([2, 4, 0]),
        family=np.array([0, 1, 1]),
        setup_out=np.array([6, 6, 0]),
    )
    assert not is_triangular(graph, graph.users[0])
    assert textbook(graph, True) == 11
    assert finished(graph).value == best_by_states(graph) == 7


def test_memory_allows_no_cut_off() -> None:
    """An early forward block takes room: the best Giffler-Thompson schedule is 151, optimum 137."""
    array = JobArray(
        [[25, 1, 50], [2, 1, 1]], [[1, 1, 50], [20, 1, 1]], lag_forward=[[0, 0], [28, 0]],
        activation=[[0, 1, 0]] * 2, memory=[0, 1, 0],
    )  # fmt: skip
    assert textbook(array.graph(), True) == 151
    assert finished(array.graph()).value == best_by_states(array.graph()) == 137


def test_zero_durations_keep_the_operation_that_sets_the_cut_off() -> None:
    """With p = 0 the strict test throws out the very operation of least end."""
    shop = JobShop([[(0, 0), (1, 3)], [(1, 2), (0, 0)], [(0, 0), (1, 0)]])
    assert finished(shop.graph()).value == best_by_states(shop.graph()) == 5
    nothing = JobShop([[(0, 0), (1, 0)], [(1, 0), (0, 0)]])
    assert finished(nothing.graph()).value == 0


def test_bytes_freed_by_whoever_comes_first_allow_no_cut_off() -> None:
    """Operation 1 could go right behind 0, but would free what 2 must free before 3 takes more."""
    graph = Schedule(
        resources=(Resource("gpu"),),
        duration=np.ones(4, np.int64),
        op_resources=Rows.of([[0]] * 4),
        arcs=Arcs.of([(0, 1), (2, 3)]),
        release=np.array([0, 0, 5, 0]),
        acquire=np.array([1, 0, 0, 1]),
        free=np.array([0, 1, 1, 0]),
    )
    assert finished(graph).value == best_by_states(graph) == 8


def test_deadlines_may_be_met_exactly() -> None:
    """The only order ends on the minute, in both jobs."""
    shop = JobShop([[(0, 3), (1, 2)], [(0, 1)]], deadline=[6, 1])
    assert finished(shop.graph()).value == 6
    late = JobShop([[(0, 3), (1, 2)], [(0, 1)]], deadline=[5, 1])
    assert finished(late.graph()).value == INFINITE


def test_one_machine_equals_carlier() -> None:
    """Heads by releases, tails by operations without machine; told of a schedule nearly as good."""
    for seed in range(depth(130, 400)):
        rng = Random(seed)
        n = rng.randint(5, 9)
        head, tail = ([rng.randint(0, 40) for _ in range(n)] for _ in range(2))
        duration = [rng.randint(1, 9) for _ in range(n)]
        graph = Schedule(
            resources=(Resource("machine"),),
            duration=np.array(duration + tail),
            op_resources=Rows.of([[0]] * n + [[]] * n),
            arcs=Arcs.of([(i, n + i) for i in range(n)]),
            release=np.array(head + [0] * n),
        )
        behind = np.array(duration) + np.array(tail)
        optimum = carlier(np.array(head), np.array(duration), behind).value
        tree = Tree(graph, search=rng.choice(["depth", "best"]))
        tree.cut(optimum + rng.randint(1, 6))
        while not tree.exhausted:
            tree.explore(1)
            assert min(tree.lower_bound(), tree.upper) <= optimum
        assert tree.value == optimum


def test_triangular_setups() -> None:
    """The quick test per family says yes only if no triple says no."""
    for seed in range(300):
        graph = random_graph(Random(seed), 6, gangs=False)
        for r in range(graph.n_resources):
            on = graph.users[r].tolist()
            broken = any(
                graph.setup(a, c) > graph.setup(a, b) + graph.duration[b] + graph.setup(b, c)
                for a in on for b in on for c in on if len({a, b, c}) == 3
            )  # fmt: skip
            assert not (is_triangular(graph, graph.users[r]) and broken)


def test_infeasible_graphs_are_proved_so() -> None:
    """Two operations with one deadline that only one can keep; bytes that nobody frees in time."""
    shop = JobShop([[(0, 3)], [(0, 3)]], deadline=[4, 4])
    assert finished(shop.graph()).value == INFINITE
    graph = Schedule(
        resources=(Resource("gpu", 3),),
        duration=np.array([1, 1]),
        op_resources=Rows.of([[0]] * 2),
        acquire=np.array([2, 2]),
    )
    assert finished(graph).value == INFINITE


# the machinery


@given(st.randoms(use_true_random=False))
def test_decisions_are_taken_back_exactly(rng: Random) -> None:
    """Any walk down and back leaves the tables as they were; heads are those of `evaluate`."""
    graph = random_graph(rng, 9, gangs=False)
    if graph.has_setups:  # heads then may count setups that another order avoids
        graph = replace(graph, setup_out=np.zeros(9)[: graph.n_operations].astype(np.int64))
        graph = replace(graph, setup_in=graph.setup_out)
    tree = Tree(graph, symmetry=False)
    var, slots, use, _, _, counters = tree._state

    def picture() -> list[Any]:
        rows = [node.HEAD, node.POSITION, node.WAIT, node.SETTLED]
        left = [
            sorted(slots[node.LEFT, b : b + n].tolist())
            for b, n in zip(graph.users.indptr[:-1], use[node.N_LEFT], strict=True)
        ]
        scalars = [int(counters[k]) for k in (node.DEPTH, node.TRAIL, node.DONE, node.LONGEST)]
        return [var[rows].tolist(), left, use[: node.TOUCHED].tolist(), scalars]

    found = np.zeros((node.N_CANDIDATE, graph.n_operations + 1), np.int64)
    pictures = []
    while (count := node.candidates(tree._graph, tree._state, found)) > 0:
        pictures.append(picture())
        y = int(found[node.CANDIDATE, rng.randrange(count)])
        node.append(tree._graph, tree._state, y, INFINITE)
        if counters[node.DEPTH] == len(graph.users.ids):
            if (graph.deadline > 10**9).all():
                expected = evaluate(graph, Rows(graph.users.indptr, slots[node.SEQ]))
                assert var[node.HEAD, :-1].tolist() == expected.head.tolist()
                assert counters[node.LONGEST] == expected.makespan
            break
    while pictures:
        node.take_back(tree._graph, tree._state)
        assert picture() == pictures.pop()


@given(st.randoms(use_true_random=False))
def test_the_bound_of_a_node_rises_to_its_best_leaf(rng: Random) -> None:
    """Along any path: bound of the node <= bound of its child <= value of the leaf."""
    graph = random_array(rng, 3, 3).graph()
    tree = Tree(graph)
    bound = int(tree._state[-1][node.LONGEST])
    found = np.zeros((node.N_CANDIDATE, graph.n_operations + 1), np.int64)
    seen = [bound]
    while (count := node.candidates(tree._graph, tree._state, found)) > 0:
        y = int(found[node.CANDIDATE, rng.randrange(count)])
        if not node.append(tree._graph, tree._state, y, INFINITE):
            return
        seen.append(int(node.bound_node(tree._graph, tree._state, seen[-1], 10**9, 100)))
    if tree._state[-1][node.DEPTH] == len(graph.users.ids):
        value = int(tree._state[-1][node.LONGEST])
        assert seen == sorted(seen) and seen[-1] == value


def test_slices_do_not_matter() -> None:
    """One node at a time or all at once: the same nodes, the same schedule, the same bounds."""
    graph = JobShop.read(INSTANCES / "zeros-6x6.jobshop.json").graph()
    for how in ({}, {"search": "best"}, {"width": 5}, {"width": 1, "as_printed": True}):
        whole = finished(graph, **how)
        sliced = Tree(graph, **how)
        while not sliced.exhausted:
            assert sliced.explore(1, goal=-1) <= 1
        assert (sliced.nodes, sliced.value) == (whole.nodes, whole.value)
        assert sliced.best() == whole.best()


def test_a_goal_stops_the_search() -> None:
    """The first leaf that is good enough ends it, and nothing goes on behind it."""
    tree = Tree(JobShop.read(INSTANCES / "ft06.txt").graph())
    tree.explore(10**6, goal=70)
    assert 55 <= tree.value <= 70 and not tree.exhausted
    assert tree.explore(10**6, goal=70) == 0


def test_only_better_schedules_are_looked_for() -> None:
    """Told of a schedule of 56, the tree finds 55; told of 55, it finds nothing: a proof."""
    graph = JobShop.read(INSTANCES / "ft06.txt").graph()
    for known, value in ((56, 55), (55, INFINITE)):
        tree = Tree(graph)
        tree.cut(known)
        tree.explore(10**6)
        assert tree.exhausted and tree.value == value and tree.upper == 55


def test_the_bound_rises_while_searching() -> None:
    """Best first: the bound never falls, and ends at the optimum."""
    tree = Tree(JobShop.read(INSTANCES / "ft06.txt").graph(), search="best")
    seen = []
    while not tree.exhausted:
        tree.explore(5)
        seen.append(min(tree.lower_bound(), tree.upper))
    assert seen == sorted(seen) and seen[-1] == 55 and len(set(seen)) > 2


def test_memory_for_nodes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too many open nodes best first goes on depth first, and is exact all the same."""
    graph = JobShop.read(INSTANCES / "tiny-reentrant-2x3.jobshop.json").graph()
    monkeypatch.setattr(giffler_thompson, "MOST_NODES", 512)
    shop = random_shop(Random(8), 5, 4)
    for problem in (graph, shop.graph(), JobShop.read(INSTANCES / "uniform-10x5.jobshop.json")):
        given = problem.graph()
        tree = Tree(given, search="best")
        while not tree.exhausted:
            tree.explore(500)
            bound = min(tree.lower_bound(), tree.upper)
        assert tree.value == bound == finished(given).value


def test_operations_without_machines() -> None:
    """Nothing to decide: the longest path is the answer; in between such operations just pass."""
    free = Schedule(
        resources=(Resource("gpu"),), duration=np.array([3, 4]), op_resources=Rows.of([[], []])
    )
    assert finished(free).value == 4
    for seed in range(60):
        graph = random_graph(Random(seed), 7, gangs=False, memory=False, deadlines=False)
        assert finished(graph).value == best_by_states(graph)


# the beam


def algorithm_1(graph: Schedule, last_tie: bool) -> list[list[int]]:
    """ArrayPipe's Algorithm 1 on a classic shop in plain Python: keep one node per level."""
    done: list[list[int]] = [[] for _ in range(graph.n_resources)]
    left = set(range(graph.n_operations))
    while left:
        head = heads_and_tails(graph, done)[0]
        arcs = zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True)
        ready = sorted(left - {k for i, k in arcs if i in left})
        star = min(ready, key=lambda i: (head[i] + graph.duration[i], i))
        k = int(graph.single_resource[star])
        cut = head[star] + graph.duration[star]
        conflict = [
            i for i in ready
            if graph.single_resource[i] == k and (i == star or head[i] < cut)
        ]  # fmt: skip
        ranked = []
        for i in conflict:
            tried = [[*row, i] if r == k else row for r, row in enumerate(done)]
            ranked.append((lower_bound(graph, tried), head[i], i))
        best = min(ranked)
        if last_tie:
            best = [one for one in ranked if one[0] == best[0]][-1]
        done[k].append(best[2])
        left.remove(best[2])
    return done


def heads_and_tails(graph: Schedule, done: list[list[int]]) -> tuple[Any, Any, int]:
    """Longest paths where what is sequenced comes before what is not."""
    extra = []
    for r, row in enumerate(done):
        rest = [i for i in graph.users[r].tolist() if i not in row]
        extra += [(i, k, 0, 0) for i, k in pairwise(row)]
        extra += [(row[-1], k, 0, 0) for k in rest if row]
    arcs = list(zip(*(c.tolist() for c in graph.arcs), strict=True)) + extra
    found = evaluate(replace(graph, arcs=Arcs.of(arcs)))
    return found.head.tolist(), evaluate(graph).tail.tolist(), found.makespan


def lower_bound(graph: Schedule, done: list[list[int]]) -> int:
    """Longest path, and Jackson's value of what is left on every machine."""
    head, tail, best = heads_and_tails(graph, done)
    for r, row in enumerate(done):
        on = [i for i in graph.users[r].tolist() if i not in row]
        duration = [int(graph.duration[i]) for i in on]
        after = [tail[i] - int(graph.duration[i]) for i in on]
        best = max(best, bounds.jackson_preemptive([head[i] for i in on], duration, after))
    return best


@pytest.mark.parametrize("last_tie", [False, True])
def test_width_1_is_algorithm_1(last_tie: bool) -> None:
    """The very schedule of the plain version; ties as published with `as_printed`."""
    for seed in range(12):
        rng = Random(seed)
        n, m = rng.randint(2, 5), rng.randint(2, 4)
        jobs = [[(k, rng.randint(0, 4)) for k in rng.sample(range(m), m)] for _ in range(n)]
        graph = JobShop(jobs).graph()
        tree = finished(graph, width=1, as_printed=last_tie, symmetry=False)
        assert tree.best().to_lists() == algorithm_1(graph, last_tie)


def test_a_beam_proves_nothing_and_keeps_to_its_way() -> None:
    """Its value is a schedule's; a known schedule does not cut it; wide enough, it is exact."""
    graph = JobShop.read(INSTANCES / "ft06.txt").graph()
    narrow, wide = finished(graph, width=1), finished(graph, width=1000)
    assert narrow.value >= wide.value == 55
    told = Tree(graph, width=1)
    told.cut(55)
    told.explore(10**6)
    assert (told.value, told.nodes) == (narrow.value, narrow.nodes)
    assert narrow.nodes <= graph.n_operations * 6


def test_a_beam_may_end_in_dead_ends() -> None:
    """With caps the one node kept may be where nothing can start any more."""
    dead = 0
    for seed in range(200):
        graph = random_array(Random(seed), 3, 2).graph()
        if not bounds.infeasibility(graph) and graph.memory.any():
            dead += finished(graph, width=1).value == INFINITE
    assert dead > 0
