"""Every installed solver passes the conformance suite, whatever kind of problem it is for."""

from __future__ import annotations

import pytest

from optsched.solving.solver import KINDS, solver, solvers
from optsched.testing import check_solver

ENGINES = [
    (kind, name)
    for kind in KINDS
    for name in solvers(kind)
    if kind != "jobarray"  # its engines are those of job shops
]

PROVE = {"auto", "branch_and_bound", "cpsat", "counts"}
"""These close every tiny problem, but for periodic ones: there `cpsat` alone does."""

BY_DAY = {
    ("jobshop", "auto"), ("jobshop", "dispatch"), ("periodic", "cpsat"), ("quota", "auto"),
    ("gpus", "counts"),
}  # fmt: skip
"""An engine of each make: a portfolio of compiled searches, a rule, CP-SAT, NumPy."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*e, marks=[] if e in BY_DAY else pytest.mark.slow) for e in ENGINES],
)
def test_conformance(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    """All checks; those with processes and clocks only in the long run."""
    long = request.config.option.markexpr != "not slow"
    exclude = [] if long else ["check_reproducible", "check_limits"]
    exact = name in PROVE and (kind, name) != ("periodic", "auto")
    print(check_solver(solver(name, kind), time_limit=0.3, exact=exact, exclude=exclude))


def test_the_names_of_the_design() -> None:
    """Every kind by `auto` and `cpsat`, and but for periods by `genetic`."""
    for kind in KINDS:
        names = {"auto", "cpsat"} | ({"genetic"} if kind != "periodic" else set())
        missing = names - set(solvers(kind))
        assert not missing, kind
    assert "branch_and_bound" in solvers("jobshop") and "dispatch" in solvers("jobarray")
    assert "dispatch" in solvers("periodic") and "greedy_quota" in solvers("quota")
    assert {"eha", "pts", "hybrid", "counts", "branch_and_bound"} <= set(solvers("gpus"))
