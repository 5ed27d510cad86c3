"""CP-SAT on GPU choices: tables of values and the model of products against the other solvers."""

from __future__ import annotations

import numpy as np
import pytest
from depth import depth
from random_subsets import allowed
from test_subset_tree import best_of, four_by_eight, problem_of, replace_policy

import optsched
from optsched.bandwidth.contention import Contention
from optsched.bandwidth.policy import Policy
from optsched.errors import InputError
from optsched_solvers.gpus import cpsat as subset_cpsat
from optsched_solvers.gpus import cpsat_model as subset_cpsat_model
from optsched_solvers.gpus.vectors import CountVectors

pytest.importorskip("ortools")


class Sat:
    """The functions under test as a solver."""

    name = "sat"
    kinds = ("gpus",)
    options = dict.fromkeys(("parameters", "mode", "symmetry"), "")
    supports = staticmethod(subset_cpsat.supports)
    solve = staticmethod(subset_cpsat.solve)


@pytest.mark.parametrize("few", [1_000, 0])
def test_optimum_and_status(few, monkeypatch):  # type: ignore[no-untyped-def]
    """Optimal with the best value of all subsets, or infeasible; by tables, and by products."""
    monkeypatch.setattr(subset_cpsat_model, "FEW_VECTORS", few)
    for seed in range(depth(25, 80)):
        problem = problem_of(seed)
        if problem.contention.fill == "exact":
            continue
        assert subset_cpsat.supports(problem)
        result = optsched.solve(problem, Sat(), time_limit=600)
        best = best_of(problem)
        if best is None:
            expected = "unknown" if allowed(problem) else "infeasible"
            assert (result.status, result.objective) == (expected, None) and result.reason, seed
            continue
        assert (result.status, result.objective, result.lower_bound) == ("optimal", -best, -best)
        assert problem.check(result.schedule) == []
        for event in result.history:
            assert event.lower_bound is None or event.lower_bound <= -best, seed


def test_agrees_with_counts_on_four_by_eight():  # type: ignore[no-untyped-def]
    """Same status, value and bound as the exact kernel over counts."""
    for seed in range(10):
        problem = four_by_eight(seed)
        result = optsched.solve(problem, Sat(), time_limit=600)
        other = optsched.solve(problem, "counts")
        assert (result.status, result.objective, result.lower_bound) == (
            other.status, other.objective, other.lower_bound,
        ), seed  # fmt: skip


def test_preferred_levels():  # type: ignore[no-untyped-def]
    """The narrowest level with a choice decides, and no bound of a narrower one is claimed."""
    for seed in range(depth(15, 40)):
        problem = problem_of(seed, policy=Policy(preferred="host"))
        if problem.contention.fill == "exact":
            continue
        result, other = optsched.solve(problem, Sat()), optsched.solve(problem, "counts")
        assert (result.status, result.objective) == (other.status, other.objective), seed


def test_iterations_repeat():  # type: ignore[no-untyped-def]
    """With iterations: one thread, the same answer twice, never a false bound."""
    problem = replace_policy(four_by_eight(4))
    best = optsched.solve(problem, "counts").objective
    for iterations in (0, 1_000, 10_000_000):
        runs = [optsched.solve(problem, Sat(), iterations=iterations, seed=5) for _ in range(2)]
        assert runs[0].objective == runs[1].objective and runs[0].status == runs[1].status
        assert runs[0].lower_bound <= best
        assert runs[0].status != "infeasible"
    assert runs[0].objective == best


def test_time_limit(monkeypatch):  # type: ignore[no-untyped-def]
    """The call ends in time, even if the model is large."""
    monkeypatch.setattr(subset_cpsat_model, "FEW_VECTORS", 0)
    problem = replace_policy(four_by_eight(5))
    best = optsched.solve(problem, "counts").objective
    result = optsched.solve(problem, Sat(), time_limit=0.3)
    assert result.seconds < 60
    assert result.status != "infeasible" and result.lower_bound <= best


