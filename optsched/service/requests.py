"""Requests without HTTP: parsed JSON in, an answer that msgspec encodes out.

`QUERIES` holds every query by name. The HTTP service and the stream of the command line both
use it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from optsched.errors import InputError
from optsched.io.strict_json import decode, placed

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.bandwidth import ClusterState, Dispatcher

Id = int | str | None
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]

_KEPT: Final = 16
"""Dispatchers in memory, by cluster and rules."""


class Query(NamedTuple):
    """A kind of request.

    Parameters
    ----------
    text
        What it does, a line.
    body, result
        Structs of request and answer, for schemas.
    answer
        Answers a parsed body; the second argument begins the messages of refusals.
    example
        A body that is answered on every machine.
    quick
        Whether small requests take less than some milliseconds.
    """

    text: str
    body: Any
    result: Any
    answer: Callable[[Any, str], Any]
    example: dict[str, Any]
    quick: bool = False


class OnCluster(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """GPUs, running jobs and rules of a question about them."""

    state: dict[str, Any]
    """``optsched.state/1``."""
    cluster: dict[str, Any] | None = None
    """``optsched.cluster/1``; not needed with a model."""
    model: dict[str, Any] | None = None
    """``optsched.bandwidth/1``."""
    policy: dict[str, Any] | None = None
    """Rules such as ``{"required": "rack", "max_hosts": 2}``."""
    traffic: str = "given"
    deadline: Seconds = 1.0
    id: Id = None


class Choose(OnCluster):
    """Choose the free GPUs with the highest bandwidth next to the running jobs."""

    gpus: int
    best: int | None = None
    """Number of choices, the best first."""
    explain: bool = False


class Chosen(msgspec.Struct, omit_defaults=True, kw_only=True):
    """GPUs and their bandwidth in GB/s."""

    gpus: str = ""
    bandwidth: float | None = None
    choices: list[dict[str, Any]] | None = None
    explain: list[str] | None = None
    assumed: tuple[str, ...] = ()
    id: Id = None


_CACHE: OrderedDict[bytes, Dispatcher] = OrderedDict()


def choose(tree: Any, name: str) -> Chosen:
    """Answer a `Choose`."""
    from optsched.bandwidth.topology.rates import KILOBYTES

    body = decode(tree, Choose, name)
    chooser, state = _dispatcher(body, name)
    with placed(f"{name}: "):
        assumed = chooser.model.assumed
        if body.best is not None:
            if body.explain:
                raise InputError("explain: goes with one choice; leave out best")
            found = chooser.best(state, body.gpus, body.best, body.deadline)
            rows = [{"gpus": state.written(one.gpus), "bandwidth": one.value / KILOBYTES}
                    for one in found]  # fmt: skip
            return Chosen(choices=rows, assumed=assumed, id=body.id, **rows[0])
        one = chooser.answer(state, body.gpus, body.deadline)
        lines = None
        if body.explain:
            lines = chooser.explain(state, body.gpus, body.deadline).splitlines()
        return Chosen(
            gpus=state.written(one.gpus), bandwidth=one.value / KILOBYTES, explain=lines,
            assumed=assumed, id=body.id,
        )  # fmt: skip


def _dispatcher(body: OnCluster, name: str) -> tuple[Dispatcher, ClusterState]:
    """Return the dispatcher of a body, kept in memory by its cluster and rules, and the state."""
    from optsched.bandwidth import BottleneckBandwidth, Dispatcher
    from optsched.bandwidth.models import model_document
    from optsched.bandwidth.placement.document import policy_from_tree
    from optsched.bandwidth.topology import documents

    if (body.cluster is None) == (body.model is None):
        raise InputError(f"{name}: cluster: expected cluster or model, one of them")
    key = msgspec.json.encode((body.cluster, body.model, body.policy, body.traffic))
    found = _CACHE.pop(key, None)
    if found is None:
        if body.model is not None:
            model = model_document.from_tree(body.model, f"{name}: model")
        else:
            given = documents.cluster_from_tree(body.cluster, f"{name}: cluster")
            model = BottleneckBandwidth(given)
        rules = None if body.policy is None else policy_from_tree(body.policy, f"{name}: policy")
        with placed(f"{name}: "):
            found = Dispatcher(model.cluster, model, policy=rules, traffic=body.traffic)  # type: ignore[arg-type]
    _CACHE[key] = found
    while len(_CACHE) > _KEPT:
        _CACHE.popitem(last=False)
    return found, documents.state_from_tree(body.state, found.cluster, f"{name}: state")


def decide(tree: Any, name: str) -> Any:
    """Answer a document ``optsched.decide/1`` by ``optsched.decision/1``."""
    from optsched.cluster.determined import decide as decide_pools
    from optsched.cluster.determined import document

    pools, given = document.from_tree(tree, name)
    return document.answer_of(pools, decide_pools(pools), given)


CLUSTER: Final = {
    "format": "optsched.cluster/1", "name": "two",
    "types": [{"name": "H100", "gpus": 4, "nic_rate": 50.0}],
    "hosts": [{"name": "n0", "type": "H100"}, {"name": "n1", "type": "H100"}],
}  # fmt: skip
STATE: Final = {
    "format": "optsched.state/1", "free": "n0:2,3 n1", "jobs": [{"name": "a", "gpus": "n0:0,1"}],
}  # fmt: skip
DECIDE: Final = {
    "format": "optsched.decide/1", "scheduler": "priority",
    "agents": [{"name": "n0", "slots": 4}, {"name": "n1", "slots": 4}],
    "groups": [{"name": "vision"}],
    "tasks": [{"name": "a", "slots": 4, "group": "vision"}],
}  # fmt: skip


class Decide(msgspec.Struct, kw_only=True):
    """A resource pool as Determined or Kubernetes see it, or several in `pools`."""

    format: str
    id: Id = None
    pools: list[dict[str, Any]] = []


def _decision() -> Any:
    from optsched.cluster.determined.document import Answer

    return Answer


QUERIES: Final = {
    "choose": Query(
        "Choose the free GPUs with the highest bandwidth.", Choose, Chosen, choose,
        {"cluster": CLUSTER, "state": STATE, "gpus": 4}, quick=True,
    ),
    "decide": Query(
        "Decide as Determined's schedulers or Kubernetes do.", Decide, dict, decide, DECIDE,
        quick=True,
    ),
}  # fmt: skip
"""Every query by its name."""
