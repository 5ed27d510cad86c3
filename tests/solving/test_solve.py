"""`optsched.solve`: limits, history, warm start, callbacks, interrupts, engines that lie."""

from __future__ import annotations

import threading
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import optsched
from optsched import Csr, JobArray, JobShop, Limits, Monitor, Progress, Result, Schedule
from optsched.errors import InputError, InternalError, UnsupportedProblem
from optsched.model.graph import scheduled
from optsched.solving.solver import Support
from optsched.testing import best_makespan
from optsched.testing.common import against_optimum

TOY = JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], name="toy")


def hard(n: int = 12, m: int = 8) -> JobShop:
    """A shop that nobody proves in a second."""
    rng = Random(1)
    return JobShop([[(k, rng.randint(1, 99)) for k in rng.sample(range(m), m)] for _ in range(n)])


class Engine:
    """A third party's solver, made of one function."""

    name = "theirs"
    options = MappingProxyType({"depth": "how deep"})

    def __init__(self, work: Any, support: Any = True) -> None:
        self.work, self.support = work, support

    def supports(self, problem: Any) -> Any:
        """What the test wants."""
        return self.support

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Any:
        """Call the function."""
        return self.work(problem, limits, monitor)


def in_order(problem: Any) -> tuple[Csr, int]:
    """Operations in the order of ids on every machine."""
    sequences = problem.graph().users
    return sequences, scheduled(problem.graph(), sequences).makespan


# results


def test_result_is_verified_and_complete() -> None:
    """Schedule, objective, bound, status, history and provenance belong together."""
    result = optsched.solve(TOY, iterations=100_000)
    assert result.status == "optimal" and result.objective == best_makespan(TOY.graph())
    assert result.gap == 0.0 and result.solver == "auto" and not result.interrupted
    assert result.schedule is not None and optsched.verify(result.schedule) == []
    claim = result.schedule.objective
    assert claim is not None and tuple(claim) == (
        "makespan",
        result.objective,
        result.objective,
        "optimal",
    )
    assert result.schedule.provenance["instance_sha256"] == TOY.sha256
    assert result.history[-1].objective == result.objective
    assert [e.elapsed for e in result.history] == sorted(e.elapsed for e in result.history)


def test_limits_by_numpy() -> None:
    """Integers and floats of NumPy are numbers too, truth values are not."""
    limits = Limits(np.float32(0.5), np.int64(5), np.uint8(7), np.int16(1), np.int32(3))
    assert limits == Limits(0.5, 5, 7, 1, 3) and type(limits.iterations) is int
    with pytest.raises(InputError, match="seed"):
        Limits(seed=np.bool_(True))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="time_limit"):
        Limits(time_limit=10**400)


def test_engines_leave_time_for_what_comes_after() -> None:
    """The limit is one of the call, so large schedules take some of it; never more than half."""
    monitor = Monitor(Limits(time_limit=100.0), reserve=10.0)
    assert 80.0 < monitor.remaining <= 90.0
    assert 40.0 < Monitor(Limits(time_limit=100.0), reserve=1e6).remaining <= 50.0


# how soon


def finished(
    *events: tuple[float, str, int | None, int | None], status: str = "feasible"
) -> Result:
    """A result with a history of (seconds, event, objective, bound), after ten seconds."""
    history = tuple(Progress(at, 0, z, b, event) for at, event, z, b in events)
    last = history[-1]
    return Result(status, None, last.objective, last.lower_bound, history, seconds=10.0)


def test_times_to_best_and_proof() -> None:
    """When the returned schedule was found, and when nothing was left to prove."""
    result = finished(
        (1.0, "incumbent", 9, None), (2.0, "incumbent", 7, None), (4.0, "bound", 7, 7),
        status="optimal",
    )  # fmt: skip
    assert (result.time_to_best, result.time_to_proof) == (2.0, 4.0)
    open_ = finished((1.0, "bound", None, 3), (2.0, "incumbent", 7, 3))
    assert (open_.time_to_best, open_.time_to_proof) == (2.0, None)
    nothing = Result("unknown", seconds=1.0)
    assert (nothing.time_to_best, nothing.time_to_proof) == (None, None)
    real = optsched.solve(TOY, time_limit=600)
    assert real.time_to_best is not None and real.time_to_proof is not None
    assert 0 < real.time_to_best <= real.time_to_proof <= real.seconds


# warm start


