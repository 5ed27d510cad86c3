"""Job arrays and job shops from CSV files, data frames and rows."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError, JobArray, JobShop
from optsched.formats.read_problem import read_problem
from optsched.testing.random_problems import random_array

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

ROWS: list[dict[str, Any]] = [
    {"job": name, "stage": v, "kind": kind, "duration": d, "bytes": 9 if kind == "F" else None}
    for name in ("small", "large")
    for v in range(2)
    for kind, d in (("F", 1.5), ("B", 2.25))
]
EXPECTED = JobArray(
    [[1500, 1500]] * 2, [[2250, 2250]] * 2, activation=9, names=["small", "large"], time_unit="us"
)
STEPS: list[dict[str, Any]] = [
    {"job": 7, "machine": "saw", "duration": 3, "release": 2},
    {"job": 8, "machine": "mill", "duration": 4, "release": None},
    {"job": 7, "machine": "mill", "duration": 2, "release": 2},
]


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The same table by columns."""
    return {key: [row[key] for row in rows] for key in rows[0]}


def csv(rows: list[dict[str, Any]], unit: str = "") -> str:
    """The same table as CSV."""
    header = ",".join(f"{key}_{unit}" if key == "duration" and unit else key for key in rows[0])
    lines = (",".join("" if x is None else str(x) for x in row.values()) for row in rows)
    return "\n".join([header, *lines]) + "\n"


