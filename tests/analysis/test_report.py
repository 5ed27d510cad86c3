"""Report numbers against brute-force sums; critical paths against their definition."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolling_arrays import equal_jobs
from strategies import graphs, periodic_schedules, schedules, spoilt

from optsched import JobArray, pipelines
from optsched.analysis.critical_path import critical_path
from optsched.analysis.occupancy import memory_steps
from optsched.analysis.report import report
from optsched.analysis.unroll import unroll
from optsched.errors import InputError
from optsched.model.schedule import Arcs, Csr, Objective, Resource, Schedule


def hand_made(start: list[int], **changes: object) -> Schedule:
    """A gang, a setup, a negative lag, a zero duration and an end mark without resource."""
    fields: dict[str, object] = {
        "resources": (Resource("a"), Resource("b")),
        "duration": np.array([4, 3, 5, 0, 0]),
        "op_resources": Csr.of([[0], [0, 1], [1], [1], []]),
        "arcs": Arcs.of([(0, 2, -2), (2, 3), (3, 4, 1)]),
        "job": np.arange(5),
        "family": np.array([0, 1, 1, 1, 1]),
        "setup_out": np.array([2, 0, 0, 0, 0]),
        "sequences": Csr.of([[0, 1], [1, 2, 3]]),
        "start": np.array(start),
    }
    return Schedule(**(fields | changes))  # type: ignore[arg-type]


def explained(s: Schedule, i: int, j: int) -> bool:
    """Whether j starts exactly when i lets it, by the definition of arcs, orders and setups."""
    turn = s.period or 0
    begin = s.start.tolist()
    for tail, head, lag, distance in zip(*(c.tolist() for c in s.arcs), strict=True):
        h = distance + int(s.offset[head] - s.offset[tail])
        if (tail, head) == (i, j) and begin[j] + h * turn == begin[i] + s.duration[i] + lag:
            return True
    for row in s.sequences.to_lists():
        around = [(row[-1], row[0], turn)] if turn and row else []
        for left, right, wrap in [(a, b, 0) for a, b in pairwise(row)] + around:
            if (left, right) == (i, j):
                change = s.family[i] != s.family[j]
                setup = int(s.setup_out[i] + s.setup_in[j]) if change else 0
                if begin[j] + wrap == begin[i] + s.duration[i] + setup:
                    return True
    return False


@given(schedules())
def test_shares_equal_sums_over_unit_times(s: Schedule) -> None:
    """Busy, setup and bubble of a resource add up to the makespan, unit by unit."""
    summary = report(s)
    for r, row in enumerate(summary.resources):
        users = [i for i in range(s.n_operations) if r in s.op_resources[i]]
        busy = sum(any(s.start[i] <= t < s.end[i] for i in users) for t in range(summary.span))
        setup = sum(s.setup(i, j) for i, j in pairwise(s.sequences[r].tolist()))
        assert (row.operations, row.busy, row.setup) == (len(users), busy, setup)
        assert row.busy + row.setup + row.bubble == summary.span == s.makespan
        if summary.span:
            assert row.busy_share + row.setup_share + row.bubble_share == pytest.approx(1)


@given(schedules())
def test_peak_memory_equals_a_walk_along_the_sequence(s: Schedule) -> None:
    """The peak is the most that any operation finds held, takes and needs."""
    for r, row in enumerate(report(s).resources):
        level, peak = 0, 0
        for i in s.sequences[r].tolist():
            peak = max(peak, level + int(s.acquire[i] + s.workspace[i]))
            level += int(s.acquire[i] - s.free[i])
        assert row.peak_memory == peak
        assert row.memory == s.resources[r].memory


@given(periodic_schedules())
def test_periodic_numbers_equal_those_of_the_unrolled_schedule(s: Schedule) -> None:
    """Peaks equal those of many cycles from cold; loads are those of one cycle."""
    flat = report(unroll(s, int(s.offset.max(initial=0)) + 3))
    for r, row in enumerate(report(s).resources):
        assert row.peak_memory == flat.resources[r].peak_memory
        assert row.busy == int(s.duration[s.users[r]].sum())
        assert row.busy + row.setup + row.bubble == s.period
        assert row.bubble >= 0


@given(st.one_of(schedules(), periodic_schedules()), st.integers(1, 3))
def test_memory_steps_are_levels_between_events(s: Schedule, cycles: int) -> None:
    """At half past every unit, the level is what has been taken and not given back."""
    turn = s.period or 0
    span = turn * cycles or s.makespan
    for r in range(s.n_resources):
        times, levels = memory_steps(s, r, cycles)
        assert (np.diff(times) > 0).all()
        assert times[0] == 0
        for t in range(span):
            level = 0
            for i in s.users[r].tolist():
                for c in range(-int(s.offset.max(initial=0)) - 12, cycles) if turn else [0]:
                    # instance of iteration c, at its true time
                    begin = int(s.start[i]) + (c + int(s.offset[i])) * turn
                    end = begin + int(s.duration[i])
                    level += int(s.acquire[i]) * (begin <= t) - int(s.free[i]) * (end <= t)
                    level += int(s.workspace[i]) * (begin <= t < end)
            assert levels[np.searchsorted(times, t, side="right") - 1] == level


@given(schedules())
def test_critical_path_of_a_semi_active_schedule_is_complete(s: Schedule) -> None:
    """From time 0 or a release to the makespan, every step explained, no operation twice."""
    path = critical_path(s)
    if not s.n_operations:
        assert path == []
        return
    assert s.end[path[-1]] == s.makespan
    assert int(s.start[path[0]]) in (0, int(s.release[path[0]]))
    assert all(explained(s, i, j) for i, j in pairwise(path))
    assert len(set(path)) == len(path)
    summary = report(s)
    assert summary.path_is_complete
    assert [step.operation for step in summary.critical_path] == path


@given(schedules(), st.integers(1, 5))
def test_a_late_schedule_has_a_gap(s: Schedule, late: int) -> None:
    """Starts that nothing explains end the path, and the report says so."""
    s = replace(s.graph(), release=np.zeros(s.n_operations, np.int64)).with_orders(
        s.sequences, s.start + late
    )
    path = critical_path(s)
    assert all(explained(s, i, j) for i, j in pairwise(path))
    if path:
        summary = report(s)
        assert not summary.path_is_complete
        assert summary.critical_path[0].reason.startswith("gap")


def allows(s: Schedule, period: int) -> bool:
    """Whether orders and offsets fit a period: no cycle weighs more (Bellman and Ford)."""
    edges = [
        (i, j, int(s.duration[i]) + lag - (distance + int(s.offset[j] - s.offset[i])) * period)
        for i, j, lag, distance in zip(*(c.tolist() for c in s.arcs), strict=True)
    ]
    for row in s.sequences.to_lists():
        for k, i in enumerate(row):
            j, wraps = row[(k + 1) % len(row)], k + 1 == len(row)
            edges.append((i, j, int(s.duration[i]) + s.setup(i, j) - wraps * period))
    start = [0] * s.n_operations
    for _ in range(s.n_operations + 1):
        late = [(j, start[i] + w) for i, j, w in edges if start[i] + w > start[j]]
        for j, t in late:
            start[j] = max(start[j], t)
        if not late:
            return True
    return False


@given(periodic_schedules())
def test_critical_cycle_tells_the_least_period(s: Schedule) -> None:
    """Tight all round where the period is least; else it says what the orders allow."""
    cycle, summary = critical_path(s), report(s)
    assert summary.path_is_complete == bool(cycle)
    assert [step.operation for step in summary.critical_path] == cycle
    if not cycle:
        assert summary.least_period is None
        assert allows(s, 1)
        return
    assert all(step.reason.startswith("after ") for step in summary.critical_path)
    assert summary.least_period <= s.period
    assert allows(s, summary.least_period)
    assert summary.least_period == 1 or not allows(s, summary.least_period - 1)
    if all(explained(s, i, j) for i, j in pairwise([*cycle, *cycle[:1]])):
        assert summary.least_period == s.period


def test_show_of_a_loose_period_says_so() -> None:
    """A period longer than the orders need is told, with the cycle that holds up a shorter one."""
    s = equal_jobs(4, 3, 5, 10)
    assert report(s).least_period == 60
    assert "these orders allow" not in printed(report(s))
    loose = replace(s, period=70, objective=Objective("period", 70, 60, "feasible"))
    summary = report(loose)
    assert summary.least_period == 60
    path = [step.operation for step in summary.critical_path]
    assert not all(explained(loose, i, j) for i, j in pairwise([*path, path[0]]))
    assert "these orders allow a period of 60 µs" in printed(summary)


def test_critical_path_of_every_feature() -> None:
    """By hand: a setup before a gang, then the other resource, a zero duration, the end mark."""
    s = hand_made([0, 6, 9, 14, 15])
    assert critical_path(s) == [0, 1, 2, 3, 4]
    assert [step.reason for step in report(s).critical_path] == [
        "at time 0", "after a + setup 2", "after b", "after b", "after its predecessor + lag 1",
    ]  # fmt: skip


@given(graphs(max_operations=3))
def test_graphs_are_refused(graph: Schedule) -> None:
    """Nothing to report or explain without starts."""
    for call in (report, critical_path):
        with pytest.raises(InputError, match="not scheduled"):
            call(graph)


@given(spoilt(st.one_of(schedules(), periodic_schedules())))
def test_wrong_schedules_are_still_shown(s: Schedule) -> None:
    """A report and its table exist for every document, right or wrong."""
    assert printed(report(s))


def test_table_shows_names_as_they_are() -> None:
    """Markup of the terminal library in a name is text, and control characters are not sent."""
    s = hand_made(
        [0, 6, 9, 14, 15],
        name="[red]x[/red]\x1b[2J",
        resources=(Resource("[bold]a[/]", 5), Resource("b\nc")),
        acquire=np.array([9, 0, 0, 0, 0]),
        kind=np.array(["[i]", "", "", "", ""]),
        objective=Objective("makespan", 15, 15, "optimal"),
    )
    text = printed(report(s))
    assert "[red]x[/red]\ufffd[2J" in text
    assert "[bold]a[/]" in text
    assert "b c" in text
    assert "[i](job 0" in text
    assert "proved optimal" in text
    assert "\x1b" not in text


def test_narrow_terminals_cut_names_but_no_numbers() -> None:
    """Nor reasons: they go on in the next line."""
    long = "x" * 60
    array = JobArray(
        [[123456789] * 2] * 2, [[987654321] * 2] * 2, switch=10**7, activation=10**12,
        memory=10**13, devices=[long, long[1:]],
    )  # fmt: skip
    summary = report(pipelines.one_f_one_b(array))
    wide, narrow = printed(summary), printed(summary, 40)
    tables = wide.split("resource ")[1].split("critical")[0]
    words = [word for word in re.split(" +|\n", tables) if word and word[0] not in "x─"]
    assert len(words) > 30 and all(word in narrow for word in words)
    assert "x" * 39 in wide and "x" * 30 not in narrow and "xxx…" in narrow
    path = printed(summary, 80).split("critical")[1]
    assert "after its predecessor" in path and not re.search("[^x ]…", path)


def printed(summary: object, width: int = 160) -> str:
    """The table as plain text."""
    from rich.console import Console

    from optsched.cli.show import render

    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None)
    console.print(render(summary), crop=False)  # type: ignore[arg-type]
    return stream.getvalue()
