"""``optsched dispatch``: which GPUs a request gets, once or for a stream of requests."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from optsched.bandwidth import BandwidthModel, ClusterState, Policy


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
    require: Annotated[
        str | None, typer.Option(help="Level of which one domain holds all.")
    ] = None,
    prefer: Annotated[
        str | None, typer.Option(help="Narrowest level that is tried, then those above.")
    ] = None,
    balance: Annotated[str, typer.Option(help="free, even or exact counts on hosts.")] = "free",
    max_hosts: Annotated[int | None, typer.Option(help="Most hosts.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="A host not to use; repeat.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="A host to use; repeat.")] = None,
    same_type: Annotated[bool, typer.Option("--same-type", help="Hosts of one type.")] = False,
    tolerance: Annotated[
        str, typer.Option(help="Bandwidth given up for a better rest: 1% or 0.01.")
    ] = "0",
    traffic: Annotated[
        str, typer.Option(help="Demands of running jobs: given, idle, moderate or heavy.")
    ] = "given",
    solver: Annotated[str, typer.Option(help="See `optsched solvers`.")] = "auto",
    explain: Annotated[bool, typer.Option("--explain", help="Say what limits it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print optsched.dispatch/1.")] = False,
    hostfile: Annotated[
        bool, typer.Option("--hostfile", help="Print a hostfile in rank order.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the schedule here.")
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Answer one JSON request per line of stdin.")
    ] = False,
) -> None:
    """Choose the free GPUs with the highest bandwidth beside the running jobs.

    A line of --stream is {"gpus": 8}; with "name" the job starts on them, {"give": NAME} ends it,
    {"state": {...}} begins anew, "id" comes back with the answer.
    """
    from optsched.bandwidth import Policy
    from optsched.errors import InputError
    from optsched.formats import state_json
    from optsched.io.files import check_outputs

    check_outputs([output], [state, cluster, model])
    found = _model(cluster, model)
    running = state_json.read(state, found.cluster)
    policy = Policy(
        required=require, preferred=prefer, balance=balance, max_hosts=max_hosts,  # type: ignore[arg-type]
        same_type=same_type, include=tuple(include) if include else None,
        exclude=tuple(exclude) if exclude else None,
    )  # fmt: skip
    share = _share(tolerance)
    if stream:
        from optsched.cli.dispatch_stream import answer_all

        if gpus is not None or output is not None:
            raise InputError("stream: the requests say how many; --gpus and -o are for one request")
        if explain or as_json or hostfile or solver != "auto":
            raise InputError(
                "stream: --explain, --json, --hostfile and --solver are for one request"
            )
        answer_all(found, running, policy, share, traffic, sys.stdin.buffer, sys.stdout.buffer)
        return
    if gpus is None:
        raise InputError("gpus: how many? give --gpus N, or --stream")
    _once(found, running, gpus, policy, share, traffic, solver, explain, as_json, hostfile, output)


def _once(
    model: BandwidthModel,
    state: ClusterState,
    gpus: int,
    policy: Policy,
    tolerance: float,
    traffic: Any,
    solver: str,
    explain: bool,
    as_json: bool,
    hostfile: bool,
    output: Path | None,
) -> None:
    import optsched
    from optsched.formats.dispatch_json import answer_of, to_json

    problem = optsched.GpuPlacement(
        state, model, gpus, policy=policy, tolerance=tolerance, traffic=traffic
    )
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
    elif explain:
        print(choice.explain())
    else:
        print(problem.cluster.written(choice.gpus))


def _model(cluster: Path | None, model: Path | None) -> BandwidthModel:
    from optsched.bandwidth import BottleneckBandwidth, Cluster
    from optsched.errors import InputError
    from optsched.formats.model_json import read_model

    own = None if cluster is None else Cluster.read(cluster)
    if model is not None:
        return read_model(model, own)
    if own is None:
        raise InputError("cluster, model: give --cluster, --model or both")
    return BottleneckBandwidth(own)


def _share(text: str) -> float:
    """``1%`` or ``0.01`` as a share."""
    from optsched.errors import InputError

    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise InputError(f"tolerance: expected a share such as 1% or 0.01, got {text!r:.60}")
    return value
