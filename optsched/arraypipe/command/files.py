"""What a run leaves in a folder, and the summary of it as a document ``optsched.run/1``."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from optsched.arraypipe.reporting.report import Report  # noqa: TC001 (msgspec reads the annotations)
from optsched.arraypipe.reporting.text import duration
from optsched.errors import InputError
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import check_format, decode, parse
from optsched.io.text import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.run_result import RunResult
    from optsched.arraypipe.trainer import ArrayTrainer
    from optsched.model.schedule import Schedule

FORMAT: Final = "optsched.run/1"


class RunFiles(NamedTuple):
    """Paths of the files of a run."""

    plan: Path
    trace: Path
    replay: Path
    summary: Path

    @classmethod
    def within(cls, folder: Path) -> RunFiles:
        """The paths, in a folder that need not be there."""
        return cls(
            folder / "plan.schedule.json",
            folder / "trace.schedule.json",
            folder / "replay.schedule.json",
            folder / "summary.json",
        )

    def write(self, summary: RunSummary, plan: Schedule, result: RunResult) -> None:
        """Write all of them; the summary last, so that it only stands beside a whole run."""
        plan.write(self.plan)
        result.trace.write(self.trace)
        result.replay.write(self.replay)
        write_atomic(self.summary, msgspec.json.format(msgspec.json.encode(summary), indent=1))


class JobSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a job ended; `iterations` are those of this run."""

    name: str
    status: str
    iterations: int
    first_loss: float | None
    last_loss: float | None
    error: str = ""


class RunSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A run in short; `str` gives what is printed at its end."""

    format: str = FORMAT
    backend: str
    steps: int
    seconds: float
    jobs: tuple[JobSummary, ...]
    report: Report

    @property
    def interrupted(self) -> bool:
        """Whether a job was stopped before its last iteration."""
        return any(job.status == "stopped" for job in self.jobs)

    @property
    def failures(self) -> list[str]:
        """Why jobs failed, a sentence each."""
        return [job.error for job in self.jobs if job.status == "failed"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def __str__(self) -> str:
        lines = [*_jobs(self.jobs), ""]
        if self.interrupted:
            lines.append("interrupted: jobs ended with whole iterations")
        ways = f"{self.backend} backend, {duration(self.seconds * 1e9)}"
        return "\n".join([*lines, ways, "", str(self.report)])


def summary_of(
    trainer: ArrayTrainer, result: RunResult, *, backend: str, steps: int, seconds: float
) -> RunSummary:
    """The summary of a run that is over (on rank 0, if there are several)."""
    jobs = []
    for job, title, losses in zip(trainer.jobs, trainer.titles, result.losses, strict=True):
        first, last = (losses[0], losses[-1]) if losses else (None, None)
        error = "" if job.error is None else str(job.error)
        jobs.append(JobSummary(title, job.status, len(losses), first, last, error))
    return RunSummary(
        backend=backend, steps=steps, seconds=seconds, jobs=tuple(jobs), report=result.report
    )


def read_summary(path: str | os.PathLike[str]) -> RunSummary:
    """Read the summary of a run, given as its folder or as the file itself.

    Raises
    ------
    InputError
        It is not there or not one; the sentence names place, rule and value.
    """
    file = RunFiles.within(Path(path)).summary if Path(path).is_dir() else Path(path)
    name = str(file)
    if file != Path(path) and not file.exists():
        raise InputError(f"{name}: no such file; `optsched arraypipe run --out` writes it")
    tree = parse(read_text(file), name)
    check_format(tree, FORMAT, name)
    return decode(tree, RunSummary, name)


@contextmanager
def made_folder(folder: Path | None) -> Iterator[None]:
    """Make the folder for results, or say why that is impossible, before anything is trained.

    If what follows raises, folders that were made for it and are empty go again; None: no folder.
    """
    if folder is None:
        yield
        return
    try:
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{folder}: cannot be made ({reason})") from None
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder}: cannot be written to (no permission)")
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for place in missing:
                place.rmdir()
        raise


def _jobs(jobs: Sequence[JobSummary]) -> list[str]:
    width = max(3, *(len(job.name) for job in jobs)) if jobs else 3
    lines = [f"{'job':{width}}  status   iterations  first loss  last loss"]
    for job in jobs:
        losses = ["-" if x is None else f"{x:.4f}" for x in (job.first_loss, job.last_loss)]
        lines.append(
            f"{plain(job.name):{width}}  {plain(job.status, 7):7}  {job.iterations:>10}  "
            f"{losses[0]:>10}  {losses[1]:>9}"
        )
        if job.error:
            lines.append(f"  {plain(job.error, 500)}")
    return lines