def test_warm_start_is_made_semi_active() -> None:
    """Starts later than necessary are pulled left."""
    sequences, value = in_order(TOY)
    late = TOY.graph().with_orders(sequences, scheduled(TOY.graph(), sequences).start + 5)  # type: ignore[operator]
    result = optsched.solve(TOY, "dispatch", warm_start=late, iterations=0)
    assert result.objective == value == late.makespan - 5


def test_wrong_warm_starts() -> None:
    """Another instance's (both hashes), one without orders, one with an overlap."""
    other = optsched.solve(hard(), "dispatch", iterations=20).schedule
    with pytest.raises(InputError, match=f"another instance .*{TOY.sha256[:12]}"):
        optsched.solve(TOY, warm_start=other)
    with pytest.raises(InputError, match="no orders"):
        optsched.solve(TOY, warm_start=TOY.graph())
    sequences, _ = in_order(TOY)
    with pytest.raises(InputError, match="warm_start: "):
        optsched.solve(TOY, warm_start=TOY.graph().with_orders(sequences, [0, 0, 0, 0]))


# callbacks and interrupts


def searching() -> int:
    """Threads, but for those in which modules go on loading behind a search that ended early."""
    return sum(not thread.name.startswith("loading") for thread in threading.enumerate())


def test_interrupt_inside_an_engine() -> None:
    """Ctrl-C returns what was found until then."""

    def work(problem: Any, limits: Limits, monitor: Monitor) -> Result:
        monitor.incumbent(*in_order(problem), "theirs")
        raise KeyboardInterrupt

    result = optsched.solve(TOY, Engine(work), time_limit=5)
    assert result.interrupted and result.schedule is not None
    assert result.objective == in_order(TOY)[1] and result.status in ("feasible", "optimal")

    def nothing(problem: Any, limits: Limits, monitor: Monitor) -> Result:
        raise KeyboardInterrupt

    assert optsched.solve(TOY, Engine(nothing), time_limit=5).status == "unknown"


