"""PTS: its picks are those of a slow twin, and never above the optimum."""

from __future__ import annotations

import random

import pytest
from depth import depth
from subset_cases import WithoutTables, judged, optimum, problem_of, solved

import optsched
from optsched.bandwidth import Cluster, ClusterState, Contention, Host, HostType, Policy
from optsched.bandwidth.rates import UNMEASURED
from optsched.errors import UnsupportedProblem
from optsched.problems.gpus.problem import Request
from optsched.testing.best_gpus import Tables
from optsched_solvers.gpus import judge
from optsched_solvers.gpus.eha import Eha
from optsched_solvers.gpus.hybrid import Hybrid
from optsched_solvers.gpus.pts import Pts


def twin(problem, model):  # type: ignore[no-untyped-def]
    """PTS in plain Python, from its description: value, GPUs, and sets evaluated."""
    cluster, free, k = problem.cluster, list(problem.state.free), problem.k

    def alone(gpus):  # type: ignore[no-untyped-def]
        value = model.known(tuple(gpus))
        return -1 if value is None else value

    def worth(gpus):  # type: ignore[no-untyped-def]
        value = judged(problem, model, gpus)
        return -1 if value is None else value

    groups = [[g for g in free if cluster.host_of[g] == h] for h in range(cluster.n_hosts)]
    groups = [group for group in groups if len(group) >= k]
    chosen = max(groups, key=alone) if groups else free
    evaluated = 0
    while len(chosen) > k:
        best = None
        for gpu in chosen:
            rest = [g for g in chosen if g != gpu]
            evaluated += 1
            if best is None or worth(rest) > best[0]:
                best = worth(rest), rest
        chosen = best[1]
    value = worth(chosen)
    return (None if value < 0 else (value, tuple(chosen))), evaluated, len(groups) == 0


def test_picks_of_the_twin():  # type: ignore[no-untyped-def]
    """Same GPUs, values and numbers of evaluations; never above the best of all subsets."""
    several = 0
    for seed in range(depth(120, 400)):
        problem, model = problem_of(seed, 12)
        expected, evaluated, everywhere = twin(problem, model)
        assert solved(problem, Pts()) == expected, seed
        n, k = len(problem.state.free), problem.k
        if everywhere:
            assert evaluated == (n * (n + 1) - k * (k + 1)) // 2
            several += 1
        if seed % 4 == 0 and expected is not None:
            assert expected[0] <= optimum(problem)
    assert several > 20


def test_chunks(monkeypatch):  # type: ignore[no-untyped-def]
    """How often the kernel looks up makes no difference."""
    cases = [problem_of(seed)[0] for seed in range(40)]
    whole = [solved(problem, Pts()) for problem in cases]
    monkeypatch.setattr(judge, "_CHUNK", 1)
    assert [solved(problem, Pts()) for problem in cases] == whole


def test_evaluations_are_reported():  # type: ignore[no-untyped-def]
    """The iterations of a run are the sets it evaluated."""
    for seed in range(40):
        problem, model = problem_of(seed)
        _, evaluated, _ = twin(problem, model)
        seen = []
        optsched.solve(problem, Pts(), on_progress=lambda p, seen=seen: seen.append(p.iteration))
        if seen:
            assert seen[-1] == evaluated


def test_models_without_tables():  # type: ignore[no-untyped-def]
    """The plain path picks the same; also with exact joint allocations."""
    for seed in range(60):
        problem, model = problem_of(seed, 9)
        plain = problem.changed(model=WithoutTables(model))
        if problem.contention.fill == "first":
            assert solved(plain, Pts()) == solved(problem, Pts()), seed
        exact, model = problem_of(seed, 9, contention=Contention(fill="exact"))
        assert solved(exact, Pts()) == twin(exact, model)[0], seed


def test_hybrid():  # type: ignore[no-untyped-def]
    """The better of both, EHA's on ties; options reach the part they belong to."""
    both = 0
    for seed in range(150):
        problem, _ = problem_of(seed)
        first, second = solved(problem, Eha(), max_candidates=2), solved(problem, Pts())
        found = solved(problem, Hybrid(), max_candidates=2)
        known = [one for one in (first, second) if one is not None]
        assert found == (max(known, key=lambda one: one[0]) if known else None), seed
        both += first is not None and second is not None and second[0] > first[0]
    assert both > 3


