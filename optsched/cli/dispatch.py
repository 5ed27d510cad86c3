"""``optsched gpus choose``: choose GPUs for one request, or for a stream of JSON requests."""

from __future__ import annotations

import io
import sys
from functools import lru_cache
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import msgspec
import typer

import optsched
from optsched.bandwidth import BottleneckBandwidth, Cluster, Dispatcher
from optsched.bandwidth.models.model_document import read_model
from optsched.bandwidth.placement.document import policy_from_tree
from optsched.bandwidth.placement.explain import to_json
from optsched.bandwidth.search.dispatcher import PACKING
from optsched.bandwidth.topology import documents
from optsched.bandwidth.topology.rates import KILOBYTES, kilobytes
from optsched.cli.options import AsJson, OptionalOutput, option, parse_options
from optsched.cli.output import answer_lines
from optsched.errors import Infeasible, InputError
from optsched.io.files import check_outputs, decode_text
from optsched.io.strict_json import decode, parse

if TYPE_CHECKING:
    from optsched.bandwidth import BandwidthModel, ClusterState, Policy

_POLICY = "KEY=VALUE such as required=rack, balance=even, max_hosts=2, exclude=n1,n2; repeat."


def choose(
    state: Annotated[Path, option("Free GPUs and jobs: optsched.state/1.", show_default=False)],
    cluster: Annotated[Path | None, option("optsched.cluster/1: links and NICs.")] = None,
    model: Annotated[Path | None, option("Learned bandwidths: optsched.bandwidth/1.")] = None,
    gpus: Annotated[int | None, option("Number of GPUs.", show_default=False)] = None,
    policy: Annotated[list[str] | None, option(_POLICY)] = None,
    traffic: Annotated[str, option("Demands of jobs: given, idle, moderate, heavy.")] = "given",
    solver: Annotated[str, option("See `optsched show`.")] = "auto",
    explain: Annotated[bool, option("Explain what limits the bandwidth.", "--explain")] = False,
    as_json: AsJson = False,
    hostfile: Annotated[bool, option("Print a hostfile in rank order.", "--hostfile")] = False,
    output: OptionalOutput = None,
    stream: Annotated[bool, option("Answer JSON lines of stdin.", "--stream")] = False,
    request: Annotated[
        list[str] | None,
        option("A line of --stream, such as '{\"scores\": 8}'; repeat. -o writes the state after."),
    ] = None,
) -> None:
    """Choose the free GPUs with the highest bandwidth next to the running jobs.

    A line of --stream is {"gpus": 8}; with "name" the job starts on them, {"give": NAME} ends it;
    also best, gang, scores, explain, what_if, resize, move, fail, repair, state and restore: see
    the documentation.

    Example: optsched gpus choose --cluster c.json --state s.json --gpus 8 --explain
    """
    check_outputs([output], [state, cluster, model])
    known = _model(cluster, model)
    running = documents.read_state(state, known.cluster)
    for line in known.assumed:
        print(f"warning: {line}", file=sys.stderr)
    rules = {"policy": _policy(policy), "traffic": traffic}
    if stream or request:
        if any((gpus is not None, output and stream, explain, as_json, hostfile, solver != "auto")):
            raise InputError(
                "stream, request: the requests have the numbers; --gpus, --solver, --explain, "
                "--json, --hostfile, and -o with --stream, are for one request"
            )
        if stream:
            answer_all(known, running, sys.stdin.buffer, sys.stdout.buffer, **rules)  # type: ignore[arg-type]
        else:
            _answer_requests(request or [], known, running, output, rules)
        return
    if as_json + explain + hostfile > 1:
        raise InputError("json, explain, hostfile: each prints the answer in its own way; give one")
    if gpus is None:
        raise InputError("gpus: missing; give --gpus N, or --stream")
    problem = optsched.GpuPlacement(running, known, gpus, **rules)  # type: ignore[arg-type]
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
        print(choice.explain() if explain else problem.state.written(choice.gpus))


