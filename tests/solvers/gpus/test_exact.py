"""Exact solvers on one request: optimality by brute force, with factors and uplinks of levels."""

from __future__ import annotations

import pytest
from depth import depth
from oracles.best_gpus import all_subsets
from random_subsets import allowed
from subset_cases import four_by_eight, optimum, ruled_problem

import optsched
from optsched.bandwidth.topology.policy import Policy
from optsched.errors import InputError, UnsupportedProblem
from optsched.solving.solver import solver as find_solver
from optsched_solvers.gpus import cpsat
from optsched_solvers.gpus.vectors import CountVectors

pytest.importorskip("ortools")
PROVERS = ["branch_and_bound", "cpsat"]


@pytest.mark.parametrize(("solver", "n"), [("branch_and_bound", 80), ("cpsat", 25)])
def test_optimum_and_status(solver, n):  # type: ignore[no-untyped-def]
    """Optimal with the best value of all subsets, or infeasible."""
    for seed in range(depth(n, 100)):
        problem = ruled_problem(seed)
        result = optsched.solve(problem, solver, time_limit=600)
        best = optimum(problem)
        if best is None:
            expected = "unknown" if allowed(problem) else "infeasible"
            assert (result.status, result.objective) == (expected, None) and result.reason, seed
            continue
        assert (result.status, result.objective, result.lower_bound) == ("optimal", -best, -best)
        assert problem.check(result.schedule) == []
        for event in result.history:  # every claim on the way was true
            assert event.lower_bound is None or event.lower_bound <= -best, seed
            assert event.objective is None or event.objective >= -best, seed


def test_agrees_with_counts_on_four_by_eight():  # type: ignore[no-untyped-def]
    """Same status, value and bound as the exact kernel over counts."""
    for seed in range(10):
        problem = four_by_eight(seed)
        result = optsched.solve(problem, "cpsat", time_limit=600)
        other = optsched.solve(problem, "counts")
        assert (result.status, result.objective, result.lower_bound) == (
            other.status, other.objective, other.lower_bound,
        ), seed  # fmt: skip


def test_preferred_levels():  # type: ignore[no-untyped-def]
    """Best among the choices on the fewest domains of the preferred level; others refuse."""
    for seed in range(depth(30, 80)):
        level = "host" if seed % 2 else "rack"
        problem = ruled_problem(seed, policy=Policy(preferred=level))
        cluster, known = problem.cluster, problem.model.known
        ranked = [
            (len({tuple(cluster.hosts[int(cluster.host_of[g])].domains) for g in gpus})
             if level == "rack" else len(set(cluster.host_of[list(gpus)])), -value)
            for value, gpus in all_subsets(problem.state, known, problem.demands, problem.k)
        ]  # fmt: skip
        for solver in ("counts", "auto"):
            result = optsched.solve(problem, solver)
            assert result.objective == min(ranked, default=(0, None))[1], seed
    for solver in (*PROVERS, "genetic", "eha"):
        with pytest.raises(UnsupportedProblem, match="preferred"):
            optsched.solve(problem, solver)


def test_vectors_break_a_policy_as_their_gpus_do():  # type: ignore[no-untyped-def]
    """The excess is 0 for feasible vectors, and for no others."""
    for seed in (*range(depth(20, 60)), 46):  # 46: no hosts are left
        few = {} if seed % 3 else {"policy": Policy(max_hosts=1)}
        problem = ruled_problem(seed, **few)
        vectors = CountVectors(problem)
        every = vectors.every()
        assert len(every) == vectors.count()
        for row, excess in zip(every.tolist(), vectors.excess(every).tolist(), strict=True):
            used = {h: c for h, c in zip(vectors.hosts, row, strict=True) if c}
            broken = problem.policy.broken_by(problem.cluster, used)
            assert (excess == 0) == (not broken), (seed, row, broken)


def test_refusals(monkeypatch):  # type: ignore[no-untyped-def]
    """Unsupported problems are refused with a reason."""
    problem = four_by_eight(0, ruled=False)

    def reason(solver: str) -> str:
        return find_solver(solver, "gpus").supports(problem).reason  # type: ignore[union-attr]

    monkeypatch.setattr(cpsat, "MOST_VECTORS", 3)
    assert "count vectors" in reason("cpsat")
    model = problem.model
    problem.__dict__["model"] = type("Odd", (), {"intra_monotone": False})()
    assert "faster hosts" in reason("branch_and_bound")
    problem.__dict__["model"] = model
    problem.__dict__["tables"] = None
    assert "no tables" in reason("branch_and_bound")


@pytest.mark.parametrize(
    ("solver", "options", "words"),
    [
        ("cpsat", {"parameters": {"no_such": 1}}, "no_such"),
        ("genetic", {"population": 3}, "options.population"),
    ],
)
def test_wrong_options(solver, options, words):  # type: ignore[no-untyped-def]
    """Refused with the field."""
    with pytest.raises(InputError, match=words):
        optsched.solve(four_by_eight(7, ruled=False), solver, options=options)
