"""What a run shows while it trains and leaves in a folder."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

import msgspec

from optsched.arraypipe.report.explain import predict
from optsched.arraypipe.report.report import Report  # noqa: TC001 (msgspec reads annotations)
from optsched.errors import InputError
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import decode_document, parse
from optsched.io.text import aligned, duration, plain

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from optsched.arraypipe.job import Job
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.trainer import ArrayTrainer
    from optsched.arraypipe.training_run import RunResult
    from optsched.model.schedule import Schedule


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
    """A run in short; `str` gives what is printed at its end."""

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
        ways = f"{self.backend} backend, {duration(self.seconds * 1e9)}"
        return "\n".join([*lines, ways, "", str(self.report)])


def summary_of(
    trainer: ArrayTrainer, result: RunResult, *, backend: str, steps: int, seconds: float
) -> RunSummary:
    """The summary of a run that is over; without jobs on ranks above 0, which have no losses."""
    jobs = []
    for job, title, losses in zip(trainer.jobs, trainer.titles, result.losses, strict=False):
        first, last = (losses[0], losses[-1]) if losses else (None, None)
        error = "" if job.error is None else str(job.error)
        jobs.append(JobSummary(title, job.status, len(losses), first, last, error))
    return RunSummary(
        backend=backend, steps=steps, seconds=seconds, jobs=tuple(jobs), report=result.report
    )


def write_results(folder: Path, summary: RunSummary, plan: Schedule, result: RunResult) -> str:
    """Write the files of a run, and name them; a summary only stands beside a whole run."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = {"plan": plan, "trace": result.trace}
    for name, document in documents.items():
        document.write(folder / f"{name}.schedule.json")
    text = msgspec.json.format(msgspec.json.encode(summary), indent=1)
    write_atomic(folder / _SUMMARY, text)
    return ", ".join([*(f"{name}.schedule.json" for name in documents), _SUMMARY])


def read_summary(path: Path) -> RunSummary:
    """Read the summary of a run, given as its folder or as the file itself."""
    file = path / _SUMMARY if path.is_dir() else path
    if file != path and not file.exists():
        raise InputError(f"{file}: no such file; `optsched arraypipe run --out` writes it")
    return decode_document(parse(read_text(file), str(file)), RunSummary, FORMAT, str(file))


def check_folder(folder: Path | None) -> None:
    """Refuse a folder for results that cannot be made or written to, before anything is trained."""
    if folder is None:
        return
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not there.is_dir():
        raise InputError(f"{folder}: cannot be made ({there} is a file)")
    if not os.access(there, os.W_OK):
        raise InputError(f"{folder}: cannot be written to (no permission)")


FIRST_AFTER_S: Final = 1.0  # of silence
EVERY_S: Final = 5.0  # between plain lines
LIVE_EVERY_S: Final = 0.25  # between two states of the table
_RECENT: Final = 33  # iterations from which the time of a cycle is taken


@dataclass(eq=False)
class _Row:
    """What is known of one job."""

    job: Job
    title: str
    copies: int  # iterations a cycle
    iteration: int = -1
    loss: float = float("nan")
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    told: int = -1

    def cells(self, steps: int) -> tuple[str, str, str, str]:
        """Name, iterations, loss, status."""
        loss = "-" if self.iteration < 0 else f"{self.loss:.4f}"
        return self.title, f"{self.iteration + 1} of {steps}", loss, self.job.status


@dataclass(eq=False)
class RunProgress:
    """Callable for ``on_step``; prints on stderr from time to time."""

    jobs: Sequence[Job]
    titles: Sequence[str]
    steps: int  # of every job
    _: KW_ONLY
    copies: Sequence[int]  # iterations a cycle of every job
    predicted_ns: float  # a cycle
    serial: bool  # devices take turns, so that the measured time of a cycle is no period
    enabled: bool = True
    stream: TextIO = field(default_factory=lambda: sys.stderr)

    def __post_init__(self) -> None:
        known = zip(self.jobs, self.titles, self.copies, strict=True)
        self.rows = {id(job): _Row(job, title, copies) for job, title, copies in known}
        self.began = time.monotonic()
        self.next = self.began + FIRST_AFTER_S
        self.live: Any = None

    @classmethod
    def of(
        cls, trainer: ArrayTrainer, plan: ExecutionPlan, steps: int, inline: bool, enabled: bool
    ) -> Self:
        """Of a run by a plan, whose last jobs may be more than it has seats."""
        from optsched.arraypipe.runtime.environment import resolve

        devices, last = resolve(trainer.devices, plan.devices) if inline else (), plan.n_jobs - 1
        return cls(
            trainer.jobs, trainer.titles, steps,
            copies=[plan.copies[min(j, last)] for j in range(len(trainer.jobs))],
            predicted_ns=predict(plan).period_ns,
            serial=len(devices) > 1 and len(set(devices)) == 1, enabled=enabled,
        )  # fmt: skip

    def add(self, job: Job, title: str) -> None:
        """A job joins."""
        self.rows[id(job)] = _Row(job, title, 1)

    def __call__(self, job: Job, iteration: int, loss: float) -> None:
        """Note a loss, and show the state if it is time to."""
        now = time.monotonic()
        row = self.rows[id(job)]
        row.iteration, row.loss = iteration, loss
        row.ends.append(now)
        if not self.enabled or now < self.next:
            return
        try:
            if self.live is not None:
                self.next = now + LIVE_EVERY_S
                self.live.update(self._table(), refresh=True)
                return
            self.next = now + EVERY_S
            text = "\n".join(f"{now - self.began:7.1f} s  {line}" for line in self._lines())
            print(text, file=self.stream, flush=True)
        except OSError:  # nobody looks any more: no reason to lose the run
            self.enabled = False

    def _period(self) -> str:
        """The time of a cycle, the median over the jobs that run, against its prediction."""
        rates = [
            (row.ends[-1] - row.ends[0]) / (len(row.ends) - 1) * row.copies
            for row in self.rows.values()
            if len(row.ends) > 1 and row.job.status == "running"
        ]
        measured = duration(median(rates) * 1e9) if rates else "-"
        turns = " (devices take turns)" if self.serial else ""
        return f"a cycle: {measured}{turns}, predicted {duration(self.predicted_ns)}"

    def _lines(self) -> list[str]:
        """One line per job that has news, and one for the period."""
        news = [row for row in self.rows.values() if row.told != row.iteration]
        width = max((len(row.title) for row in news), default=0)
        found = []
        for row in news:
            title, done, loss, status = row.cells(self.steps)
            found.append(f"{title:{width}}  iteration {done}  loss {loss}  {status}")
            row.told = row.iteration
        return [*found, self._period()] if found else []

    def _table(self) -> Any:
        from rich import box
        from rich.table import Table

        table = Table("job", "iteration", "loss", "status", box=box.SIMPLE, caption=self._period())
        for row in self.rows.values():
            table.add_row(*row.cells(self.steps))
        return table

    def __enter__(self) -> Self:
        if self.enabled and self.stream.isatty():
            from rich.console import Console
            from rich.live import Live

            # no thread of its own: it would cost the run time at moments that nobody chose
            console = Console(file=self.stream, highlight=False)
            self.live = Live(console=console, auto_refresh=False, transient=True)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            with suppress(OSError):
                self.live.stop()
            self.live = None
