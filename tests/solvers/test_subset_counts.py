"""`counts` passes the conformance suite."""

from __future__ import annotations

from optsched.testing import SolverTests


class TestConformance(SolverTests):
    """Exact by counts."""

    solver = "counts"
    exact = True
