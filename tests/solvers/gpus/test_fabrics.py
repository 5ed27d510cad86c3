"""Fabrics that are not joined: no solver, dispatcher or gang spans them, and refusals say so."""

from __future__ import annotations

import json
import random
from itertools import combinations

import pytest
from oracles.best_gpus import Tables, share, sizes_of, state_of

import optsched
from optsched.bandwidth import (
    Cluster,
    ClusterState,
    Dispatcher,
    Host,
)
from optsched.errors import Infeasible
from optsched.plan import ClusterSnapshot
from optsched.service.known import Known
from optsched.service.stream import Session

EXACT = ("auto", "counts", "cpsat", "branch_and_bound")
OTHERS = ("genetic", "eha", "pts", "hybrid", "topo", "proximity", "random_subset")
LEVELS = [("spine", "leaf"), ("fabric", "rack"), ("leaf", "leaf2"), ("zone", "rack")]


def apart(seed: int) -> tuple[Tables, ClusterState, random.Random]:
    """A model and a state of two or three fabrics, hosts in any order, names of leaves repeated."""
    rng = random.Random(seed)
    model = Tables(rng, sizes_of(rng, 9))
    levels = rng.choice(LEVELS)
    fabrics = [rng.randrange(3) for _ in model.cluster.hosts]
    hosts = tuple(
        Host(host.name, host.type, (f"f{of}", f"leaf-{rng.randrange(2)}"))
        for host, of in zip(model.cluster.hosts, fabrics, strict=True)
    )
    model.cluster = Cluster(hosts, model.cluster.types, levels)
    return model, state_of(rng, model.cluster), rng


def fabric_of(cluster: Cluster, gpu: int) -> str:
    """Domain at the top."""
    return cluster.hosts[int(cluster.host_of[gpu])].domains[0]


def best_of(problem: optsched.GpuPlacement) -> int | None:
    """The optimum over all sets of one fabric, without the library's rules."""
    state, k, known = problem.state, problem.k, problem.model.known  # type: ignore[attr-defined]
    values = [
        share(state, known, problem.demands, gpus)
        for gpus in combinations(state.free, k)
        if len({fabric_of(problem.cluster, gpu) for gpu in gpus}) == 1
    ]
    return max((value for value in values if value is not None), default=None)


def largest(state: ClusterState) -> int:
    """Most free GPUs of a fabric."""
    names = [fabric_of(state.cluster, gpu) for gpu in state.free]
    return max(map(names.count, names))


@pytest.mark.parametrize("seed", range(24))
def test_no_solver_spans_fabrics(seed: int) -> None:
    """Exact solvers find the best set of one fabric; all others stay in one; refusals name it."""
    model, state, rng = apart(seed)
    k = rng.randint(1, len(state.free))
    problem = optsched.GpuPlacement(state, model, k)
    best = best_of(problem)
    for name in EXACT + OTHERS:
        options = {"population": 8} if name == "genetic" else {}
        result = optsched.solve(problem, name, iterations=200, options=options)
        if best is None:
            assert result.status == "infeasible"
            assert f"with {largest(state)}" in result.reason and "joins" in result.reason
            continue
        assert result.schedule is not None, (name, result)
        gpus = problem.chosen(result.schedule)
        assert len({fabric_of(state.cluster, gpu) for gpu in gpus}) == 1, name
        assert -result.objective <= best
        if name in ("auto", "counts"):
            assert -result.objective == best
    pair = optsched.GpuPlacement(state, model, 2) if len(state.free) > 1 else None
    for chosen in combinations(state.free, 2) if pair is not None else ():
        if len({fabric_of(state.cluster, gpu) for gpu in chosen}) > 1:
            assert "not joined" in pair.faults(chosen)[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(12))
def test_dispatcher_stays_in_one_fabric(seed: int) -> None:
    """So do the best choices, scores, what-if, gangs and the lines of a stream."""
    model, state, rng = apart(seed + 100)
    fast = Dispatcher(state.cluster, model)
    k = rng.randint(1, largest(state))
    best = best_of(optsched.GpuPlacement(state, model, k))
    assert fast.answer(state, k).value == best
    for one in fast.best(state, k, 5):
        assert len({fabric_of(state.cluster, gpu) for gpu in one.gpus}) == 1
    names = [fabric_of(state.cluster, gpu) for gpu in state.free]
    able = {
        state.cluster.gpu_name(gpu).split("/")[0]
        for gpu, name in zip(state.free, names, strict=True)
        if names.count(name) >= k
    }
    assert set(fast.scores(state, k)) == able
    if largest(state) < len(state.free):
        with pytest.raises(Infeasible, match=f"with {largest(state)}"):
            fast.choose(state, largest(state) + 1)
        what = fast.what_if(state, state.free)
        assert "not joined" in what.fault and what.share.value == what.share.standalone == 0
        session = Session()
        session.clusters[""] = Known(ClusterSnapshot(state), model)
        line = json.dumps({"do": "choose", "gpus": largest(state) + 1}).encode()
        answer = json.loads(session.answer(line))
        assert answer["code"] == 409 and "joins" in answer["error"]["message"]


@pytest.mark.parametrize("seed", range(12))
def test_no_verb_of_a_state_spans_fabrics(seed: int) -> None:
    """A job starts, grows and moves within one fabric; one that lay across before may shrink."""
    _, state, rng = apart(seed)
    state, gpus = ClusterState.idle(state.cluster), range(state.cluster.n_gpus)
    for _ in range(20):
        two = rng.sample(gpus, 2)
        spans = len({fabric_of(state.cluster, gpu) for gpu in two}) > 1
        start = state.take(two[:1], "a")
        for verb, given in ((state.take, (two, "a")), (start.resize, ("a", two))):
            if spans:
                with pytest.raises(optsched.InputError, match="are not joined"):
                    verb(*given)
            else:
                assert set(verb(*given).job("a").gpus) == set(two)
        rest = state.cluster.written(gpu for gpu in gpus if gpu not in two)
        before = ClusterState.parse(
            state.cluster, free=rest, jobs={"old": state.cluster.written(two)}
        )
        assert before.resize("old", two[:1]).job("old").gpus == (two[0],)
        there = rng.sample(before.free, 2)
        if len({fabric_of(state.cluster, gpu) for gpu in there}) > 1:
            with pytest.raises(optsched.InputError, match="are not joined"):
                before.move("old", there)
