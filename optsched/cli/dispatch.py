"""``optsched dispatch``: which GPUs a request gets, once or for a stream of requests."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli.options import AsJson, OptionalOutput, parse_options
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.bandwidth import BandwidthModel, Policy

_POLICY = "KEY=VALUE such as required=rack, balance=even, max_hosts=2, exclude=n1,n2; repeat."


def dispatch(
    state: Annotated[
        Path, typer.Option(help="Free GPUs and running jobs: optsched.state/1.", show_default=False)
    ],
    cluster: Annotated[
        Path | None, typer.Option(help="optsched.cluster/1; bandwidths by its links and NICs.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Measured or learnt bandwidths: optsched.bandwidth/1.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="How many.", show_default=False)] = None,
    policy: Annotated[list[str] | None, typer.Option(help=_POLICY)] = None,
    tolerance: Annotated[
        str, typer.Option(help="Bandwidth given up for a better rest: 1% or 0.01.")
    ] = "0",
    traffic: Annotated[
        str, typer.Option(help="Demands of running jobs: given, idle, moderate or heavy.")
    ] = "given",
    solver: Annotated[str, typer.Option(help="See `optsched solvers`.")] = "auto",
    explain: Annotated[bool, typer.Option("--explain", help="Say what limits it.")] = False,
    as_json: AsJson = False,
    hostfile: Annotated[
        bool, typer.Option("--hostfile", help="Print a hostfile in rank order.")
    ] = False,
    output: OptionalOutput = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Answer one JSON request per line of stdin.")
    ] = False,
) -> None:
    """Choose the free GPUs with the highest bandwidth beside the running jobs.

    A line of --stream is {"gpus": 8}; with "name" the job starts on them, {"give": NAME} ends it,
    {"state": {...}} begins anew, "id" comes back with the answer.
    """
    import optsched
    from optsched.formats import state_json
    from optsched.formats.dispatch_json import answer_of, to_json
    from optsched.io.files import check_outputs

    check_outputs([output], [state, cluster, model])
    known = _model(cluster, model)
    running = state_json.read(state, known.cluster)
    rules: dict[str, Any] = {
        "policy": _policy(policy),
        "tolerance": _share(tolerance),
        "traffic": traffic,
    }
    if stream:
        if any((gpus is not None, output, explain, as_json, hostfile, solver != "auto")):
            raise InputError(
                "stream: the requests say how many; --gpus, --solver, --explain, --json, "
                "--hostfile and -o are for one request"
            )
        from optsched.cli.dispatch_stream import answer_all

        answer_all(known, running, sys.stdin.buffer, sys.stdout.buffer, **rules)
        return
    if gpus is None:
        raise InputError("gpus: how many? give --gpus N, or --stream")
    problem = optsched.GpuPlacement(running, known, gpus, **rules)
    result = optsched.solve(problem, solver)
    if result.schedule is None:
        if result.interrupted:
            raise KeyboardInterrupt
        print(f"{result.status}: {result.reason or 'nothing found'}", file=sys.stderr)
        raise typer.Exit(1)
    choice = problem.choice(result.schedule)
    if output is not None:
        result.schedule.write(output)
    if as_json:
        print(to_json(answer_of(choice, result)).decode(), end="")
    elif hostfile:
        print(choice.hostfile(), end="")
    else:
        print(choice.explain() if explain else problem.cluster.written(choice.gpus))


def _model(cluster: Path | None, model: Path | None) -> BandwidthModel:
    from optsched.bandwidth import BottleneckBandwidth, Cluster
    from optsched.formats.model_json import read_model

    own = None if cluster is None else Cluster.read(cluster)
    if model is not None:
        return read_model(model, own)
    if own is None:
        raise InputError("cluster, model: give --cluster, --model or both")
    return BottleneckBandwidth(own)


def _policy(given: list[str] | None) -> Policy:
    """The rules on counts; hosts may be separated by commas."""
    from optsched.problems.gpus.document import policy_from_tree

    tree = parse_options(given)
    for key in ("include", "exclude"):
        if isinstance(tree.get(key), str):
            tree[key] = tree[key].split(",")
    return policy_from_tree(tree, "policy")


def _share(text: str) -> float:
    """``1%`` or ``0.01`` as a share."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise InputError(f"tolerance: expected a share such as 1% or 0.01, got {text!r:.60}")
    return value