def test_policies():  # type: ignore[no-untyped-def]
    """`required` and `exclude` are obeyed, other rules are refused by name."""
    obeyed = 0
    for seed in range(60):
        problem, _ = problem_of(seed)
        names = [host.name for host in problem.cluster.hosts]
        rules = [{"required": "rack"}, {"exclude": (names[-1],)}, {"required": "host"}]
        narrow = optsched.GpuPlacement(
            problem.state, problem.model, max(1, problem.k // 2),
            policy=Policy(**random.Random(seed).choice(rules)), traffic="idle",
        )  # fmt: skip
        found = solved(narrow, Pts())
        if found is not None:
            obeyed += 1
            assert found[0] <= optimum(narrow)
    assert obeyed > 20
    for rule in ({"balance": "exact"}, {"min_hosts": 2}, {"include": (names[0],)}):
        other = problem.changed(requests=(Request("a", 2, Policy(**rule)),))
        with pytest.raises(UnsupportedProblem, match=next(iter(rule))):
            optsched.solve(other, Pts())


def test_measured_only():  # type: ignore[no-untyped-def]
    """With `on_unmeasured="measured"` no choice has a pattern that is only believed."""

    class Doubted(Tables):
        def network(self, patterns, which="value"):  # type: ignore[no-untyped-def]
            values = super().network(patterns)
            doubt = (patterns.sum(axis=1) % 3 == 2) & ((patterns > 0).sum(axis=1) > 1)
            known = values != UNMEASURED
            if which == "value":
                return values
            return values + (doubt & known) * (-1 if which == "low" else 1)

    answered = 0
    for seed in range(60):
        rng = random.Random(seed)
        model = Doubted(rng, [3, 3, 2])
        state = ClusterState.with_free(model.cluster, rng.sample(range(8), rng.randint(4, 8)))
        k = rng.randint(2, len(state.free))
        problem = optsched.GpuPlacement(state, model, k, on_unmeasured="measured")
        for solver in (Eha(), Pts(), Hybrid()):
            found = solved(problem, solver)
            hosts = {int(model.cluster.host_of[g]) for g in found[1]} if found else set()
            assert found is None or len(hosts) == 1 or k % 3 != 2
            answered += found is not None
        bare = problem.changed(model=WithoutTables(model))
        with pytest.raises(UnsupportedProblem, match="measured"):
            optsched.solve(bare, Pts())
    assert answered > 50


def test_nothing_is_known():  # type: ignore[no-untyped-def]
    """Without any measured pattern there is no answer, and the reason says so."""
    model = Tables(random.Random(4), [2, 2], gaps=1.0)
    for given in (model, WithoutTables(model)):
        problem = optsched.GpuPlacement(ClusterState.idle(model.cluster), given, 3)
        for solver in (Eha(), Pts(), Hybrid()):
            result = optsched.solve(problem, solver)
            assert result.status == "unknown" and "known bandwidth" in result.reason


def test_time_limit():  # type: ignore[no-untyped-def]
    """A search of half a million slow evaluations ends soon after its limit."""
    kind = HostType("h", 8)
    cluster = Cluster(tuple(Host(f"n{i}", "h") for i in range(100)), (kind,))

    class Wide(Tables):
        def __init__(self) -> None:
            self.cluster, self.gaps = cluster, 0

        def limit(self, pattern):  # type: ignore[no-untyped-def]
            return 1_000_000 * len(pattern) + sum(pattern)

        def intra_of(self, kind, which="value"):  # type: ignore[no-untyped-def]
            return None

    problem = optsched.GpuPlacement(ClusterState.idle(cluster), Wide(), 400)
    assert problem.tables is None
    result = optsched.solve(problem, Pts(), time_limit=0.5)
    assert result.status == "unknown" and result.seconds < 30
