"""``optsched elastic``: jobs really train on a shared pool of workers, with a live table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="History as a *.schedule.json.")
    ] = None,
    metrics: Annotated[Path | None, typer.Option(help="All metrics: optsched.metrics/1.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Report: .html, .png, .svg or .pdf.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep checkpoints and the state of the run here.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --folder.")
    ] = False,
    devices: Annotated[
        str | None, typer.Option(help="Such as cpu,cpu or cuda:0,cuda:1 [default: GPUs, else CPU].")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Put a simulation of the same jobs beside it.")
    ] = False,
    demo: Annotated[
        bool, typer.Option("--demo", help="Five small jobs on two workers, with a picture.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Train jobs on a pool of workers; a policy decides at the end of every pass.

    Ctrl-C writes what there is. Exit code 1 if a job failed.
    """
    from importlib import resources

    from optsched.cli import say
    from optsched.cli.elastic_table import LiveTable, count
    from optsched.cli.simulate_input import policies
    from optsched.cli.simulate_output import Outputs
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
    chosen = policies([policy], [], option or [])
    if len(chosen) > 1:
        raise InputError(f"policy: expected one, got {policy!r:.60}")
    ((name, rule),) = chosen.items()
    outputs = Outputs(out, metrics, None, plot, (name,), {"jobs": file_label(str(jobs))})
    outputs.check(jobs)
    specs = read_jobs(jobs)
    with LiveTable(f"{name}, {count(slots, 'worker')}", quiet=quiet) as table:
        found = run(
            specs, slots, rule, devices=places, folder=folder, resume=resume, on_progress=table
        )
    outputs.write({name: found}, quiet=True)
    table.summary(found)
    if compare:
        table.comparison(found)
    drawn = plot if found.metrics.ended.any() else None
    for path in (out, metrics, drawn):
        if path is not None:
            table.print(f"wrote {path}")
    if drawn != plot:
        table.print(f"{plot} is not written: no job has ended")
    for job, reason in found.failed.items():
        say(f"failed: job {job!r:.60}: {reason}")
    if not found.complete:
        say("interrupted" + (f": go on with --folder {folder} --resume" if folder else ""))
        raise typer.Exit(130)
    if found.failed:
        raise typer.Exit(1)
