"""Queries by name, for the HTTP service and the stream of the command line, with examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from optsched.cluster.determined import decide, document
from optsched.io.strict_json import decode
from optsched.service import requests
from optsched.service.requests import OnCluster, OnSnapshot

if TYPE_CHECKING:
    from optsched.service.known import Known


class Query(NamedTuple):
    """A kind of request.

    `body` and `result` are structs, or names of documents, for schemas; `example` is a body that is
    answered on every machine; small requests of a `quick` query take some milliseconds at most.
    """

    body: Any
    result: Any
    example: dict[str, Any]
    quick: bool = False

    @property
    def text(self) -> str:
        """What it does, a line."""
        found = _decide if isinstance(self.body, str) else self.body
        return (found.__doc__ or "").partition("\n")[0]

    @property
    def on_cluster(self) -> bool:
        """Whether it can be about a cluster in memory."""
        return not isinstance(self.body, str) and issubclass(self.body, (OnCluster, OnSnapshot))


def _decide(tree: Any) -> Any:
    """Decide as Determined's schedulers or Kubernetes do."""
    pools, given = document.from_tree(tree, "body")
    return document.answer_of(pools, decide(pools), given)


_CLUSTER: Final = {
    "format": "optsched.cluster/1", "types": [{"name": "H100-SXM", "gpus": 4, "nic_rate": 50.0}],
    "hosts": [{"name": "n0", "type": "H100-SXM"}, {"name": "n1", "type": "H100-SXM"}],
}  # fmt: skip
_STATE: Final = {
    "format": "optsched.state/1", "free": "n0:2,3 n1:2,3",
    "jobs": [{"name": "a", "gpus": "n0:0,1"}, {"name": "b", "gpus": "n1:0,1"}],
}  # fmt: skip
_ON: Final = {"cluster": _CLUSTER, "state": _STATE}
_NOW: Final = {**_ON, "gpus": 2}
_SHOP: Final = {
    "format": "optsched.jobshop/1", "machines": ["m0", "m1"],
    "jobs": [{"operations": [[0, 3], [1, 2]]}, {"operations": [[1, 4], [0, 1]]}],
}  # fmt: skip
_SCHEDULE: Final = {
    "format": "optsched.schedule/1", "resources": [{"name": "m0"}],
    "operations": [{"duration": 3, "resources": [0]}, {"duration": 1, "resources": [0]}],
    "sequences": [[0, 1]], "starts": [0, 3],
}  # fmt: skip
_SNAPSHOT: Final = {
    "format": "optsched.snapshot/1", "cluster": _CLUSTER, "state": _STATE,
    "jobs": [{"name": "a", "gpus": 2, "move": 5}, {"name": "b", "gpus": 2, "move": 3},
             {"name": "c", "gpus": 4, "level": "host"}],
}  # fmt: skip
_POOL: Final = {
    "format": "optsched.decide/1", "scheduler": "priority",
    "agents": [{"name": "n0", "slots": 4}, {"name": "n1", "slots": 4}],
    "tasks": [{"name": "a", "slots": 4}],
}  # fmt: skip

QUERIES: Final = {
    "choose": Query(requests.Choose, requests.Chosen, _NOW, quick=True),
    "gang": Query(requests.Gang, requests.Ganged, _ON | {"jobs": {"c": 1, "d": 2}}),
    "scores": Query(requests.Scores, requests.Scored, _NOW, quick=True),
    "what_if": Query(requests.WhatIf, requests.Compared, _ON | {"gpus": "n0:2 n1:2"}, quick=True),
    "decide": Query("decide", "decision", _POOL, quick=True),
    "verify": Query(requests.Verify, requests.Verified, {"schedule": _SCHEDULE}, quick=True),
    "solve": Query(requests.Solve, requests.Solved, {"problem": _SHOP, "time_limit": 1}),
    "plan": Query(requests.Plan, requests.Planned, {"snapshot": _SNAPSHOT}),
    "clear": Query(requests.Clear, requests.Cleared, {"snapshot": _SNAPSHOT, "request": "c"}),
}
"""Every query by its name."""

PATHS: Final = {name: f"/v1/{name.replace('_', '-')}" for name in QUERIES}
"""Path of every query."""


def ask(name: str, tree: Any, known: Known | None = None) -> Any:
    """Answer a parsed body of a query, about a cluster in memory or the one in the body."""
    query = QUERIES[name]
    if isinstance(query.body, str):
        return _decide(tree)
    body = decode(tree, query.body, "body")
    found = body.answer(known)
    found.id = body.id
    return found
