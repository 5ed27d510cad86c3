"""Latency, wait and throughput of the jobs of an array, against the oracle and unrolled runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolling_arrays import equal_jobs, rolling

import optsched
from optsched.analysis.iterations import JobReport, job_reports, throughput
from optsched.analysis.report import report

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule


@pytest.mark.parametrize("stages", [1, 2, 3, 8, 12])
def test_equal_jobs_never_wait(stages: int) -> None:
    """The oracle: max(K, S)(f + b) is a period, every job passes in S(f + b) without a pause."""
    f, b = 2, 3
    for jobs in range(1, 13):
        s = equal_jobs(jobs, stages, f, b, activation=4)
        assert optsched.verify(s) == []
        assert s.period == max(jobs, stages) * (f + b)
        summary = report(s)
        latency = stages * (f + b)
        cycles = latency / s.period
        assert summary.iterations == tuple(
            JobReport(j, 1, latency, 0, cycles, None) for j in range(jobs)
        )
        assert summary.throughput == pytest.approx(jobs * 10**6 / s.period)
        assert summary.least_period == s.period or jobs < stages
        for v, device in enumerate(summary.resources):
            assert device.busy == jobs * (f + b)
            assert device.bubble == s.period - device.busy
            assert device.peak_memory == 4 * min(jobs, stages - v)  # held (S - v)(f + b) each


@st.composite
def arrays(draw: st.DrawFn) -> Schedule:
    """Rolling arrays with copies and lags, right or wrong (jobs may collide)."""
    jobs, stages = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    times = st.lists(
        st.lists(st.integers(0, 4), min_size=stages, max_size=stages), min_size=jobs, max_size=jobs
    )
    row = st.lists(st.integers(0, 9), min_size=jobs, max_size=jobs)
    copies = draw(st.lists(st.integers(1, 3), min_size=jobs, max_size=jobs))
    s = rolling(
        draw(row), draw(times), draw(times), draw(st.integers(3, 30)),
        copies=copies, lag=draw(st.integers(0, 2)),
    )  # fmt: skip
    begin = s.start + s.offset * s.period
    late = np.cumsum(draw(st.lists(st.integers(0, 3), min_size=len(begin), max_size=len(begin))))
    begin = begin + late  # some wait, also for ever longer
    return replace(s, start=begin % s.period, offset=begin // s.period, sequences=s.sequences)


def spans(s: Schedule) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Per (job, iteration) of a one-shot schedule: first start, last end, number of blocks."""
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    columns = (s.job.tolist(), s.iteration.tolist(), s.start.tolist(), s.end.tolist())
    for job, iteration, start, end in zip(*columns, strict=True):
        first, last, count = found.get((job, iteration), (start, end, 0))
        found[job, iteration] = min(first, start), max(last, end), count + 1
    return found


def chain(s: Schedule, job: int) -> int:
    """The longest path of a job's first copy, by relaxing its arcs until nothing changes."""
    mine = {i for i in range(s.n_operations) if s.job[i] == job and s.iteration[i] == 0}
    head = dict.fromkeys(mine, 0)
    for _ in mine:
        for i, j, lag, distance in zip(*(c.tolist() for c in s.arcs), strict=True):
            if i in mine and j in mine and not distance:
                head[j] = max(head[j], head[i] + int(s.duration[i]) + lag)
    return max(head[i] + int(s.duration[i]) for i in mine)


@given(arrays())
def test_latencies_are_those_of_the_run(s: Schedule) -> None:
    """Every complete iteration of an unrolled run takes as long as its copy; the worst is told."""
    cycles = int(s.offset.max()) + 3
    run = spans(s.unroll(cycles))
    rows = job_reports(s)
    assert [row.job for row in rows] == sorted(set(s.job.tolist()))
    for row in rows:
        blocks = int(((s.job == row.job) & (s.iteration == 0)).sum())
        whole = {
            t: (end - start)
            for (job, t), (start, end, count) in run.items()
            if job == row.job and count == blocks
        }
        assert row.iterations == len(set(s.iteration[s.job == row.job].tolist()))
        assert max(whole.values()) == row.latency
        assert row.latency - row.wait == chain(s, row.job)
        assert row.cycles == row.latency / s.period


@given(arrays())
def test_throughput_counts_all_copies(s: Schedule) -> None:
    """Iterations of all jobs per period, in seconds of every unit."""
    copies = len({*zip(s.job.tolist(), s.iteration.tolist(), strict=True)})
    for unit, ticks in (("ns", 10**9), ("us", 10**6), ("ms", 1000), ("s", 1)):
        one = replace(s, time_unit=unit)
        found = throughput(one, job_reports(one), s.period)
        assert found == pytest.approx(copies * ticks / s.period)
    assert throughput(s, job_reports(s), 0) is None
    assert throughput(s, (), 5) is None


def test_one_shot_arrays_by_hand() -> None:
    """Two jobs, the second waits for the first; switches and end marks are no part of a block."""
    array = optsched.JobArray([[2, 2], [1, 1]], [[4, 4], [1, 1]], switch=3, trailing_switch=True)
    result = optsched.solve(array, "dispatch", iterations=1)
    assert result.schedule is not None
    s = result.schedule
    rows = job_reports(s)
    assert [(row.iterations, row.cycles) for row in rows] == [(1, None)] * 2
    held = np.diff(s.op_resources.indptr) > 0
    for row in rows:
        mine = held & (s.job == row.job)
        assert row.latency == s.end[mine].max() - s.start[mine].min()
        assert row.latency - row.wait == (12, 4)[row.job]
    assert report(s).throughput == pytest.approx(2 * 10**6 / s.makespan)
    assert report(s).solver == "dispatch"


def test_huge_offsets_are_exact() -> None:
    """2^53 cycles of 2^53 do not wrap round."""
    most = 2**53
    s = equal_jobs(2, 1)
    s = replace(s, period=most, offset=np.array([0, most, 0, 0]))
    assert job_reports(s)[0].latency == most * most + 3


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([True, False], [True, False]),
        ((False, False), [False, False]),
        ([True], [True, None]),
        (None, [None, None]),
        ("always", [None, None]),
        ([1, 0], [None, None]),
    ],
)
def test_recompute_as_the_document_tells(told: object, expected: list[bool | None]) -> None:
    """One bool a job, or nothing at all."""
    s = replace(equal_jobs(2, 2), provenance={"recompute": told, "solver": 7})
    assert [row.recompute for row in job_reports(s)] == expected
    assert report(s).solver == ""
