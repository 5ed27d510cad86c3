"""``optsched generate pipeline``: hand-made schedules of equal stages, a model or a job array."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import optsched
from optsched import pipelines
from optsched.analysis.occupancy import peak_memory
from optsched.cli.options import Objective, OptionalOutput, argument, option, with_objective
from optsched.cli.output import wrote
from optsched.cli.tables import display, table
from optsched.errors import InputError
from optsched.io.files import check_outputs
from optsched.io.text import bytes_text, one_line, time_text
from optsched.io.values import integer
from optsched.pipelines import NAMES, bubble, idle_share, uniform
from optsched.pipelines.equal_stages import CHUNKED, SPLIT, layout
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.model.schedule import Schedule

SIZES = {"stages": 8, "micro_batches": 32, "chunks": 2}
TIME = 12
"""Time of a forward block; divisible by the usual numbers of chunks."""


def pipeline(
    name: Annotated[
        str,
        argument("vanilla, gpipe, one_f_one_b, interleaved, chimera, hanayo, zb_h1, zb_h2, all."),
    ],
    file: Annotated[Path | None, argument("A *.jobarray.json instead of sizes.")] = None,
    stages: Annotated[int | None, option("Devices [default: 8].")] = None,
    micro_batches: Annotated[int | None, option("Of the job [default: 32].")] = None,
    chunks: Annotated[
        int | None, option("Stages a device (interleaved, hanayo) [default: 2].")
    ] = None,
    forward: Annotated[int | None, option("Time a micro-batch [default: 12].")] = None,
    backward: Annotated[int | None, option("Whole backward pass [default: 2 x --forward].")] = None,
    weight: Annotated[
        int | None,
        option("Weight gradient, part of --backward [default: half of it]."),
    ] = None,
    model: Annotated[str | None, option("vgg19, resnet152, bert_large or gpt2_xl.")] = None,
    batch_size: Annotated[int | None, option("Samples of a micro-batch [default: 1].")] = None,
    memory: Annotated[str | None, option("Of a device, such as 80GB.")] = None,
    objective: Objective = None,
    output: OptionalOutput = None,
) -> None:
    """Compare hand-made pipeline schedules: makespan, bubble, peak memory.

    The written schedule is for `optsched show` and `convert` (to torch's CSV).

    Example: optsched generate pipeline one_f_one_b --stages 4 -o 1f1b.schedule.json
    """
    if name != "all" and name not in NAMES:
        raise InputError(f"name: expected one of {', '.join(NAMES)}, all, got {name!r:.40}")
    if name == "all" and output is not None:
        raise InputError("all: prints a table only; name one pipeline to write it")
    check_outputs([output], [file])
    if name not in ("all", *CHUNKED):
        _refuse(f"{name}: has one stage a device", {"chunks": chunks})
    times = {"forward": forward, "backward": backward, "weight": weight}
    sizes = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    profile = {"batch_size": batch_size, "memory": memory}
    make, equal = _source(file, model, times, sizes, profile)
    rows, found = [], []
    for one in NAMES if name == "all" else [name]:
        try:
            job = with_objective(make(one), objective)
            found.append(getattr(pipelines, one)(job))
        except InputError as error:
            if name != "all":
                raise
            rows.append([one, "-", "-", one_line(str(error), 300), "-", "-"])
        else:
            rows.append(_row(one, found[-1], equal))
    span = "makespan" if all(schedule.period is None for schedule in found) else "period"
    heads = ("pipeline", span, "bubble", "published", "peak", "memory")
    display(table(heads, rows, left=(0, 3)))
    if name != "all":
        for violation in optsched.verify(found[0]):
            print(f"does not fit: {one_line(violation.message, 1000)}")
        wrote(output, found[0].write)


def _source(
    file: Path | None,
    model: str | None,
    times: Mapping[str, int | None],
    sizes: Mapping[str, int | None],
    profile: Mapping[str, Any],
) -> tuple[Callable[[str], JobArray], dict[str, int]]:
    """Return a function from a pipeline's name to its job, and the sizes of equal stages."""
    if file is not None:
        _refuse(f"{file}: is complete", {**sizes, **times, **profile, "model": model})
        array = JobArray.read(file)
        return lambda _: array, {}
    whole = {key: SIZES[key] if size is None else size for key, size in sizes.items()}
    if model is not None:
        _refuse("model: has times", times)
        batch, count, size = profile["batch_size"], whole["micro_batches"], whole["stages"]

        def of_model(name: str) -> JobArray:
            _, place = layout(name, size, whole["chunks"])
            return JobArray.from_profile(
                model, len(place), [(1 if batch is None else batch) * count], micro_batches=count,
                place=place, memory=profile["memory"], split_backward=name in SPLIT,
                name=f"{name}-{model}-{size}x{count}",
            )  # fmt: skip

        return of_model, {}
    _refuse("model: missing", profile)
    given = {key: time and integer(key, time, 0, 2**53) for key, time in times.items()}
    forward = TIME if given["forward"] is None else given["forward"]
    backward = 2 * forward if given["backward"] is None else given["backward"]
    weight = backward // 2 if given["weight"] is None else given["weight"]
    if weight > backward:
        raise InputError(f"weight: expected 0..{backward}, a part of --backward, got {weight}")
    whole |= {"forward": forward, "backward": backward - weight, "weight": weight}
    return lambda name: uniform(name, **whole), whole


def _row(name: str, schedule: Schedule, equal: Mapping[str, int]) -> list[str]:
    """Return the row of one pipeline."""
    peak = max((peak_memory(schedule, r) for r in range(schedule.n_resources)), default=0)
    chunks = equal.get("chunks", 0) if name in CHUNKED else 1
    span = schedule.makespan if schedule.period is None else schedule.period
    return [
        name, time_text(span, schedule.time_unit), _percent(idle_share(schedule)),
        _published(name, equal) if equal else "",
        f"{peak / chunks:g}" if equal else bytes_text(peak),  # equal stages count activations
        "too small" if optsched.verify(schedule) else "fits",
    ]  # fmt: skip


def _published(name: str, equal: Mapping[str, int]) -> str:
    """Return the published bubble, or the reason why it has none."""
    try:
        value = bubble(name, **equal)
    except InputError as error:  # names the numbers that have one
        about, _, reason = str(error).partition(": ")
        return reason if about == name else ""
    return f"{_percent(value)} = {value}{' of a period' if name == 'zb_h2' else ''}"


def _refuse(why: str, others: Mapping[str, Any]) -> None:
    """Refuse options without effect."""
    for key, value in others.items():
        if value is not None:
            raise InputError(f"{why}, --{key.replace('_', '-')} has no meaning then")


def _percent(share: Any) -> str:
    return f"{100 * float(share):.2f} %"
