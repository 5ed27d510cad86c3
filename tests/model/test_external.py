"""Schedules from starts and machine orders of another tool."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from strategies import schedules

import optsched
from optsched import CyclicOrder, InputError, JobArray, JobShop, Resource, Schedule, verify
from optsched.model.graph import describe

SHOP = JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], name="toy")
GOOD = [0, 4, 0, 4]
GANG = Schedule(
    resources=(Resource("a"), Resource("b")), duration=[3], op_resources=[[0, 1]], arcs=[]
)


@pytest.mark.parametrize(
    "starts",
    [
        GOOD,
        [[0, 4], [0, 4]],
        {0: 0, 1: 4, 2: 0, 3: 4},
        {(0, 0): 0, ("0", 1): 4, (1, 0): 0, "operation(job 1, stage 1)": 4},
        [(0, "m0", 0), ("job0", "m1", 4), (1, "m1", 0), ("1", 0, 4)],
    ],
)
def test_starts_by_index_job_and_name(starts: Any) -> None:
    """All forms give the same schedule of the problem."""
    schedule = Schedule.from_starts(SHOP, starts)
    assert schedule.start is not None and schedule.start.tolist() == GOOD
    assert verify(schedule, SHOP) == []
    assert SHOP.evaluate(schedule) == 6


def test_rows_of_jobs_and_machines() -> None:
    """A job's blocks on a device are matched by time; names of jobs are those of the problem."""
    array = JobArray([[2, 2], [3, 3]], [[4, 4], [6, 6]], names=["a", "b"])
    found = optsched.solve(array, "dispatch").schedule
    assert found is not None and found.start is not None
    devices = found.single_resource.tolist()
    keys = zip(found.job.tolist(), devices, found.start.tolist(), strict=True)
    rows = [(array.names[j], f"gpu{d}", start) for j, d, start in keys]
    again = Schedule.from_starts(array, rows[::-1])
    assert again.sequences == found.sequences and verify(again, array) == []
    named = {f"F(job {'ab'[j]}, stage {v})": 0 for j in range(2) for v in range(2)}
    named |= {f"B(job {'ab'[j]}, stage {v})": 50 for j in range(2) for v in range(2)}
    assert {v.kind for v in verify(Schedule.from_starts(array, named), array)} >= {"overlap"}
    for wrong, message in (
        ([*rows[:-1], ("c", "gpu0", 1)], r'starts\[7\]: job "c" has no further operation on gpu0'),
        ([*rows[:-1], ("a", "gpu0", 1)], r'starts\[.\]: job "a" has no further operation'),
        ([*rows[:-1], ("b", "gpu7", 1)], r'starts\[7\]: no machine "gpu7"'),
        ([*rows[:-1], ("b", "gpu0", 1.5)], r"starts\[7\]\[2\]: expected an integer"),
    ):
        with pytest.raises(InputError, match=message):
            Schedule.from_starts(array, wrong)
    several = JobArray([[1]], [[1]], micro_batches=2)
    with pytest.raises(InputError, match=r"order of B\(job 0.* is not fixed; give such names"):
        Schedule.from_starts(several, [("0", "gpu0", t) for t in range(4)])


def test_orders_by_index_job_and_name() -> None:
    """The earliest schedule of the orders."""
    for orders in ([[0, 3], [2, 1]], {"m1": [(1, 0), 1], "m0": [0, "operation(job 1, stage 1)"]}):
        schedule = Schedule.from_orders(SHOP, orders)
        assert schedule.makespan == 6 and verify(schedule, SHOP) == []
    with pytest.raises(CyclicOrder):
        Schedule.from_orders(SHOP, [[3, 0], [1, 2]])


def test_orders_of_jobs_by_name() -> None:
    """The form of the literature: the jobs of every machine in turn."""
    for orders in ([["job0", "job1"], ["job1", "job0"]], {"m1": ["1", "0"], "m0": ["0", 3]}):
        assert Schedule.from_orders(SHOP, orders).makespan == 6
    with pytest.raises(InputError, match=r'orders\[0\]: job "job0" has no further operation on m0'):
        Schedule.from_orders(SHOP, [["job0", "job0"], ["job1", "job0"]])
    with pytest.raises(InputError, match=r"sequences\[1\]: operation 1 is missing"):
        Schedule.from_orders(SHOP, {"m0": ["job0", "job1"], "m1": ["job1"]})
    array = JobArray([[2, 2], [3, 3]], [[4, 4], [6, 6]], names=["a", "b"])
    found = Schedule.from_orders(array, [list("abba"), list("abba")])  # F, then B of a job
    assert found.sequences is not None and found.sequences.to_lists() == [
        [0, 4, 7, 3],
        [1, 5, 6, 2],
    ]
    assert {v.kind for v in verify(found, array)} == set()
    with pytest.raises(InputError, match="is not fixed; give such names"):
        Schedule.from_orders(JobArray([[1]], [[1]], micro_batches=2), [["job0"] * 4])


