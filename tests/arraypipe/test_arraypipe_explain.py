"""What is said of a plan before it runs, and of jobs while they run."""

from __future__ import annotations

import io
import random
from types import SimpleNamespace
from typing import Any

import pytest
from arraypipe_plans import random_rolling
from hypothesis import given
from hypothesis import strategies as st
from test_arraypipe_trace import MICRO, course_of, simulate

import optsched
from optsched.arraypipe import random_schedule
from optsched.arraypipe.cli import output
from optsched.arraypipe.cli.output import RunProgress
from optsched.arraypipe.plan.plan import ExecutionPlan, compile
from optsched.arraypipe.report.explain import explain, headline, predict


def slope(plan: ExecutionPlan, iterations: int) -> float:
    """Nanoseconds a cycle of a long run in which every block starts as early as it can."""
    course = course_of([plan], [iterations * r for r in plan.copies], random.Random(0))
    duration = plan.schedule.duration.tolist()
    ends: dict[int, int] = {}
    for record in simulate(course, lambda k, i: duration[i] * MICRO):
        ends[record.cycle] = max(ends.get(record.cycle, 0), record.end_ns)
    first, final = iterations // 2, iterations - 1
    return (ends[final] - ends[first]) / (final - first)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 3),
    st.integers(0, 10**6), st.booleans(),
)  # fmt: skip
def test_predicted_period_is_that_of_a_long_run(
    microbatches: list[int], n_stages: int, seed: int, rolling: bool
) -> None:
    """Maximum cycle ratio and unrolled run agree, with offsets, copies and lags, and the bound."""
    array = optsched.JobArray(
        [[3, 5], [4, 2]], [[6, 4], [3, 7]], lag_forward=[[2], [1]], lag_backward=[[1], [3]],
        multiplicity=[1, 2], objective="period",
    )  # fmt: skip
    once = random_schedule(microbatches, n_stages, seed=seed)
    plan = compile(random_rolling(array, seed=seed) if rolling else once)
    found = predict(plan)
    claimed = plan.schedule.period
    assert found.bound_ns <= found.period_ns <= (claimed * MICRO if claimed else found.period_ns)
    assert slope(plan, 48) == pytest.approx(found.period_ns, rel=0.05)


def test_chain_and_load_of_a_known_plan() -> None:
    """One job in two stages: the chain is the period; the load is what its devices do."""
    array = optsched.JobArray([[3, 5]], [[6, 4]], lag_forward=[[2]], lag_backward=[[1]])
    schedule = optsched.solve(array, time_limit=600).schedule
    assert schedule is not None
    found = predict(compile(schedule))
    assert (found.period_ns, found.load_ns) == (21 * MICRO, (9 * MICRO, 9 * MICRO))
    assert (found.chain_ns, found.chain_job) == (21 * MICRO, 0)


def test_explanation_of_shared_devices() -> None:
    """Stages on one device are named, long lists are cut, nothing is sent on a single device."""
    plan = compile(random_schedule([4, 4], 4, place=[0, 0, 1, 1], seed=1))
    text = explain(plan)
    assert "device0: stages 0, 1, 32 blocks" in text and "... and 8 more" in text and "@1" in text
    assert "of activations" not in text and headline(plan) in text
    assert "channels: none" in explain(compile(random_schedule([1], 2, place=[0, 0], seed=1)))


class Terminal(io.StringIO):
    """A stream that says whether it is a terminal, and whether anybody takes what it is given."""

    terminal, broken = False, False

    def isatty(self) -> bool:
        """As it was told."""
        return self.terminal

    def write(self, text: str) -> int:
        """`BrokenPipeError` if nobody takes it."""
        if self.broken:
            raise BrokenPipeError
        return super().write(text)


def progress(monkeypatch: pytest.MonkeyPatch, n: int, **options: Any) -> tuple[str, RunProgress]:
    """What is shown of so many iterations of two jobs, 20 ms a cycle by the clock of the test."""
    stream = Terminal()
    for name in ("terminal", "broken"):
        setattr(stream, name, options.pop(name, False))
    clock = iter(range(10**6))
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: next(clock) / 100))
    jobs: list[Any] = [SimpleNamespace(status="running") for _ in range(2)]
    options = {"copies": [1, 1], "predicted_ns": 19e6, "serial": False, "stream": stream} | options
    with RunProgress(jobs, ["slow", "fast"], 1000, **options) as shown:
        for iteration in range(n):
            shown(jobs[0], iteration, 2.5)
            shown(jobs[1], iteration, 1.25)
    return stream.getvalue(), shown


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first second on a line per job with news and one for the period, every 5 s."""
    lines = progress(monkeypatch, 400)[0].splitlines()
    assert len(lines) == 2 * 3
    assert lines[0] == "    1.0 s  slow  iteration 50 of 1000  loss 2.5000  running"
    assert lines[2] == "    1.0 s  a cycle: 20 ms, predicted 19 ms"
    assert lines[3].startswith("    6.0 s")
    text, shown = progress(monkeypatch, 200, terminal=True)  # a table, taken back at the end
    assert "fast" in text and "1.2500" in text and "predicted 19 ms" in text
    assert shown.live is None
    assert progress(monkeypatch, 400, enabled=False)[0] == ""
    assert not progress(monkeypatch, 400, broken=True)[1].enabled
