"""``optsched cluster elastic``: train jobs on a shared pool of workers."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer

from optsched.cli import options, say
from optsched.cli.options import argument, option
from optsched.cli.output import RunOutputs
from optsched.cli.progress import Bar
from optsched.cli.simulate import policies
from optsched.cli.tables import display, table
from optsched.cluster.policies import variants
from optsched.errors import InputError
from optsched.io.text import one_line
from optsched.io.values import file_label, integer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.table import Table

    from optsched.elastic import LiveRun, Status
    from optsched.elastic.live import LiveJob

_BETWEEN: Final = 0.5
"""Seconds between lines about passes."""

_POLICY: Final = "time_to_target"

_ACTIVE: Final = ("joining", "running")


def elastic(
    jobs: Annotated[Path | None, argument("TOML file, see docs/clusters/elastic-pool.md.")] = None,
    slots: Annotated[int | None, option("Workers, with --remote [default: as --devices].")] = None,
    policy: Annotated[
        str | None, option("Of optsched cluster simulate [default: time_to_target].")
    ] = None,
    option: Annotated[list[str] | None, option("KEY=VALUE of the policy; repeat.")] = None,
    out: options.History = None,
    metrics: options.Metrics = None,
    plot: options.ReportFile = None,
    preempt: Annotated[
        str | None, option("'pass' (at the end of passes, the default), or 'anytime'.")
    ] = None,
    folder: Annotated[Path | None, option("For checkpoints and state.")] = None,
    resume: Annotated[bool, option("Continue the run in --folder.", "--resume")] = False,
    devices: options.Devices = None,
    listen: Annotated[str | None, option("HOST:PORT of this host, for workers that join.")] = None,
    remote: Annotated[int | None, option("How many of --slots join [default: 1].")] = None,
    join: Annotated[str | None, option("HOST:PORT of a pool, to be --slots workers of it.")] = None,
    demo: Annotated[
        bool, option("Five small jobs on two workers; writes elastic-demo.html.", "--demo")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Train jobs on a pool of workers; a policy decides at the end of every pass.

    Ctrl-C or SIGTERM stops the passes and writes the results so far. Exit code 1: a job failed.

    Example: optsched cluster elastic jobs.toml --slots 2 --folder state --plot run.html
    """
    from optsched.elastic.door import TOKEN, OpenPool
    from optsched.elastic.job import read_jobs
    from optsched.elastic.runner import run

    if join is not None:
        taken = {
            "JOBS": jobs, "--listen": listen, "--remote": remote, "--folder": folder, "-o": out,
            "--metrics": metrics, "--plot": plot, "--demo": demo or None, "--policy": policy,
            "--option": option, "--preempt": preempt, "--resume": resume or None,
        }  # fmt: skip
        _join(join, slots, devices, taken, quiet=quiet)
        return
    policy = _POLICY if policy is None else policy
    preempt = "pass" if preempt is None else preempt
    if demo:
        if jobs is not None:
            raise InputError(f"demo: has jobs already; leave out {jobs} or --demo")
        jobs = Path(str(resources.files("optsched.elastic") / "demo.toml"))
        plot = plot or Path("elastic-demo.html")
    if jobs is None:
        raise InputError("jobs: name a file JOBS.toml, or give --demo")
    places = None if devices is None else devices.split(",")
    joining = 0 if listen is None else 1 if remote is None else remote
    if slots is None:
        slots = len(places) + joining if places else 2 if demo else None
    if remote is not None and listen is None:
        raise InputError("remote: give --listen HOST:PORT too, the address that workers join")
    if slots is None:
        raise InputError("slots: missing; give --slots N or --devices")
    if len(variants([policy])) > 1:
        raise InputError(f"policy: expected one, got {policy!r:.60}")
    rule = policies([policy], option)[policy]
    outputs = RunOutputs(out, metrics, plot, (policy,), {"jobs": file_label(str(jobs))})
    outputs.check(jobs)
    specs = read_jobs(jobs)
    with Bar(quiet=quiet) as bar:
        news = News(f"{policy}, {count(slots, 'worker')}", bar, quiet=quiet)
        if listen is not None:
            news.print(f"on other hosts: optsched cluster elastic --join {listen}, with {TOKEN}")
        pool = slots if listen is None else OpenPool(slots, joining, listen)
        found = run(
            specs, pool, rule, preempt=cast("Literal['pass', 'anytime']", preempt),
            devices=places, folder=folder, resume=resume, on_progress=news,
        )  # fmt: skip
    written = outputs.write({policy: found}, quiet=True)
    news.summary(found)
    for path in written:
        news.print(f"wrote {path}")
    if plot is not None and plot not in written:
        news.print(f"{plot} is not written: no job has ended")
    for job, reason in found.failed.items():
        say(f"failed: job {job!r:.60}: {reason}")
    if not found.complete:
        say("interrupted" + (f": continue with --folder {folder} --resume" if folder else ""))
        raise SystemExit(130)
    if found.failed:
        raise typer.Exit(1)


