"""Every solver that chooses GPUs passes the conformance suite for that."""

from __future__ import annotations

import pytest

import optsched
from optsched.solving.solver import solver
from optsched.testing.check_subsets import SUBSET_CHECKS, check_subset_exact

SOLVERS = optsched.solvers("gpus")
EXACT = ("auto", "branch_and_bound", "counts", "cpsat")


@pytest.mark.parametrize("check", SUBSET_CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "pods"])
def test_conformance(name, check):  # type: ignore[no-untyped-def]
    """Allowed, honest, repeatable; `pods` takes none of the suite's models."""
    check(solver(name, "gpus"), (), 1.0)


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):  # type: ignore[no-untyped-def]
    """Those that prove, prove."""
    check_subset_exact(solver(name, "gpus"), (), 1.0)


def test_all_are_there() -> None:
    """The names of the design."""
    assert set(SOLVERS) == {
        "auto", "branch_and_bound", "counts", "cpsat", "eha", "genetic", "hybrid", "pods",
        "proximity", "pts", "random_subset", "topo",
    }  # fmt: skip