@pytest.mark.parametrize("names", [None, ["a", "b"]])
def test_frames_of_starts(names: list[str] | None) -> None:
    """`to_pandas` and back, with either name of the column; a missing column is named."""
    pytest.importorskip("pandas")
    array = JobArray([[2, 2], [3, 3]], [[4, 4], [6, 6]], names=names)
    found = optsched.solve(array, "dispatch").schedule
    assert found is not None and found.start is not None
    frame = found.to_pandas()
    for table in (frame, frame.rename(columns={"resource": "machine"}).sample(frac=1)):
        again = Schedule.from_starts(array, table)
        assert again.start is not None and again.start.tolist() == found.start.tolist()
    with pytest.raises(InputError, match=r"starts: column resource is missing"):
        Schedule.from_starts(array, frame[["job", "start"]])
    for column, value in (("start", 0.5), ("start", float("nan")), ("job", "c"), ("resource", 99)):
        wrong = frame.astype({"start": float} if column == "start" else object)
        wrong.loc[wrong.index[2], column] = value
        place = column.replace("resource", "machine")
        with pytest.raises(InputError, match=rf"starts\[2\]\.{place}: "):
            Schedule.from_starts(array, wrong)
    with pytest.raises(InputError, match=r"starts: .* is missing"):
        Schedule.from_starts(array, frame[1:])


@given(schedules())
def test_correct_starts_are_correct(s: Schedule) -> None:
    """Orders follow from the starts of any schedule without violations, whatever its graph."""
    if verify(s):
        return
    names = [describe(s, i) for i in range(s.n_operations)]
    keys = names if len(set(names)) == len(names) else range(s.n_operations)
    again = Schedule.from_starts(s.graph(), dict(zip(keys, s.start.tolist(), strict=True)))  # type: ignore[union-attr]
    assert [v for v in verify(again, s.graph()) if v.kind not in ("memory", "free")] == []


def test_rolling_starts_need_the_period() -> None:
    """In absolute time of one iteration; offsets and places in the cycle follow."""
    array = JobArray([[1, 2], [2, 1]], [[1, 2], [3, 1]], objective="period")
    found = optsched.solve(array, time_limit=60).schedule
    assert found is not None and found.start is not None and found.period is not None
    absolute = found.start + found.offset * found.period
    again = Schedule.from_starts(array, absolute, period=found.period)
    assert verify(again, array) == [] and array.evaluate(again) == found.period
    for given_period, message in ((None, "period: missing"), (0, "period: expected an integer")):
        with pytest.raises(InputError, match=message):
            Schedule.from_starts(array, absolute, period=given_period)


@pytest.mark.parametrize(
    ("starts", "kind", "sentence"),
    [
        ([0, 3, 0, 4], "overlap", "starts 1 before operation 2 .* ends on m1"),
        ([0, 2, 9, 13], "precedence", "operation 0 .* must precede it and ends at 3: 1 missing"),
    ],
)
def test_broken_rules_are_the_verifiers_sentences(starts: Any, kind: str, sentence: str) -> None:
    """A wrong result is a schedule, and `verify` names the rule."""
    (violation,) = verify(Schedule.from_starts(SHOP, starts), SHOP)
    assert violation.kind == kind
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(violation.message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule.from_starts(SHOP, [0, 3]), "starts: expected 4 values, one an op"),
        (lambda: Schedule.from_starts(SHOP, [[1], [2]]), "starts: expected one row per job"),
        (lambda: Schedule.from_starts(SHOP, {0: 1}), "starts: .*stage 1\\), operation 1, is miss"),
        (lambda: Schedule.from_starts(SHOP, {0: 1, (0, 0): 2}), "starts: .* is given twice"),
        (lambda: Schedule.from_starts(SHOP, {(0, 2): 1}), r"starts: no operation \(0, 2\)"),
        (lambda: Schedule.from_starts(SHOP, "x"), "starts: expected a list or a mapping"),
        (lambda: Schedule.from_starts(SHOP, [0, -1, 0, 4]), r"starts\[1\]: expected 0..2\^53"),
        (lambda: Schedule.from_starts(SHOP, [0.5] * 4), "starts: expected integers, got float64"),
        (lambda: Schedule.from_starts(SHOP, GOOD, period=9), "period: this problem has none"),
        (lambda: Schedule.from_starts(3, GOOD), "problem: expected a JobShop"),  # type: ignore[arg-type]
        (lambda: Schedule.from_orders(SHOP, [[0, 3]]), "orders: expected 2 rows, one per machine"),
        (lambda: Schedule.from_orders(SHOP, {"m7": []}), 'orders: no machine "m7"; there are m0'),
        (lambda: Schedule.from_orders(SHOP, [[0], [2, 1]]), "operation 3 is missing"),
        (lambda: Schedule.from_orders(SHOP, [[0, 3], 5]), r"orders\[1\]: expected a list of op"),
        (lambda: Schedule.from_orders(SHOP, {"m0": [0, 3], 0: [0]}), "orders: m0 is given twice"),
        (lambda: Schedule.from_starts(SHOP, [[0, 3], 5]), "starts: expected one row per job"),
        (lambda: Schedule.from_starts(GANG, [(0, "a", 1), (0, "b", 2)]), "starts at 1, not 2"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    """One sentence with the argument and the operation or machine."""
    with pytest.raises(InputError, match=message):
        make()


def test_equal_names_need_indices() -> None:
    """A name that two operations share is refused."""
    graph = Schedule(resources=(), duration=[1, 1], op_resources=[[], []])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"operations \[0, 1\] are called"):
        Schedule.from_starts(graph, {describe(graph, 0): 0})
