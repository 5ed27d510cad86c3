"""Trace and report: the run as it was, and where its time went."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import runs
from arraypipe_models import adamw, sgd, trainer
from arraypipe_plans import random_rolling
from depth import seeds
from hypothesis import given
from hypothesis import strategies as st
from memory_limits import least

import optsched
from optsched import JobArray, verify
from optsched.arraypipe import Job, RunConfig, random_schedule
from optsched.arraypipe.plan.plan import ExecutionPlan, compile_plan, routes
from optsched.arraypipe.plan.segments import Change, RunPlan, Walk
from optsched.arraypipe.plan.types import Record
from optsched.arraypipe.report import RunLog, compare, explain, measured, predict
from optsched.arraypipe.runtime import inline
from optsched.arraypipe.runtime.inline import since
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched import Schedule


pytestmark = pytest.mark.torch
MICRO = 1000  # nanoseconds


@dataclass
class SlotJob:
    """What a run plan has to know of a job."""

    begin: int
    end: int
    over: bool = False

    def rest(self) -> None:
        """It has nothing to let go."""


def run_plan_of(
    plans: Sequence[ExecutionPlan], steps: Sequence[int], draw: random.Random
) -> RunPlan:
    """A run plan of these plans, one after the other, that swaps equal jobs in between."""
    runs = [SlotJob(0, n) for n in steps]
    run_plan = RunPlan(plans[0], runs, routes)
    for plan in plans[1:]:
        for slot, job in enumerate(run_plan.now.slots):
            begun = draw.randint(0, run_plan.now.count[slot])
            run_plan.now.count[slot] = begun
            runs[job].begin += begun
        alike: dict[int, list[int]] = {}
        for job, n in enumerate(plan.microbatches):
            alike.setdefault(n, []).append(job)
        slots = list(range(len(runs)))
        for jobs in alike.values():
            for slot, job in zip(jobs, draw.sample(jobs, len(jobs)), strict=True):
                slots[slot] = job
        run_plan.follow(Change(plan, tuple(slots)))
    return run_plan


def log(run_plan: RunPlan, records: Sequence[Record], **more: Any) -> RunLog:
    """What such a run leaves."""
    return RunLog(run_plan.name, tuple(run_plan.segments), records, **more)


def simulate(run_plan: RunPlan, time: Callable[[int, int], int]) -> list[Record]:
    """Run a run plan on parallel devices; ``time(segment, operation)`` are durations in ns.

    Longest paths by dictionaries, with the lags and setups of the plans.
    """
    ended: dict[tuple[int, int, int], int] = {}
    updated: dict[tuple[int, int, int], int] = {}
    free: dict[int, tuple[int, int]] = {}  # end of a device's last block, its setup
    last_family: dict[int, int] = {}
    records = []
    for k, part in enumerate(run_plan.segments):
        plan, document = part.plan, part.plan.schedule
        for i, cycle, iteration in Walk(part):
            block = plan.blocks[i]
            job = part.slots[block.job]
            start, before = free.get(block.device, (0, -1))
            if before >= 0:
                same = last_family[block.device]
                family = job if document.family[i] == block.job else int(document.family[i])
                if same != family:
                    start += before + int(document.setup_in[i]) * MICRO
            for tail, _, tokens, lag in plan.waits[i]:
                if (k, tail, cycle - tokens) in ended:
                    start = max(start, ended[k, tail, cycle - tokens] + lag * MICRO)
            if block.kind == "F" and block.microbatch == 0:
                start = max(start, updated.get((job, block.stage, iteration - 1), 0))
            end = start + time(k, i)
            ended[k, i, cycle] = end
            updated[job, block.stage, iteration] = end
            free[block.device] = (end, int(document.setup_out[i]) * MICRO)
            last_family[block.device] = job
            records.append(Record(k, i, cycle, iteration, start, end))
    return records


def by_device(run_plan: RunPlan, records: Sequence[Record]) -> list[Record]:
    """The records as the devices hand them in: one list after the other, the last device first."""

    def device(record: Record) -> int:
        return run_plan.segments[record.segment].plan.blocks[record.operation].device

    return sorted(records, key=device, reverse=True)


@st.composite
def run_plans(draw: st.DrawFn) -> tuple[RunPlan, random.Random]:
    """One to three segments of random plans of the same jobs, each run for another time."""
    rng = random.Random(draw(st.integers(0, 2**16)))
    parts = draw(st.integers(1, 3))
    if draw(st.booleans()):  # periodic plans, with lags and setups
        array = rolling_array(switch=7, lag_forward=5, lag_backward=5)
        plans = [compile_plan(random_rolling(array, seed=rng.randrange(99))) for _ in range(parts)]
        return run_plan_of(plans, [rng.randint(0, 9) for _ in range(3)], rng), rng
    microbatches = draw(st.lists(st.integers(1, 2), min_size=1, max_size=4))
    n_stages = draw(st.integers(1, 3))
    update = [j for j in range(len(microbatches)) if draw(st.booleans())]
    recompute = [j for j in range(len(microbatches)) if draw(st.booleans())]
    plans = []
    for _ in range(parts):
        place = [rng.randrange(n_stages) for _ in range(n_stages)]
        place[0] = n_stages - 1
        schedule = random_schedule(
            microbatches, n_stages, place=place, update=update, recompute=recompute,
            seed=rng.randrange(99),
        )  # fmt: skip
        plans.append(compile_plan(schedule))
    return run_plan_of(plans, [rng.randint(0, 6) for _ in microbatches], rng), rng


def rolling_array(**options: Any) -> JobArray:
    """Three jobs of three stages, in microseconds."""
    forward = [[30, 20, 40], [20, 20, 20], [50, 10, 30]]
    backward = [[2 * t for t in row] for row in forward]
    return JobArray(forward, backward, objective="period", **options)


@given(run_plans(), st.booleans())
def test_every_run_verifies(given_run_plan: tuple[RunPlan, random.Random], serial: bool) -> None:
    """Stops, swapped slots and plans, serial or parallel: all is obeyed."""
    run_plan, rng = given_run_plan
    if serial:
        records, clock = [], 0
        for k, part in enumerate(run_plan.segments):
            for now in Walk(part):
                start = clock + rng.randint(0, 5)
                clock = start + rng.randint(0, 9)
                records.append(Record(k, *now, start, clock))
    else:
        records = by_device(run_plan, simulate(run_plan, lambda k, i: rng.randint(1, 9)))
    found = log(run_plan, records)
    trace = measured(found)
    assert optsched.verify(trace) == []
    assert trace.n_operations == len(records)
    assert not len(trace.arcs.lag) or trace.arcs.lag.min() >= 0
    assert trace.duration.tolist() == [r.end_ns - r.start_ns for r in records]
    for job, run in enumerate(run_plan.runs):
        mine = sorted(set(trace.iteration[trace.job == job].tolist()))
        assert mine == list(range(run.end))


@given(run_plans(), st.integers(0, 30))
def test_clocks_that_disagree(given_run_plan: tuple[RunPlan, random.Random], apart: int) -> None:
    """Devices whose clocks are apart: the trace verifies, and says how much it had to bend."""
    run_plan, rng = given_run_plan
    shift = [rng.randint(0, apart) for _ in range(3)]
    records = []
    for r in by_device(run_plan, simulate(run_plan, lambda k, i: rng.randint(5, 9))):
        s = shift[run_plan.segments[r.segment].plan.blocks[r.operation].device]
        records.append(r._replace(start_ns=r.start_ns + s, end_ns=r.end_ns + s))
    trace = measured(log(run_plan, records, uncertainty_ns=apart))
    assert optsched.verify(trace) == []
    said = trace.provenance
    if "clock_uncertainty_ns" in said:
        assert -apart <= said["most_negative_lag_ns"] <= 0
        assert (trace.arcs.lag < 0).sum() == said["arcs_of_negative_lag"]
        if apart < 5:  # a block lasts longer than that
            assert said["arcs_left_out"] == 0


@seeds(1, 3)
def test_a_prediction_that_comes_true(seed: int) -> None:
    """Devices that need the predicted times: predicted and measured are the schedule's period."""
    schedule = random_rolling(rolling_array(), seed=seed)
    plan = compile_plan(schedule)
    run_plan = run_plan_of([plan], [60, 60, 60], random.Random(seed))
    records = simulate(run_plan, lambda k, i: int(schedule.duration[i]) * MICRO)
    report = compare(log(run_plan, by_device(run_plan, records)))
    assert schedule.period is not None
    assert report.predicted_ns == predict(plan).period_ns <= schedule.period * MICRO
    assert report.measured_ns == pytest.approx(report.predicted_ns, rel=0.01)
    assert not report.serial and report.waited_ns == 0 and report.left_out == 0
    assert "predicted" in report._repr_html_()
    twice = simulate(run_plan, lambda k, i: 2 * int(schedule.duration[i]) * MICRO)
    slow = compare(log(run_plan, by_device(run_plan, twice)))
    assert slow.predicted_ns == report.predicted_ns < slow.measured_ns / 1.5
    # a job that ends early: cycles in which all blocks ran count
    run_plan = run_plan_of([plan], [60, 60, 60], random.Random(seed))
    run_plan.now.count[1] = 30
    records = simulate(run_plan, lambda k, i: int(schedule.duration[i]) * MICRO)
    early = compare(log(run_plan, by_device(run_plan, records)))
    assert early.measured_ns == pytest.approx(report.predicted_ns, rel=0.02)


