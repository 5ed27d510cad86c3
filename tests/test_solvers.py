"""Every installed backend passes the conformance suite."""

from optsched.testing import SolverTests


class TestAuto(SolverTests):
    """`auto`."""

    solver = "auto"
    time_limit = 0.5
    exact = True


class TestBranchAndBound(SolverTests):
    """`branch_and_bound`, failure-directed."""

    solver = "branch_and_bound"
    time_limit = 0.5
    exact = True


class TestCpSat(SolverTests):
    """`cpsat`."""

    solver = "cpsat"
    time_limit = 0.5
    exact = True


class TestDispatch(SolverTests):
    """`dispatch`."""

    solver = "dispatch"
    time_limit = 0.5


class TestGenetic(SolverTests):
    """`genetic`."""

    solver = "genetic"
    time_limit = 0.5


class TestTabu(SolverTests):
    """`tabu`."""

    solver = "tabu"
    time_limit = 0.5