def _join(
    address: str, slots: int | None, devices: str | None, taken: Mapping[str, Any], *, quiet: bool
) -> None:  # fmt: skip
    """Be workers of a pool until it ends."""
    from optsched.elastic.remote import join
    from optsched.elastic.runner import devices_of

    for name in (key for key, value in taken.items() if value is not None):
        raise InputError(f"join: the pool at {address} has jobs and their policy; leave out {name}")
    given = None if devices is None else devices.split(",")
    slots = len(given or "1") if slots is None else integer("slots", slots, 1, 4096)
    places = devices_of(given, slots)
    join(address, places, on_change=lambda line: None if quiet else print(line, flush=True))
    if not quiet:
        print(f"the pool at {address} has ended")


class News:
    """Print every change of a job on stdout; an error of stdout does not end the run.

    Passes are counted in the status line of a terminal; elsewhere they are lines too.
    """

    def __init__(self, title: str, bar: Bar, *, quiet: bool) -> None:
        self.title, self.bar, self.quiet = title, bar, quiet
        self.status: Status | None = None
        self._counters: list[Callable[..., None]] = []
        self._due = 0.0

    def __call__(self, status: Status) -> None:
        """Print the changes since the last call."""
        old, self.status = self.status, status
        if old is None:
            self.print(f"{self.title}, {count(len(status.jobs), 'job')}; starting the workers")
            jobs = status.jobs if self.bar.live else []
            self._counters = [self.bar.task(job.spec.name, job.spec.passes) for job in jobs]
            return
        for counter, job in zip(self._counters, status.jobs, strict=False):
            counter(job.passes)
        for before, job in zip(old.jobs, status.jobs, strict=True):
            self._line(status.time, before, job)

    def _line(self, time: float, before: LiveJob, job: LiveJob) -> None:
        """Print the change of a job, if there is one; passes at most every `_BETWEEN` seconds."""
        same = len(before.slots) == len(job.slots) and before.reason == job.reason
        same &= before.phase == job.phase or (before.phase, job.phase) == _ACTIVE
        passed = before.passes != job.passes and not self.bar.live and monotonic() >= self._due
        if same and not passed:
            return
        self._due = monotonic() + _BETWEEN
        name, phase, workers, passes, u, metric, jct, reason = _cells(job, time)
        parts = [f"{time:7.1f} s  {name:16} {phase:8}"]
        parts += [count(len(job.slots), "worker")] * bool(workers)
        parts += [f"pass {passes}, U {u}, metric {metric}"] * bool(job.passes)
        parts += [f"JCT {jct} s"] * (phase in ("ended", "failed"))
        self.print("  ".join([*parts, reason]).rstrip())

    def summary(self, run: LiveRun) -> None:
        """Print the last state, and means."""
        assert self.status is not None
        heads = ("job", "phase", "workers", "pass", "U", "metric", "JCT (s)", "why")
        rows = [_cells(job, self.status.time) for job in self.status.jobs]
        self.print(table(heads, rows, left=(0, 1, 7)))
        m = run.metrics
        ended = int(m.ended.sum())
        line = f"{ended} of {count(m.jobs, 'job')} ended"
        if ended:
            line += (
                f": mean JCT {m.jct_mean / 1e3:.1f} s, mean queueing {m.queueing_mean / 1e3:.1f} s,"
                f" makespan {m.makespan / 1e3:.1f} s"
            )
        self.print(line)

    def print(self, what: str | Table) -> None:
        """Print until stdout is closed, as by `head`."""
        try:
            if not self.quiet and isinstance(what, str):
                print(what, flush=True)
            elif not self.quiet:
                display(what)
        except OSError:
            self.quiet = True


def count(number: int, thing: str) -> str:
    """Format ``1 job``, ``2 jobs``."""
    return f"{number} {thing}{'s' * (number != 1)}"


def _cells(job: LiveJob, time: float) -> tuple[str, ...]:
    """Return name, phase, workers, passes, uncertainty, metric, seconds since submit, reason."""
    u, metric = (f"{job.log[-1][k]:.3f}" if job.log else "-" for k in ("uncertainty", "metric"))
    target = "" if job.spec.target is None else f" of {job.spec.target:g}"
    jct = max(0.0, (job.finished / 1e3 if job.finished >= 0 else time) - job.spec.submit)
    return (
        one_line(job.spec.name, 40), job.phase, str(len(job.slots) or ""),
        f"{job.passes}/{job.spec.passes}", u, metric + target,
        "" if job.phase == "unborn" else f"{jct:.1f}", one_line(job.reason, 200),
    )  # fmt: skip
