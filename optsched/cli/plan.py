"""``optsched plan``: what starts on a live cluster, when the others do, what to move."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli import options, say
from optsched.cli.options import argument, only, option
from optsched.cli.output import stdin_or_file, wrote
from optsched.cli.progress import Bar
from optsched.errors import InputError, InternalError
from optsched.io.files import check_outputs, read_text
from optsched.io.strict_json import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Schedule
    from optsched.plan import ClusterSnapshot, MovePlan
    from optsched.plan.starts import Plan


def plan(
    snapshot: Annotated[Path, argument("optsched.snapshot/1; - reads stdin.")],
    output: options.OptionalOutput = None,
    clear: Annotated[str | None, option("Waiting request to make space for.")] = None,
    best: Annotated[int | None, option("Number of cheapest plans of --clear [default: 1].")] = None,
    defragment: Annotated[int | None, option("Most cost of moves that free hosts.")] = None,
    level: Annotated[
        str | None, option("Level of the domains to free by --defragment [default: host].")
    ] = None,
    model: Annotated[Path | None, option("Bandwidths: optsched.bandwidth/1.")] = None,
    policy: Annotated[
        str | None, option("Of expected starts [default: fifo:backfill=first_fit].")
    ] = None,
    spread: Annotated[
        float | None, option("Sigma of true over expected durations [default: 0.5].")
    ] = None,
    history: Annotated[
        Path | None, option("Trace of past jobs: their durations, not --spread, and arrivals.")
    ] = None,
    seed: options.Seed = 0,
    time_limit: Annotated[
        float, option("Seconds for each plan of moves, or for all orders of arrays.", "--time")
    ] = 10.0,
    slurm: Annotated[Path | None, option("squeue --json; SNAPSHOT: scontrol show node -d.")] = None,
    kubernetes: Annotated[
        bool, option("SNAPSHOT is kubectl get nodes,pods -A -o json.", "--kubernetes")
    ] = False,
    cluster: Annotated[Path | None, option("optsched.cluster/1 of --slurm, --kubernetes.")] = None,
    now: Annotated[int | None, option("Time of that output, s since 1970 [default: 0].")] = None,
    save: Annotated[Path | None, option("Write the snapshot here.")] = None,
    previous: Annotated[Path | None, option("Former plan, kept as far as possible.")] = None,
    train: Annotated[
        Path | None, option("Train the job arrays; plan, picture and results go to this folder.")
    ] = None,
    jobs: options.Jobs = None,
    engine: options.EngineName = "loky",
    as_json: options.AsJson = False,
) -> None:
    """Decide what starts now and predict the other starts; or find evictions and moves.

    With -o, the plan (a schedule) or the state after the moves is written. Files named in job
    arrays are in the folder of SNAPSHOT.

    Example: optsched plan snapshot.json --clear big-job
    """
    from optsched.bandwidth import read_model
    from optsched.cluster import read_trace
    from optsched.model.schedule import Schedule
    from optsched.plan.arrays import order_arrays
    from optsched.plan.expected import POLICY, past_jobs
    from optsched.plan.starts import plan as plan_snapshot
    from optsched.solving.fan_out import Engine

    check_outputs([output, save], [snapshot, slurm, model, cluster, previous, history])
    moves = clear is not None or defragment is not None
    starts = {"policy": policy, "spread": spread, "train": train, "history": history, "jobs": jobs,
              "previous": previous, "engine": None if engine == "loky" else engine}  # fmt: skip
    only({"best": best}, clear is not None, "with --clear")
    only({"level": level}, defragment is not None, "with --defragment")
    only(starts, not moves, "without --clear and --defragment")
    only({"spread": spread}, history is None, "without --history")
    only({"train": train}, not as_json, "without --json")
    only({"cluster": cluster, "now": now}, slurm is not None or kubernetes,
         "with --slurm or --kubernetes")  # fmt: skip
    given = _snapshot(snapshot, slurm, kubernetes, cluster, now or 0)
    known = None if model is None else read_model(model)
    if moves:
        limits = {"model": known, "time_limit": time_limit}
        with Bar().clock("evictions and moves"):
            plans = _moves(given, clear, 1 if best is None else best, defragment, level, limits)
        _print_moves(plans, as_json)
        wrote(save, given.write, quiet=as_json)
        wrote(output, plans[0].after().write, quiet=as_json)
        return
    before = None if previous is None else Schedule.read(previous)
    past = None if history is None else past_jobs(read_trace(history, ignore_columns=True), given)
    with Bar().clock("starts, and orders of arrays"):
        found = plan_snapshot(
            given, model=known, policy=POLICY if policy is None else policy, previous=before,
            sigma=0.5 if spread is None else spread, seed=seed,
            factors=past and past.factors, later=past.arrivals if past else (),
            parallel=Engine(engine, jobs),
        )  # fmt: skip
        schedule = order_arrays(found, time_limit=time_limit, previous=before)
    _print_starts(found, schedule, before, as_json)
    if train is None:
        wrote(save, given.write, quiet=as_json)
        wrote(output, schedule.write, quiet=as_json)
    else:
        _train(schedule, train, {save: given.write, output: schedule.write})


def _print_starts(found: Plan, schedule: Schedule, before: Schedule | None, as_json: bool) -> None:
    """Verify a plan; print its starts, assumptions, orders of arrays and changes."""
    from optsched.model.verify import verify
    from optsched.plan.array_request import planned_arrays
    from optsched.plan.arrays import explain_arrays

    if faults := verify(schedule):
        raise InternalError(f"the plan breaks a rule: {faults[0].message}")
    if as_json:
        print(json.dumps(dict(schedule.provenance)))
        return
    arrays = {one.name for one in planned_arrays(schedule)}
    pairs = zip(found.verdicts, found.explain(), strict=True)
    lines = [text for one, text in pairs if one.job.name not in arrays]
    lines += [f"assumed: {text}" for text in found.assumed]
    lines += [f"{len(found.starts)} of {len(found.verdicts)} start now, gap {found.gap:.1%}"]
    lines += explain_arrays(schedule, before)
    lines += [one.text for one in found.changes if one.job not in arrays]
    print(*lines, sep="\n")


def _train(schedule: Schedule, folder: Path, files: Mapping[Path | None, Any]) -> None:
    """Write, draw and train the job arrays of a plan, after all checks."""
    from optsched.arraypipe.commands import check_folder, need_torch
    from optsched.arraypipe.from_plan import check_trainable, train
    from optsched.plots import html

    check_trainable(schedule)
    check_folder(folder)
    need_torch()
    for written, write in files.items():
        wrote(written, write)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.schedule.json"
    wrote(path, schedule.write)
    wrote(folder / "plan.html", lambda page: html.write(schedule, page))
    if not train(schedule, path, folder):
        raise typer.Exit(1)


def _with_instances(tree: Any, folder: Path) -> Any:
    """Replace names of files in the job arrays of a snapshot by their instances."""
    from optsched.arraypipe.profile import Profile
    from optsched.formats.read_problem import read_problem

    jobs = tree.get("jobs") if isinstance(tree, dict) else None
    for job in jobs if isinstance(jobs, list) else ():
        array = job.get("array") if isinstance(job, dict) else None
        if isinstance(array, dict) and isinstance(script := array.get("script"), str):
            array["script"] = str(folder / script)
        if isinstance(array, dict) and isinstance(name := array.get("problem"), str):
            profiled = name.endswith(".profile.json")
            path = folder / name
            array["problem"] = Profile.read(path).problem() if profiled else read_problem(path)
    return tree


def _moves(
    given: ClusterSnapshot, clear: str | None, best: int, budget: int | None, level: str | None,
    limits: dict[str, Any],
) -> list[MovePlan]:  # fmt: skip
    """Return plans of evictions and moves, the best first."""
    from optsched.plan.clearing import alternatives, defragment

    if clear is None:
        return [defragment(given, budget or 0, level="host" if level is None else level, **limits)]
    if budget is not None:
        raise InputError("clear, defragment: expected one of them")
    plans = alternatives(given, clear, best, **limits)
    if not plans:
        say(f"unknown: no plan for {clear} in {limits['time_limit']:g} s; give more --time")
        raise typer.Exit(1)
    return plans


def _print_moves(plans: list[MovePlan], as_json: bool) -> None:
    if as_json:
        print(json.dumps([_document(one) for one in plans]))
        return
    for i, one in enumerate(plans):
        print(*[f"Alternative {i}:"] * bool(i), *one.explain(), sep="\n")


def _document(one: MovePlan) -> dict[str, Any]:
    """Return a plan of moves as JSON."""
    written = one.snapshot.state.written
    return {
        "cost": one.cost, "bound": one.bound, "status": one.status, "evict": one.evict,
        "move": {name: written(gpus) for name, gpus in one.move.items()},
        "request": one.request and one.request.name, "gpus": written(one.gpus), "free": one.free,
    }  # fmt: skip


def _snapshot(
    path: Path, slurm: Path | None, kubernetes: bool, cluster: Path | None, now: int
) -> ClusterSnapshot:
    """Read a snapshot of one of three forms."""
    from optsched.bandwidth import Cluster
    from optsched.plan import live, snapshot

    if slurm is None and not kubernetes:
        name, text = stdin_or_file(path)
        return snapshot.from_tree(_with_instances(parse(text, name), path.parent), name)
    if cluster is None or (slurm is not None and kubernetes):
        raise InputError("cluster: expected --cluster, and --slurm or --kubernetes")
    topology = Cluster.read(cluster)
    if slurm is not None:
        return live.from_slurm(topology, stdin_or_file(path)[1], read_text(slurm), now=now)
    return live.from_kubernetes(topology, stdin_or_file(path)[1], now=now)