def _answer_requests(
    requests: list[str],
    model: BandwidthModel,
    state: ClusterState,
    output: Path | None,
    rules: dict[str, Any],
) -> None:
    """Answer requests of the command line; write the state after them if all succeed."""
    lines, answers = io.BytesIO("".join(f"{r}\n" for r in requests).encode()), io.BytesIO()
    after = answer_all(model, state, lines, answers, **rules)
    print(answers.getvalue().decode(), end="")
    found = [msgspec.json.decode(line) for line in answers.getvalue().splitlines()]
    if any("error" in answer for answer in found):
        raise typer.Exit(2)
    if any("infeasible" in answer for answer in found):
        raise typer.Exit(1)
    if output is not None:
        after.write(output)


def _model(cluster: Path | None, model: Path | None) -> BandwidthModel:
    given = None if cluster is None else Cluster.read(cluster)
    if model is not None:
        return read_model(model, given)
    if given is None:
        raise InputError("cluster, model: give --cluster, --model or both")
    return BottleneckBandwidth(given)


def _policy(given: list[str] | None) -> Policy:
    """Parse the rules; lists are separated by spaces, or by commas if they name no GPU ids."""
    tree = parse_options(given)
    for key in ("include", "exclude", "apart"):
        if isinstance(text := tree.get(key), str):
            tree[key] = text.split(None if ":" in text or " " in text else ",")
    return policy_from_tree(tree, "policy")


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a stream: one of the `VERBS` with its fields."""

    gpus: int | None = None
    scores: int | None = None
    what_if: str | None = None
    gang: dict[str, int] | None = None
    explain: int | None = None
    give: str | None = None
    resize: str | None = None
    move: str | None = None
    fail: str | None = None
    repair: str | None = None
    state: bool | None = None
    restore: Any = None
    name: str | None = None
    demand: float | None = None
    best: int | None = None
    packing: float | None = None
    policy: Any = None
    deadline: float | None = None
    to: str | None = None
    id: int | str | None = None


VERBS: Final = {
    "gpus": ("name", "demand", "best", "policy", "deadline"),
    "scores": ("packing", "policy", "deadline"),
    "what_if": ("policy", "deadline"), "gang": ("policy", "deadline"),
    "explain": ("policy", "deadline"), "give": (), "resize": ("to",), "move": ("to",), "fail": (),
    "repair": (), "state": (), "restore": (),
}  # fmt: skip
"""Verbs of a line, and the fields that go with each; those with a deadline are queries."""


def answer_all(
    model: BandwidthModel,
    state: ClusterState,
    lines: BinaryIO,
    answers: BinaryIO,
    *,
    policy: Policy,
    traffic: Any = "given",
) -> ClusterState:
    """Answer every line and return the state after them; an invalid line gets an error object.

    Parameters
    ----------
    model, state, policy, traffic
        As in `GpuPlacement`; the initial state.
    lines, answers
        An answer is flushed before the next line is read.
    """

    @lru_cache(maxsize=256)
    def dispatcher(rules: Policy) -> Dispatcher:
        return Dispatcher(model.cluster, model, policy=rules, traffic=traffic)

    dispatcher(policy)  # refuses invalid arguments before the first line
    encode = msgspec.json.Encoder().encode

    def answer(number: int, line: bytes) -> bytes:
        nonlocal state
        found: dict[str, Any] = {}
        try:
            name = f"line {number}"
            tree = parse(decode_text(line, name), name)
            if isinstance(tree, dict) and type(tree.get("id")) in (int, str):
                found["id"] = tree["id"]  # also of a refused line
            request = decode(tree, Request, name)
            verb = _verb(tree)
            if "deadline" in VERBS[verb]:
                given = policy
                if request.policy is not None:
                    given = policy_from_tree(request.policy, "policy")
                state = _query(verb, request, found, state, dispatcher(given))
            else:
                state = _change(verb, request, found, state)
        except Infeasible as error:
            found["infeasible"] = str(error)
        except InputError as error:
            found["error"] = str(error)
        return encode(found) + b"\n"

    answer_lines(lines, answers, answer)
    return state


def _verb(given: dict[str, Any]) -> str:
    """Return the verb of a line; refuse two verbs and fields that do not go with it."""
    verbs = [key for key in given if key in VERBS and given[key] is not None]
    if len(verbs) != 1:
        raise InputError(f"expected one of {', '.join(VERBS)}, got {' and '.join(verbs) or 'none'}")
    for key, value in given.items():
        if key not in (verbs[0], "id", *VERBS[verbs[0]]) and value is not None:
            raise InputError(f"{key}: does not go with {verbs[0]}")
    return verbs[0]


def _query(
    verb: str, request: Request, answer: dict[str, Any], state: ClusterState, chooser: Dispatcher
) -> ClusterState:
    """Fill the answer to a query; return the state, in which jobs with a name have started."""
    until = request.deadline

    def choice(gpus: tuple[int, ...], value: int) -> dict[str, Any]:
        return {"gpus": state.written(gpus), "bandwidth": value / KILOBYTES}

    if verb == "scores":
        weight = PACKING if request.packing is None else request.packing
        answer["scores"] = chooser.scores(state, request.scores, until, weight)  # type: ignore[arg-type]
    elif verb == "explain":
        answer["explain"] = chooser.explain(state, request.explain, until).splitlines()  # type: ignore[arg-type]
    elif verb == "gang":
        found = chooser.gang(state, request.gang or {}, until)
        answer["gang"] = {name: choice(one.gpus, one.value) for name, one in found.items()}
        for name, one in found.items():
            state = state.take(one.gpus, name)
    elif verb == "what_if":
        what = chooser.what_if(state, request.what_if or "", until)
        rates = {"best": what.best, "regret": what.regret}
        answer |= {
            **choice(what.gpus, what.share.value), "alone": what.share.standalone / KILOBYTES,
            "victims": {name: lost / KILOBYTES for name, lost in what.victims.items()},
            **{key: None if rate is None else rate / KILOBYTES for key, rate in rates.items()},
            "fault": what.fault,
        }  # fmt: skip
    elif request.best is not None:
        if request.name is not None or request.demand is not None:
            raise InputError("name, demand: do not go with best; a job starts on one choice")
        best = chooser.best(state, request.gpus, request.best, until)  # type: ignore[arg-type]
        answer["choices"] = [choice(one.gpus, one.value) for one in best]
    else:
        if request.demand is not None and request.name is None:
            raise InputError("demand: goes with the name of the job that starts")
        demand = None if request.demand is None else kilobytes("demand", request.demand)
        gpus, value = chooser.choose(state, request.gpus, until)  # type: ignore[arg-type]
        answer |= choice(gpus, value)
        if request.name is not None:
            state = state.take(gpus, request.name, demand)
    if chooser.model.assumed and verb != "scores":
        answer["assumed"] = chooser.model.assumed
    return state


def _change(
    verb: str, request: Request, answer: dict[str, Any], state: ClusterState
) -> ClusterState:
    """Change the state and answer its free GPUs; or answer the state itself."""
    value = getattr(request, verb)
    if verb == "state":
        if value is not True:
            raise InputError("state: expected true, got false")
        answer["state"] = msgspec.json.decode(documents.state_json(state))
        return state
    if verb == "restore":
        state = documents.state_from_tree(value, state.cluster, "restore")
    elif verb in ("resize", "move"):
        if request.to is None:
            raise InputError(f"to: {verb} needs GPUs such as 'n01:0-3 n02'")
        state = getattr(state, verb)(value, request.to)
    elif verb in ("fail", "repair") and not value:
        raise InputError(f"{verb}: expected GPUs such as 'n01:0-3 n02', got none")
    else:
        if verb == "fail":
            answer["jobs"] = state.jobs_on(value)
        state = getattr(state, verb)(value)
    answer["free"] = len(state.free)
    return state
