"""Logs of schedulers as traces: ``sacct``, SWF, Helios, Philly, Alibaba, Tiresias, CSV.

A reader yields every run of every job; `import_trace` merges them into jobs.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from optsched.cluster.workload.job import CONTROL, MOST_AMOUNT
from optsched.cluster.workload.speedup import MOST_GPUS
from optsched.errors import InputError
from optsched.formats.registry import Reader, Source, looks_like, readers
from optsched.io.csv_rows import csv_records, csv_text
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import MAX_INTEGER, decode, parse, shortened, without_collector
from optsched.io.values import MAX_NAME, one_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(?:\.[0-9]{0,18})?")
_SPAN = re.compile(r"(?:(?:([0-9]{1,6})-)?([0-9]{1,4}):)?([0-5][0-9]):([0-5][0-9])(?:\.[0-9]*)?")
_TRES = re.compile(r"gres/gpu(?::([^=,]*))?=([0-9]{1,9})(?=,|$)")
_MIG = re.compile(r"[0-9]+g\.[0-9]+gb")
_CPU = re.compile(r"(?:^|,)cpu=([0-9]{1,9})(?=,|$)")
_MEMORY = re.compile(r"(?:^|,)mem=([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMGTP]?)(?=,|$)")
_SWF = re.compile(r"\s*(;.*|(-?[0-9.]+\s+){17}-?[0-9.]+\s*)")
_BY_GPU: Final = {"cpus": "cpus_per_gpu", "memory_gb": "memory_per_gpu_gb"}
_MIB: Final = {unit: Decimal(1024) ** (k - 1) for k, unit in enumerate("KMGTP")} | {"": 1}
_LIMITS: Final = "QOS", "Reservation", "Constraints"
_UNKNOWN: Final = ("", "-1", "None", "Unknown", "N/A", "nan", "null", "(null)", "INVALID")
_NONE: Final = {*_UNKNOWN, "normal"}


class Run(NamedTuple):
    """One run of a job; times in seconds, None if unknown.

    Without `start` it never ran, without `seconds` it has not ended. `parallel`: it ran at the
    same time as the other runs of the job, as tasks do; else after them, as attempts do.
    """

    place: str
    job: str
    submit: Decimal | None
    start: Decimal | None
    seconds: Decimal | None
    gpus: Decimal
    kind: str = ""
    group: str = ""
    parallel: bool = False
    cpus: Decimal = Decimal(0)
    memory_gb: Decimal = Decimal(0)
    """Of all its GPUs."""


@dataclass
class _Job:
    """A job, merged from its runs."""

    submit: Decimal = Decimal("Infinity")
    gpus: Decimal = Decimal(0)
    cpus: Decimal = Decimal(0)
    memory_gb: Decimal = Decimal(0)
    gpu_time: Decimal = Decimal(0)
    start: Decimal = Decimal("Infinity")
    end: Decimal = Decimal("-Infinity")
    kind: str = ""
    group: str = ""
    ended: bool = True
    started: bool = False

    def add(self, run: Run) -> None:
        submit = run.start if run.submit is None else run.submit
        self.submit = self.submit if submit is None else min(self.submit, submit)
        self.kind, self.group = self.kind or run.kind, self.group or run.group
        if run.start is None:
            return
        self.started, self.ended = True, self.ended and run.seconds is not None
        seconds = run.seconds or Decimal(0)
        self.gpu_time += run.gpus * seconds
        if run.parallel and run.gpus:
            self.start, self.end = min(self.start, run.start), max(self.end, run.start + seconds)
        for key in ("gpus", *_BY_GPU) if run.gpus else ():
            before, its = getattr(self, key), getattr(run, key)
            setattr(self, key, before + its if run.parallel else max(before, its))

    @property
    def seconds(self) -> int:
        """Whole seconds, rounded up: from the first start to the last end, or of all attempts."""
        return math.ceil(
            self.end - self.start if self.end >= self.start else self.gpu_time / self.gpus
        )


def import_trace(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str = "auto",
    *,
    zero: str = "drop",
    shares: str = "up",
) -> list[str]:
    """Write the log of a scheduler as a trace for `optsched.cluster.read_trace`; return notes.

    Times count from the first submission that is kept, in whole seconds: submissions rounded down,
    durations up. CPUs and memory (GiB) are by GPU, in thousandths rounded up. Successive runs of a
    job, such as requeued jobs, become one job of the same GPU-time on the most GPUs of a run. Jobs
    without a start, an end or GPUs are left out; their final state does not matter.

    Parameters
    ----------
    format
        Name of a reader, such as ``"sacct"``; ``"auto"`` decides by the content.
    zero
        Jobs of 0 seconds: ``"drop"`` leaves them out, ``"keep"`` makes them 1 second long.
    shares
        Jobs with a part of a GPU: ``"up"`` rounds the sum of a job's parts up to whole GPUs,
        ``"drop"`` leaves such jobs out, and a number N writes all sizes in N-ths of a GPU, rounded
        up: for nodes of N times as many GPUs.
    """
    one_of("zero", zero, ("drop", "keep"))
    parts = 1
    if re.fullmatch(r"[1-9][0-9]{0,3}", shares):
        parts = int(shares)
    elif shares not in ("up", "drop"):
        raise InputError(f"shares: expected up, drop or a number in 1..9999, got {shares!r:.40}")
    file, text = str(source), read_text(source)
    with without_collector():
        name, jobs = _jobs(file, text, format)
    rules: dict[str, Callable[[_Job], bool]] = {
        "never started": lambda job: not job.started,
        "not ended": lambda job: not job.ended,
        "without GPUs": lambda job: not job.gpus,
        "of 0 seconds (keep: 1 second)": lambda job: zero == "drop" and not job.seconds,
        "with shares of GPUs": lambda job: shares == "drop" and job.gpus % 1 != 0,
    }
    counts, left = [], jobs
    for what, rule in rules.items():
        kept = {key: job for key, job in left.items() if not rule(job)}
        counts += [f"{len(left) - len(kept):,} {what}"] * (len(kept) < len(left))
        left = kept
    notes = [f"{name}: {len(left):,} of {len(jobs):,} jobs"]
    notes += [f"left out: {', '.join(counts)}"] * bool(counts)
    if not left:
        raise InputError(f"{file}: no jobs are left: {'; '.join(notes)}")
    if parts > 1:
        notes.append(f"sizes are in 1/{parts} of a GPU: simulate on nodes of {parts} times as many")
    sizes = {key: math.ceil(job.gpus * parts) for key, job in left.items()}
    if cut := [key for key, job in left.items() if sizes[key] != job.gpus * parts]:
        added = sum((sizes[key] - left[key].gpus * parts) * left[key].seconds for key in cut)
        more = float(added) / float(sum(j.gpus * parts * j.seconds for j in left.values()) or 1)
        notes.append(f"rounded up: {len(cut):,} jobs with shares of GPUs, {more:+.1%} GPU-time")
    first = min(job.submit for job in left.values())
    for key, job in left.items():
        late = job.submit - first + job.seconds > MAX_INTEGER
        if late or sizes[key] > MOST_GPUS or max(job.cpus, job.memory_gb) > MOST_AMOUNT:
            limits = "at most 2^24 GPUs, 2^20 CPUs and GiB, an end within 2^53 s of the first job"
            raise InputError(f"{file}: job {key!r:.40}: expected {limits}; take it out of the log")
    header = ["submit_time_s", "job_id", "num_gpus", "duration_s", "type", "group"]
    needs = [key for key in _BY_GPU if any(getattr(job, key) for job in left.values())]
    rows = [
        (int(job.submit - first), key, sizes[key], max(job.seconds, 1), job.kind, job.group,
         *(math.ceil(getattr(job, amount) * 1000 / sizes[key]) / 1000 for amount in needs))
        for key, job in left.items()
    ]  # fmt: skip
    write_atomic(target, csv_text(header + [_BY_GPU[key] for key in needs], sorted(rows)))
    return notes


def _jobs(file: str, text: str, format: str) -> tuple[str, dict[str, _Job]]:
    """Return the format of a log, and its jobs by name."""
    known = readers("trace")
    one_of("format", format, ["auto", *known])
    given = Source(file, text, parse(text, file) if text.lstrip()[:1] in ("[", "{") else None)
    names = [format] if format != "auto" else [n for n in known if known[n].recognises(given)]
    if not names:
        raise InputError(
            f"{file}: of no known format (sacct: with -P and a header); name one: "
            f"{', '.join(known)}{looks_like(text)}"
        )
    jobs: dict[str, _Job] = {}
    for run in known[names[0]].read(given):
        if not run.job or min(run.gpus, run.cpus, run.memory_gb, run.seconds or Decimal(0)) < 0:
            what = "a name, GPUs, CPUs and memory >= 0 and an end after its start"
            raise InputError(f"{run.place}: expected {what}, got job {run.job!r:.40}")
        for text in (run.job, run.kind, run.group):
            if len(text) > MAX_NAME or CONTROL.search(text):
                what = f"names of at most {MAX_NAME} printable characters"
                raise InputError(f"{run.place}: expected {what}, got {text!r:.40}")
        jobs.setdefault(run.job, _Job()).add(run)
    return names[0], jobs


def _time(text: str, place: str) -> Decimal | None:
    """Parse seconds, a date (without a zone: UTC) or a span; None if unknown."""
    if text in _UNKNOWN:
        return None
    if _NUMBER.fullmatch(text):
        return Decimal(text)
    if span := _SPAN.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in span.groups())
        return Decimal(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    try:
        date = datetime.fromisoformat(text)
        return Decimal(str((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()))
    except (ValueError, OverflowError):
        raise InputError(
            f"{place}: expected seconds, a date such as 2020-06-09 18:41:01 or a time such as "
            f"1-02:03:04, got {text!r:.60}"
        ) from None


def _count(text: str, place: str) -> Decimal:
    if text not in _UNKNOWN and not _NUMBER.fullmatch(text):
        raise InputError(f"{place}: expected a number, got {text!r:.60}")
    return Decimal(0 if text in _UNKNOWN else text)


def _amount(cells: Mapping[str, str], place: str, keys: Sequence[str], unit: int) -> Decimal:
    """Multiply cells and divide by a unit; 0 without such columns."""
    if not keys or any(key not in cells for key in keys):
        return Decimal(0)
    return math.prod(_count(cells[key], f"{place}: {key}") for key in keys) / Decimal(unit)


class _Columns(NamedTuple):
    """Columns of a table; amounts are products of columns, with a unit."""

    job: str
    submit: str
    start: str
    end: str
    seconds: tuple[str, ...]
    gpus: tuple[tuple[str, ...], int]
    kind: str = ""
    group: str = ""
    parallel: bool = False
    header: tuple[str, ...] = ()
    """Header of files that may lack it."""
    cpus: tuple[tuple[str, ...], int] = (), 1
    memory_gb: tuple[tuple[str, ...], int] = (), 1

    @property
    def needed(self) -> list[str]:
        """Required columns."""
        return list(dict.fromkeys((*self[:4], *self.gpus[0])))

    def recognises(self, source: Source) -> bool:
        """Whether the first line has the required columns."""
        head = source.text.lstrip().partition("\n")[0].strip()
        if self.header and re.search(r",(Terminated|Running|Failed|Waiting),", head):
            return head.count(",") == len(self.header) - 1
        return set(re.split(r"[|,]", head)).issuperset(self.needed)

    def read(self, source: Source) -> Iterator[Run]:
        """Yield a run per row."""
        header = self.header if not source.text.startswith(self.header[:1]) else ()
        for place, cells in csv_records(source.text, source.file, (), self.needed, ",", header):
            amounts = (self.gpus, self.cpus, self.memory_gb)
            gpus, cpus, memory = (_amount(cells, place, *amount) for amount in amounts)
            yield self.run(place, cells, gpus)._replace(cpus=cpus, memory_gb=memory)

    def run(self, place: str, cells: Mapping[str, str], gpus: Decimal) -> Run:
        """Return the run of a row."""
        submit, start, end = (_time(cells[key], f"{place}: {key}") for key in self[1:4])
        known = next((key for key in self.seconds if key in cells), None)
        seconds = None if start is None or end is None else end - start
        if known and end is not None:
            seconds = _time(cells[known], f"{place}: {known}")
        kind, group = cells.get(self.kind, ""), cells.get(self.group, "")
        return Run(place, cells[self.job], submit, start, seconds, gpus, kind, group, self.parallel)


_HELIOS = _Columns(
    "job_id", "submit_time", "start_time", "end_time", ("duration",), (("gpu_num",), 1), group="vc",
    cpus=(("cpu_num",), 1),
)  # fmt: skip
_POD = _Columns(
    "name", "creation_time", "scheduled_time", "deletion_time", (),
    (("num_gpu", "gpu_milli"), 1000), "gpu_spec", "qos",
    cpus=(("cpu_milli",), 1000), memory_gb=(("memory_mib",), 1024),
)  # fmt: skip
_TASK = _Columns(
    "job_name", "start_time", "start_time", "end_time", (), (("inst_num", "plan_gpu"), 100),
    "gpu_type", parallel=True, cpus=(("inst_num", "plan_cpu"), 100),
    memory_gb=(("inst_num", "plan_mem"), 1),
    header=(
        "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu",
        "plan_mem", "plan_gpu", "gpu_type",
    ),
)  # fmt: skip
_TIRESIAS = _Columns(
    "job_id", "submit_time", "submit_time", "duration", ("duration",), (("num_gpu",), 1),
    kind="model_name",
)  # fmt: skip
_CSV = _Columns(
    "job_id", "submit_time_s", "submit_time_s", "duration_s", ("duration_s",), (("num_gpus",), 1),
    kind="type", group="group",
)  # fmt: skip
_SACCT = _Columns(
    "JobID", "Submit", "Start", "End", ("ElapsedRaw", "Elapsed"), ((), 1), "Partition", "Account"
)


def _sacct(source: Source) -> Iterator[Run]:
    """Yield runs of Slurm; steps (``17.batch``) are skipped, parts (``17+1``) run in parallel."""
    limits = set[str]()
    for place, cells in csv_records(source.text, source.file, (), _SACCT.needed, "|"):
        if "." in cells["JobID"]:
            continue
        key = "AllocTRES" if "AllocTRES" in cells else "ReqTRES"
        if key not in cells:
            what = "the column is missing (sacct -P -o ...,AllocTRES)"
            raise InputError(f"{place}: AllocTRES: {what}")
        found = _TRES.findall(cells[key])
        limits |= {f"{name} {cells[name]}" for name in _LIMITS if cells.get(name, "") not in _NONE}
        limits |= {*re.findall(r"license/[^=,]+", cells[key])}
        for kind in filter(_MIG.search, (kind for kind, _ in found)):
            raise InputError(
                f"{place}: {key}: gres/gpu:{kind:.40} is a part of a GPU (MIG), traces hold whole "
                "GPUs: leave such jobs out"
            )
        total = [int(count) for kind, count in found if not kind]
        gpus = Decimal(sum(total) if total else sum(int(count) for _, count in found))
        run = _SACCT.run(place, cells, gpus)
        job, part, _ = run.job.partition("+")
        kind = "|".join(kind for kind, count in found if kind and int(count)) or run.kind
        start = None if key == "AllocTRES" and not cells[key] else run.start
        cpus, memory = _CPU.search(cells[key]), _MEMORY.search(cells[key])
        yield run._replace(
            job=job, start=start, kind=kind, parallel=bool(part),
            cpus=Decimal(cpus[1] if cpus else 0),
            memory_gb=Decimal(memory[1]) * _MIB[memory[2]] / 1024 if memory else Decimal(0),
        )  # fmt: skip
    if limits:
        what = "not modeled, jobs may start earlier than in Slurm; leave them out or set max_slots"
        warnings.warn(f"{source.file}: {shortened(sorted(limits))}: {what}", stacklevel=2)


def _swf(source: Source) -> Iterator[Run]:
    """Yield runs; processors count as GPUs, partial runs (status 2 to 4) are skipped."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if not (fields := line.split()) or line.lstrip().startswith(";"):
            continue
        place = f"{source.file}:{number}"
        if len(fields) != 18:
            raise InputError(f"{place}: expected 18 fields, got {len(fields)}")
        submit, wait, run = (_time(fields[k], f"{place}: field {k + 1}") for k in (1, 2, 3))
        used, requested = (_count(fields[k], f"{place}: field {k + 1}") for k in (4, 7))
        if fields[10] not in ("2", "3", "4"):
            start = None if run is None or submit is None else submit + (wait or 0)
            owner = "" if fields[11] == "-1" else fields[11]
            yield Run(
                place, fields[0], submit, start, run, used or requested, f"q{fields[14]}", owner
            )