def test_what_blocks_waited_for() -> None:
    """Messages and copies of states add up; in turn on one device a cycle is the sum of blocks."""
    plan = compile_plan(random_schedule([1], 2, seed=0))
    run_plan = run_plan_of([plan], [1], random.Random(0))
    at = {(b.kind, b.stage): b.operation for b in plan.blocks}
    times = {("F", 0): (0, 10), ("F", 1): (16, 30), ("B", 1): (33, 50), ("B", 0): (57, 60)}
    records = [
        Record(0, at[key], 0, 0, *when, 2, exposed_ns)
        for (key, when), exposed_ns in zip(times.items(), [0, 4, 1, 0], strict=True)
    ]
    report = compare(log(run_plan, records, parallel=True))
    assert [(d.compute_ns, d.waited_ns) for d in report.devices] == [(13, 4), (31, 9)]
    assert (report.waited_ns, report.exposed_ns, report.wall_ns) == (13, 5, 60)
    assert [round(d.idle, 6) for d in report.devices] == [round(47 / 60, 6), round(29 / 60, 6)]
    turns = compare(log(run_plan, records))
    assert turns.serial and turns.predicted_ns == sum(predict(plan).load_ns)
    assert "in turn" in str(turns)


def test_a_run_of_nothing() -> None:
    """All jobs had been done before: empty documents, and a report that says so."""
    plan = compile_plan(random_schedule([1, 2], 2, seed=0))
    run_plan = run_plan_of([plan], [0, 0], random.Random(0))
    document, report = measured(log(run_plan, [])), compare(log(run_plan, []))
    assert document.n_operations == 0 and optsched.verify(document) == []
    assert (report.wall_ns, report.cycles, report.measured_ns) == (0, 0, None)
    assert "measured -; waited 0 ns" in str(report)


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
    array = JobArray(
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
    array = JobArray([[3, 5]], [[6, 4]], lag_forward=[[2]], lag_backward=[[1]])
    schedule = optsched.solve(array, time_limit=600).schedule
    assert schedule is not None
    plan = compile_plan(schedule)
    assert predict(plan) == (21 * MICRO, (9 * MICRO, 9 * MICRO), 21 * MICRO)
    assert "1 jobs in 2 stages on 2 devices\npredicted period 21 us, 0.0% above" in explain(plan)
    assert "devices compute 43%, 43% of it" in explain(plan)


# of a long run the end is remembered, in bounded memory


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
    whole = runs.run(array, schedule, 12)
    assert "blocks_left_out" not in whole.trace.provenance and whole.report.left_out == 0
    total = len(whole.log.records)
    monkeypatch.setattr(inline, "MOST", 3 * blocks)
    array = trainer(jobs(3), memory=array.config.memory)
    result = runs.run(array, schedule, 12)
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


def test_a_notebook_shows_report_and_losses() -> None:
    """A short repr, a picture of the blocks below the report, and a row per loss."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    array = trainer(jobs(2))
    result = runs.run(array, random_schedule([1] * 2, 3, seed=5), 3)
    for thing in (result, result.log, result.report):
        assert len(repr(thing)) < 200 and "\n" not in repr(thing)
    page = result._repr_html_()
    assert "a cycle: predicted" in page and "data:image/png" in page
    frame = result.to_pandas()
    assert frame.loss.tolist() == [loss for row in result.losses for loss in row]
    assert frame.job.tolist() == [0] * 3 + [1] * 3 and frame.iteration.tolist() == [0, 1, 2] * 2
