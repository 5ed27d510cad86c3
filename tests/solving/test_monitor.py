"""The blackboard: what it takes and refuses, who is told what and when, many threads at once."""

from __future__ import annotations

import logging
import random
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

import optsched
from optsched import Csr, InternalError, JobShop, Limits, Monitor, Progress, Watcher
from optsched.solving.monitor import BOUND_INTERVAL
from optsched.solving.progress import ProgressLog

if TYPE_CHECKING:
    from optsched import Result

TOY = JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], name="toy")
ORDERS = Csr.of([[0, 3], [2, 1]])


class Everything(Watcher):
    """Writes down what it hears, and from which thread."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.threads: set[int] = set()

    def note(self, name: str, what: Any) -> None:
        """One call."""
        self.heard.append((name, what))
        self.threads.add(threading.get_ident())

    def on_start(self, problem: Any) -> None:
        """Note."""
        self.note("start", problem)

    def on_incumbent(self, progress: Progress) -> None:
        """Note."""
        self.note("incumbent", progress)

    def on_bound(self, progress: Progress) -> None:
        """Note."""
        self.note("bound", progress)

    def on_restart(self, progress: Progress) -> None:
        """Note."""
        self.note("restart", progress)

    def on_end(self, result: Result) -> None:
        """Note."""
        self.note("end", result)


# the blackboard


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


# who is told


class Clock:
    """Time passes only by hand."""

    now = 100.0

    def perf_counter(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all monitors."""
    found = Clock()
    monkeypatch.setattr("optsched.solving.monitor.time", found)
    return found


def test_bounds_are_told_in_bundles(clock: Clock) -> None:
    """Not one by one, but none is lost; an incumbent comes at once, with those before it."""
    seen: list[Progress] = []
    monitor = Monitor(Limits(60), seen.append)
    clock.now += 2 * BOUND_INTERVAL
    monitor.bound(1)
    for value in range(2, 40):
        monitor.bound(value)
    told = len(seen)
    assert told == 1
    monitor.incumbent(ORDERS, 50)
    assert seen == monitor.history and len(seen) == 40


def test_ticks(clock: Clock) -> None:
    """Without news one every half second, however often somebody polls."""
    seen: list[Progress] = []
    monitor = Monitor(Limits(60), seen.append)
    for _ in range(240):
        monitor.poll()
        clock.now += 0.005
    assert [e.event for e in seen] == ["tick"] * 2


def test_other_threads_never_call_the_user() -> None:
    """Their news wait for the thread that made the monitor."""
    watcher = Everything()
    seen: list[Progress] = []
    monitor = Monitor(Limits(60), seen.append, watcher=watcher)

    def work() -> None:
        monitor.incumbent(ORDERS, 10)
        monitor.bound(3)
        monitor.restart("elsewhere")
        monitor.should_stop()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not seen and not watcher.heard
    monitor.poll()
    assert [e.event for e in seen] == ["incumbent", "bound"]
    assert [name for name, _ in watcher.heard] == ["incumbent", "bound", "restart"]


@pytest.mark.parametrize("solver", ["auto", "dispatch", "cpsat"])
def test_a_watcher_hears_the_whole_run(solver: str) -> None:
    """Start first, end last, in between what `history` holds; all in the caller's thread."""
    watcher = Everything()
    result = optsched.solve(TOY, solver, time_limit=100, watcher=watcher)
    names = [name for name, _ in watcher.heard]
    assert names[0] == "start" and names[-1] == "end" and watcher.threads == {threading.get_ident()}
    assert watcher.heard[0][1] is TOY and watcher.heard[-1][1] is result
    told = [what for name, what in watcher.heard if name in ("incumbent", "bound")]
    assert told == list(result.history)


@pytest.mark.parametrize("method", ["on_start", "on_incumbent", "on_bound"])
def test_a_watcher_stops_and_raises(method: str) -> None:
    """By returning true, and by an exception that carries the best so far."""
    shop = JobShop.read("ta21")

    class Mine(Watcher):
        pass

    setattr(Mine, method, lambda self, what: True)
    result = optsched.solve(shop, "dispatch", time_limit=600, watcher=Mine(),
                            options={"search": True})  # fmt: skip
    assert result.interrupted and result.seconds < 300

    def fail(self: Any, what: Any) -> None:
        raise ZeroDivisionError(method)

    setattr(Mine, method, fail)
    with pytest.raises(ZeroDivisionError, match=method) as caught:
        optsched.solve(shop, "dispatch", time_limit=600, watcher=Mine())
    assert caught.value.result.status in ("unknown", "feasible")  # type: ignore[attr-defined]


def test_on_end_may_raise_too() -> None:
    """The result is not lost."""

    class Mine(Watcher):
        def on_end(self, result: Result) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        optsched.solve(TOY, "dispatch", watcher=Mine())
    assert caught.value.result.schedule is not None  # type: ignore[attr-defined]


# the log


def test_progress_prints_as_a_line() -> None:
    """All that is known, and H for a new best."""
    one = Progress(12.34, 1204000, 930, 915, "incumbent", "tabu")
    assert str(one) == "   12.3 s  1204000 steps  objective 930 H  bound 915  gap 1.64%  tabu"
    two = Progress(0.0, 0, None, None, "tick")
    assert str(two) == "    0.0 s  objective -  bound -  gap -"


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The first after a second, then every five; H if anything better came since the last."""
    log = ProgressLog(logging.getLogger("optsched"))
    with caplog.at_level(logging.INFO, "optsched"):
        for at, event in [(0.5, "incumbent"), (1.1, "tick"), (2, "tick"), (5, "bound"),
                          (6.2, "bound"), (6.3, "incumbent"), (12, "bound")]:  # fmt: skip
            log(Progress(at, 0, 7, 3, event))
    assert [line.split() for line in caplog.messages] == [
        ["1.1", "s", "objective", "7", "H", "bound", "3", "gap", "133.33%"],
        ["6.2", "s", "objective", "7", "bound", "3", "gap", "133.33%"],
        ["12.0", "s", "objective", "7", "H", "bound", "3", "gap", "133.33%"],
    ]
