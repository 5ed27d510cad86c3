"""Every solver that chooses GPUs passes the conformance suite for that."""

from __future__ import annotations

import pytest

import optsched
from optsched.registry import answers, solver
from optsched.testing.check_subsets import SUBSET_CHECKS, check_subset_exact

SOLVERS = [name for name in optsched.solvers() if "resources" in answers(solver(name))]
EXACT = {"auto", "branch_and_bound", "counts", "cpsat"}


@pytest.mark.parametrize("check", [*SUBSET_CHECKS, check_subset_exact], ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", SOLVERS)
def test_conformance(name, check):  # type: ignore[no-untyped-def]
    """Allowed, honest, repeatable; exact ones prove."""
    if name == "pods":
        pytest.skip("the suite's models are no PodBandwidth: see test_pod_search")
    if check is not check_subset_exact or name in EXACT:
        check(solver(name), (), 1.0)


def test_all_are_there() -> None:
    """The names of the design."""
    assert set(SOLVERS) == {
        "auto", "branch_and_bound", "counts", "cpsat", "eha", "genetic", "hybrid", "pods",
        "proximity", "pts", "random_subset", "topo",
    }  # fmt: skip