class _Server(msgspec.Struct):
    gpus: list[str]


class _Attempt(msgspec.Struct):
    start_time: str | None = None
    end_time: str | None = None
    detail: list[_Server] = []


class _Submission(msgspec.Struct):
    jobid: str
    submitted_time: str
    attempts: list[_Attempt]
    vc: str = ""


def _philly(source: Source) -> Iterator[Run]:
    """Yield attempts; an attempt without an end counts only if it is the last."""
    for i, job in enumerate(decode(source.tree, list[_Submission], source.file)):
        place = f"{source.file}: [{i}]"
        submit = _time(job.submitted_time, f"{place}.submitted_time")
        if not job.attempts:
            yield Run(place, job.jobid, submit, None, None, Decimal(0))
        for k, one in enumerate(job.attempts, 1):
            at = f"{place}.attempts[{k - 1}]"
            start = _time(one.start_time or "", f"{at}.start_time")
            end = _time(one.end_time or "", f"{at}.end_time")
            if end is None and k < len(job.attempts):
                start = None
            gpus = Decimal(sum(len(server.gpus) for server in one.detail))
            seconds = None if start is None or end is None else end - start
            yield Run(at, job.jobid, submit, start, seconds, gpus, group=job.vc)


def _is_philly(source: Source) -> bool:
    tree = source.tree
    return isinstance(tree, list) and any(isinstance(t, dict) and "attempts" in t for t in tree[:1])


def _is_sacct(source: Source) -> bool:
    return "|" in source.text.lstrip().partition("\n")[0] and _SACCT.recognises(source)


SACCT = Reader("sacct", _is_sacct, _sacct, kind="trace")
HELIOS, ALIBABA2020, ALIBABA2023, TIRESIAS, CSV = (
    Reader(name, columns.recognises, columns.read, kind="trace")
    for name, columns in (
        ("helios", _HELIOS), ("alibaba2020", _TASK), ("alibaba2023", _POD),
        ("tiresias", _TIRESIAS), ("csv", _CSV),
    )
)  # fmt: skip
PHILLY = Reader("philly", _is_philly, _philly, kind="trace")
SWF = Reader("swf", lambda source: _SWF.match(source.text) is not None, _swf, kind="trace")