def test_interrupt_inside_cp_sat(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its thread waits for CP-SAT."""
    looks = []
    advance = optsched.Monitor.advance

    def pressed(monitor: optsched.Monitor, steps: int) -> None:
        advance(monitor, steps)
        looks.append(steps)
        if len(looks) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(optsched.Monitor, "advance", pressed)
    before = searching()
    result = optsched.solve(hard(), "cpsat", time_limit=600, workers=1)
    assert result.interrupted and result.schedule is not None
    assert searching() <= before


# third parties


def test_a_solver_object() -> None:
    """An instance of a class of one's own; what it returns without reporting counts too."""

    def work(problem: Any, limits: Limits, monitor: Monitor) -> Result:
        return Result("feasible", scheduled(problem.graph(), in_order(problem)[0]))

    result = optsched.solve(TOY, Engine(work), time_limit=1, options={"depth": 3})
    assert result.solver == "theirs" and result.objective == in_order(TOY)[1]
    assert result.schedule is not None and result.schedule.provenance["options"] == {"depth": 3}
    assert optsched.solve(TOY, Engine(lambda *_: None), time_limit=1).status == "unknown"


def test_a_broken_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its solver alone fails, with the entry point; others still work and list it."""
    from importlib.metadata import EntryPoint

    from optsched.solving import solver

    points = dict(solver._entry_points("jobshop"))
    points["lost"] = EntryPoint("lost", "nomodule:X", "optsched.solvers.jobshop")
    monkeypatch.setattr(solver, "_entry_points", lambda kind: points if kind == "jobshop" else {})
    with pytest.raises(UnsupportedProblem, match=r"solver lost: its entry point nomodule:X cannot"):
        optsched.solve(TOY, "lost")
    assert "nomodule" in solver.support_by_name("lost", TOY).reason
    assert optsched.solve(TOY, "dispatch").schedule is not None


def lie(kind: str) -> Any:
    """A solver that claims something false."""

    def work(problem: Any, limits: Limits, monitor: Monitor) -> Result:
        sequences, value = in_order(problem)
        if kind == "too good":
            monitor.incumbent(sequences, value - 1)
        elif kind == "below the bound":
            monitor.incumbent(sequences, 0)
        elif kind == "rows":  # no `Csr`
            monitor.incumbent([[0, 3], [2, 1]], value)
        elif kind == "too bad":
            monitor.incumbent(sequences, value + 1)
        elif kind == "bound":
            monitor.incumbent(sequences, value)
            monitor.bound(value + 1, "theirs")
        elif kind == "bound first":
            monitor.bound(value + 1, "theirs")
            monitor.incumbent(sequences, value)
        elif kind == "cycle":
            monitor.incumbent(Csr.of([[3, 0], [1, 2]]), value)
        elif kind == "foreign":
            monitor.incumbent(Csr.of([[0, 1], [2, 3]]), value)
        elif kind == "incomplete":
            return Result(
                "feasible", problem.graph().with_orders(Csr.of([[0], [1, 2]]), [0, 3, 0, 0])
            )
        elif kind == "infeasible":
            monitor.incumbent(sequences, value)
            return Result("infeasible", reason="so I say")
        return Result("unknown")

    return Engine(work)


@pytest.mark.parametrize(
    "kind", ["too good", "below the bound", "too bad", "cycle", "foreign", "rows", "incomplete"]
)
def test_wrong_schedules_are_refused(kind: str) -> None:
    """Wrong values and impossible orders: `InternalError`, by name."""
    with pytest.raises(InternalError, match="theirs returned"):
        optsched.solve(TOY, lie(kind), time_limit=1)


def test_what_is_not_a_result_is_refused() -> None:
    """By name."""
    theirs = lie("too good")
    theirs.solve = lambda *_: {"objective": 1}
    with pytest.raises(InternalError, match="theirs returned a dict, not a Result"):
        optsched.solve(TOY, theirs, time_limit=1)


@pytest.mark.parametrize("kind", ["bound", "bound first", "infeasible"])
def test_a_refuted_claim_does_not_cost_the_schedule(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes back verified and without proof; what contradicts it is said."""
    result = optsched.solve(TOY, lie(kind), time_limit=1)
    assert result.status == "feasible" and result.objective == in_order(TOY)[1]
    assert result.schedule is not None and not optsched.verify(result.schedule)
    assert result.lower_bound == TOY.lower_bound() < result.objective
    said = {
        "bound": f"theirs proved the bound {result.objective + 1}, but",
        "infeasible": "theirs proved that there is no schedule (so I say), but",
    }[kind.split()[0]]
    assert said in result.contradiction and f" {result.objective} exists" in result.contradiction
    assert [result.contradiction in line for line in caplog.messages] == [True]
    assert "please report" in caplog.text and TOY.sha256 in caplog.text
    with pytest.raises(AssertionError, match="theirs proved"):
        against_optimum(TOY, result)


def test_a_warm_start_refutes_what_is_said_of_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the problem's own bound, and its own proof that nothing is feasible."""
    start = optsched.solve(TOY, "dispatch").schedule
    monkeypatch.setattr(JobShop, "lower_bound", lambda self: 10**6)
    for solver in ("auto", "cpsat"):
        result = optsched.solve(TOY, solver, warm_start=start, time_limit=0.2)
        assert result.status == "feasible" and result.lower_bound is None
        assert "bounds proved the bound 1000000" in result.contradiction
    monkeypatch.setattr(JobShop, "infeasibility", lambda self: "too long")
    result = optsched.solve(TOY, "dispatch", warm_start=start)
    assert result.status == "feasible" and "no schedule (too long)" in result.contradiction


def test_unsupported_problems_name_who_can() -> None:
    """The reason, then the solvers that take it, or that none does."""
    refuses = Engine(None, Support(False, "too blue"))
    with pytest.raises(
        UnsupportedProblem,
        match=r"theirs does not .* too blue; these do: auto, branch_and_bound, cpsat, dispatch",
    ):
        optsched.solve(TOY, refuses)
    period = JobArray([[1]], [[1]], objective="period")
    with pytest.raises(
        UnsupportedProblem, match=r"no problem of the kind periodic; these do: .*cpsat"
    ):
        optsched.solve(period, refuses)
    from optsched import Resource

    gang = Schedule(
        resources=(Resource("a"), Resource("b")),
        duration=[1],
        op_resources=Csr.of([[0, 1]]),  # type: ignore[arg-type]
    )
    with pytest.raises(
        UnsupportedProblem,
        match=r"holds 2 resources at once; these do: auto, branch_and_bound, cpsat$",
    ):
        optsched.solve(gang, "dispatch")
    assert optsched.solve(gang, iterations=1000).objective == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"solver": "cpsta"}, "did you mean cpsat"), ({"solver": "x"}, "installed: auto"),
        ({"options": {"deep": 1}}, "has no option 'deep'"), ({"workers": 0}, "workers"),
        ({"time_limit": -1}, "time_limit"), ({"seed": 2**31}, "seed"), ({"target": 1.5}, "target"),
    ],
)  # fmt: skip
def test_wrong_arguments(given: dict[str, Any], message: str) -> None:
    """One sentence with the name of the argument."""
    with pytest.raises(InputError, match=message):
        optsched.solve(TOY, **given)