def test_start_is_kept():  # type: ignore[no-untyped-def]
    """A warm start is never lost."""
    problem = replace_policy(four_by_eight(6))
    start = optsched.solve(problem, "counts")
    result = optsched.solve(problem, Sat(), iterations=0, warm_start=start.schedule)
    assert result.objective == start.objective


def test_vectors_are_all_vectors():  # type: ignore[no-untyped-def]
    """Blocks hold every count vector once; `count` is their number; sums are k."""
    for seed in range(40):
        problem = problem_of(seed, policy=Policy())
        vectors = CountVectors(problem, problem.requests[0])
        blocks = list(vectors.blocks(3))
        rows = [tuple(row) for block in blocks for row in block.tolist()]
        room = vectors.room.tolist()
        expected = [
            tuple(index) for index in np.ndindex(*(n + 1 for n in room)) if sum(index) == problem.k
        ]
        assert sorted(rows) == expected and vectors.count() == len(expected)


def test_values_are_the_definition():  # type: ignore[no-untyped-def]
    """Values of vectors are what their best subsets get, and the policy's excess is 0 if kept."""
    from optsched.bandwidth.model import UnmeasuredPattern

    for seed in range(depth(20, 60)):
        problem = problem_of(seed)
        if problem.contention.fill == "exact":
            continue
        vectors = CountVectors(problem, problem.requests[0])
        level = vectors.levels()[0]
        for block in vectors.blocks():
            values, wrong = vectors.shares(block).value.tolist(), vectors.excess(block, level)
            for row, value, fault in zip(block, values, wrong.tolist(), strict=True):
                gpus = vectors.gpus(row)
                broken = problem.policy.broken_by(
                    problem.cluster,
                    {h: c for h, c in zip(vectors.hosts, row.tolist(), strict=True) if c},
                )
                assert (fault == 0) == (not broken), (seed, row, broken)
                if value < 0:
                    with pytest.raises(UnmeasuredPattern):
                        problem.shares([gpus])
                else:
                    assert problem.shares([gpus])[0].value == value, (seed, row)


def test_refusals(monkeypatch):  # type: ignore[no-untyped-def]
    """Exact joint allocations, several requests, wide numbers, many hosts: a sentence each."""
    problem = four_by_eight(0)
    exact = problem.changed(contention=Contention(fill="exact"))
    assert "exact GPUs" in subset_cpsat.supports(exact).reason
    two = problem.changed(
        requests=(
            optsched.problems.gpus.problem.Request("a", 1),
            optsched.problems.gpus.problem.Request("b", 1),
        )
    )
    assert "one request" in subset_cpsat.supports(two).reason
    monkeypatch.setattr(subset_cpsat_model, "MOST_VECTORS", 0)
    assert subset_cpsat.supports(problem)
    with monkeypatch.context() as patch:
        patch.setattr(subset_cpsat_model, "WIDEST", 1000)
        assert "64-bit" in subset_cpsat.supports(problem).reason
    with monkeypatch.context() as patch:
        patch.setattr(subset_cpsat_model, "MOST_HOSTS", 3)
        assert "more than 3 hosts" in subset_cpsat.supports(problem).reason
    monkeypatch.setattr(subset_cpsat_model, "MOST_ROWS", 0)
    assert "rows" in subset_cpsat.supports(problem).reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parameters": {"no_such": 1}}, "no_such"),
        ({"parameters": 3}, "options.parameters"),
        ({"mode": "else"}, "options.mode"),
        ({"parameters": {"max_time_in_seconds": -1.0}}, "options.parameters"),
    ],
)
def test_wrong_options(options, words):  # type: ignore[no-untyped-def]
    """Refused with the field."""
    with pytest.raises(InputError, match=words):
        optsched.solve(four_by_eight(0), Sat(), options=options)
