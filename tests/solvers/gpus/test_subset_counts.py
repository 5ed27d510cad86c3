"""`counts` passes the conformance suite, and answers while its kernel is not there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from oracles.best_gpus import Tables
from uncompiled import never_load, uncompile

import optsched
from optsched.bandwidth import ClusterState
from optsched.bandwidth.search import counts
from optsched.formats.read_problem import read_problem

if TYPE_CHECKING:
    import pytest

CASES = sorted((Path(__file__).parents[3] / "instances" / "subset").glob("*-4x8-3.subset.json"))


def test_exact_without_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same GPUs, bandwidth and proof on 4 hosts of 8, as soon as the process is there."""
    problems = [read_problem(file) for file in CASES]
    expected = [optsched.solve(problem) for problem in problems]
    uncompile(monkeypatch, counts)
    never_load(monkeypatch)
    for problem, warm in zip(problems, expected, strict=True):
        cold = optsched.solve(problem)
        assert warm.status == cold.status == "optimal"
        assert cold.schedule == warm.schedule


def test_an_answer_where_there_is_no_time_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiled kernels many hosts get the nearest GPUs, and no proof is claimed."""
    uncompile(monkeypatch, counts)
    never_load(monkeypatch)
    for sizes in ([3] * 12, [8] * 6):
        model = Tables(random.Random(1), sizes)
        problem = optsched.GpuPlacement(ClusterState.idle(model.cluster), model, 20)
        found = optsched.solve(problem, "counts", time_limit=1)
        assert [step.source for step in found.history if step.event == "incumbent"] == ["proximity"]
        assert (found.status == "optimal") == (found.objective == problem.lower_bound())
