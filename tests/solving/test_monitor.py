"""The monitor: incumbents and bounds, callbacks in time and thread, many threads at once."""

from __future__ import annotations

import random
import threading
from itertools import pairwise
from typing import Any

import pytest

import optsched
from optsched import Csr, InternalError, JobShop, Limits, Monitor, Progress
from optsched.solving.monitor import BOUND_INTERVAL

TOY = JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], name="toy")
ORDERS = Csr.of([[0, 3], [2, 1]])


def test_only_better_incumbents_and_higher_bounds_count() -> None:
    """What is not better is refused with False and leaves no trace."""
    monitor = Monitor(Limits(60))
    assert monitor.incumbent(ORDERS, 10, "a") and monitor.bound(5, "b")
    other = Csr.of([[3, 0], [1, 2]])
    for value in (10, 11):
        assert not monitor.incumbent(other, value)
    for value in (5, 4):
        assert not monitor.bound(value)
    assert (monitor.objective, monitor.lower_bound) == (10, 5) and monitor.solution is ORDERS
    assert monitor.best == (10, ORDERS) and not monitor.proved
    assert [(e.event, e.source) for e in monitor.history] == [("incumbent", "a"), ("bound", "b")]
    assert monitor.incumbent(other, 5) and monitor.proved and monitor.should_stop()


@pytest.mark.parametrize("bound_first", [True, False])
def test_a_contradiction_costs_the_bounds(bound_first: bool) -> None:
    """The schedule stays, with the problem's own bound; no engine's claim is taken any more."""
    monitor = Monitor(Limits(60))
    monitor.bound(3, "bounds")
    monitor.bound(5, "other prover")
    if bound_first:
        monitor.bound(11, "prover")
        assert monitor.incumbent(ORDERS, 10, "finder")
    else:
        monitor.incumbent(ORDERS, 10, "finder")
        with pytest.raises(InternalError, match="prover proved the bound 11"):
            monitor.bound(11, "prover")
    assert monitor.contradiction == "prover proved the bound 11, but a schedule of 10 exists"
    assert monitor.best == (10, ORDERS) and monitor.lower_bound == 3
    assert monitor.history[-1].objective == 10 and monitor.history[-1].lower_bound == 3
    with pytest.raises(InternalError):
        monitor.bound(4, "third prover")
    assert monitor.incumbent(ORDERS, 9) and not monitor.should_stop()


def test_not_even_the_own_bound_is_kept_against_a_schedule() -> None:
    """Then there is none; and a run that only a proof would end, ends."""
    monitor = Monitor(Limits(target=0))
    monitor.bound(11, "bounds")
    monitor.incumbent(ORDERS, 10)
    assert monitor.lower_bound is None and monitor.should_stop()


def test_many_threads_at_once() -> None:
    """Whatever eight threads write, incumbents fall, bounds rise, orders belong to the value."""
    monitor = Monitor(Limits(60))
    rows = {value: Csr.of([[value]]) for value in range(1000, 2000)}
    torn: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(400):
            value = rng.randrange(1000, 2000)
            monitor.incumbent(rows[value], value, str(seed))
            monitor.bound(rng.randrange(0, 1000), str(seed))
            monitor.advance(1)
            objective, sequences = monitor.best
            if sequences is not rows[objective]:  # type: ignore[index]
                torn.append(objective)
            monitor.should_stop()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = monitor.history
    assert not torn and monitor.iteration == 3200
    assert [e.elapsed for e in history] == sorted(e.elapsed for e in history)
    for before, event in pairwise(history):
        if event.event == "incumbent":
            assert before.objective is None or event.objective < before.objective  # type: ignore[operator]
            assert event.lower_bound == before.lower_bound
        else:
            assert before.lower_bound is None or event.lower_bound > before.lower_bound  # type: ignore[operator]
            assert event.objective == before.objective


# callbacks


class FakeTime:
    """Stands for the module `time`: advanced by hand."""

    now = 100.0

    def perf_counter(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The time of all monitors."""
    found = FakeTime()
    monkeypatch.setattr("optsched.solving.incumbent.time", found)
    return found


def test_bounds_are_reported_in_bundles(clock: FakeTime) -> None:
    """Not one by one, but none is lost; an incumbent comes at once, with those before it."""
    seen: list[Progress] = []
    monitor = Monitor(Limits(60), seen.append)
    clock.now += 2 * BOUND_INTERVAL
    monitor.bound(1)
    for value in range(2, 40):
        monitor.bound(value)
    assert len(seen) == 1
    monitor.incumbent(ORDERS, 50)
    assert seen == monitor.history and len(seen) == 40


def test_ticks(clock: FakeTime) -> None:
    """Without news one every half second, however many polls."""
    seen: list[Progress] = []
    monitor = Monitor(Limits(60), seen.append)
    for _ in range(240):
        monitor.poll()
        clock.now += 0.005
    assert [e.event for e in seen] == ["tick"] * 2


def test_other_threads_never_call_the_user() -> None:
    """Their events are reported by the thread that made the monitor."""
    seen: list[Progress] = []
    monitor = Monitor(Limits(60), seen.append)

    def work() -> None:
        monitor.incumbent(ORDERS, 10)
        monitor.bound(3)
        monitor.should_stop()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not seen
    monitor.poll()
    assert [e.event for e in seen] == ["incumbent", "bound"]


@pytest.mark.parametrize("solver", ["auto", "dispatch", "cpsat"])
def test_a_callback_gets_the_whole_history(solver: str) -> None:
    """Every incumbent and bound, in the caller's thread."""
    seen, threads = list[Progress](), set[int]()

    def note(progress: Progress) -> None:
        seen.append(progress)
        threads.add(threading.get_ident())

    result = optsched.solve(TOY, solver, time_limit=100, on_progress=note)
    assert [e for e in seen if e.event != "tick"] == list(result.history)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("event", ["incumbent", "bound"])
def test_a_callback_stops_and_raises(event: str) -> None:
    """By returning true, and by an exception that carries the best schedule so far."""
    shop = JobShop.read("ta21")
    result = optsched.solve(shop, "dispatch", time_limit=600, options={"search": True},
                            on_progress=lambda now: now.event == event)  # fmt: skip
    assert result.interrupted and result.seconds < 300

    def fail(progress: Progress) -> None:
        if progress.event == event:
            raise ZeroDivisionError(event)

    with pytest.raises(ZeroDivisionError, match=event) as caught:
        optsched.solve(shop, "dispatch", time_limit=600, on_progress=fail)
    assert caught.value.result.status in ("unknown", "feasible")  # type: ignore[attr-defined]