class Frame:
    """What pandas and polars have in common."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._columns = columns(rows)
        self.columns = list(self._columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self._columns[name]


def test_arrays_of_every_source(tmp_path: Path) -> None:
    """Rows, columns, frames, and files are the same array; extra arguments are fields."""
    path = tmp_path / "a.csv"
    path.write_text(csv(ROWS, "ms"))
    for table in (ROWS, columns(ROWS), Frame(ROWS)):
        assert JobArray.from_table(table, "ms") == EXPECTED
        changed = JobArray.from_table(table, "ms", switch=5, objective="period")
        assert changed == EXPECTED.replace(switch=5, objective="period")
    named = EXPECTED.replace(name="a")
    assert read_problem(path) == named == JobArray.from_table(path)
    pandas = pytest.importorskip("pandas")
    whole = pandas.DataFrame(ROWS).fillna({"bytes": 0})
    assert JobArray.from_table(whole, "ms") == EXPECTED


def test_shops(tmp_path: Path) -> None:
    """Machines by name or number, steps by a column, integers without a unit."""
    path = tmp_path / "s.csv"
    path.write_text(csv(STEPS))
    shop = read_problem(path)
    expected = JobShop(
        [[(0, 3), (1, 2)], [(1, 4)]], ["saw", "mill"], release=[2, 0], names=["7", "8"], name="s"
    )
    assert shop == expected
    numbered = [{**row, "machine": i % 2, "step": 9 - i} for i, row in enumerate(STEPS)]
    shop = JobShop.from_table(numbered, "us", tick="ns")
    assert (shop.jobs, shop.time_unit) == ((((0, 2000), (0, 3000)), ((1, 4000),)), "ns")
    padded = [{**row, "machine": name} for row, name in zip(STEPS, ("1", "01", "1"), strict=True)]
    assert JobShop.from_table(padded).machines == ("1", "01")


@given(st.randoms(use_true_random=False), st.sampled_from(["ns", "us", "ms", "s"]))
def test_wide_tables(rng: Random, unit: str) -> None:
    """One row a job holds every table of an array."""
    array = random_array(rng)
    keys = ["forward", "backward", "weight", "switch", "lag_forward", "lag_backward", "activation"]
    table: dict[str, list[Any]] = {"job": list(array.names)}
    for key in keys:
        values = getattr(array, key)
        for v in range(0 if values is None else values.shape[1]):
            suffix = "" if key == "activation" else f"_{unit}"
            table[f"{key}_{v}{suffix}"] = values[:, v].tolist()
    table["micro_batches"] = array.micro_batches.tolist()
    found = JobArray.from_table(table, tick=unit, memory=None)
    assert found.time_unit == unit
    for key in (*keys, "micro_batches"):
        a, b = getattr(found, key), getattr(array, key)
        assert (a is None) == (b is None) and (a is None or a.tolist() == b.tolist())


@given(st.floats(0, 1e6), st.sampled_from(["ns", "us", "ms", "s"]))
def test_rounding(value: float, unit: str) -> None:
    """To the nearest tick, exactly; a positive time is never 0."""
    rows = [{"job": "a", "machine": 0, "duration": value}]
    exact = Fraction(value) * {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}[unit] / 1000
    if exact and not round(exact):
        with pytest.raises(InputError, match="less than half a tick"):
            JobShop.from_table(rows, unit, tick="us")
        return
    assert JobShop.from_table(rows, unit, tick="us").duration.tolist() == [round(exact)]


def changed(**cells: Any) -> list[dict[str, Any]]:
    """The rows with other cells in row 3."""
    return [{**row, **cells} if r == 3 else row for r, row in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("table", "unit", "message"),
    [
        (changed(duration=float("nan")), "ms", "row 3, column duration: .*finite number, got nan"),
        (changed(duration=1e300), "s", "row 3, column duration: more than 2.53 ticks .*1e.300"),
        (changed(duration=1e-9), "ms", "row 3, column duration: less than half a tick of 1 us"),
        (changed(duration=-1), "ms", "row 3, column duration: expected a number >= 0, got -1"),
        (changed(duration=True), "ms", "row 3, column duration: .*got True"),
        (changed(duration="1_0"), "ms", 'row 3, column duration: .*got "1_0"'),
        (changed(duration=None), "ms", "row 3, column duration: expected a number, got None"),
        (changed(bytes=4), "ms", "row 3, column bytes: expected none for kind B"),
        (changed(bytes=0.5), "ms", "row 3, column bytes: expected an integer, got 0.5"),
        (changed(kind="X"), "ms", 'row 3, column kind: expected one of F, .*got "X"'),
        (changed(stage=2**53), "ms", '"small": backward of stage 9007199254740992, expected 0..1'),
        (changed(stage=0), "ms", "row 3: a second value of backward, stage 0"),
        (changed(job=""), "ms", "row 3, column job: expected a name"),
        (ROWS[:3], "ms", '"small": backward of stage 1 is missing'),
        (ROWS, "", "unit of the times is missing: give `time_unit`, or headers such as duration_m"),
        (ROWS, "min", "time_unit: expected one of ns, us, ms, s"),
        ([], "ms", "expected a header and at least one row"),
        (3, "ms", "table: expected a path, a data frame"),
        ([{"a": 1}, {"b": 2}], "ms", "row 1: expected a mapping with the keys of row 0"),
        ([{**row, "durration": 1} for row in ROWS], "ms", "unknown column .*did you mean duration"),
        ([{**r, "micro_batches": i} for i, r in enumerate(ROWS, 1)], "ms", "expected 1 as before"),
        ({"forward_0": [1], "backward_1": [1]}, "ms", "backward of stage 1, expected 0..0"),
        ({"forward": [1], "backward_0": [1]}, "ms", "column forward: expected one per stage"),
        ({"forward_0": [1], "backward_0": [1], "release_0": [4]}, "ms", "release has no stages"),
        ({"forward_0_us": [1], "forward_0": [1], "backward_0": [1]}, "ms", "both hold forward"),
        ({1: [1], "1": [1]}, "ms", "two columns have the same name"),
        ({"job": ["a"], "stage": [1]}, "ms", "column kind is missing"),
        ({"job": ["a", "b"], "stage": [1]}, "ms", "the columns differ in length"),
    ],
    ids=lambda x: str(x)[-40:],
)
def test_refusals(table: Any, unit: str, message: str) -> None:
    """With row, column and value."""
    with pytest.raises(InputError, match=message) as caught:
        JobArray.from_table(table, unit)
    assert "\n" not in str(caught.value)


def test_refusals_of_files_and_shops(tmp_path: Path) -> None:
    """File and line; a float needs a unit; arguments do not overrule columns."""
    path = tmp_path / "a.csv"
    path.write_text(csv(changed(duration="x"), "ms"))
    with pytest.raises(InputError, match=r'a\.csv:5, column duration_ms: .*got "x"'):
        read_problem(path)
    path.write_text(csv(ROWS))
    with pytest.raises(InputError, match="the unit of the times is missing"):
        read_problem(path)
    floats = [{**row, "duration": 0.5} for row in STEPS]
    with pytest.raises(InputError, match=r"row 0.*integer .*duration_ms\), got 0.5"):
        JobShop.from_table(floats)
    with pytest.raises(InputError, match="tick: no column of table has a unit: give `time_unit`"):
        JobShop.from_table(STEPS, tick="ns")
    path.write_text(csv(ROWS, "ms"))
    with pytest.raises(InputError, match=r"time_unit: headers of .*\(ms\), leave it out"):
        JobArray.from_table(path, "s")
    with pytest.raises(InputError, match="row 0, column duration: expected a number >= 0"):
        JobShop.from_table([{**STEPS[0], "duration": -1}])
    with pytest.raises(InputError, match="release: given as an argument"):
        JobShop.from_table(STEPS, release=[1, 1])
    with pytest.raises(InputError, match='row 0: job "7": two rows have the same step'):
        JobShop.from_table([{**row, "step": 1} for row in STEPS])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "job,stage,kind,duration_ms\na,0,F,1\na,0,B,1\na,1,F,1\n",
            ':2: job "a": backward of stage',
        ),
        ("job,forward_0_ms,backward_0_ms\na,1,1\na,1,2\n", ':3: job "a" has several rows'),
        ("job,forward_ms,backward_0_ms\na,1,2\n", ": column forward_ms: expected one per stage"),
        (
            "job,forward_0_ms,backward_0_ms,activation_1\na,1,2,3\n",
            ':2: job "a": activation of sta',
        ),
        ("job,machine,step,duration\na,0,0,1\na,1,0,2\n", ':2: job "a": two rows have the same'),
        (
            "job,forward_0_ms,backward_0_ms,micro_batches\na,1,2,0\n",
            ":2, column micro_batches: expected a number >= 1",
        ),
    ],
)
def test_refusals_of_files_name_file_and_row(tmp_path: Path, text: str, message: str) -> None:
    """Also those of several rows."""
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=f"^{path}{message}"):
        read_problem(path)


def test_a_stage_without_its_column_is_refused() -> None:
    """Bytes or lags of one stage are not taken as 0 because a column was forgotten."""
    row = {"job": "a", "forward_0": 1, "forward_1": 1, "backward_0": 2, "backward_1": 2}
    for field in ("activation", "switch"):
        with pytest.raises(InputError, match=f"column {field}_1 is missing"):
            JobArray.from_table([{**row, f"{field}_0": 5}], "us")
    assert JobArray.from_table([{**row, "lag_forward_0": 5}], "us").lag_forward.tolist() == [[5]]
