"""Files and the printed summary of a run of the command line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from optsched.arraypipe.report.report import Report  # noqa: TC001 (msgspec reads annotations)
from optsched.errors import InputError
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import decode_document, parse
from optsched.io.text import aligned, duration, plain

if TYPE_CHECKING:
    from pathlib import Path

    from optsched.arraypipe.training_run import RunResult


FORMAT: Final = "optsched.run/1"
_SUMMARY: Final = "summary.json"


class JobSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a job ended; `iterations` are those of this run."""

    name: str
    status: str
    iterations: int
    first_loss: float | None
    last_loss: float | None
    error: str = ""


class RunSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Short form of a run; `str` gives what is printed at its end."""

    format: str = FORMAT
    backend: str
    steps: int
    seconds: float
    jobs: tuple[JobSummary, ...]
    report: Report

    @property
    def failures(self) -> list[str]:
        """Why jobs failed, a sentence each."""
        return [job.error for job in self.jobs if job.status == "failed"]

    def __str__(self) -> str:
        rows = [["job", "status", "iterations", "first loss", "last loss"]]
        for job in self.jobs:
            losses = ["-" if x is None else f"{x:.4f}" for x in (job.first_loss, job.last_loss)]
            rows.append([plain(job.name), plain(job.status, 7), str(job.iterations), *losses])
        head, *body = aligned(rows, left=2)
        lines = [head]
        for line, job in zip(body, self.jobs, strict=True):
            lines += [line, f"  {plain(job.error, 500)}"] if job.error else [line]
        lines.append("")
        if any(job.status == "stopped" for job in self.jobs):
            lines.append("interrupted: jobs ended with whole iterations")
        backend = f"{self.backend} backend, {duration(self.seconds * 1e9)}"
        return "\n".join([*lines, backend, "", str(self.report)])


def summary_of(result: RunResult, *, backend: str, steps: int, seconds: float) -> RunSummary:
    """Return the summary of a run; without jobs on ranks above 0, which have no losses."""
    jobs = []
    titles = result.log.provenance["jobs"]
    for job, title, losses in zip(result.jobs, titles, result.losses, strict=False):
        first, last = (losses[0], losses[-1]) if losses else (None, None)
        error = "" if job.error is None else str(job.error)
        jobs.append(JobSummary(title, job.status, len(losses), first, last, error))
    return RunSummary(
        backend=backend, steps=steps, seconds=seconds, jobs=tuple(jobs), report=result.report
    )


def write_results(folder: Path, summary: RunSummary, result: RunResult) -> str:
    """Write plan, trace and summary of a run; return the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = result.log.segments[0].plan.schedule
    for name, document in {"plan": plan, "trace": result.trace}.items():
        document.write(folder / f"{name}.schedule.json")
    write_atomic(folder / _SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=1))
    return f"plan.schedule.json, trace.schedule.json, {_SUMMARY}"


def read_summary(path: Path) -> RunSummary:
    """Read the summary of a run, given as its folder or as the file itself."""
    file = path / _SUMMARY if path.is_dir() else path
    if file != path and not file.exists():
        raise InputError(f"{file}: no such file; `optsched arraypipe run --out` writes it")
    return decode_document(parse(read_text(file), str(file)), RunSummary, FORMAT, str(file))


def check_folder(folder: Path | None) -> None:
    """Refuse a folder that cannot be made or written to, before anything is trained."""
    if folder is None:
        return
    parent = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not parent.is_dir():
        raise InputError(f"{folder}: cannot be made ({parent} is a file)")
    if not os.access(parent, os.W_OK):
        raise InputError(f"{folder}: cannot be written to (no permission)")
