"""Quota plans of few jobs are solved exactly while nothing is compiled."""

from __future__ import annotations

import random
import sys
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
from uncompiled import never_load, uncompile

import optsched
from optsched import QuotaPlan
from optsched.kernels.plain_python import in_python
from optsched.problems.quota.synthetic import synthetic
from optsched.testing.best_quota import random_plan
from optsched_solvers.quota import multiple_choice
from optsched_solvers.quota.exact import certificate

if TYPE_CHECKING:
    from optsched_solvers.quota import Certificate


def plans() -> list[QuotaPlan]:
    """Small ones of every shape, and some of fifty jobs."""
    small = [random_plan(random.Random(seed)) for seed in range(150)]
    small = [plan for plan in small if len(plan.kinds) == 1 and not plan.infeasibility()]
    objectives = ("sum", "max_min", "makespan", "proportional")
    return small + [
        synthetic(50, 8, seed, objective=which) for seed, which in enumerate(objectives)
    ]


def answers(given: list[QuotaPlan]) -> list[tuple[object, ...]]:
    """What does not depend on time: schedules, bounds, and proofs."""
    found = []
    for plan in given:
        result = optsched.solve(plan, "quota", time_limit=20)
        proof: Certificate | None = certificate(plan)
        said = None if proof is None else proof.found
        found.append((result.schedule, result.objective, result.lower_bound, result.status, said))
    return found


def uncompile_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of quotas is there."""
    names = [name for name in sys.modules if name.startswith("optsched_solvers.quota")]
    uncompile(monkeypatch, *(sys.modules[name] for name in names))
    never_load(monkeypatch)


def test_the_same_answers_and_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotas, nodes, ties, bounds and certificates are those of the kernels; nothing overflows."""
    given = plans()
    warm = answers(given)
    uncompile_all(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cold = answers(plans())
    for number, (one, other) in enumerate(zip(warm, cold, strict=True)):
        assert one == other, number


def test_hard_sums_go_on_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many partial solutions for Python: the kernel begins anew and gives its own answer."""
    rng = np.random.default_rng(0)
    size = np.sort(rng.choice(np.arange(1, 10**4), (40, 8)))
    given = np.arange(0, 321, 8), size.ravel(), (size + rng.integers(0, 9, (40, 8))).ravel(), 10**5
    warm, _ = multiple_choice.choice(*given)
    monkeypatch.setattr(multiple_choice, "PLAIN_STATES", 30)
    with in_python():
        assert (multiple_choice.choice(*given)[0] == warm).all()
        uncompile_all(monkeypatch)
        with pytest.raises(AssertionError, match="would be compiled"):
            multiple_choice.choice(*given)
        monkeypatch.undo()
        assert (multiple_choice.choice(*given)[0] == warm).all()
