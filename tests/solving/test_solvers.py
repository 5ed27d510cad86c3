"""Every installed backend passes the conformance suite."""

import pytest

from optsched.testing import SolverTests


class _Quick(SolverTests):
    """Fresh processes are for the long run: they take longer than all the rest."""

    @pytest.mark.slow
    def test_reproducible(self) -> None:
        """Same instance, seed and iterations give the same schedule."""
        super().test_reproducible()


class _Timed(_Quick):
    """What takes the time that it is given is for the long run, too."""

    @pytest.mark.slow
    def test_limits(self) -> None:
        """Limits of zero, a second, a target: obeyed, with a legal status."""
        super().test_limits()

    @pytest.mark.slow
    def test_monitor(self) -> None:
        """Incumbents fall, bounds rise, callbacks may stop or raise."""
        super().test_monitor()

    @pytest.mark.slow
    def test_progress(self) -> None:
        """News come while the solver works."""
        super().test_progress()

    @pytest.mark.slow
    def test_silent(self) -> None:
        """Nothing is printed."""
        super().test_silent()

    @pytest.mark.slow
    def test_leaves_no_trace(self) -> None:
        """Problem, random state, settings and threads are as before."""
        super().test_leaves_no_trace()


class TestAuto(_Quick):
    """`auto`."""

    solver = "auto"
    time_limit = 0.3
    exact = True


class TestBranchAndBound(_Timed):
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


class TestTabu(_Timed):
    """`tabu`."""

    solver = "tabu"
    time_limit = 0.3
