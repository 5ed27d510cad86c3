"""``optsched dispatch``: which GPUs a request gets, once or for a stream of requests.

With ``--stream`` one JSON request a line, one answer a line, in order.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec
import typer

import optsched
from optsched.bandwidth import BottleneckBandwidth, Cluster, Dispatcher
from optsched.bandwidth.models.model_document import read_model
from optsched.bandwidth.topology import state_document
from optsched.bandwidth.topology.rates import KILOBYTES, kilobytes
from optsched.cli.options import AsJson, OptionalOutput, parse_options
from optsched.cli.output import answer_lines
from optsched.errors import Infeasible, InputError
from optsched.io.files import check_outputs
from optsched.io.strict_json import parse
from optsched.problems.gpus.document import policy_from_tree
from optsched.problems.gpus.explain import to_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.bandwidth import BandwidthModel, ClusterState, Policy

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
    check_outputs([output], [state, cluster, model])
    known = _model(cluster, model)
    running = state_document.read(state, known.cluster)
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
        answer_all(known, running, sys.stdin.buffer, sys.stdout.buffer, **rules)
        return
    if as_json + explain + hostfile > 1:
        raise InputError("json, explain, hostfile: each prints the answer in its own way; give one")
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
        print(to_json(choice, result).decode(), end="")
    elif hostfile:
        print(choice.hostfile(), end="")
    else:
        print(choice.explain() if explain else problem.cluster.written(choice.gpus))


def _model(cluster: Path | None, model: Path | None) -> BandwidthModel:
    own = None if cluster is None else Cluster.read(cluster)
    if model is not None:
        return read_model(model, own)
    if own is None:
        raise InputError("cluster, model: give --cluster, --model or both")
    return BottleneckBandwidth(own)


def _policy(given: list[str] | None) -> Policy:
    """The rules on counts; hosts may be separated by commas."""
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


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A line: a request for GPUs, the end of a job, or another state."""

    gpus: int | None = None
    name: str | None = None
    demand: float | None = None
    give: str | None = None
    state: Any = None
    policy: Any = None
    id: int | str | None = None


class Answer(msgspec.Struct, omit_defaults=True):
    """A line: the GPUs and their bandwidth in GB/s, or what is wrong with the request."""

    id: int | str | None = None
    gpus: str | None = None
    bandwidth: float | None = None
    free: int | None = None
    error: str | None = None


def answer_all(
    model: BandwidthModel,
    state: ClusterState,
    lines: BinaryIO,
    answers: BinaryIO,
    *,
    policy: Policy,
    tolerance: float = 0.0,
    traffic: Any = "given",
) -> None:
    """Answer every line; a bad one gets an error object, and the next is read.

    Parameters
    ----------
    model, state, policy, tolerance, traffic
        As in `GpuPlacement`; the state that the first line finds.
    lines, answers
        An answer is written before the next line is read.
    """

    @cache
    def dispatcher(rules: Policy) -> Dispatcher:
        return Dispatcher(model.cluster, model, policy=rules, tolerance=tolerance, traffic=traffic)

    dispatcher(policy)  # what is wrong with it, is so before the first line
    decoder, encode = msgspec.json.Decoder(Request), msgspec.json.Encoder().encode
    written = _writer(model.cluster)

    def answer(number: int, line: bytes) -> bytes:
        nonlocal state
        found = Answer()
        try:
            request = decoder.decode(line)
            found.id = request.id
            state = _step(request, found, state, dispatcher, policy, written)
        except (InputError, Infeasible, msgspec.MsgspecError, UnicodeDecodeError) as error:
            found.error = str(error)
        return encode(found) + b"\n"

    answer_lines(lines, answers, answer)


def _step(
    request: Request,
    answer: Answer,
    state: ClusterState,
    dispatcher: Callable[[Policy], Dispatcher],
    policy: Policy,
    written: Callable[[tuple[int, ...]], str],
) -> ClusterState:
    """Fill the answer; the state after the request."""
    asked = [key for key in ("gpus", "give", "state") if getattr(request, key) is not None]
    if len(asked) != 1:
        raise InputError(f"expected one of gpus, give, state, got {' and '.join(asked) or 'none'}")
    if request.gpus is None and (request.name or request.policy or request.demand is not None):
        raise InputError("name, demand, policy: go with gpus")
    if request.demand is not None and request.name is None:
        raise InputError("demand: goes with the name of the job that starts")
    if request.give is not None:
        state = state.give(request.give)
        answer.free = len(state.free)
        return state
    if request.state is not None:
        tree = parse(msgspec.json.encode(request.state).decode(), "state")
        state = state_document.from_tree(tree, state.cluster, "state")
        answer.free = len(state.free)
        return state
    rules = policy if request.policy is None else policy_from_tree(request.policy, "policy")
    gpus, bandwidth, alone, _ = dispatcher(rules).answer(state, request.gpus)  # type: ignore[arg-type]
    if request.name is not None:
        wanted = alone if request.demand is None else kilobytes("demand", request.demand)
        state = state.take(gpus, request.name, wanted)
    answer.gpus, answer.bandwidth = written(gpus), bandwidth / KILOBYTES
    return state


def _writer(cluster: Cluster) -> Callable[[tuple[int, ...]], str]:
    """`Cluster.written` for sorted GPUs, which remembers what it wrote for a host."""
    host_of = cluster.host_of.tolist()
    part = cache(cluster.written)

    def written(gpus: tuple[int, ...]) -> str:
        parts = []
        begin = 0
        for i in range(1, len(gpus) + 1):
            if i == len(gpus) or host_of[gpus[i]] != host_of[gpus[begin]]:
                parts.append(part(gpus[begin:i]))
                begin = i
        return " ".join(parts)

    return written
