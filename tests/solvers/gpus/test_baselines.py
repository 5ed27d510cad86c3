"""Dispatchers that ask for no bandwidths: what they choose, and that it is allowed."""

from __future__ import annotations

import random

import pytest
from oracles.best_gpus import Tables, all_subsets
from subset_cases import problem_of, solved

import optsched
from optsched.bandwidth import Cluster, ClusterState, Host, HostType, Policy
from optsched.errors import UnsupportedProblem
from optsched_solvers.gpus.bandpilot import Proximity, RandomSubset, Topo
from optsched_solvers.gpus.proximity import proximity
from optsched_solvers.gpus.topo import nearest_links

ALL = (Proximity(), Topo(), RandomSubset())


def paired(names="ab"):  # type: ignore[no-untyped-def]
    """Hosts of 8 GPUs: pairs joined by NVLink, fours by a switch, two NUMA groups."""
    links = tuple(
        tuple(
            "X" if i == k else "NV4" if i // 2 == k // 2 else "PXB" if i // 4 == k // 4 else "SYS"
            for k in range(8)
        )
        for i in range(8)
    )
    kind = HostType("pairs", 8, links, ((0, 1, 2, 3), (4, 5, 6, 7)))
    return Cluster(tuple(Host(name, "pairs") for name in names), (kind,))


@pytest.mark.parametrize("solver", ALL, ids=lambda s: s.name)
def test_allowed_and_never_above_the_optimum(solver):  # type: ignore[no-untyped-def]
    """The choice is a set of k free GPUs (`solved` checks that), judged as the oracle does."""
    answered = 0
    for seed in range(120):
        problem, model = problem_of(seed)
        found = solved(problem, solver)
        values = dict(
            (gpus, value)
            for value, gpus in all_subsets(problem.state, model.known, problem.demands, problem.k)
        )
        if found is None:
            assert model.gaps
            continue
        answered += 1
        assert values[found[1]] == found[0] <= max(values.values())
    assert answered > 90


def test_proximity_rule():  # type: ignore[no-untyped-def]
    """NUMA group, then host, then hosts whole by falling room, entirely free groups first."""
    cluster = paired("abc")
    cases = [
        ("a:0,1,2 b:4,5,6,7 c:0,1", 3, "b:4,5,6"),
        ("a:0,1,2 b:4,5,6 c:0,1", 3, "a:0,1,2"),
        ("a:0,2,4,5,6,7 b:0,1,2,3,4", 5, "a:0,4,5,6,7"),
        ("a:0,1,2 b:0,1,2,3,4 c:0,1,2,3,5,7", 8, "c:0,1,2,3,5,7 b:0,1"),
        ("a:0,1,2,3 b:1,2,4,5,6,7 c:0", 11, "a:0,1,2,3 b:1,2,4,5,6,7 c:0"),
        ("a:0,1,2,3,4,5,6 b:1,2,4,5,6,7 c:0", 12, "a:0-6 b:1,4,5,6,7"),
        ("c:7", 1, "c:7"),
    ]
    for free, k, expected in cases:
        assert proximity(cluster, cluster.parse(free), k) == cluster.parse(expected), free


def test_topo_rule():  # type: ignore[no-untyped-def]
    """Pairs are kept together; the host whose choice weighs most wins; else hosts by room."""
    cluster = paired("abc")
    cases = [
        ("a:0,2,4,6 b:1,6,7", 2, "b:6,7"),
        ("a:0,2,3,4 b:0,1,2,4", 3, "a:0,2,3"),
        ("a:0,2,4,6,7 b:0,1,2", 3, "a:4,6,7"),
        ("a:0,1,2,3 b:0,1,2,3,4,6,7 c:1", 9, "b:0,1,2,3,4,6,7 a:0,1"),
        ("a:1,2,3,4 b:0,1,2,3,4,6,7 c:1", 9, "b:0,1,2,3,4,6,7 a:2,3"),
        ("a:5 b:2", 1, "a:5"),
    ]
    for free, k, expected in cases:
        assert nearest_links(cluster, cluster.parse(free), k) == cluster.parse(expected), free


@pytest.mark.parametrize("solver", ALL, ids=lambda s: s.name)
def test_policies(solver):  # type: ignore[no-untyped-def]
    """`exclude` is obeyed, other rules are refused by name."""
    model = Tables(random.Random(4), [4, 4, 2])
    state = ClusterState.idle(model.cluster)
    for k in range(1, 7):
        problem = optsched.GpuPlacement(state, model, k, policy=Policy(exclude=("n0",)))
        assert min(solved(problem, solver)[1]) >= 4
    too_many = optsched.GpuPlacement(state, model, 7, policy=Policy(exclude=("n0",)))
    assert optsched.solve(too_many, solver).status == "infeasible"
    for rule in ({"required": "rack"}, {"balance": "even"}):
        problem = optsched.GpuPlacement(state, model, 2, policy=Policy(**rule))
        with pytest.raises(UnsupportedProblem, match=next(iter(rule))):
            optsched.solve(problem, solver)
