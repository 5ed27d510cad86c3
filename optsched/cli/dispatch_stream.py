"""``optsched dispatch --stream``: one JSON request a line, one answer a line, in order."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from optsched.bandwidth import Dispatcher
from optsched.bandwidth.rates import KILOBYTES, kilobytes
from optsched.cli.output import answer_lines
from optsched.errors import InputError
from optsched.formats import state_json
from optsched.io.strict_json import parse
from optsched.problems.gpus.document import policy_from_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.bandwidth import BandwidthModel, Cluster, ClusterState, Policy


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
        except (InputError, msgspec.MsgspecError, UnicodeDecodeError) as error:
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
        state = state_json.from_tree(tree, state.cluster, "state")
        answer.free = len(state.free)
        return state
    rules = policy if request.policy is None else policy_from_tree(request.policy, "policy")
    gpus, bandwidth, alone = dispatcher(rules).answer(state, request.gpus)  # type: ignore[arg-type]
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
