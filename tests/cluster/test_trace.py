"""Traces: what is written is read, what is wrong is refused with row and field."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.cluster.workload.job import WORK, Job, rates
from optsched.cluster.workload.nodes import Nodes
from optsched.cluster.workload.speedup import Amdahl
from optsched.cluster.workload.trace import read_trace, write_trace
from optsched.cluster.workload.workload import Workload
from optsched.errors import InputError

HEAD = "job_id,submit_time_s,num_gpus,duration_s,priority,type\n"
ROOT = Path(__file__).parent.parent.parent


def trace(tmp_path: Path, body: str, head: str = HEAD) -> Path:
    """A file with these rows."""
    path = tmp_path / "t.csv"
    path.write_bytes((head + body).encode())
    return path


NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]),
    min_size=1, max_size=6,
)  # fmt: skip


def test_a_trace_by_hand(tmp_path: Path) -> None:
    """Columns, defaults, floats that are whole, tasks without GPUs, any order of columns."""
    path = trace(
        tmp_path,
        "5.0,a,vc1,3,1e2,7\n7,b,,0,4,\n\n7,c,vc1,8,10,\n",
        "submit_time_s,job_id,group,num_gpus,duration_s,priority\n",
    )
    w = read_trace(path, Nodes(1))
    assert w.names == ("a", "b", "c") and w.submit.tolist() == [5, 7, 7]
    assert w.size.tolist() == [3, 0, 8]
    assert w.work.tolist() == [300 * WORK, 4 * WORK, 80 * WORK]
    assert w.priority.tolist() == [7, 50, 50] and w.group.tolist() == [0, 1, 0]
    assert [g.name for g in w.groups] == ["vc1", ""] and w.name == "t.csv"
    assert (-(-w.work // w.rate)).tolist() == [100, 4, 10]


def test_options(tmp_path: Path) -> None:
    """Every option that changes what is read."""
    path = trace(tmp_path, "a,0,4,10,2,m\nb,3.25,16,20,,n\nc,5,1,7,3,k\n")
    kept = read_trace(path, time_unit="ms", largest=4)
    assert kept.names == ("a", "c") and kept.work.tolist() == [40_000 * WORK, 7000 * WORK]
    assert kept.submit.tolist() == [0, 5000] and kept.priority.tolist() == [2, 3]
    law = Amdahl(0.5)
    one = trace(tmp_path, "a,0,4,10,2,m\n")
    curved = read_trace(one, speedup=law, sizes=[1, 2, 4])
    assert curved.rates_of(0).tolist() == [round(WORK * law.of(g)) for g in (1, 2, 4)]
    assert curved.work[0] == 10 * round(WORK * law.of(4))  # exactly its duration at its own size
    cut = read_trace(one, passes=3)
    assert cut.passes[0] == 3 and cut.pass_work[0] == 40 * WORK // 3 + 1


def test_other_separators_and_packed_files(tmp_path: Path) -> None:
    """Semicolons, tabs and gzip are refused with the reason."""
    head = "job_id,submit_time_s,num_gpus,duration_s"
    for content, message in (
        (head.replace(",", ";").encode(), "columns: expected commas, got 'job_id;submit"),
        (head.replace(",", "\t").encode(), r"columns: expected commas, got 'job_id\\tsubmit"),
        (gzip.compress(head.encode()), "gzip: unpack it"),
    ):
        (tmp_path / "t.csv").write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_trace(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        ("", {}, "no jobs"),
        ("a,0,1,-5,,\n", {}, r't.csv:2 \(job "a"\): duration_s: expected a time > 0, got -5'),
        ("a,0,1,nan,,\n", {}, r't.csv:2 \(job "a"\): duration_s: expected seconds, got "nan"'),
        ("a,0,1,9007199254740993,,\n", {}, r"9007199254740993 s is beyond 2\^53 s"),
        (
            "a,0,1,1.5,,\n",
            {},
            r"1.5 s is not a whole number of s \(time_unit='ms'; optsched cluster work",
        ),
        ("a,0,16777216,9007199254740992,,\n", {}, r"more work than 2\^62"),
        ("a,0,1,5,,k\nb,0,1,,,k\n", {}, "t.csv:3 .*duration_s: expected seconds, got nothing"),
        ("a,-1,1,5,,\n", {}, "submit_time_s: expected a time >= 0, got -1"),
        ("a,0,0.46,5,,\n", {}, r'expected whole GPUs .*that share a GPU.*, got "0.46"'),
        ("a,0,-1,5,,\n", {}, r'num_gpus: expected whole GPUs in 0\.\.2\^24 .*, got "-1"'),
        ("a,0,9,5,,\n", {"nodes": Nodes(1)}, "needs 9 GPUs, but the cluster has 8"),
        ("a,0,9,5,,\n", {"largest": 8}, "no job has at most 8 GPUs"),
        ("a,0,1,5,,\na,1,1,5,,\n", {}, "t.csv:3 .*job_id: is also that of .*t.csv:2"),
        (",0,1,5,,\n", {}, "t.csv:2 .*job_id: empty"),
        (f"{'x' * 201},0,1,5,,\n", {}, r"t.csv:2 .*job_id: expected up to 200"),
        ("a,0,1,5,0,\n", {}, r"t.csv:2: .*priority: expected an integer in 1\.\.99, got 0"),
        ("a,0,1,5\n", {}, "t.csv:2: has 4 fields, the header has 6"),
        ('a,0,1,5,,"x\n', {}, "not valid CSV"),
        ("a,0,1,5,,\n", {"sizes": [2, 1]}, "sizes: expected ascending"),
    ],
)
def test_hostile_rows(tmp_path: Path, body: str, options: dict[str, Any], message: str) -> None:
    """One sentence with the row and the field."""
    path = trace(tmp_path, body)
    with pytest.raises(InputError, match=message) as found:
        read_trace(path, **options)
    assert "\n" not in str(found.value) and len(str(found.value)) < 500


def test_hostile_files(tmp_path: Path) -> None:
    """Nothing there, a folder, bytes that are no text, headers, columns that may be skipped."""
    for head, message in (
        ("\n\n", "the file is empty"),
        ("job_id,submit_time_s\n", '"num_gpus" is missing'),
        (
            "job_id,submit_time_s,num_gpus,duration_s,x\n",
            'unknown column "x" .*optsched cluster workload',
        ),
        ("job_id,submit_time_s,gpus,duration_s\n", r"\(did you mean num_gpus\?\)"),
        ("job_id,submit_time_s,num_gpus,job_id\n", '"job_id" appears twice'),
    ):
        with pytest.raises(InputError, match=message):
            read_trace(trace(tmp_path, "", head))
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(InputError, match="directory"):
        read_trace(tmp_path)
    path = tmp_path / "x.csv"
    path.write_bytes(HEAD.encode() + b"\xff,0,1,5,,\n")
    with pytest.raises(InputError, match=r"x.csv:2: not a text file"):
        read_trace(path)
    path.write_bytes(b"\xef\xbb\xbf" + HEAD.replace("\n", ",x\r\n").encode() + b"a,0,1,5,,,q\r\n")
    with pytest.raises(InputError, match="unknown column"):
        read_trace(path)
    assert read_trace(path, ignore_columns=True).names == ("a",)


LAW = Amdahl(0.3)
SIZES = st.one_of(
    st.just((0,)),
    st.lists(st.integers(1, 80), min_size=1, max_size=5, unique=True).map(lambda x: (*sorted(x),)),
    st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda x: (*range(x[0], sum(x) + 1),)),
)


@st.composite
def elastic(draw: st.DrawFn) -> Workload:
    """Jobs that use every column, of one speed-up."""
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    made = []
    for name in names:
        sizes = draw(SIZES)
        own = draw(st.sampled_from(sizes))
        made.append(
            Job(
                name=name,
                submit=draw(st.integers(0, 10**9)),
                sizes=sizes,
                speedup=LAW,
                work=draw(st.integers(1, 10**6)) * rates(LAW, (own,))[0],
                passes=draw(st.sampled_from([1, 7, 10**6])),
                priority=draw(st.integers(1, 99)),
                weight=draw(st.sampled_from([1.0, 0.1, 5e-324, 1.7e308, 1 / 3])),
                group=draw(st.sampled_from(["", "a", 'b,"', "µ"])),
                preemptible=draw(st.booleans()),
                template=draw(st.sampled_from(["", "cnn on digits", "x|y"])),
            )
        )
    return Workload.of(made, time_unit=draw(st.sampled_from(["s", "ms", "us", "ns"])))


@given(elastic())
def test_elastic_round_trip(tmp_path: Path, workload: Workload) -> None:
    """Every column that a trace may have."""
    write_trace(workload, tmp_path / "x.csv")
    again = read_trace(tmp_path / "x.csv", time_unit=workload.time_unit, speedup=LAW)
    assert again == workload.changed(name="x.csv")


def extra(tmp_path: Path, columns: str, body: str) -> Path:
    """A file with these columns beside the usual ones."""
    return trace(tmp_path, body, f"job_id,submit_time_s,num_gpus,duration_s,{columns}\n")


def test_more_columns_by_hand(tmp_path: Path) -> None:
    """Their meanings, their defaults, and what goes first."""
    path = extra(
        tmp_path,
        "sizes,weight,group,preemptible,passes,template",
        "a,0,2,10,1|2|4,2.5,u,false,7,m\n"
        "b,0,3,10,2-3,,u,1,,\n"
        "c,0,3,10,3|4,,,true,,m\n"
        "d,0,8,10,,1e-3,v,0,,k\n"
        "e,0,0,10,0,,,,,\n",
    )
    w = read_trace(path, passes=3, sizes=[1, 8])
    assert [w.sizes_of(i).tolist() for i in range(5)] == [[1, 2, 4], [2, 3], [3, 4], [1, 8], [0]]
    assert w.work.tolist() == [n * 10 * WORK for n in (2, 3, 3, 8, 1)]
    assert w.weight.tolist() == [2.5, 1, 1, 1e-3, 1] and w.passes.tolist() == [7, 3, 3, 3, 3]
    assert [w.groups[g].name for g in w.group] == ["u", "u", "", "v", ""]
    assert w.preemptible.tolist() == [False, True, True, False, True]
    assert w.templates == ("k", "m") and w.template.tolist() == [1, -1, 1, 0, -1]


@pytest.mark.parametrize(
    ("columns", "cells", "message"),
    [
        ("sizes", "3-4", r'num_gpus: 2 is not among the sizes "3-4"'),
        ("sizes", "1-16777216", "sizes in all rows"),
        ("sizes", "1-99999999999999", "sizes: expected ascending"),
        ("sizes", "1;2", r'sizes: expected .* such as 1\|2\|4 or .*got "1;2"'),
        ("weight", "0", r"t.csv:2: .*weight: expected a finite number > 0, got 0"),
        ("preemptible", "yes", "preemptible: expected true, false, 1 or 0"),
        ("passes", "0", r"t.csv:2: .*passes: expected an integer in 1"),
        ("passes", "9007199254740000", "passes of less than one unit of work"),
        ("passes", "99999999999999999999", r"t.csv:2 .*passes: expected a whole number, got"),
        ("group", "x" * 201, r"t.csv:2 .*group: expected up to 200 characters"),
        ("template", '"a\nb"', r"t.csv:3 .*template: .*without control characters"),
    ],
)  # fmt: skip
def test_hostile_extras(tmp_path: Path, columns: str, cells: str, message: str) -> None:
    """One sentence with the row and the field."""
    with pytest.raises(InputError, match=message) as found:
        read_trace(extra(tmp_path, columns, f"a,0,2,10,{cells}\n"))
    assert "\n" not in str(found.value)


def test_what_clashes(tmp_path: Path) -> None:
    """Columns that are not known, bytes that no name has."""
    path = extra(tmp_path, "workload,group", "a,0,1,5,x,u\nb,1,1,5,y,\n")
    with pytest.raises(InputError, match=r'unknown column "workload" \(ignore_columns=True'):
        read_trace(path)
    assert len(read_trace(path, ignore_columns=True)) == 2
    with pytest.raises(InputError, match=r"t.csv:3: a NUL byte"):
        read_trace(trace(tmp_path, "a,0,1,5,,\nb\0,0,1,5,,\n"))
    with pytest.raises(InputError, match=r"t.csv:3 .*job_id: .*control characters"):
        read_trace(trace(tmp_path, '"a\nb",0,1,5,,\n'))
    with pytest.raises(InputError, match=r"t.csv:3: job .b.: .* would end beyond 2\^53"):
        read_trace(trace(tmp_path, "a,0,1,5,,\nb,9007199254740992,1,5,,\n"))


def test_the_traces_that_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script beside them writes the same bytes."""
    import importlib.util

    place = ROOT / "instances" / "trace"
    spec = importlib.util.spec_from_file_location("make_traces", place / "make.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setattr(made, "HERE", tmp_path)
    made.main()
    names = sorted(path.name for path in place.glob("*.csv"))
    assert names == sorted(path.name for path in tmp_path.glob("*.csv"))
    for name in names:
        assert (tmp_path / name).read_bytes() == (place / name).read_bytes()
        assert len(read_trace(place / name, Nodes(4))) >= 60
