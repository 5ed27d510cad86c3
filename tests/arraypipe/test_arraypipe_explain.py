"""The text and the prediction of a plan."""

from __future__ import annotations

import random

import pytest
from arraypipe_plans import random_rolling
from hypothesis import given
from hypothesis import strategies as st
from test_arraypipe_trace import MICRO, run_plan_of, simulate

import optsched
from optsched.arraypipe import random_schedule
from optsched.arraypipe.plan.plan import ExecutionPlan, compile_plan
from optsched.arraypipe.report.report import explain, headline, predict


def slope(plan: ExecutionPlan, iterations: int) -> float:
    """Nanoseconds a cycle of a long run in which every block starts as early as it can."""
    run_plan = run_plan_of([plan], [iterations * r for r in plan.copies], random.Random(0))
    duration = plan.schedule.duration.tolist()
    ends: dict[int, int] = {}
    for record in simulate(run_plan, lambda k, i: duration[i] * MICRO):
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
    plan = compile_plan(random_rolling(array, seed=seed) if rolling else once)
    found = predict(plan)
    claimed = plan.schedule.period
    assert found.bound_ns <= found.period_ns <= (claimed * MICRO if claimed else found.period_ns)
    assert slope(plan, 48) == pytest.approx(found.period_ns, rel=0.05)


def test_chain_and_load_of_a_known_plan() -> None:
    """One job in two stages: the chain is the period; the load is what its devices do."""
    array = optsched.JobArray([[3, 5]], [[6, 4]], lag_forward=[[2]], lag_backward=[[1]])
    schedule = optsched.solve(array, time_limit=600).schedule
    assert schedule is not None
    found = predict(compile_plan(schedule))
    assert (found.period_ns, found.load_ns) == (21 * MICRO, (9 * MICRO, 9 * MICRO))
    assert (found.chain_ns, found.chain_job) == (21 * MICRO, 0)


def test_explanation_of_shared_devices() -> None:
    """Stages on one device are named, long lists are cut, nothing is sent on a single device."""
    plan = compile_plan(random_schedule([4, 4], 4, place=[0, 0, 1, 1], seed=1))
    text = explain(plan)
    assert "device0: stages 0, 1, 32 blocks" in text and "... and 8 more" in text and "@1" in text
    assert "of activations" not in text and headline(plan) in text
