"""The exact kernel against all subsets of small clusters: values, ties, policies, contention."""

from __future__ import annotations

import random

import numpy as np
import pytest
from depth import depth
from oracles.best_gpus import (
    Tables,
    policy_of,
    sizes_of,
    state_of,
)
from random_subsets import best_subset, subsets_of
from uncompiled import uncompile

from optsched.bandwidth import Cluster, ClusterState, Host
from optsched.bandwidth.models.contention import demands, share
from optsched.bandwidth.models.model import UnmeasuredPattern
from optsched.bandwidth.search import counts
from optsched.bandwidth.search.by_counts import MOST_LEAVES, best_by_counts, leaves_in_python

CASES = depth(100, 400)


def case(seed: int, most: int = 11) -> tuple:  # type: ignore[type-arg]
    """Model, state, demands, k and policy."""
    rng = random.Random(seed)
    model = Tables(rng, sizes_of(rng, rng.randint(2, most)), gaps=rng.choice([0, 0, 0.2]))
    state = state_of(rng, model.cluster)
    policy = policy_of(rng, model.cluster)
    wanted = tuple(
        rng.randint(0, 300) * 1_000_000 if job.demand is None else job.demand for job in state.jobs
    )
    k = rng.randint(1, len(state.free))
    return model, state, wanted, k, policy


def test_ties():  # type: ignore[no-untyped-def]
    """Of equals the choice leaves the best rest, then has the lowest ids."""
    for seed in range(CASES):
        model, state, wanted, k, policy = case(seed, 9)
        found = best_by_counts(model.tables(), state, wanted, k, policy, ties=True)
        best = best_subset(state, model.known, wanted, k, policy)
        if best is None:
            assert found is None, seed
            continue
        assert found is not None, seed
        assert (found.value, found.gpus) == (best.value, best.gpus), seed


def test_ties_go_to_the_fewest_domains():  # type: ignore[no-untyped-def]
    """From the top level down, however hosts and domains are mixed; then to the fewest hosts."""
    for seed in range(CASES):
        rng = random.Random(seed)
        model = Tables(rng, sizes_of(rng, 9))
        levels = ("block", "rack", "tray")[: rng.randint(0, 3)]
        ways = [tuple(rng.choice("abc") for _ in levels) for _ in model.cluster.hosts]
        hosts = zip(model.cluster.hosts, ways, strict=True)
        model.cluster = Cluster(
            tuple(Host(host.name, host.type, way) for host, way in hosts),
            model.cluster.types, levels,
        )  # fmt: skip
        model.values = [rng.choice(model.values)]  # the network gives all patterns the same
        state = state_of(rng, model.cluster)
        k = rng.randint(1, len(state.free))
        found = best_by_counts(model.tables(), state, (0,) * len(state.jobs), k, ties=True)
        best = best_subset(state, model.known, (0,) * len(state.jobs), k)
        assert found is not None and best is not None
        assert (found.value, found.gpus) == (best.value, best.gpus), seed


def test_predictions_are_the_tables():  # type: ignore[no-untyped-def]
    """`predict`, the definition in plain Python, and the tables say the same of every subset."""
    for seed in range(20):
        model = Tables(random.Random(seed), sizes_of(random.Random(seed), 7), gaps=0.1)
        tables, cluster = model.tables(), model.cluster
        for gpus in subsets_of(tuple(range(cluster.n_gpus))):
            expected = model.known(gpus)
            row = np.zeros((1, cluster.n_gpus), np.bool_)
            row[0, list(gpus)] = True
            assert tables.value(gpus) == (-1 if expected is None else expected)
            if expected is None:
                with pytest.raises(UnmeasuredPattern):
                    model.predict(row)
                continue
            assert model.predict(row).tolist() == [expected] == model.of_sets([gpus])
            counts = np.bincount(cluster.host_of[list(gpus)], minlength=cluster.n_hosts)
            assert tables.network[tables.automaton.states(counts[None])[0]] >= expected


def test_shared_definition():  # type: ignore[no-untyped-def]
    """`share` of a model is the definition of the oracle."""
    from oracles.best_gpus import share as expected

    for seed in range(300):
        model, state, wanted, k, _ = case(seed)
        rng = random.Random(seed)
        gpus = tuple(sorted(rng.sample(state.free, k)))
        value = expected(state, model.known, wanted, gpus)
        if value is None:
            with pytest.raises(UnmeasuredPattern):
                share(model, state, gpus, wanted)
        else:
            assert share(model, state, gpus, wanted).value == value, seed


def test_demands():  # type: ignore[no-untyped-def]
    """Idle is nothing, heavy is what the job reaches alone, moderate between, and repeatable."""
    for seed in range(40):
        model, state, *_ = case(seed)
        if model.gaps:
            continue
        alone = [model.known(job.gpus) for job in state.jobs]
        assert demands(model, state, "idle") == (0,) * len(alone)
        assert list(demands(model, state, "heavy")) == alone
        moderate = demands(model, state, "moderate", 3)
        assert moderate == demands(model, state, "moderate", 3)
        for part, most in zip(moderate, alone, strict=True):
            assert most // 4 <= part <= 3 * most // 4 + 1
        given = demands(model, state)
        for value, job, most in zip(given, state.jobs, alone, strict=True):
            assert value == (most if job.demand is None else job.demand)


def test_python_answers_as_the_kernel(monkeypatch):  # type: ignore[no-untyped-def]
    """The same choice, ties, proof and vectors looked at while the kernel is not compiled."""
    asked = []
    for seed in range(150):
        model, state, wanted, k, policy = case(seed)
        given = model.tables(), state, wanted, k, policy
        rest = {"ties": seed % 3 > 0, "leaves": (10**6, 5)[seed % 2]}
        asked.append((given, rest, best_by_counts(*given, **rest)))
    uncompile(monkeypatch, counts)
    for seed, (given, rest, expected) in enumerate(asked):
        assert best_by_counts(*given, **rest) == expected, seed


def test_python_leaves_large_questions_to_the_kernel(monkeypatch):  # type: ignore[no-untyped-def]
    """Nine hosts, one of nine GPUs, or many vectors of equal worth: Python would take too long."""
    for sizes, k in (([4] * 9, 18), ([9] * 2, 9), ([8] * 6, 28)):
        model = Tables(random.Random(1), sizes)
        few = leaves_in_python(model.cluster.sizes, k)
        assert few < MOST_LEAVES and (few > 0) == (sizes == [8] * 6)
    assert leaves_in_python([8] * 4, 16) == MOST_LEAVES
    state = ClusterState.idle(model.cluster)
    exact = best_by_counts(model.tables(), state, (), k, ties=True)
    cut = best_by_counts(model.tables(), state, (), k, ties=True, leaves=few)
    assert exact.visited > cut.visited
    uncompile(monkeypatch, counts)
    assert best_by_counts(model.tables(), state, (), k, ties=True, leaves=few) == cut
    with pytest.raises(AssertionError, match="choose would be compiled"):
        best_by_counts(model.tables(), state, (), k, ties=True)
