"""Files of others: read rightly, or refused with a word on what they look like."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import JobShop, Schedule
from optsched.cluster import Nodes, read_trace
from optsched.errors import InputError
from optsched.formats import standard, taillard
from optsched.formats.job_logs import import_trace
from optsched.formats.read_problem import read_problem
from optsched.formats.standard import ORDINARY
from optsched.model.schedule import NO_DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Operations = list[list[list[tuple[int, int]]]]
"""Of every job of a flexible shop every operation's machines with their durations."""


@st.composite
def flexible_shops(draw: st.DrawFn) -> tuple[int, Operations]:
    """Machines, and jobs of operations of which one at least has alternatives."""
    m = draw(st.integers(2, 8))

    def operation(least: int) -> list[tuple[int, int]]:
        some = draw(st.sets(st.integers(0, m - 1), min_size=least, max_size=4))
        return [(k, draw(st.integers(0, 99))) for k in sorted(some)]

    jobs = [
        [operation(1) for _ in range(draw(st.integers(1, 5)))]
        for _ in range(draw(st.integers(1, 6)))
    ]
    jobs[draw(st.integers(0, len(jobs) - 1))].append(operation(2))
    return m, jobs


def fjsp(m: int, jobs: Operations, third: str = "", base: int = 1, gap: str = " ") -> str:
    """The text of FJSPLIB, as Brandimarte, Hurink and PyJobShop write it."""
    rows = [f"{len(jobs)} {m} {third}".rstrip()]
    for job in jobs:
        numbers = [len(job)]
        for operation in job:
            numbers.append(len(operation))
            numbers += [x for k, p in operation for x in (k + base, p)]
        rows.append(gap.join(map(str, numbers)))
    return "\n".join(rows) + "\n"


@given(
    shop=flexible_shops(), third=st.sampled_from(["", "2", "1.15"]), base=st.sampled_from([0, 1]),
    gap=st.sampled_from([" ", "   ", "\t"]), rest=st.sampled_from(["", "\n", "0 1 2\n3 4 5\n"]),
)  # fmt: skip
def test_flexible_shops(
    shop: tuple[int, Operations], third: str, base: int, gap: str, rest: str, tmp_path: Path
) -> None:
    """Refused by name in every spelling, read as re-entrant too; the count is right."""
    m, jobs = shop
    path = tmp_path / "shop.fjs"
    path.write_text("# a comment\n" + fjsp(m, jobs, third, base, gap) + rest)
    count = sum(len(operation) > 1 for job in jobs for operation in job)
    what = f"this looks like a flexible job shop ({count} operation{'s' * (count > 1)} with altern"
    for reentrant in (False, True):
        with pytest.raises(InputError) as error:
            JobShop.read(path, reentrant=reentrant)
        assert str(error.value).startswith(f"{path}: {what}")


@given(m=st.integers(1, 4), data=st.data())
def test_ordinary_shops_that_look_flexible(m: int, data: st.DataObject, tmp_path: Path) -> None:
    """What we write we read, whatever it looks like; a mark in the file says what it is."""
    pair = st.tuples(st.integers(0, m - 1), st.integers(0, 3))
    jobs = data.draw(st.lists(st.lists(pair, min_size=1, max_size=4), min_size=1, max_size=2))
    shop = JobShop(jobs, [f"m{k}" for k in range(m)], name="s")
    path = tmp_path / "s.txt"
    path.write_text(standard.to_text(shop))
    assert JobShop.read(path, reentrant=True) == shop
    if shop.is_classic:
        assert JobShop.read(path).sha256 == shop.sha256
        path.write_text(taillard.to_text(shop))
        assert JobShop.read(path).sha256 == shop.sha256


def test_the_mark_and_the_name_of_the_format(tmp_path: Path) -> None:
    """Both make an ordinary shop of a text that looks like a flexible one."""
    text = fjsp(3, [[[(0, 5), (2, 7)]], [[(2, 4), (0, 6)]]], base=0)
    path = tmp_path / "s.txt"
    path.write_text(text)
    shop = JobShop.read(path, format="standard")
    assert shop.jobs == (((1, 2), (0, 5), (2, 7)), ((1, 2), (2, 4), (0, 6)))
    path.write_text(standard.to_text(shop))
    assert path.read_text() == f"{ORDINARY}\n{text}"
    assert JobShop.read(path) == shop


FOREIGN_SHOPS: dict[str, str] = {
    "number of jobs, number of machines, initial seed, upper bound and lower bound :\n"
    " 2 2 873654221 1278 1232\nprocessing times :\n 54 83\n 79 3\n": "this looks like a flow shop",
    "number of jobs, number of machines, time seed, machine seed, upper bound, lower bound :\n"
    " 2 2 1 2 193 186\nprocessing times :\n 54 34\n 9 15\nmachines :\n 1 2\n 2 1\n": "an open shop",
    "6 6 1.15\n6 1 3 1 1 1 3\n": "flexible job shops, which are not",  # cut
      # due dates, weights
    "2 2\n1 3 2 4\n2 2 1 1\n": "machines are 0-based here",
    "2 2\n3 0 4 1\n2 1 1 0\n": "expected a machine in 0..1, got 3",  # durations first
    "2 2\n0 3 1 4\n1 2 0 1\n2 2\n0 1 1 1\n1 1 0 1\n": "expected the end of the file",
    "************\nfile with basedata : J301_1.BAS\njobs (incl. supersource/sink ): 32\n": "",
    "32 4\n12 13 4 12\n0 0 0 0 0 3 2 3 4\n": "expected 4 durations",  # Patterson
    "<?xml version='1.0'?>\n<shop/>\n": "this looks like XML",
    "2 2\n": "expected rows after the line",
    '{"jobs": [[{"machine": 0, "duration": 3}]]}': "readable are",
    '{"name": "x", "jobs": [{"route": [0], "dur": [1]}], "n_stages": 1}': "route",
    "": "the file is empty",
}  # fmt: skip


