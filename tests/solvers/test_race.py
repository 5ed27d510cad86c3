"""Several engines with one incumbent and one bound."""

from __future__ import annotations

import threading
import time

import pytest

import optsched
from optsched.model.schedule import Csr
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.solving.result import Result
from optsched_solvers._race import Race

ROWS = Csr.of([[0]])


def _monitor(seconds: float = 60.0) -> Monitor:
    return Monitor(Limits(time_limit=seconds))


def _until_told(lap: Monitor) -> None:
    while not lap.should_stop():
        time.sleep(0.001)


def test_bound_of_one_and_schedule_of_another_end_the_race() -> None:
    """The proof is shared: neither engine alone has it."""
    monitor = _monitor()
    race = Race(monitor)

    def search(lap: Monitor) -> Result:
        lap.incumbent(ROWS, 7, "search")
        _until_told(lap)
        return Result("unknown")

    def prove(lap: Monitor) -> Result:
        lap.bound(7, "prove")
        _until_told(lap)
        return Result("unknown")

    race.enter(search)
    race.enter(prove)
    while race.wait(0.01):
        pass
    assert race.finish().status == "unknown"
    assert (monitor.objective, monitor.lower_bound) == (7, 7)
    assert {event.source for event in monitor.history} == {"search", "prove"}
    assert monitor.elapsed < 50
    assert not monitor.interrupted


def test_failure_stops_the_others_and_comes_out() -> None:
    """No thread is left behind, and the error is not lost."""
    race = Race(_monitor(60))
    before = threading.active_count()

    def fail(lap: Monitor) -> Result:
        raise ZeroDivisionError("broken engine")

    race.enter(_until_told_result)
    race.enter(fail)
    while race.wait(0.01):
        pass
    with pytest.raises(ZeroDivisionError, match="broken engine"):
        race.finish()
    assert threading.active_count() <= before


def _until_told_result(lap: Monitor) -> Result:
    _until_told(lap)
    return Result("unknown")


def test_proof_of_infeasibility_ends_the_race_without_interrupting() -> None:
    """The others stop, and nobody is said to have pressed Ctrl-C."""
    monitor = _monitor(60)
    race = Race(monitor)
    race.enter(_until_told_result)
    race.enter(lambda lap: Result("infeasible", reason="no room"))
    while race.wait(0.01):
        pass
    assert race.finish().reason == "no room"
    assert not monitor.interrupted
    assert monitor.elapsed < 30


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_auto_proves_a_small_shop_with_any_number_of_workers(workers: int) -> None:
    """All line-ups of the portfolio work."""
    shop = optsched.JobShop.read("instances/jobshop/ft06.txt")
    result = optsched.solve(shop, time_limit=600, workers=workers)
    assert (result.status, result.objective, result.lower_bound) == ("optimal", 55, 55)


def test_auto_without_proofs_beyond_a_number_of_jobs() -> None:
    """`exact_up_to` leaves the bound as it is, and refuses nonsense."""
    shop = optsched.JobShop.read("instances/jobshop/ft06.txt")
    result = optsched.solve(shop, time_limit=0.5, options={"exact_up_to": 5})
    assert result.lower_bound == shop.lower_bound()
    with pytest.raises(optsched.InputError, match=r"options\.exact_up_to: expected"):
        optsched.solve(shop, time_limit=1, options={"exact_up_to": -1})


@pytest.mark.parametrize("claim", ["bound", "infeasible"])
def test_who_is_refuted_drops_out(claim: str) -> None:
    """The others go on, and what they find is not lost."""
    monitor = _monitor()
    monitor.incumbent(ROWS, 7, "search")
    race = Race(monitor)
    refuted = threading.Event()

    def liar(lap: Monitor) -> Result:
        try:
            if claim == "bound":
                lap.bound(8, "liar")
            return Result("infeasible", reason="so it says")
        finally:
            refuted.set()

    def search(lap: Monitor) -> None:
        refuted.wait()
        time.sleep(0.05)
        assert not lap.should_stop()
        lap.incumbent(ROWS, 6, "search")

    race.enter(liar)
    race.enter(search)
    while race.wait(0.01):
        pass
    assert race.finish().status == ("unknown" if claim == "bound" else "infeasible")
    assert monitor.objective == 6 and bool(monitor.contradiction) == (claim == "bound")
