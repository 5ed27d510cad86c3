"""``optsched cluster decide`` as another scheduler, and ``cluster manifest`` for Kubernetes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Final

import typer

from optsched.cli.options import OptionalOutput, argument, option
from optsched.cli.output import stdin_or_file, wrote
from optsched.cluster.determined import decide as decide_pools
from optsched.cluster.determined.document import answer_of, from_tree, read_answer, to_json
from optsched.errors import InputError
from optsched.io.files import check_outputs, write_atomic
from optsched.io.strict_json import format_json, parse, placed, without_collector

if TYPE_CHECKING:
    from optsched.formats.kubernetes import Gang

_PLAN_SECONDS: Final = 60.0
"""Time limit of a plan; most take milliseconds after the kernels are compiled."""


def decide(
    state: Annotated[Path, argument("optsched.decide/1; - reads stdin.")],
    scheduler: Annotated[
        str | None, option("fair_share, priority, kubernetes [default: state].")
    ] = None,
    variant: Annotated[str | None, option("code (as it decides) or docs.")] = None,
    preemption: Annotated[
        bool | None, option("Release tasks for a better priority [default: state, off].")
    ] = None,
    mode: Annotated[str | None, option("Of kubernetes: default or gang.")] = None,
    fit: Annotated[str | None, option("best (fullest agents first) or worst.")] = None,
    output: OptionalOutput = None,
) -> None:
    """Decide which tasks start where and which are released; print optsched.decision/1.

    Options override the settings in the state. The same state gets the same decision.

    Example: optsched cluster decide state.json --scheduler priority --preemption
    """
    given = {
        "scheduler": scheduler, "variant": variant, "preemption": preemption, "mode": mode,
        "fit": fit,
    }  # fmt: skip
    overrides = {key: value for key, value in given.items() if value is not None}
    check_outputs([output], [state])
    name, text = stdin_or_file(state)
    with without_collector():
        pools, given_id = from_tree(parse(text, name), name, overrides)
    answer = to_json(answer_of(pools, decide_pools(pools), given_id))
    wrote(output, answer)
    sys.stdout.write(answer.decode() * (output is None))


def manifest(
    file: Annotated[Path, argument("optsched.quota/1 or optsched.decision/1; - is stdin.")],
    gang: Annotated[str, option("podgroup, volcano, kueue or optsched.")] = "podgroup",
    queue: Annotated[str | None, option("Queue of volcano, or LocalQueue of kueue.")] = None,
    schedule: Annotated[Path | None, option("Schedule of the plan [default: solve it].")] = None,
    gpus_per_pod: Annotated[int | None, option("At most [default: 8, as nodes allow].")] = None,
    pin: Annotated[bool, option("Only on the nodes that were chosen.", "--pin")] = False,
    image: Annotated[str, option("Container image.")] = "job:latest",
    command: Annotated[str | None, option("[default: that of the image].")] = None,
    gpu_resource: Annotated[str, option("Name of the resource of GPUs.")] = "nvidia.com/gpu",
    output: OptionalOutput = None,
) -> None:
    """Write a Kubernetes List for kubectl: an Indexed Job per running job, pods all or none.

    Example: optsched cluster manifest plan.quota.json --gang volcano --queue research -o jobs.json
    """
    import msgspec

    from optsched.formats import kubernetes

    try:
        arguments = None if command is None else tuple(shlex.split(command))
    except ValueError as error:
        raise InputError(f"command: {error} in {command!r:.60}") from None
    options = kubernetes.Options(
        gang=gang, queue=queue, gpus_per_pod=gpus_per_pod, pin=pin, image=image, command=arguments,  # type: ignore[arg-type]
        gpu_resource=gpu_resource,
    )  # fmt: skip
    check_outputs([output], [None if str(file) == "-" else file, schedule])
    gangs, notes = _gangs(file, schedule)
    written = msgspec.json.encode(kubernetes.manifest(gangs, options))
    text = msgspec.json.format(written, indent=2) + b"\n"
    for job in gangs:
        pods, gpus = kubernetes.pods_of(job, gpus_per_pod, pin=pin)
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
    from optsched.formats import kubernetes
    from optsched.model.schedule import Schedule
    from optsched.problems.quota import document as quota_json
    from optsched.solving.solve import solve

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
            given = Schedule.read(schedule)
            with placed(f"{schedule}: "):
                plan.answer(given)  # refuses one that breaks a rule
                return kubernetes.of_plan(plan, given), []
        result = solve(plan, time_limit=_PLAN_SECONDS)
        if result.schedule is None:
            print(f"{result.status}: {result.reason or 'nothing found'}", file=sys.stderr)
            raise typer.Exit(1)
        return kubernetes.of_plan(plan, result.schedule), []
    raise InputError(
        f"{name}: format: expected optsched.quota/1 or optsched.decision/1, "
        f"got {format_json(found) if found is not None else 'nothing'}"
    )
