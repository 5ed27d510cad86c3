"""``optsched pipeline``: hand-made pipeline schedules of equal stages, a model or a job array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli.options import Objective, OptionalOutput  # noqa: TC001
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.model.schedule import Schedule
    from optsched.model.violation import Violation
    from optsched.problems.jobarray.problem import JobArray

SIZES = {"stages": 8, "micro_batches": 32, "chunks": 2}
TIME = 12
"""A multiple of the usual numbers of chunks."""


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
    stages: Annotated[int | None, typer.Option(help="Devices [default: 8].")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Of the job [default: 32].")] = None,
    chunks: Annotated[
        int | None, typer.Option(help="Stages a device, for interleaved and hanayo [default: 2].")
    ] = None,
    forward: Annotated[
        int | None, typer.Option(help="Time of a device for a micro-batch [default: 12].")
    ] = None,
    backward: Annotated[
        int | None, typer.Option(help="Input gradient [default: as --forward].")
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(
            help="Weight gradient, a block of its own in zb_h1 and zb_h2, else part of the "
            "backward pass [default: as --backward]."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="vgg19, resnet152, bert_large or gpt2_xl instead of times.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples of a micro-batch of the model [default: 1].")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of a device, such as 80GB [default: unlimited].")
    ] = None,
    objective: Objective = None,
    output: OptionalOutput = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it: .png, .svg, .pdf, or .html for a page.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the order as torch's pipelining CSV.")
    ] = None,
) -> None:
    """A hand-made pipeline schedule: makespan, bubble, peak memory; or all of them in a table."""
    from optsched.cli.output import check_drawing, console, wrote
    from optsched.io.files import check_outputs
    from optsched.pipelines import NAMES
    from optsched.pipelines.equal_stages import CHUNKED

    if name != "all" and name not in NAMES:
        raise InputError(f"name: expected one of {', '.join(NAMES)}, all, got {name!r:.40}")
    if name == "all" and any((output, plot, csv)):
        raise InputError("all: prints a table only; name one pipeline to write, draw or export it")
    check_outputs([output, plot, csv], [file])
    check_drawing(plot)
    if name not in ("all", *CHUNKED):
        _only(f"{name}: has one stage a device", {"chunks": chunks})
    times = {"forward": forward, "backward": backward, "weight": weight}
    profile = {"batch_size": batch_size, "memory": memory}
    sizes = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    if file is not None:
        _only(f"{file}: says it all", {**sizes, **times, **profile, "model": model})
    else:
        _only(*(("model: missing", profile) if model is None else ("model: has times", times)))
    source = Source(file, model, times, sizes, profile)
    rows = [_row(one, source, objective, name == "all") for one in NAMES if name in (one, "all")]
    if name == "all":
        console().print(_comparison(rows))
        return
    (row,) = rows
    assert row.schedule is not None  # or there was an error
    if csv is not None:
        from optsched.formats import pipelining_csv

        cells = pipelining_csv.to_csv(row.schedule)  # before anything is written: not all have one
    _print_details(row, row.schedule)
    wrote(output, row.schedule.write)
    wrote(plot, partial(_draw, row.schedule))
    if csv is not None:
        wrote(csv, cells)


class Source:
    """Where the job of every pipeline comes from: a file, a model, or equal stages."""

    def __init__(
        self,
        file: Path | None,
        model: str | None,
        times: dict[str, int | None],
        sizes: dict[str, int | None],
        profile: dict[str, Any],
    ) -> None:
        from optsched.io.values import integer
        from optsched.problems.jobarray.problem import JobArray

        self.array = None if file is None else JobArray.read(file)
        self.model, self.memory = model, profile["memory"]
        self.batch_size = 1 if profile["batch_size"] is None else profile["batch_size"]
        self.sizes = {key: SIZES[key] if size is None else size for key, size in sizes.items()}
        self.times, last = {}, TIME
        for key, given in times.items():  # what is not said is as the one before
            last = self.times[key] = last if given is None else integer(key, given, 0, 2**53)

    def job(self, name: str) -> JobArray:
        """The job as this pipeline wants it."""
        from optsched.pipelines import uniform
        from optsched.pipelines.equal_stages import SPLIT, layout
        from optsched.problems.jobarray.problem import JobArray

        if self.array is not None:
            return self.array
        if self.model is None:
            return uniform(name, **self.times, **self.sizes)
        stages, m = self.sizes["stages"], self.sizes["micro_batches"]
        _, place = layout(name, stages, self.sizes["chunks"])
        return JobArray.from_profile(
            self.model, len(place), [self.batch_size * m], micro_batches=m, place=place,
            split_backward=name in SPLIT, name=f"{name}-{self.model}-{stages}x{m}",
            memory=self.memory,
        )  # fmt: skip

    def published(self, name: str) -> tuple[str, int]:
        """The published bubble or why there is none, and the activations of a device's share.

        Both are of equal stages only: else there is none, and activations are bytes.
        """
        from optsched.pipelines import bubble
        from optsched.pipelines.equal_stages import CHUNKED

        if self.array is not None or self.model is not None:
            return "", 0
        chunks = self.sizes["chunks"] if name in CHUNKED else 1
        try:
            value = bubble(name, **self.times, **self.sizes)
        except InputError as error:  # it says for which numbers there is one
            about, _, reason = str(error).partition(": ")
            return reason if about == name else "", chunks
        of = " of a period" if name == "zb_h2" else ""
        return f"{_percent(value)} = {value}{of}", chunks


@dataclass(frozen=True)
class Row:
    """One pipeline: its schedule, or the sentence why there is none."""

    name: str
    schedule: Schedule | None = None
    violations: Iterable[Violation] = ()
    published: str = ""
    chunks: int = 0  # activations are counted in chunks; 0: bytes
    reason: str = ""


def _row(name: str, source: Source, objective: str | None, table: bool) -> Row:
    """The schedule of one pipeline; in a table a refusal is a row, too."""
    import optsched
    from optsched import pipelines

    try:
        job = source.job(name)
        if objective is not None and objective != job.objective:
            job = job.with_objective(objective)
        schedule = getattr(pipelines, name)(job)
    except InputError as error:
        if not table:
            raise
        return Row(name, reason=str(error))
    return Row(name, schedule, optsched.verify(schedule), *source.published(name))


def _comparison(rows: list[Row]) -> Any:
    """All pipelines side by side."""
    from optsched.analysis.occupancy import peak_memory
    from optsched.cli.output import table
    from optsched.io.text import plain
    from optsched.pipelines import idle_share

    periodic = any(row.schedule is not None and row.schedule.period for row in rows)
    span = "period" if periodic else "makespan"
    found = table("pipeline", span, "bubble", "published", "peak", "memory", left=(0, 3))
    for row in rows:
        schedule = row.schedule
        if schedule is None:
            found.add_row(row.name, "-", "-", plain(row.reason, 300), "-", "-")
            continue
        peak = max((peak_memory(schedule, r) for r in range(schedule.n_resources)), default=0)
        found.add_row(
            row.name, _span(schedule), _percent(idle_share(schedule)), row.published,
            _held(peak, row.chunks), "too small" if row.violations else "fits",
        )  # fmt: skip
    return found


def _print_details(row: Row, schedule: Schedule) -> None:
    """What there is to know about one pipeline."""
    from optsched.analysis.report import report
    from optsched.cli.output import console, facts, table
    from optsched.io.text import bytes_text, plain
    from optsched.pipelines import idle_share

    kind = "makespan" if schedule.period is None else "period"
    facts(
        [
            ("pipeline", schedule.name or row.name),
            (kind, _span(schedule)),
            ("bubble", _percent(idle_share(schedule))),
            *([("published", row.published)] if row.published else []),
        ]
    )
    what = "peak activations" if row.chunks else "peak memory"
    heads = ("device", "operations", "busy", "bubble", what)
    found = table(*heads, *(() if row.chunks else ("capacity",)))
    for line in report(schedule).resources:
        capacity = bytes_text(line.memory) if line.memory else "unlimited"
        found.add_row(
            plain(line.name, 40), str(line.operations), f"{100 * line.busy_share:.1f} %",
            f"{100 * line.bubble_share:.1f} %", _held(line.peak_memory, row.chunks),
            *(() if row.chunks else (capacity,)),
        )  # fmt: skip
    console().print(found)
    for violation in row.violations:
        print(f"does not fit: {plain(violation.message, 1000)}")


def _draw(schedule: Schedule, path: Path) -> None:
    from optsched.cli.output import PAGES
    from optsched.plots.gantt import gantt
    from optsched.plots.html import write

    if path.suffix.lower() in PAGES:
        write(schedule, path)
    else:
        gantt(schedule, path)


def _only(why: str, others: dict[str, Any]) -> None:
    """Refuse options that would have no effect."""
    for key, value in others.items():
        if value is not None:
            raise InputError(f"{why}, --{key.replace('_', '-')} has no meaning then")


def _span(schedule: Schedule) -> str:
    from optsched.io.text import time_text

    span = schedule.makespan if schedule.period is None else schedule.period
    return time_text(span, schedule.time_unit)


def _held(count: int, chunks: int) -> str:
    """Activations of whole devices, or bytes."""
    from optsched.io.text import bytes_text

    return f"{count / chunks:g}" if chunks else bytes_text(count)


def _percent(share: Any) -> str:
    return f"{100 * float(share):.2f} %"
