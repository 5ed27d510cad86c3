"""Logs of schedulers as traces: every format as its scheduler writes it, against plain sums."""

from __future__ import annotations

import csv
import json
import math
import warnings
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.cluster import Nodes, read_trace
from optsched.errors import InputError
from optsched.formats.job_logs import import_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from program import Cli


class Sample(NamedTuple):
    """A job: when it came, and when it ran for how long; `gpus` in hundredths.

    Without runs it never started; a last run of None seconds had not ended.
    """

    name: str
    submit: int
    gpus: int
    runs: tuple[tuple[int, int | None], ...]
    owner: str = "vc1"


def date(seconds: int, between: str = " ") -> str:
    """A time of the log as a date."""
    start = datetime(2020, 6, 9, 18, tzinfo=UTC)
    return (start + timedelta(seconds=seconds)).strftime(f"%Y-%m-%d{between}%H:%M:%S")


def sacct(jobs: list[Sample]) -> str:
    """`sacct -a -D -P -o ...`: of a requeued job a row a run, submitted when it was requeued."""
    lines = ["JobID|Account|Partition|State|Submit|Start|End|Elapsed|ReqTRES|AllocTRES"]
    for job in jobs:
        tres = f"billing=8,cpu=16,gres/gpu:a100={job.gpus // 100},gres/gpu={job.gpus // 100},node=1"
        tres = tres if job.gpus else "billing=8,cpu=16,mem=4G,node=1"
        submit, head = job.submit, f"{job.name}|{job.owner}|gpu"
        if not job.runs:
            lines += [f"{head}|CANCELLED by 100|{date(submit, 'T')}|{date(submit + 5, 'T')}|"
                      f"{date(submit + 5, 'T')}|00:00:00|{tres}|"]  # fmt: skip
        for k, (start, seconds) in enumerate(job.runs):
            end, took = "Unknown", seconds or 0
            if seconds is not None:
                end = date(start + seconds, "T")
            days, rest = divmod(took, 86400)
            clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
            span = f"{days}-{clock}" if days else clock
            last = k == len(job.runs) - 1
            state = "RUNNING" if seconds is None else "FAILED" if last else "REQUEUED"
            times = f"{date(submit, 'T')}|{date(start, 'T')}|{end}|{span}"
            lines += [f"{head}|{state}|{times}|{tres}|{tres}"]
            lines += [f"{job.name}.batch|{job.owner}||{state}|{times}||{tres}"]
            submit = start + took
    return "\n".join(lines) + "\n"


