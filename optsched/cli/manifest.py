"""``optsched manifest``: Kubernetes jobs with gang scheduling."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

import optsched
from optsched.cli.options import OptionalOutput, argument, option
from optsched.cli.output import stdin_or_file
from optsched.cluster.determined.document import read_answer
from optsched.errors import InputError
from optsched.formats import kubernetes
from optsched.formats.kubernetes import Options, pods_of
from optsched.io.files import check_outputs, write_atomic
from optsched.io.strict_json import format_json, parse, without_collector
from optsched.model.schedule import Schedule
from optsched.problems.quota import document as quota_json

if TYPE_CHECKING:
    from optsched.formats.kubernetes import Gang

_PLAN_SECONDS: Final = 60.0
"""Time limit of a plan; most take milliseconds after the kernels are compiled."""


def manifest(
    file: Annotated[
        Path,
        argument("optsched.quota/1 or optsched.decision/1; - is stdin."),
    ],
    gang: Annotated[str, option("podgroup, volcano or kueue.")] = "podgroup",
    queue: Annotated[str | None, option("Of volcano; LocalQueue of kueue.")] = None,
    schedule: Annotated[Path | None, option("Of the plan [default: solve it].")] = None,
    gpus_per_pod: Annotated[int | None, option("At most [default: 8, as nodes allow].")] = None,
    pin: Annotated[bool, option("Only on the nodes that were chosen.", "--pin")] = False,
    image: Annotated[str, option("Container image.")] = "job:latest",
    command: Annotated[str | None, option("[default: that of the image].")] = None,
    gpu_resource: Annotated[str, option("Name of the resource of GPUs.")] = "nvidia.com/gpu",
    output: OptionalOutput = None,
) -> None:
    """Write a Kubernetes List for kubectl: an Indexed Job per running job, pods all or none.

    Example: optsched manifest plan.quota.json --gang volcano --queue research -o jobs.json
    """
    try:
        arguments = None if command is None else tuple(shlex.split(command))
    except ValueError as error:
        raise InputError(f"command: {error} in {command!r:.60}") from None
    options = Options(
        gang=gang, queue=queue, gpus_per_pod=gpus_per_pod, pin=pin, image=image, command=arguments,  # type: ignore[arg-type]
        gpu_resource=gpu_resource,
    )  # fmt: skip
    check_outputs([output], [None if str(file) == "-" else file, schedule])
    gangs, notes = _gangs(file, schedule)
    written = msgspec.json.encode(kubernetes.manifest(gangs, options))
    text = msgspec.json.format(written, indent=2) + b"\n"
    for job in gangs:
        pods, gpus = pods_of(job, gpus_per_pod, pin=pin)
        if more := pods * gpus - job.gpus:
            notes.append(f"job {job.name}: its equal pods need {more} GPUs beyond the quota")
    if output is not None:
        write_atomic(output, text)
    else:
        sys.stdout.write(text.decode())
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _gangs(file: Path, schedule: Path | None) -> tuple[list[Gang], list[str]]:
    """Return the jobs to start, and notes."""
    name, text = stdin_or_file(file)
    with without_collector():
        tree = parse(text, name)
    found = tree.get("format") if isinstance(tree, dict) else None
    family = found.partition("/")[0] if isinstance(found, str) else ""
    if family != "optsched.quota" and schedule is not None:
        raise InputError("schedule: goes with a quota plan")
    if family == "optsched.decision" or (
        found is None and isinstance(tree, dict) and "error" in tree
    ):
        answer = read_answer(tree, name)
        released = ", ".join(answer.release or [])
        notes = [f"to be released, so delete these jobs: {released}"] if released else []
        return kubernetes.of_answer(answer), notes
    if family == "optsched.quota":
        plan = quota_json.from_tree(tree, name)
        if schedule is not None:
            return kubernetes.of_plan(plan, Schedule.read(schedule)), []
        result = optsched.solve(plan, time_limit=_PLAN_SECONDS)
        if result.schedule is None:
            print(f"{result.status}: {result.reason or 'nothing found'}", file=sys.stderr)
            raise typer.Exit(1)
        return kubernetes.of_plan(plan, result.schedule), []
    raise InputError(
        f"{name}: format: expected optsched.quota/1 or optsched.decision/1, "
        f"got {format_json(found) if found is not None else 'nothing'}"
    )
