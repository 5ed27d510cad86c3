"""``optsched decide`` as another scheduler, and ``optsched plan`` of a live cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli import options  # noqa: TC001 (typer reads the annotations)
from optsched.cli.options import argument, option
from optsched.cli.output import answer_lines, stdin_or_file, wrote
from optsched.cluster.determined import decide as decide_pools
from optsched.cluster.determined.document import Answer, answer_of, from_tree, to_json
from optsched.errors import InputError
from optsched.io.files import check_outputs, decode_text, read_text
from optsched.io.strict_json import parse, without_collector

if TYPE_CHECKING:
    from optsched.plan import ClusterSnapshot, MovePlan


def decide(
    state: Annotated[Path | None, argument("optsched.decide/1; - reads stdin.")] = None,
    scheduler: Annotated[
        str | None, option("fair_share, priority, kubernetes [default: state].")
    ] = None,
    variant: Annotated[str | None, option("code (as it decides) or docs.")] = None,
    preemption: Annotated[
        bool | None,
        option(
            "Release tasks for a better priority [default: state, off].",
            "--preemption/--no-preemption",
        ),
    ] = None,
    mode: Annotated[str | None, option("Of kubernetes: default or gang.")] = None,
    fit: Annotated[str | None, option("best (fullest agents first) or worst.")] = None,
    stream: Annotated[bool, option("A state per line of stdin.", "--stream")] = False,
) -> None:
    """Decide which tasks start where and which are released; print optsched.decision/1.

    Options override the settings in the state. The same state gets the same decision. In a
    stream, "id" is returned with it.

    Example: optsched decide state.json --scheduler priority --preemption
    """
    given = {
        "scheduler": scheduler, "variant": variant, "preemption": preemption, "mode": mode,
        "fit": fit,
    }  # fmt: skip
    overrides = {key: value for key, value in given.items() if value is not None}
    if stream:
        if state is not None and str(state) != "-":
            raise InputError(f"stream: states are read from stdin; leave out {str(state)!r:.60}")
        answer_lines(
            sys.stdin.buffer,
            sys.stdout.buffer,
            lambda number, line: _answer(line, f"line {number}", overrides),
        )
        return
    if state is None:
        raise InputError("state: missing; give a file, - for stdin, or --stream")
    name, text = stdin_or_file(state)
    with without_collector():
        pools, given_id = from_tree(parse(text, name), name, overrides)
    sys.stdout.write(_decided(pools, given_id).decode())


def _answer(line: bytes, name: str, overrides: dict[str, Any]) -> bytes:
    """Answer one line; an invalid one gets an error object."""
    given = None
    try:
        tree = parse(decode_text(line, name), name)
        found = tree.get("id") if isinstance(tree, dict) else None
        if isinstance(found, (int, str)) and not isinstance(found, bool):
            given = found  # also if other fields are invalid
        return _decided(*from_tree(tree, name, overrides))
    except InputError as error:
        return to_json(Answer(id=given, error=str(error)))


def _decided(pools: object, given: object) -> bytes:
    return to_json(answer_of(pools, decide_pools(pools), given))  # type: ignore[arg-type]


def plan(
    snapshot: Annotated[Path, argument("optsched.snapshot/1; - reads stdin.")],
    output: options.OptionalOutput = None,
    clear: Annotated[str | None, option("Waiting request to make space for.")] = None,
    best: Annotated[int, option("Number of cheapest plans of --clear.")] = 1,
    defragment: Annotated[int | None, option("Most cost of moves that free hosts.")] = None,
    level: Annotated[str, option("Level of the domains to free.")] = "host",
    model: Annotated[Path | None, option("Bandwidths: optsched.bandwidth/1.")] = None,
    policy: Annotated[str | None, option("Of expected starts, NAME:KEY=VALUE.")] = None,
    spread: Annotated[float, option("Sigma of true over expected durations.")] = 0.5,
    seed: options.Seed = 0,
    time_limit: Annotated[float, option("Seconds for each plan of moves.", "--time")] = 10.0,
    slurm: Annotated[Path | None, option("squeue --json of scontrol show node -d.")] = None,
    kubernetes: Annotated[
        bool, option("SNAPSHOT is kubectl get nodes,pods -A -o json.", "--kubernetes")
    ] = False,
    cluster: Annotated[Path | None, option("optsched.cluster/1, for these two.")] = None,
    now: Annotated[int, option("Their time, seconds since 1970.")] = 0,
    save: Annotated[Path | None, option("Write the snapshot here.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Decide what starts now and predict the other starts; or find evictions and moves.

    With -o, the plan (a schedule) or the state after the moves is written.

    Example: optsched plan snapshot.json --clear big-job
    """
    from optsched.bandwidth import read_model
    from optsched.plan.expected import POLICY
    from optsched.plan.starts import plan as plan_snapshot

    check_outputs([output, save], [snapshot, slurm, model, cluster])
    given = _snapshot(snapshot, slurm, kubernetes, cluster, now)
    known = None if model is None else read_model(model)
    wrote(save, given.write, quiet=as_json)
    if clear is not None or defragment is not None:
        limits = {"model": known, "time_limit": time_limit}
        plans = _moves(given, clear, best, defragment, level, limits)
        if as_json:
            print(json.dumps([_document(one) for one in plans]))
        for i, one in enumerate(() if as_json else plans):
            print(*[f"Alternative {i}:"] * bool(i), *one.explain(), sep="\n")
        wrote(output, plans[0].after().write, quiet=as_json)
        return
    found = plan_snapshot(given, model=known, policy=policy or POLICY, sigma=spread, seed=seed)
    if as_json:
        print(json.dumps(dict(found.schedule.provenance)))
    else:
        print(*found.explain(), *(f"assumed: {text}" for text in found.assumed), sep="\n")
        print(f"{len(found.starts)} of {len(found.verdicts)} start now, gap {found.gap:.1%}")
    wrote(output, found.schedule.write, quiet=as_json)


def _moves(
    given: ClusterSnapshot, clear: str | None, best: int, budget: int | None, level: str,
    limits: dict[str, Any],
) -> list[MovePlan]:  # fmt: skip
    """Return plans of evictions and moves, the best first."""
    from optsched.plan.clearing import alternatives, defragment

    if clear is None:
        return [defragment(given, budget or 0, level=level, **limits)]
    if budget is not None:
        raise InputError("clear, defragment: expected one of them")
    plans = alternatives(given, clear, best, **limits)
    if not plans:
        print(f"unknown: no plan for {clear} in {limits['time_limit']:g} s; give more --time")
        raise typer.Exit(1)
    return plans


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
        return snapshot.from_tree(parse(text, name), name)
    if cluster is None or (slurm is not None and kubernetes):
        raise InputError("cluster: expected --cluster, and --slurm or --kubernetes")
    topology = Cluster.read(cluster)
    if slurm is not None:
        return live.from_slurm(topology, read_text(path), read_text(slurm), now=now)
    return live.from_kubernetes(topology, read_text(path), now=now)