def swf(jobs: list[Sample]) -> str:
    """The archive's format: comments, 18 fields, -1 where nothing is known, parts of a job."""
    lines = ["; Version: 2.2", ";  MaxProcs: 128", ""]
    for job in jobs:
        start, seconds = (job.runs or ((-1, -1),))[0]
        wait = start - job.submit if job.runs else -1
        used, asked, user = (job.gpus // 100, -1, 7) if job.runs else (-1, job.gpus // 100, 7)
        run = -1 if seconds is None else seconds
        rest = f"-1 -1 {asked} 3600 -1 %d {user} 1 -1 2 -1 -1 -1"
        lines.append(
            f"{job.name:>6} {job.submit} {wait} {run} {used} {rest % (1 if job.runs else 5)}"
        )
        lines.append(f"{job.name:>6} {job.submit} {wait} 1 {used} {rest % 2}")
    return "\n".join(lines) + "\n"


def helios(jobs: list[Sample]) -> str:
    """`cluster_log.csv` of SenseTime's clusters."""
    lines = [
        "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue"
    ]
    for job in jobs:
        start, seconds = (job.runs or ((None, None),))[0]
        begin = "" if start is None else date(start)
        end = "" if start is None or seconds is None else date(start + seconds)
        lines.append(
            f"{job.name},u1,{job.owner},{job.gpus // 100},6,1,COMPLETED,{date(job.submit)},{begin},"
            f"{end},{'' if seconds is None else seconds},0"
        )
    return "\n".join(lines) + "\n"


def philly(jobs: list[Sample]) -> str:
    """`cluster_job_log`: attempts with the GPUs of every server; unknown times are `None`."""
    tree = []
    for job in jobs:
        detail = [{"ip": "m1", "gpus": [f"gpu{i}" for i in range(job.gpus // 100)]}]
        attempts: list[Any] = [
            {"start_time": date(start), "detail": detail,
             "end_time": "None" if seconds is None else date(start + seconds)}
            for start, seconds in job.runs
        ]  # fmt: skip
        if attempts:  # an attempt whose end was not logged
            attempts.insert(0, {"start_time": None, "end_time": None, "detail": detail})
        tree.append({"status": "Pass", "vc": job.owner, "jobid": job.name, "attempts": attempts,
                     "submitted_time": date(job.submit), "user": "ce2f4c"})  # fmt: skip
    return json.dumps(tree, indent=1)


def alibaba2020(jobs: list[Sample]) -> str:
    """`pai_task_table.csv`, without a header: tasks of a job side by side, GPUs in percent."""
    lines = []
    for job in jobs:
        for start, seconds in job.runs:
            end = "" if seconds is None else f"{start + seconds}.0"
            state = "Running" if seconds is None else "Terminated"
            lines += [f"{job.name},ps,1.0,{state},{start}.0,{end},600.0,29.3,,",
                      f"{job.name},worker,2.0,{state},{start}.0,{end},600.0,29.3,{job.gpus / 2},"
                      "MISC"]  # fmt: skip
        if not job.runs:
            lines += [f"{job.name},worker,1.0,Waiting,,,600.0,29.3,{float(job.gpus)},MISC"]
    return "\n".join(lines) + "\n"


def alibaba2023(jobs: list[Sample]) -> str:
    """`openb_pod_list_default.csv`: shares in thousandths of one GPU."""
    lines = [
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
    ]
    for job in jobs:
        count, milli = (1, job.gpus * 10) if job.gpus < 100 else (job.gpus // 100, 1000)
        start, seconds = (job.runs or (("", None),))[0]
        end = "" if seconds is None else int(start) + seconds
        lines.append(f"{job.name},8000,30517,{count},{milli},V100M16|V100M32,{job.owner},Succeeded,"
                     f"{job.submit},{end},{start}")  # fmt: skip
    return "\n".join(lines) + "\n"


def tiresias(jobs: list[Sample]) -> str:
    """A trace of the simulator of Tiresias, in which every job that is listed has ended."""
    lines = ["job_id,num_gpu,submit_time,iterations,model_name,duration,interval"]
    for job in jobs:
        seconds = next((s for _, s in job.runs), None)
        lines.append(f"{job.name},{job.gpus // 100},{job.submit},{seconds or 0},vgg16,"
                     f"{'' if seconds is None else seconds},12")  # fmt: skip
    return "\n".join(lines) + "\n"


def plain(jobs: list[Sample]) -> str:
    """A table of one's own with dates."""
    lines = ["job_id,submit_time_s,num_gpus,duration_s,group"]
    for job in jobs:
        seconds = next((s for _, s in job.runs), None)
        lines.append(f"{job.name},{date(job.submit, 'T')}Z,{job.gpus / 100:g},"
                     f"{'' if seconds is None else seconds},{job.owner}")  # fmt: skip
    return "\n".join(lines) + "\n"


class Format(NamedTuple):
    """How a format is written, and what it can say."""

    write: Callable[[list[Sample]], str]
    shares: bool = False
    several: bool = False


FORMATS = {
    "sacct": Format(sacct, several=True), "swf": Format(swf), "helios": Format(helios),
    "philly": Format(philly, several=True), "alibaba2020": Format(alibaba2020, shares=True),
    "alibaba2023": Format(alibaba2023, shares=True), "csv": Format(plain, shares=True),
    "tiresias": Format(tiresias),
}  # fmt: skip


@st.composite
def samples(draw: st.DrawFn, kind: Format) -> list[Sample]:
    """Jobs in the order of submission, all kinds of ends among them."""
    jobs, clock = [], draw(st.integers(0, 10**6))
    for i in range(draw(st.integers(1, 8))):
        clock += draw(st.integers(0, 10**5))
        now, runs = clock, list[tuple[int, int | None]]()
        for _ in range(draw(st.integers(0, 3 if kind.several else 1))):
            now += draw(st.integers(0, 999))
            runs.append((now, draw(st.integers(0, 3) | st.integers(0, 10**6))))
            now += runs[-1][1] or 0
        if runs and draw(st.integers(0, 5)) == 0:
            runs[-1] = runs[-1][0], None
        whole = draw(st.integers(0, 9)) * 100
        gpus = draw(st.integers(1, 99)) if kind.shares and draw(st.booleans()) else whole
        jobs.append(Sample(str(100 + i), clock, gpus, tuple(runs)))
    return jobs


def wanted(jobs: list[Sample], zero: str, shares: str, first_start: bool) -> list[list[str]]:
    """Rows of the trace by plain sums: name, submission, whole GPUs, seconds."""
    rows = []
    for job in jobs:
        known = [seconds for _, seconds in job.runs if seconds is not None]
        if not known or len(known) < len(job.runs) or not job.gpus:
            continue
        if (not sum(known) and zero == "drop") or (job.gpus % 100 and shares == "drop"):
            continue
        submit = job.runs[0][0] if first_start else job.submit
        parts = int(shares) if shares.isdigit() else 1
        size = math.ceil(Fraction(job.gpus * parts, 100))
        rows.append((submit, job.name, size, max(sum(known), 1)))
    first = min((row[0] for row in rows), default=0)
    return [[str(s - first), name, str(g), str(d)] for s, name, g, d in sorted(rows)]


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_any_log(name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """The jobs that ran and ended are in the trace, and the trace can be simulated."""
    form = FORMATS[name]
    jobs = data.draw(samples(form))
    zero = data.draw(st.sampled_from(["drop", "keep"]))
    shares = data.draw(st.sampled_from(["up", "drop", "100", "7"]))
    folder = tmp_path_factory.mktemp("log")
    log, trace = folder / "log", folder / "trace.csv"
    text = form.write(jobs)
    log.write_text(text.replace("\n", "\r\n") if data.draw(st.booleans()) else text, newline="")
    rows = wanted(jobs, zero, shares, first_start=name == "alibaba2020")
    if not rows:
        with pytest.raises(InputError, match=r"log: no jobs are left: .*left out:"):
            import_trace(log, trace, name, zero=zero, shares=shares)
        assert not trace.exists()
        return
    notes = import_trace(log, trace, zero=zero, shares=shares)  # the content tells the format
    assert notes[0] == f"{name}: {len(rows)} of {len(jobs)} jobs"
    with trace.open(newline="") as stream:
        found = list(csv.reader(stream))
    assert [row[:4] for row in found[1:]] == rows
    workload = read_trace(trace, Nodes(2, gpus=800))
    assert workload.submit.tolist() == [int(row[0]) for row in rows]
    parts = {"up": 1, "drop": 100}.get(shares) or int(shares)
    there = [job for job in jobs if [r for r in rows if r[1] == job.name]]
    assert any("rounded up" in note for note in notes) == any(
        job.gpus * parts % 100 for job in there
    )
    assert any("simulate on nodes" in note for note in notes) == shares.isdigit()


def test_more_columns(tmp_path: Path) -> None:
    """Groups, types, CPUs and memory by format; old GRES; only requested TRES; `-p`."""
    owner = {"sacct": "vc1", "swf": "7", "helios": "vc1", "philly": "vc1", "alibaba2020": "",
             "alibaba2023": "vc1", "csv": "vc1", "tiresias": ""}  # fmt: skip
    kinds = {"sacct": "a100", "swf": "q2", "alibaba2020": "MISC", "tiresias": "vgg16",
             "alibaba2023": "V100M16|V100M32"}  # fmt: skip
    needs = {"sacct": ",8.0", "helios": ",3.0", "alibaba2020": ",6.0,29.3",
             "alibaba2023": ",4.0,14.901"}  # fmt: skip
    log, trace = tmp_path / "log", tmp_path / "t.csv"
    for name, form in FORMATS.items():
        log.write_text(form.write([Sample("1", 50, 200, ((60, 9),))]))
        import_trace(log, trace)
        row = trace.read_text().splitlines()[1]
        assert row == f"0,1,2,9,{kinds.get(name, '')},{owner[name]}{needs.get(name, '')}", name
    log.write_text("JobID|Submit|Start|End|ElapsedRaw|ReqTRES|\n"
                   "7_[1-3]|1000|Unknown|Unknown|0|gres/gpu=1|\n"
                   "7_1|1000|1010|1100|40|cpu=4,gres/gpu:a100=2,gres/gpu:h100=1|\n")  # fmt: skip
    assert import_trace(log, trace) == ["sacct: 1 of 2 jobs", "left out: 1 never started"]
    assert trace.read_text().splitlines()[1] == "0,7_1,3,40,a100|h100,,1.334"
    # parts of a job beside each other, Slurm's own word for a damaged time, minutes alone
    log.write_text("JobID|Partition|Submit|Start|End|Elapsed|AllocTRES\n"
                   "8+0|p|0|10|70|01:00|cpu=9,mem=6G,gres/gpu:a100=4,gres/gpumem=9G\n"
                   "8+1|p|0|10|70|00:01:00|mem=3072M,gres/gpu=2\n8+0.batch|p|0|10|70|01:00|gres/gpu=4\n"
                   "9|p|0|10|5|INVALID|gres/gpu=1\n10|p|0|None|5|00:00:00|\n"
                   "11|p|5|11|12|0-00:00:01|gres/gpu:a100_80g=1\n")  # fmt: skip
    assert import_trace(log, trace)[1] == "left out: 1 never started, 1 not ended"
    assert trace.read_text().splitlines()[1:] == [
        "0,8,6,60,a100,,1.5,1.5", "5,11,1,1,a100_80g,,0.0,0.0"
    ]  # fmt: skip


def test_notes(tmp_path: Path) -> None:
    """What is left out and rounded is counted, by reason."""
    jobs = [Sample("1", 0, 50, ((0, 100),)), Sample("2", 0, 100, ((0, 100),)),
            Sample("3", 1, 100, ((1, 0),)), Sample("4", 1, 100, ((1, None),)),
            Sample("5", 1, 0, ((1, 9),)), Sample("6", 2, 100, ())]  # fmt: skip
    (tmp_path / "log").write_text(alibaba2023(jobs))
    notes = import_trace(tmp_path / "log", tmp_path / "t.csv")
    assert notes == [
        "alibaba2023: 2 of 6 jobs",
        "left out: 1 never started, 1 not ended, 1 without GPUs, 1 of 0 seconds (keep: 1 second)",
        "rounded up: 1 jobs with shares of GPUs, +33.3% GPU-time",
    ]


def test_limits_of_slurm_are_named(tmp_path: Path) -> None:
    """QOS, reservations and licenses are not modeled: a warning with field and value."""
    head = "JobID|Submit|Start|End|Elapsed|QOS|Reservation|AllocTRES\n"
    time = "2020-01-01T00:00:00|2020-01-01T00:00:00|2020-01-01T00:01:00|00:01:00"
    for cells, warning in (
        ("normal||gres/gpu=2", ""), ("high||gres/gpu=2", "QOS high"),
        ("normal|maint|gres/gpu=2", "Reservation maint"),
        ("normal||gres/gpu=2,license/matlab=1", "license/matlab"),
    ):  # fmt: skip
        (tmp_path / "log").write_text(f"{head}1|{time}|{cells}\n")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            import_trace(tmp_path / "log", tmp_path / "t.csv")
        texts = [str(one.message) for one in found]
        assert len(texts) == bool(warning) and all(f"log: {warning}: not" in one for one in texts)


ONE = [Sample("1", 50, 100, ((60, 9),))]
BAD = {
    "unknown": ("hello\n", r"f: of no known format .*; name one: sacct, helios"),
    "date": (helios(ONE).replace("2020-06-09 18:01:00", "9 June"), r"f:2: start_time: expected"),
    "backwards": (helios(ONE).replace(",9,0", ",-9,0"), r"f:2: expected a name, GPUs"),
    "bar": (sacct(ONE).replace("|gpu|", "|a|b|", 1), r"f:2: expected 10 .* \(a \| in a JobName\?"),
    "no TRES": (sacct(ONE).replace("TRES", "Gres"), r"f:2: AllocTRES: the column is"),
    "MIG": (sacct(ONE).replace("gpu:a100", "gpu:1g.5gb"), r"f:2: AllocTRES: gres/gpu:1g.5gb is"),
    "task": (alibaba2020(ONE).replace("50.0,MISC", "half,MISC"), r"f:2: plan_gpu: expected"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault is found, and named with its line and field; nothing is written."""
    monkeypatch.chdir(tmp_path)
    text, message = BAD[case]
    Path("f").write_text(text)
    with pytest.raises(InputError, match=message):
        import_trace("f", "t.csv")
    assert not Path("t.csv").exists()


def test_command(cli: Cli) -> None:
    """A dump becomes a trace, the trace is simulated; a dump that is simulated names the way."""
    Path("dump.txt").write_text(sacct([*ONE, Sample("2", 70, 800, ((80, 0),))]))
    ran = cli("cluster", "workload", "dump.txt", "-o", "t.csv")
    assert (ran.code, ran.out.splitlines()) == (0, [
        "sacct: 1 of 2 jobs", "left out: 1 of 0 seconds (keep: 1 second)", "wrote t.csv",
    ])  # fmt: skip
    assert (
        cli(
            "cluster", "workload", "dump.txt", "-o", "t.csv", "--zero", "keep", "--from", "sacct"
        ).code
        == 0
    )
    assert cli("cluster", "simulate", "t.csv", "--policy", "fifo", "--nodes", "1x8").code == 0
    wrong = cli("cluster", "simulate", "dump.txt", "--policy", "fifo", "--nodes", "1x8")
    assert wrong.code == 2 and "`optsched cluster workload` reads" in wrong.err
    assert (
        "format: expected one of"
        in cli("cluster", "workload", "dump.txt", "-o", "x", "--from", "?").err
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('"a\nb",0,1,1,', r"names of at most 200 printable"),
        ("a,0,16777217,1,", r"job 'a': expected at most 2\^24 GPUs"),
        ("a,0,1,9007199254740993,", r"within 2\^53 s"),
    ],
)
def test_no_trace_is_written_that_cannot_be_read(tmp_path, row, message):
    """What `read_trace` would refuse is refused where it comes from."""
    log, trace = tmp_path / "log.csv", tmp_path / "trace.csv"
    log.write_text(f"job_id,submit_time_s,num_gpus,duration_s,group\n{row}\n")
    with pytest.raises(InputError, match=message):
        import_trace(log, trace)
    assert not trace.exists()
