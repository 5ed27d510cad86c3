"""Every installed backend passes the conformance suite."""

import pytest

from optsched.testing import SolverTests


class _Quick(SolverTests):
    """By day only `auto` is repeated in fresh processes: that takes longer than all the rest."""

    @pytest.mark.slow
    def test_reproducible(self) -> None:
        """Same instance, seed and iterations give the same schedule."""
        super().test_reproducible()


class TestAuto(SolverTests):
    """`auto`."""

    solver = "auto"
    time_limit = 0.3
    exact = True


class TestBranchAndBound(_Quick):
    """`branch_and_bound`, failure-directed."""

    solver = "branch_and_bound"
    time_limit = 0.3
    exact = True


class TestCpSat(_Quick):
    """`cpsat`."""

    solver = "cpsat"
    time_limit = 0.3
    exact = True


class TestDispatch(_Quick):
    """`dispatch`."""

    solver = "dispatch"
    time_limit = 0.3


@pytest.mark.slow
class TestGenetic(_Quick):
    """`genetic`."""

    solver = "genetic"
    time_limit = 0.3


class TestTabu(_Quick):
    """`tabu`."""

    solver = "tabu"
    time_limit = 0.3
