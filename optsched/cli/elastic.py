"""``optsched elastic``: jobs really train on a shared pool of workers, with a live table."""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Final, Self

import typer

from optsched.cli.options import Devices, History, Metrics, Quiet, ReportFile  # noqa: TC001
from optsched.cli.simulate import policies
from optsched.io.text import plain

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from optsched.elastic import LiveRun, Status
    from optsched.elastic.live import LiveJob

_STYLE: Final = {"running": "green", "joining": "green", "pending": "yellow", "failed": "red",
                 "unborn": "dim", "ended": ""}  # fmt: skip
_BETWEEN: Final = 0.5  # seconds between lines about nothing but passes
_ACTIVE: Final = ("joining", "running")


def elastic(
    jobs: Annotated[
        Path | None, typer.Argument(help="Jobs (TOML), see docs/elastic.md.", show_default=False)
    ] = None,
    slots: Annotated[
        int | None, typer.Option(help="Workers [default: as many as --devices].")
    ] = None,
    policy: Annotated[str, typer.Option(help="Of optsched simulate.")] = "time_to_target",
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the policy; may be repeated.")
    ] = None,
    out: History = None,
    metrics: Metrics = None,
    plot: ReportFile = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep checkpoints and the state of the run here.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --folder.")
    ] = False,
    devices: Devices = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Put a simulation of the same jobs beside it.")
    ] = False,
    demo: Annotated[
        bool, typer.Option("--demo", help="Five small jobs on two workers, with a picture.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train jobs on a pool of workers; a policy decides at the end of every pass.

    Ctrl-C writes what there is. Exit code 1 if a job failed.
    """
    from importlib import resources

    from optsched.cli import say
    from optsched.cli.output import RunOutputs
    from optsched.elastic.job import read_jobs
    from optsched.elastic.runner import run
    from optsched.errors import InputError
    from optsched.io.values import file_label

    if demo:
        if jobs is not None:
            raise InputError(f"demo: it has jobs of its own; leave out {jobs} or --demo")
        jobs = Path(str(resources.files("optsched.elastic") / "demo.toml"))
        plot = plot or Path("elastic-demo.html")
    if jobs is None:
        raise InputError("jobs: name a file JOBS.toml, or give --demo")
    places = None if devices is None else devices.split(",")
    if slots is None:
        slots = len(places) if places else 2 if demo else None
    if slots is None:
        raise InputError("slots: how many workers? give --slots N")
    if "," in policy:
        raise InputError(f"policy: expected one, got {policy!r:.60}")
    rule = policies([policy], option)[0][policy]
    outputs = RunOutputs(out, metrics, None, plot, (policy,), {"jobs": file_label(str(jobs))})
    outputs.check(jobs)
    specs = read_jobs(jobs)
    with LiveTable(f"{policy}, {count(slots, 'worker')}", quiet=quiet) as table:
        found = run(
            specs, slots, rule, devices=places, folder=folder, resume=resume, on_progress=table
        )
    written = outputs.write({policy: found}, quiet=True)
    table.summary(found)
    if compare:
        table.comparison(found)
    for path in written:
        table.print(f"wrote {path}")
    if plot is not None and plot not in written:
        table.print(f"{plot} is not written: no job has ended")
    for job, reason in found.failed.items():
        say(f"failed: job {job!r:.60}: {reason}")
    if not found.complete:
        say("interrupted" + (f": go on with --folder {folder} --resume" if folder else ""))
        raise typer.Exit(130)
    if found.failed:
        raise typer.Exit(1)


class LiveTable:
    """To be told the state of a run; on stdout, which may go away without harm to the run."""

    def __init__(self, title: str, *, quiet: bool) -> None:
        self.title, self.quiet = title, quiet
        self.status: Status | None = None
        self._heard, self._ticking, self._due = 0.0, False, 0.0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ticking = False
        if self._live is not None:
            self._live.stop()

    def __call__(self, status: Status) -> None:
        """Show the state; from the second one on the clock runs."""
        old, self.status = self.status, status
        self._heard, self._ticking = monotonic(), old is not None
        if old is None and not self.quiet and sys.stdout.isatty():
            from rich.live import Live

            from optsched.cli.output import console

            self._live = Live(console=console(), get_renderable=self.table, refresh_per_second=1)
            self._live.start()
        if self._live is not None:
            self._live.refresh()
        elif old is None:
            self.print(f"{self.title}, {count(len(status.jobs), 'job')}; starting the workers")
        else:
            for before, job in zip(old.jobs, status.jobs, strict=True):
                self._line(status.time, before, job)

    def _line(self, time: float, before: LiveJob, job: LiveJob) -> None:
        """One change of a job."""
        same = len(before.slots) == len(job.slots) and before.reason == job.reason
        same &= before.phase == job.phase or (before.phase, job.phase) == _ACTIVE
        if same and (before.passes == job.passes or monotonic() < self._due):
            return
        self._due = monotonic() + _BETWEEN
        words = [f"{time:7.1f} s  {plain(job.spec.name, 40):16} {job.phase:8}"]
        if job.slots:
            words.append(count(len(job.slots), "worker"))
        if job.passes:
            words.append(
                f"pass {_passes(job)}, U {_last(job, 'uncertainty')}, metric {_metric(job)}"
            )
        if job.phase in ("ended", "failed"):
            words.append(f"JCT {_jct(job, time):.1f} s")
        self.print("  ".join([*words, plain(job.reason, 200)]).rstrip())

    def table(self) -> Table:
        """The state now; where a terminal is too low, jobs that run come first."""
        from optsched.cli.output import table as make_table

        assert self.status is not None
        since = monotonic() - self._heard if self._ticking else 0.0
        jobs = list(self.status.jobs)
        room = self._live.console.height - 6 if self._live is not None else len(jobs)
        if len(jobs) > room:
            jobs.sort(key=lambda job: [*_STYLE].index(job.phase))
        left_out = f", {len(jobs) - room} more jobs" if len(jobs) > room else ""
        heads = ("job", "phase", "workers", "pass", "U", "metric", "JCT (s)")
        found = make_table(*heads, left=(0, 1), no_wrap=True)
        found.title = f"{self.title}, {self.status.time + since:.0f} s{left_out}"
        if any(job.reason for job in jobs):
            found.add_column("why", overflow="ellipsis", no_wrap=True)
        for job in jobs[: max(room, 1)]:
            open_ = since if job.phase in ("pending", *_ACTIVE) else 0.0
            since_submit = f"{_jct(job, self.status.time) + open_:.1f}"
            cells = (
                plain(job.spec.name, 40), job.phase, str(len(job.slots) or ""), _passes(job),
                _last(job, "uncertainty"), _metric(job),
                "" if job.phase == "unborn" else since_submit, plain(job.reason, 200),
            )  # fmt: skip
            found.add_row(*cells[: len(found.columns)], style=_STYLE[job.phase])
        return found

    def summary(self, run: LiveRun) -> None:
        """The last state, unless it is on the screen, and means."""
        if self._live is None:
            self._print_table(self.table())
        m = run.metrics
        ended = int(m.ended.sum())
        line = f"{ended} of {count(m.jobs, 'job')} ended"
        if ended:
            line += (
                f": mean JCT {m.jct_mean / 1e3:.1f} s, mean queueing {m.queueing_mean / 1e3:.1f} s,"
                f" makespan {m.makespan / 1e3:.1f} s"
            )
        self.print(f"{line}; the scheduler took {run.overhead:.1%} of the time")

    def comparison(self, run: LiveRun) -> None:
        """Simulated beside measured, of the jobs that ended."""
        from optsched.cli.output import table as make_table

        (ended,) = (run.log.finished >= 0).nonzero()
        if not len(ended):
            self.print("nothing to compare: no job ended")
            return
        simulated, submit = run.simulated(), run.workload.submit[ended]
        found = make_table("", "simulated (s)", "measured (s)", "off", no_wrap=True)
        one, two = simulated.jct, run.jct[ended]
        rows = [*zip(simulated.workload.names, one, two, strict=True)]
        rows += [("mean JCT", one.mean(), two.mean())]
        ends = simulated.log.finished.max(), run.log.finished[ended].max()
        rows += [("makespan", *(end - submit.min() for end in ends))]
        for k, (name, said, real) in enumerate(rows):
            off = f"{said / real - 1:+.1%}" if real else "-"
            row = f"{said / 1e3:.2f}", f"{real / 1e3:.2f}", off
            found.add_row(plain(name, 40), *row, end_section=k == len(two) - 1)
        self._print_table(found)

    def _print_table(self, table: Table) -> None:
        from optsched.cli.output import console

        out = console()
        with out.capture() as text:
            out.print(table)
        self.print(text.get().rstrip("\n"))

    def print(self, text: str) -> None:
        """Unless nobody reads any more, as after `head`: no reason to lose the run."""
        if not self.quiet:
            try:
                print(text, flush=True)
            except OSError:
                self.quiet = True


def count(number: int, thing: str) -> str:
    """Such as ``1 job``, ``2 jobs``."""
    return f"{number} {thing}{'s' * (number != 1)}"


def _passes(job: LiveJob) -> str:
    return f"{job.passes}/{job.spec.passes}"


def _jct(job: LiveJob, time: float) -> float:
    """Seconds since it was submitted, at most until its end."""
    return max(0.0, (job.finished / 1e3 if job.finished >= 0 else time) - job.spec.submit)


def _metric(job: LiveJob) -> str:
    target = job.spec.target
    return _last(job, "metric") + ("" if target is None else f" of {target:g}")


def _last(job: LiveJob, key: str) -> str:
    return f"{job.log[-1][key]:.3f}" if job.log else "-"
