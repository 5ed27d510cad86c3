"""Of a long run the end is remembered, in bounded memory, and it is a trace like any other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arraypipe_models import adamw, sgd, trainer
from hypothesis import given
from hypothesis import strategies as st
from memory_limits import least
from runs import run
from test_arraypipe_trace import log, run_plans, simulate

from optsched import verify
from optsched.arraypipe import Job, RunConfig, random_schedule
from optsched.arraypipe.report import compare, measured
from optsched.arraypipe.runtime import inline
from optsched.arraypipe.runtime.inline import since
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    import random

    import pytest

    from optsched import Schedule
    from optsched.arraypipe.plan.segments import RunPlan


def names(trace: Schedule) -> list[tuple[Any, ...]]:
    """What a block is: job, stage, micro-batch, iteration, and kind."""
    labels = (trace.job, trace.stage, trace.microbatch, trace.iteration, trace.kind)
    return list(zip(*(column.tolist() for column in labels), strict=True))


def arcs(trace: Schedule) -> set[tuple[Any, Any]]:
    """Arcs between blocks, by their names."""
    row = names(trace)
    return {(row[i], row[j]) for i, j in zip(trace.arcs.tail, trace.arcs.head, strict=True)}


@given(run_plans(), st.integers(0, 99))
def test_the_end_of_a_run(given_run_plan: tuple[RunPlan, random.Random], place: int) -> None:
    """From any cycle on: verified, with exactly the arcs between what is left, and a report."""
    run_plan, rng = given_run_plan
    records = simulate(run_plan, lambda k, i: rng.randint(1, 9))
    if not records:
        return
    row = records[place * len(records) // 100]
    cut = row.segment, row.cycle
    whole = measured(log(run_plan, records))
    left = since(cut, records)
    late = log(run_plan, left, left_out=len(records) - len(left))
    trace = measured(late)
    assert verify(trace) == []
    assert trace.n_operations == len(left)
    here = set(names(trace))
    assert arcs(trace) == {(i, j) for i, j in arcs(whole) if i in here and j in here}
    report = compare(late)
    assert report.cycles == len({(r.segment, r.cycle) for r in left})
    assert ("blocks before them)" in str(report)) == (len(left) < len(records))


def jobs(n: int) -> list[Job]:
    """Of two optimizers."""
    return [Job(i, 6, sgd if i % 2 else adamw, recompute=True) for i in range(n)]


def test_an_inline_run_remembers_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long runs the last segments; training is not touched."""
    array = trainer(jobs(3))
    schedule = random_schedule([1] * 3, 3, seed=5)
    blocks = schedule.n_operations
    array.config = RunConfig(memory=least(array, schedule))
    whole = run(array, schedule, 12)
    assert "blocks_left_out" not in whole.trace.provenance and whole.report.left_out == 0
    total = len(whole.log.records)
    monkeypatch.setattr(inline, "MOST", 3 * blocks)
    array = trainer(jobs(3), memory=array.config.memory)
    result = run(array, schedule, 12)
    for one, other in zip(result.trained, whole.trained, strict=True):
        assert differences(one, other) == []
    kept = len(result.log.records)
    assert verify(result.trace) == []
    assert result.trace.provenance["blocks_left_out"] == total - kept > 0
    assert kept % blocks == 0 < kept  # whole cycles
    ends = [[row for row in names(one.trace) if " " not in row[-1]] for one in (result, whole)]
    assert ends[0][-6:] == ends[1][-6:]
    copies = whole.trace.n_operations - total
    assert 0 < result.trace.n_operations - kept < copies
    assert result.report.exposed_ns > 0
    text = str(result.report)
    assert f"(the last {result.report.cycles} cycles; " in text
