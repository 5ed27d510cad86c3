"""``optsched pipeline``: hand-made pipeline schedules of equal stages, a model or a job array."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli.pipeline_jobs import (
    CHUNKS,
    MICRO_BATCHES,
    STAGES,
    TIME,
    EqualStages,
    JobFile,
    Jobs,
    ModelJob,
)
from optsched.cli.pipeline_table import Row, comparison, details
from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule


_PAGES = (".html", ".htm")


def pipeline(
    name: Annotated[
        str,
        typer.Argument(
            help="vanilla, gpipe, one_f_one_b, interleaved, bpipe, chimera, hanayo, zb_h1, zb_h2, "
            "or all: a table of them."
        ),
    ],
    file: Annotated[
        Path | None, typer.Argument(help="A *.jobarray.json document instead of the sizes below.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help=f"Devices [default: {STAGES}].", show_default=False)
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help=f"Of the job [default: {MICRO_BATCHES}].", show_default=False)
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            help=f"Stages a device, for interleaved and hanayo [default: {CHUNKS}].",
            show_default=False,
        ),
    ] = None,
    forward: Annotated[
        int | None,
        typer.Option(
            help=f"Time of a device for a micro-batch [default: {TIME}].", show_default=False
        ),
    ] = None,
    backward: Annotated[
        int | None,
        typer.Option(help="Input gradient [default: as --forward].", show_default=False),
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(
            help="Weight gradient, a block of its own in zb_h1 and zb_h2, else part of the "
            "backward pass [default: as --backward].",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="vgg19, resnet152, bert_large or gpt2_xl instead of times.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples of a micro-batch of the model [default: 1].")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="Of the model: balanced or naive [default: balanced].")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Of the model: nvlink, pcie, infiniband or mixed [default: nvlink]."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of a device, such as 80GB [default: unlimited].")
    ] = None,
    copy_time: Annotated[
        int | None,
        typer.Option(help="Of one activation, for bpipe [default: 0].", min=0, show_default=False),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="makespan, or period: iterations follow each other for ever "
            "[default: as the file says, else makespan].",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the schedule here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it: .png, .svg, .pdf, or .html for a page.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the order as torch's pipelining CSV.")
    ] = None,
) -> None:
    """A hand-made pipeline schedule: makespan, bubble, peak memory; or all of them in a table."""
    from rich.console import Console

    from optsched.io.files import check_outputs
    from optsched.pipelines import NAMES
    from optsched.pipelines.formulas import CHUNKED

    if name != "all" and name not in NAMES:
        raise InputError(f"name: expected one of {', '.join(NAMES)}, all, got {name!r:.40}")
    if name == "all" and any((output, plot, csv)):
        raise InputError("all: prints a table only; name one pipeline to write, draw or export it")
    check_outputs([output, plot, csv], [file])
    _check_picture(plot)
    if name not in ("all", *CHUNKED):
        _only(f"{name}: has one stage a device", {"chunks": chunks})
    if name not in ("all", "bpipe"):
        _only(f"{name}: copies no activations", {"copy_time": copy_time})
    times = {"forward": forward, "backward": backward, "weight": weight}
    for key, value in times.items():
        if value is not None:
            integer(key, value, 0, 2**53)
    profile = {"batch_size": batch_size, "partition": partition, "link": link, "memory": memory}
    sizes = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    if file is not None:
        _only(f"{file}: says it all", {**sizes, **times, **profile, "model": model})
        jobs: Jobs = JobFile(file)
    elif model is not None:
        _only("model: has times of its own", times)
        jobs = ModelJob(model, profile, sizes)
    else:
        _only("model: missing", profile)
        jobs = EqualStages(times, sizes)
    rows = [_row(one, jobs, objective, copy_time or 0, name == "all") for one in _names(name)]
    console = Console(highlight=False)
    if name == "all":
        console.print(comparison(rows))
        return
    (row,) = rows
    assert row.schedule is not None  # or there was an error
    cells = None if csv is None else _cells(row.schedule)
    details(row, console)
    _write(row.schedule, output, plot, csv, cells)


def _row(name: str, jobs: Jobs, objective: str | None, copy_time: int, table: bool) -> Row:
    """The schedule of one pipeline; in a table a refusal is a row, too."""
    import optsched
    from optsched import pipelines

    try:
        job, chunks = jobs.job(name)
        if objective is not None and objective != job.objective:
            job = job.with_objective(objective)
        options = {"copy_time": copy_time} if name == "bpipe" else {}
        schedule = getattr(pipelines, name)(job, **options)
    except InputError as error:
        if not table:
            raise
        return Row(name, reason=str(error))
    violations = tuple(optsched.verify(schedule))
    return Row(name, schedule, violations, jobs.published(name), chunks)


def _check_picture(plot: Path | None) -> None:
    """Refuse a drawing of another suffix than those there are."""
    from optsched.plots.picture import PICTURES

    legal = (*PICTURES, *_PAGES)
    if plot is not None and plot.suffix.lower() not in legal:
        raise InputError(f"{plot}: expected a drawing ending in {', '.join(legal)}")


def _cells(schedule: Schedule) -> str:
    """The CSV of a schedule, before anything is written: not all orders have one."""
    from optsched.formats import pipelining_csv

    return pipelining_csv.to_csv(schedule)


def _write(
    schedule: Schedule, output: Path | None, plot: Path | None, csv: Path | None, cells: str | None
) -> None:
    from optsched.io.files import write_atomic

    if output is not None:
        schedule.write(output)
        print(f"wrote {output}")
    if plot is not None:
        if plot.suffix.lower() in _PAGES:
            from optsched.plots.html import write as write_html

            write_html(schedule, plot)
        else:
            from optsched.plots.gantt import gantt

            gantt(schedule, plot)
        print(f"wrote {plot}")
    if csv is not None and cells is not None:
        write_atomic(csv, cells)
        print(f"wrote {csv}")


def _names(name: str) -> tuple[str, ...]:
    from optsched.pipelines import NAMES

    return NAMES if name == "all" else (name,)


def _only(why: str, others: dict[str, Any]) -> None:
    """Refuse options that would have no effect."""
    for key, value in others.items():
        if value is not None:
            raise InputError(f"{why}, --{key.replace('_', '-')} has no meaning then")
