"""Measurements as CSV: nothing is lost, and every fault has its line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth import synthetic
from optsched.bandwidth.models.measured import MeasuredBandwidth
from optsched.bandwidth.models.measurements import Measurement, MeasurementTable, MixedMeasurements
from optsched.bandwidth.models.model import OPERATIONS, UnmeasuredPattern
from optsched.bandwidth.topology.cluster import Cluster, HostType
from optsched.bandwidth.topology.rates import MOST, UNMEASURED
from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "op,payload_bytes,hosts,pattern,gpus,busbw_GBps\n"
LINE = "all_reduce,16777216,2,5+3,,153.44\n"


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    """With or without GPUs, seen alone or beside other traffic."""
    counts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    gpus: tuple[tuple[str, tuple[int, ...]], ...] = ()
    if draw(st.booleans()):
        names = draw(
            st.lists(
                st.text("abcü[]\"'-_.01", min_size=1, max_size=5),
                min_size=len(counts), max_size=len(counts), unique=True,
            )
        )  # fmt: skip
        ids = [
            draw(st.lists(st.integers(0, 255), min_size=c, max_size=c, unique=True)) for c in counts
        ]
        gpus = tuple((name, tuple(i)) for name, i in zip(names, ids, strict=True))
    return Measurement(
        tuple(counts), draw(st.integers(0, MOST - 1)), gpus, draw(st.integers(0, 3)) == 0
    )


@given(
    st.lists(measurements(), min_size=1, max_size=5),
    st.sampled_from(OPERATIONS),
    st.none() | st.integers(1, 2**53),
    st.booleans(),
)
def test_round_trip(rows: list[Measurement], op: str, payload: int | None, mixed: bool) -> None:
    """What is written is what is read, to the kB/s, whatever ends the lines."""
    table = MeasurementTable(tuple(rows), op, payload, mixed)
    text = table.to_csv()
    assert MeasurementTable.parse(text, "t") == table
    assert MeasurementTable.parse(text.replace("\n", "\r\n"), "t") == table
    assert MeasurementTable.parse(text, "t", op, payload) == table


def test_files(tmp_path: Path) -> None:
    """By way of a file, with a byte-order mark and empty lines too."""
    path = tmp_path / "m.csv"
    table = MeasurementTable((Measurement((5, 3), 153_440_000),), payload=16 << 20)
    table.write(path)
    assert path.read_text() == HEAD + LINE
    assert MeasurementTable.read(path) == table
    path.write_bytes(b"\xef\xbb\xbf" + (HEAD + "\n" + LINE + ",,,,,\n").encode())
    assert MeasurementTable.read(path) == table


def test_choice() -> None:
    """Two collectives or payloads need a choice; the message names both lines."""
    text = HEAD + LINE + LINE.replace("16777216", "1024") + LINE.replace("all_reduce", "reduce")
    with pytest.raises(MixedMeasurements, match=r"t:3: all_reduce of 1024 .* t:2 .* 16777216"):
        MeasurementTable.parse(text, "t")
    with pytest.raises(MixedMeasurements, match="t:3"):
        MeasurementTable.parse(text, "t", op="all_reduce")
    with pytest.raises(MixedMeasurements, match="t:4: reduce of"):
        MeasurementTable.parse(text, "t", payload=16777216)
    assert len(MeasurementTable.parse(text, "t", payload=1024)) == 1
    assert MeasurementTable.parse(text, "t", "all_reduce", 16777216).payload == 16777216
    with pytest.raises(InputError, match="no broadcast of any size; there are all_reduce of 1024"):
        MeasurementTable.parse(text, "t", op="broadcast")
    unknown = HEAD + LINE + LINE.replace("16777216", "")
    with pytest.raises(MixedMeasurements, match="of unknown size"):
        MeasurementTable.parse(unknown, "t")


BAD = {
    "": "t: the file is empty",
    HEAD: "t: there are no measurements",
    HEAD.replace("pattern", "patern"): 't:1: unknown column "patern"; known: op,payload_bytes',
    HEAD.replace(",busbw_GBps", ""): 't:1: column "busbw_GBps" is missing',
    HEAD.replace("hosts", "op"): 't:1: column "op" appears twice',
    HEAD + "all_reduce,8,2,5+3,4\n": "t:2: expected 6 columns, got 5",
    HEAD + LINE + "allreduce,8,2,5+3,,4\n": "t:3: op: expected one of all_reduce",
    HEAD + "reduce,-8,2,5+3,,4\n": "t:2: payload_bytes: expected bytes",
    HEAD + "reduce,99999999999999999999,2,5+3,,4\n": "t:2: payload_bytes: expected bytes",
    HEAD + "reduce,8,3,5+3,,4\n": r"t:2: hosts: expected 2 as in the pattern 5\+3, got '3'",
    HEAD + "reduce,8,2,5-3,,4\n": r"t:2: pattern: expected counts such as 5\+3",
    HEAD + "reduce,8,2,5+0,,4\n": r"t:2: pattern: expected counts",
    HEAD + "reduce,8,2,5+3,,-4\n": "t:2: busbw_GBps: expected GB/s >= 0",
    HEAD + "reduce,8,2,5+3,,nan\n": "t:2: busbw_GBps: expected GB/s >= 0",
    HEAD + "reduce,8,2,5+3,,1_0\n": "t:2: busbw_GBps: expected GB/s >= 0",
    HEAD + "reduce,8,2,5+3,,153440\n": r"t:2: busbw_GBps: .*MB/s\?",
    HEAD + "reduce,8,2,5+3,,\n": "t:2: busbw_GBps: expected GB/s",
    HEAD + 'reduce,8,2,5+3,"a:0-4 b:0,1",4\n': r"t:2: gpus: are not of the pattern 5\+3",
    HEAD + "reduce,8,2,2+1,a:1-0 b:0,4\n": "t:2: gpus: .*expected ids in",
    HEAD + "reduce,8,1,2,a:0 a:1,4\n": "t:2: gpus: a host or an id is given twice",
    HEAD + "reduce,8,1,2,a,4\n": "t:2: gpus: expected HOST:IDS",
    HEAD + 'reduce,8,1,2,"a,4\n': "t:2: not valid CSV",
    HEAD.strip() + ",censored\nreduce,8,1,2,,4,yes\n": "t:2: censored: expected 0 or 1",
}


@pytest.mark.parametrize("text", BAD)
def test_refused(text: str) -> None:
    """Each fault is found, and named with its line."""
    with pytest.raises(InputError, match=BAD[text]):
        MeasurementTable.parse(text, "t")


# a table of measured patterns: what it knows, and what it refuses to guess

CLUSTER = Cluster.uniform(HostType("h", 4), 3)


def of(*rows: tuple[tuple[int, ...], int]) -> MeasurementTable:
    """A table of patterns and values."""
    return MeasurementTable(tuple(Measurement(pattern, value) for pattern, value in rows))


@given(st.integers(0, 2**20), st.integers(1, 2**12 - 1))
def test_a_complete_table_answers_by_sorted_counts(seed: int, mask: int) -> None:
    """B(S) is the entry of the counts of S, whichever hosts and GPUs; 0 for a single GPU."""
    cluster = synthetic.cluster("nvswitch", 3)
    table = synthetic.network(cluster, seed % 3)
    entries = {row.pattern: row.value for row in table}
    row = np.zeros(cluster.n_gpus, np.bool_)
    for i in range(12):
        row[2 * i] = mask >> i & 1
    counts = [int(row[8 * h : 8 * h + 8].sum()) for h in range(3)]
    pattern = tuple(sorted((c for c in counts if c), reverse=True))
    expected = entries[pattern] if sum(pattern) > 1 else 0
    model = MeasuredBandwidth(cluster, table)
    assert model.of(np.flatnonzero(row)) == expected
    low, high = model.interval(row[None])
    assert low[0] == high[0] == expected


def test_what_was_not_measured_is_not_guessed() -> None:
    """`predict` raises with the pattern; the interval spans 0 to the largest value."""
    model = MeasuredBandwidth(CLUSTER, of(((2, 2), 70), ((4,), 300)))
    with pytest.raises(UnmeasuredPattern, match=r"3\+1 is not measured") as caught:
        model.of([0, 1, 2, 4])
    assert caught.value.pattern == "3+1"
    row = np.zeros((1, 12), np.bool_)
    row[0, [0, 1, 2, 4]] = True
    low, high = model.interval(row)
    assert (low[0], high[0]) == (0, 300)
    tables = model.tables()
    assert tables is not None
    assert tables.network[tables.automaton.states(np.array([[3, 1]]))[0]] == UNMEASURED
    assert tables.network[tables.automaton.states(np.array([[2, 2]]))[0]] == 70


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Measurement((5, 1), 1), r"measurements\[0\].pattern: 5\+1 does not fit 3 hosts"),
        (Measurement((1, 1, 1, 1), 1), "does not fit 3 hosts"),
        (Measurement((1, 1), 1, (("n01", (0,)), ("n09", (0,)))), r"gpus: there is no host 'n09'"),
        (Measurement((1, 1), 1, (("n01", (0,)), ("n02", (4,)))), "ids in 0..3 on n02, got 4"),
    ],
)
def test_measurements_of_another_cluster_are_refused(row: Measurement, words: str) -> None:
    """With the position, what is wrong, and what is possible."""
    with pytest.raises(InputError, match=words):
        MeasuredBandwidth(CLUSTER, MeasurementTable((row,)))
