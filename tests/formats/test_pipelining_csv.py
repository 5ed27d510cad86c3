"""PyTorch's pipelining CSV: written, read back, refused with the place of the error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelining_orders import (
    as_text,
    blocks_of,
    cells_in,
    random_job,
    random_schedule,
)

from optsched import JobArray, Schedule, verify
from optsched.errors import CyclicOrder, InputError
from optsched.formats import pipelining_csv
from optsched.model.graph import scheduled
from optsched.model.schedule import Arcs, Csr, Resource
from optsched.pipelines import one_f_one_b

if TYPE_CHECKING:
    from random import Random

    from program import Cli

JOB = JobArray([[2, 3]], [[4, 5]], micro_batches=2)
GOOD = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"


# writing


def test_one_f_one_b_is_the_known_table() -> None:
    """Four ranks, four micro-batches: every column one step of unit blocks."""
    schedule = one_f_one_b(JobArray([[1] * 4], [[2] * 4], micro_batches=4))
    assert pipelining_csv.to_csv(schedule).splitlines() == [
        "0F0,0F1,0F2,0F3,,,,0B0,,0B1,,0B2,,0B3",
        ",1F0,1F1,1F2,,,1B0,1F3,1B1,,1B2,,1B3,",
        ",,2F0,2F1,,2B0,2F2,2B1,2F3,2B2,,2B3,,",
        ",,,3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,,,",
    ]
    assert pipelining_csv.to_csv(schedule, compact=True).splitlines()[3] == (
        "3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3"
    )


@given(st.randoms(use_true_random=False))
def test_a_block_stands_behind_its_inputs(rng: Random) -> None:
    """Padded: later columns than all inputs, order kept; compact: the same without blanks."""
    job = random_job(rng)
    schedule = random_schedule(rng, job)
    text = pipelining_csv.to_csv(schedule)
    rows = cells_in(text)
    column = {block: k for row in rows for block, k in row.items()}
    last, grads = job.n_stages - 1, "B" if job.weight is None else "I"
    for (kind, v, m), k in column.items():
        inputs = {
            "F": [("F", v - 1, m)] if v else [],
            "W": [("I", v, m)],
        }.get(kind, [(grads, v + 1, m)] if v < last else [("F", v, m)])
        assert all(column[block] < k for block in inputs), text
    assert all(list(row.values()) == sorted(row.values()) for row in rows)
    assert len({line.count(",") for line in text.splitlines()}) == 1
    compact = pipelining_csv.to_csv(schedule, compact=True)
    assert [list(row) for row in cells_in(compact)] == [list(row) for row in rows]
    assert ",," not in compact and ",\n" not in compact


@given(st.randoms(use_true_random=False))
def test_round_trip(rng: Random) -> None:
    """Read back: correct, the same orders, numbered as the last stage meets the micro-batches."""
    job = random_job(rng)
    schedule = random_schedule(rng, job)
    text = pipelining_csv.to_csv(schedule)
    again = pipelining_csv.from_text(text, "order.csv", job)
    assert verify(again) == []
    before, after = blocks_of(schedule), blocks_of(again)
    arrival = [m for row in before for kind, v, m in row if (kind, v) == ("F", job.n_stages - 1)]
    assert [
        [(kind, v, arrival.index(m)) for kind, v, m in row if kind in "FBIW"] for row in before
    ] == [[block for block in row if block[0] in "FBIW"] for row in after]
    assert pipelining_csv.to_csv(again) == text
    assert pipelining_csv.from_text(
        pipelining_csv.to_csv(schedule, compact=True), "order.csv", job
    ) == again  # fmt: skip
    if not {"R", "U"} & set(schedule.kind.tolist()):
        assert again.makespan == schedule.makespan
    for row in after:
        for k, (kind, v, m) in enumerate(row):
            if kind == "R":
                assert row[k + 1] in [("B", v, m), ("I", v, m)]
            if kind == "U":
                assert not any(b[0] in "BIW" and b[1] == v for b in row[k:])
                if job.update_mode == "block":
                    assert row[k - 1][0] in "BIW" and row[k - 1][1] == v


def with_orders(schedule: Schedule, rows: list[list[int]]) -> Schedule:
    """The same starts, other orders."""
    assert schedule.start is not None
    return schedule.with_orders(Csr.of(rows), schedule.start)


def test_what_torch_would_reject_is_not_written() -> None:
    """One sentence each, before any file is there."""
    one = one_f_one_b(JOB)
    two = one_f_one_b(JobArray([[1, 1]] * 2, [[1, 1]] * 2))
    mirrored = JobArray([[1, 1]], [[1, 1]], micro_batches=2, place=[[[0, 1], [1, 0]]])
    graph = mirrored.graph()
    chimera = scheduled(graph, Csr.of(graph.users.to_lists()))
    idle = one_f_one_b(JobArray([[1, 1]], [[1, 1]], devices=["a", "b", "c"]))
    rolling = replace(one, period=100)
    cases = {
        "holds one job, this schedule has 2": two,
        "holds one iteration, this schedule has a period": rolling,
        "solve it first": JOB.graph(),
        "stage 1 runs on gpu0 and on gpu1, torch allows one rank per stage": chimera,
        "c: runs no block": idle,
        r"operations\[0\].kind: .* got 'copy'": replace(
            one, kind=np.array(["copy", *one.kind[1:]])
        ),
    }
    for message, schedule in cases.items():
        with pytest.raises(InputError, match=message):
            pipelining_csv.to_csv(schedule)


def handmade(cells: list[str]) -> Schedule:
    """A document with these blocks in a row on one device."""
    kinds, stages, numbers = zip(*((c[1], int(c[0]), int(c[2])) for c in cells), strict=True)
    n = len(cells)
    return Schedule(
        resources=(Resource("gpu0"),), duration=np.ones(n, np.int64), kind=np.array(kinds),
        op_resources=Csr.of([[0]] * n), arcs=Arcs.of([]), stage=np.array(stages),
        microbatch=np.array(numbers), sequences=Csr.of([range(n)]), start=np.arange(n),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("0F0 0I0", "stage 0, micro-batch 0: expected .*, got F, I"),  # unequal I and W
        ("0F0", "got F"),
        ("1F0 1B0", "stage 0, micro-batch 0: .* got none"),
        ("0F0 0B0 1F0 1B0 1F1 1B1", "stage 0, micro-batch 1: .* got none"),
    ],
)
def test_incomplete_documents_are_not_written(cells: str, message: str) -> None:
    """Stage, micro-batch and what is there."""
    with pytest.raises(InputError, match=message):
        pipelining_csv.to_csv(handmade(cells.split()))


@pytest.mark.parametrize("cells", ["0B0 0F0", "0F0 1F0 0B0 1I0 1W0"])
def test_deadlocks_are_not_written(cells: str) -> None:
    """The cycle in words, even if the document has no arcs."""
    with pytest.raises(CyclicOrder, match=r"gpu0: [FBIW]\(job 0, stage"):
        pipelining_csv.to_csv(handmade(cells.split()))


# reading


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD.rstrip("\n"),
        "\ufeff" + GOOD,
        GOOD.replace("\n", "\r\n"),
        GOOD.replace("0F1", '"0F1"').replace(",0B1", ", 0B1 "),
        GOOD.replace("0F1,,0B0", "(0F1;0B0)OVERLAP_F_B"),
    ],
)
def test_marks_line_ends_and_quotes_do_not_matter(text: str, tmp_path: Path) -> None:
    """Byte-order mark, CRLF, quotes, spaces, overlapped cells."""
    path = tmp_path / "order.csv"
    path.write_bytes(text.encode())
    again = pipelining_csv.read(path, JOB)
    assert verify(again) == [] and again.sequences == one_f_one_b(JOB).sequences
    assert again.provenance == {"pipeline": "order"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "order.csv: the file is empty"),
        (GOOD.replace("\n,1F0", "\n\n,1F0"), "order.csv:2: a row without blocks"),
        (GOOD.replace("1B1", "1b1"), 'order.csv:2:5: expected <stage>.*, got "1b1"'),
        (GOOD.replace("0F1", "(0F1;1F1)OVERLAP_F_B"), "order.csv:1:2: expected <stage>"),
        (GOOD.replace("0F1", '"0F1'), r"order.csv:\d: not valid CSV"),
        (GOOD.replace("0F1", "0F0"), "order.csv:1:2: 0F0 is already at order.csv:1:1"),
        (GOOD.replace("0B0", "0I0"), "order.csv:1:4: 0I0: the job has no weight blocks"),
        (GOOD.replace("1B1", ""), r"order.csv: 1B1 is missing in row 2 \(gpu1\)"),
        ("0F0,0B0\n", "order.csv: has 1 rows, one per rank, but the job has 2 devices"),
        ("\n".join(GOOD.split()[::-1]), r"order.csv:1:2: 1F0: stage 1 is in row 1, but the job "
         r"has it on gpu1 \(row 2\); place=\[1, 0\] fits this file"),
        ("0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n", "order.csv:1:2: 0F0 after 0F1, but .*free"),
    ],
)  # fmt: skip
def test_hostile_files(text: str, message: str) -> None:
    """One sentence with row and cell."""
    with pytest.raises(InputError, match=message) as found:
        pipelining_csv.from_text(text.removeprefix("\ufeff"), "order.csv", JOB)
    assert not isinstance(found.value, CyclicOrder) and "\n" not in str(found.value)


@pytest.mark.parametrize(
    "text", ["0B0,0F0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n"]
)
def test_deadlocks_are_refused_with_the_cycle(text: str) -> None:
    """The file and the operations that wait for each other."""
    job = JOB.replace(microbatch_order="free")
    with pytest.raises(CyclicOrder, match=r"order.csv: .* gpu0: B\(job 0, stage 0") as found:
        pipelining_csv.from_text(text, "order.csv", job)
    assert len(found.value.cycle) >= 2


@given(st.randoms(use_true_random=False))
def test_changed_files_are_read_rightly_or_refused(rng: Random) -> None:
    """After random edits: a correct schedule with exactly the cells of the file, or a refusal."""
    job = random_job(rng, 3, 3).replace(update=0, update_mode="none", recompute_mode="never")
    rows = [line.split(",") for line in
            pipelining_csv.to_csv(random_schedule(rng, job)).splitlines()]  # fmt: skip
    for _ in range(rng.randint(1, 2)):
        row = rng.choice(rows)
        a, b = rng.randrange(len(row)), rng.randrange(len(row))
        how = rng.choice(["swap", "drop", "copy", "edit", "move"])
        if how == "swap":
            row[a], row[b] = row[b], row[a]
        elif how == "drop":
            row[a] = ""
        elif how == "copy":
            row[a] = row[b]
        elif how == "edit":
            row[a] = row[a].replace(rng.choice("FBIW012"), rng.choice(["F", "b", "1", "", "x"]))
        else:
            rng.choice(rows).insert(0, row[a])
    try:
        again = pipelining_csv.from_text(as_text(rows), "order.csv", job)
    except InputError as error:
        assert str(error).startswith("order.csv")
        return
    assert verify(again) == []
    assert [[f"{v}{kind}{m}" for kind, v, m in row] for row in blocks_of(again)] == [
        [cell for cell in row if cell] for row in rows
    ]


# command line


def test_convert_both_ways(cli: Cli) -> None:
    """A document to a CSV, padded or not, and back with the times of the job."""
    JOB.write("x.jobarray.json")
    one_f_one_b(JOB).write("y.schedule.json")
    ran = cli("convert", "y.schedule.json", "order.csv")
    assert (ran.code, ran.out, ran.err) == (0, "wrote order.csv, orders only\n", "")
    assert Path("order.csv").read_text() == pipelining_csv.to_csv(one_f_one_b(JOB))
    pipelining_csv.write(one_f_one_b(JOB), "compact.csv", compact=True)
    for name in ("order.csv", "compact.csv"):
        assert cli("convert", name, "z.schedule.json", "--problem", "x.jobarray.json").code == 0
        again = Schedule.read("z.schedule.json")
        assert verify(again) == [] and again.sequences == one_f_one_b(JOB).sequences
