"""A small part of the fuzzing that ``make fuzz`` does, far from the seeds it begins with."""

from __future__ import annotations

from collections import Counter
from typing import Any

import fuzz
import pytest

from optsched import Limits, Monitor, Result

SEEDS = {"recompute": 2, "period": 10}


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_no_false_claims(kind: str) -> None:
    """Bounds, proofs and schedules of all solvers against brute force."""
    found: list[str] = []
    judged = 0
    for seed in range(10**6, 10**6 + SEEDS.get(kind, 12)):
        try:
            found += fuzz.failures(kind, seed, Counter())
            judged += 1
        except fuzz.TooLarge:
            continue
    assert not found, "\n".join(found)
    assert judged


class Lies:
    """A solver that proves too much, or finds nothing."""

    name = "lies"
    options: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, claim: str) -> None:
        self.claim = claim

    def supports(self, problem: Any) -> bool:
        """Whatever there is."""
        return True

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Claim it."""
        if self.claim == "bound":
            monitor.bound(10**6, self.name)
        return Result("infeasible" if self.claim == "infeasible" else "unknown", reason="so I say")


@pytest.mark.parametrize(
    ("claim", "said"),
    [("bound", "bound 1000000 >"), ("infeasible", "called infeasible"), ("nothing", "no answer")],
)
def test_every_false_claim_is_seen(claim: str, said: str) -> None:
    """A bound above the optimum, a refuted instance that has a schedule, no answer at all."""
    problem = fuzz.draw("shop", 0)
    best = fuzz.best_order(problem)
    run = fuzz.Run(Lies(claim), {"time_limit": 60}, must_answer=True)  # type: ignore[arg-type]
    assert best is not None and said in fuzz.fault(problem, run, best)
