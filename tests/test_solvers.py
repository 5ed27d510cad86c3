"""Every installed backend passes the conformance suite."""

from optsched.testing import SolverTests


class TestAuto(SolverTests):
    """`auto`."""

    solver = "auto"
    time_limit = 0.5


class TestCpSat(SolverTests):
    """`cpsat`."""

    solver = "cpsat"
    time_limit = 0.5


class TestDispatch(SolverTests):
    """`dispatch`."""

    solver = "dispatch"
    time_limit = 0.5
