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
from optsched_solvers._portfolio import Portfolio

ROWS = Csr.of([[0]])


def _monitor(seconds: float = 60.0) -> Monitor:
    return Monitor(Limits(time_limit=seconds))


def _wait(member: Monitor) -> None:
    while not member.should_stop():
        time.sleep(0.001)


def test_bound_of_one_and_schedule_of_another_end_the_portfolio() -> None:
    """The proof is shared: neither engine alone has it."""
    monitor = _monitor()
    portfolio = Portfolio(monitor)

    def search(member: Monitor) -> Result:
        member.incumbent(ROWS, 7, "search")
        _wait(member)
        return Result("unknown")

    def prove(member: Monitor) -> Result:
        member.bound(7, "prove")
        _wait(member)
        return Result("unknown")

    portfolio.add(search)
    portfolio.add(prove)
    while portfolio.wait(0.01):
        pass
    assert portfolio.finish().status == "unknown"
    assert (monitor.objective, monitor.lower_bound) == (7, 7)
    assert {event.source for event in monitor.history} == {"search", "prove"}
    assert not monitor.interrupted


def test_failure_stops_the_others_and_comes_out() -> None:
    """No thread is left behind, and the error is not lost."""
    portfolio = Portfolio(_monitor(60))
    before = threading.active_count()

    def fail(member: Monitor) -> Result:
        raise ZeroDivisionError("broken engine")

    portfolio.add(_wait_for_result)
    portfolio.add(fail)
    while portfolio.wait(0.01):
        pass
    with pytest.raises(ZeroDivisionError, match="broken engine"):
        portfolio.finish()
    assert threading.active_count() <= before


def _wait_for_result(member: Monitor) -> Result:
    _wait(member)
    return Result("unknown")


def test_proof_of_infeasibility_ends_the_portfolio_without_interrupting() -> None:
    """The others stop, and the run does not count as interrupted."""
    monitor = _monitor(60)
    portfolio = Portfolio(monitor)
    portfolio.add(_wait_for_result)
    portfolio.add(lambda member: Result("infeasible", reason="too little memory"))
    while portfolio.wait(0.01):
        pass
    assert portfolio.finish().reason == "too little memory"
    assert not monitor.interrupted


@pytest.mark.parametrize("workers", [1, 3])
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
def test_refuted_engine_drops_out(claim: str) -> None:
    """The others go on, and what they find is not lost."""
    monitor = _monitor()
    monitor.incumbent(ROWS, 7, "search")
    portfolio = Portfolio(monitor)
    refuted = threading.Event()

    def liar(member: Monitor) -> Result:
        try:
            if claim == "bound":
                member.bound(8, "liar")
            return Result("infeasible", reason="so it says")
        finally:
            refuted.set()

    def search(member: Monitor) -> None:
        refuted.wait()
        time.sleep(0.05)
        assert not member.should_stop()
        member.incumbent(ROWS, 6, "search")

    portfolio.add(liar)
    portfolio.add(search)
    while portfolio.wait(0.01):
        pass
    assert portfolio.finish().status == ("unknown" if claim == "bound" else "infeasible")
    assert monitor.objective == 6 and bool(monitor.contradiction) == (claim == "bound")