@pytest.mark.parametrize("text", FOREIGN_SHOPS)
def test_other_texts_are_no_job_shops(text: str, tmp_path: Path) -> None:
    """Other problems and layouts are refused in one sentence, never read as ordinary shops."""
    path = tmp_path / "x.txt"
    for content in (text, text.replace("\n", "\r\n"), text.replace(" ", "\t")):
        path.write_text(content, newline="")
        message = attempt(lambda: read_problem(path))
        assert message.startswith(f"{path}:") and FOREIGN_SHOPS[text] in message


# job_shop_lib

LIB: dict[str, Any] = {
    "name": "s", "duration_matrix": [[3, 2, 9], [4, 1]], "machines_matrix": [[0, 1, 0], [1, 0]],
}  # fmt: skip
WINDOWS = ("release_dates_matrix", "deadlines_matrix")


@given(data=st.data(), inside=st.booleans())
def test_windows_of_operations(data: st.DataObject, inside: bool, tmp_path: Path) -> None:
    """Release dates and deadlines of every operation, at the top or in the metadata, are kept."""
    rows = [
        [[data.draw(st.none() | st.integers(0, 50)) for _ in p] for p in LIB["duration_matrix"]]
        for _ in WINDOWS
    ]
    rows[0] = [[x or 0 for x in row] for row in rows[0]]
    found = dict(zip(WINDOWS, rows, strict=True))
    tree = LIB | ({"metadata": found} if inside else found)
    path = tmp_path / "s.json"
    path.write_text(json.dumps(tree))
    problem = read_problem(path)
    graph = problem.graph()
    assert graph.release.tolist() == [x for row in rows[0] for x in row]
    ends = [None if d == NO_DEADLINE else d for d in graph.deadline.tolist()]
    assert ends == [x for row in rows[1] for x in row]
    late = any(x for row in rows[0] for x in row[1:])
    early = any(x is not None for row in rows[1] for x in row[:-1])
    assert isinstance(problem, Schedule if late or early else JobShop)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"due_dates_matrix": [[None, None, 20], [None, None]]}, "due_dates_matrix: due dates are not"),
    ({"machines_matrix": [[[0, 1], 1, 0], [[1, 0], 0]]}, "flexible job shop (2 operations with al"),
    ({"deadlines_matrix": [[9, 9], [9, 9]]}, "deadlines_matrix[0]: expected 3 values"),
    ({"setup_times": [[0]]}, 'unknown field "setup_times"'),
    *(
        ({"metadata": {key: [[1, 2], [2, 1]]}}, f"metadata.{key}: may change the problem")
        for key in (
            "setup_times", "arrival_times", "breakdowns", "weights", "due_dates", "precedences",
            "no_wait_jobs", "operation_data",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_changes_the_problem(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Refused with its field; nothing is dropped."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps(LIB | fields))
    with pytest.raises(InputError) as error:
        read_problem(path)
    assert message in str(error.value)


# tables and logs

TABLES: dict[str, str] = {
    "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n1,2,3,4,vgg,5,6": "a Tire",
    "job_id,user,vc,jobname,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration"
    ",queue\n1,u,v,j,8,6,1,COMPLETED,2020-01-01 00:00:00,2020-01-01 00:00:00,2020-01-01 00:09,9,":
        "a Helios log",
    "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
    "a,b,1,Terminated,1,2,3,4,100,V100": "Alibaba's tasks",
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,"
    "deletion_time,scheduled_time\np,1,1,1,1000,,LS,Succeeded,1,9,2": "Alibaba's pods",
    "JobID|Submit|Start|End|AllocTRES\n": "a log of sacct",
    "       JobID    JobName  Partition      State \n------------ ---------- ---------- \n":
        "sacct without -P",
    '{\n  "meta": {},\n  "jobs": [{"job_id": 1}]}': "sacct --json",
    '[{"status": "Pass", "vc": "a", "jobid": "b", "attempts": [], "submitted_time": "None"}]':
        "Philly's log",
    "; Version: 2.2\n; Computer: x\n1 0 5 9 4 -1 -1 4 9 -1 1 3 1 -1 1 -1 -1 -1\n": "SWF",
    "1 0 5 9 4 -1 -1 4 9 -1 1 3 1 -1 1 -1 -1 -1\n": "SWF",
    "job_id,submit_time_s,num_gpus,duration_s\n1,0,1,1\n": "a trace:",
}  # fmt: skip


def attempt(read: Callable[[], Any]) -> str:
    """The refusal in one sentence, or nothing."""
    try:
        read()
    except InputError as error:
        assert str(error).isprintable()
        return str(error)
    return ""


@pytest.mark.parametrize("text", TABLES)
def test_known_tables(text: str, tmp_path: Path) -> None:
    """Taken for what they are: a log is imported or named, a trace refuses other columns."""
    path = tmp_path / "x.csv"
    for content in (text, "\ufeff" + text if text[0] != "{" else text):
        path.write_text(content)
        log = attempt(lambda: import_trace(path, tmp_path / "t.csv"))
        assert not log or f"this looks like {TABLES[text]}" in log or "no jobs are left" in log
        trace = attempt(lambda: read_trace(path, Nodes(1, gpus=8)))
        own = TABLES[text] == "a trace:"
        assert (own and not trace) or f"this looks like {TABLES[text]}" in trace
        shop = attempt(lambda: read_problem(path))
        assert shop and (text[:1] in "{[ R1" or f"this looks like {TABLES[text]}" in shop)
