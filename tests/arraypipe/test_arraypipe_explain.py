"""What is said of a plan before it runs, and of jobs while they run."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched.arraypipe import random_schedule
from optsched.arraypipe.cli.output import RunProgress
from optsched.arraypipe.plan.messages import routes
from optsched.arraypipe.plan.orders import random_rolling
from optsched.arraypipe.plan.plan import ExecutionPlan, compile
from optsched.arraypipe.plan.segments import Segment, Walk
from optsched.arraypipe.report.explain import explain, headline, predict
from optsched.arraypipe.report.gantt_text import gantt_text


def slope(plan: ExecutionPlan, iterations: int) -> float:
    """Time a cycle of a long run in which every block starts as early as it can."""
    ends: dict[tuple[int, int], int] = {}
    free = [0] * len(plan.devices)
    last = [0] * len(plan.devices)  # operation that ran before
    schedule = plan.schedule
    by_cycle: dict[int, int] = {}
    seats = tuple(range(plan.n_jobs))
    lengths = [iterations * r for r in plan.copies]
    for i, cycle, _ in Walk(Segment(plan, routes(plan), seats, [0] * plan.n_jobs, lengths)):
        block = plan.blocks[i]
        waits = [
            ends[arc.tail, cycle - arc.tokens] + arc.lag
            for arc in plan.waits[i]
            if (arc.tail, cycle - arc.tokens) in ends
        ]
        setup = schedule.setup(last[block.device], i) if free[block.device] else 0
        start = max([free[block.device] + setup, *waits])
        last[block.device] = i
        ends[i, cycle] = free[block.device] = start + int(schedule.duration[i])
        by_cycle[cycle] = max(by_cycle.get(cycle, 0), ends[i, cycle])
    first, final = iterations // 2, iterations - 1
    return (by_cycle[final] - by_cycle[first]) / (final - first)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 10**6)
)
def test_predicted_period_is_that_of_a_long_run(
    microbatches: list[int], n_stages: int, seed: int
) -> None:
    """Maximum cycle ratio and unrolled run agree, and no run beats the bound."""
    plan = compile(random_schedule(microbatches, n_stages, seed=seed))
    found = predict(plan)
    assert found.bound <= found.period
    assert slope(plan, 48) == pytest.approx(found.period, rel=0.05)


@given(st.integers(0, 10**6))
def test_predicted_period_of_rolling_plans(seed: int) -> None:
    """Offsets, several iterations a cycle and lags are seen."""
    array = optsched.JobArray(
        [[3, 5], [4, 2]], [[6, 4], [3, 7]], lag_forward=[[2], [1]], lag_backward=[[1], [3]],
        multiplicity=[1, 2], objective="period",
    )  # fmt: skip
    plan = compile(random_rolling(array, seed=seed))
    found = predict(plan)
    assert plan.schedule.period is not None
    assert found.bound <= found.period <= plan.schedule.period
    assert slope(plan, 48) == pytest.approx(found.period, rel=0.05)


def test_chain_and_load_of_a_known_plan() -> None:
    """One job in two stages: the chain is the period; the load is what its devices do."""
    array = optsched.JobArray([[3, 5]], [[6, 4]], lag_forward=[[2]], lag_backward=[[1]])
    schedule = optsched.solve(array, time_limit=600).schedule
    assert schedule is not None
    found = predict(compile(schedule))
    assert (found.period, found.load, found.chain, found.chain_job) == (21, (9, 9), 21, 0)


def test_explanation_of_shared_devices() -> None:
    """Stages on one device are named, long lists are cut, nothing is sent on a single device."""
    plan = compile(random_schedule([4, 4], 4, place=[0, 0, 1, 1], seed=1))
    text = explain(plan)
    assert "device0: stages 0-1, 32 blocks" in text and "... and 8 more" in text and "@1" in text
    alone = explain(compile(random_schedule([1], 2, place=[0, 0], seed=1)))
    assert "channels: none" in alone
    assert headline(plan) in text


def test_chart_in_letters() -> None:
    """Forward small, backward capital, idle dots; columns cover the span and no more."""
    schedule = random_schedule([1, 1], 1, seed=2)
    first, second = (gantt_text(schedule, 0, schedule.makespan, width=w) for w in (12, 60))
    for text, width in ((first, 12), (second, 60)):
        row = text.splitlines()[0].split("|")[1]
        assert len(row) == width and set(row) == set("aAbB")
        assert row.count("A") == row.count("B") == 2 * row.count("a") == 2 * row.count("b")
    late = gantt_text(schedule, schedule.makespan, schedule.makespan + 5, width=5)
    assert late.splitlines()[0].endswith("|.....|")
    with pytest.raises(optsched.InputError, match="end: expected more than 4"):
        gantt_text(schedule, 4, 4)
    with pytest.raises(optsched.InputError, match="nothing to draw"):
        gantt_text(schedule.graph(), 0, 4)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


def progress(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> tuple[RunProgress, list[Any]]:
    """Of two jobs, 20 ms a cycle by the clock of the test."""
    from optsched.arraypipe.cli import output

    clock = iter(range(10**6))
    time = SimpleNamespace(monotonic=lambda: next(clock) / 100)
    monkeypatch.setattr(output, "time", time)
    jobs: list[Any] = [SimpleNamespace(status="running") for _ in range(2)]
    shown = RunProgress(
        jobs, ["slow", "fast"], 1000, copies=[1, 1], predicted=19e6, serial=False, stream=stream
    )
    return shown, jobs


def test_plain_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first second on a line per job with news and one for the period, every 5 s."""
    stream = io.StringIO()
    shown, jobs = progress(stream, monkeypatch)
    with shown:
        for iteration in range(400):
            shown(jobs[0], iteration, 2.5)
            shown(jobs[1], iteration, 1.25)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 * 3
    assert lines[0] == "    1.0 s  slow  iteration 50 of 1000  loss 2.5000  running"
    assert lines[2] == "    1.0 s  a cycle: 20 ms, predicted 19 ms"
    assert lines[3].startswith("    6.0 s")


def test_live_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a table, taken back at the end."""
    stream = Terminal()
    shown, jobs = progress(stream, monkeypatch)
    with shown:
        for iteration in range(200):
            shown(jobs[1], iteration, 1.25)
    text = stream.getvalue()
    assert "fast" in text and "1.2500" in text and "predicted 19 ms" in text
    assert shown.live is None


def test_quiet_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is printed when nothing is wanted, or when nobody takes it."""
    stream = io.StringIO()
    shown, jobs = progress(stream, monkeypatch)
    shown.enabled = False
    for iteration in range(400):
        shown(jobs[0], iteration, 2.5)
    assert stream.getvalue() == ""
    shown.enabled = True
    stream.write = lambda text: (_ for _ in ()).throw(BrokenPipeError)  # type: ignore[method-assign,assignment]
    for iteration in range(400):
        shown(jobs[0], iteration, 2.5)
    assert not shown.enabled
