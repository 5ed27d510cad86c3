"""Requests as lines of JSON: queries, and clusters in memory that requests read and change."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from optsched.bandwidth.topology import documents
from optsched.errors import InputError
from optsched.io.strict_json import decode, format_json
from optsched.io.values import did_you_mean
from optsched.plan import ClusterSnapshot
from optsched.service.answers import Reply, replied
from optsched.service.changes import Changed, Decision, Parts, Present
from optsched.service.known import Known
from optsched.service.queries import QUERIES, ask
from optsched.service.requests import (
    Body,
    ClusterDocument,
    Id,
    ModelDocument,
    SnapshotDocument,
    StateDocument,
    model_of,
    snapshot_of,
)


class Open(Body, kw_only=True):
    """Name a cluster in memory; later requests refer to it, and change it."""

    name: str = ""
    """By default, the cluster of requests that name none."""
    snapshot: SnapshotDocument | None = None
    state: StateDocument | None = None
    """Instead of a snapshot, with cluster or model: no facts of jobs."""
    cluster: ClusterDocument | None = None
    """Without cluster and model: those of the cluster that had the name."""
    model: ModelDocument | None = None


VERBS: Final = {
    **{name: query.body for name, query in QUERIES.items()},
    "open": Open, "change": Parts, "read": Body, "help": Body,
}  # fmt: skip
"""Bodies by the values of ``do``."""

_ON_CLUSTER: Final = {name for name, query in QUERIES.items() if query.on_cluster}


class Session:
    """Answers lines of requests; keeps clusters in memory."""

    def __init__(self) -> None:
        self.clusters: dict[str, Known] = {}
        self.refused = 0
        """Number of lines without an answer."""

    def answer(self, line: bytes) -> bytes:
        """Return the answer to one line: a line with the same ``id``."""
        given: Id = None

        def call(tree: Any) -> Any:
            nonlocal given
            if not isinstance(tree, dict):
                raise InputError(f"body: expected an object, got {format_json(tree)}")
            if type(tree.get("id")) in (int, str):
                given = tree["id"]  # also of a refused line
            return self._call(tree)

        reply = replied(call, line, None)
        self.refused += reply.status != 200
        return _line(given, reply)

    def _call(self, tree: dict[str, Any]) -> Any:
        verb = tree.pop("do", None)
        if not isinstance(verb, str) or verb not in VERBS:
            got = "nothing" if verb is None else format_json(verb)
            hint = did_you_mean(verb, VERBS) if isinstance(verb, str) else ""
            raise InputError(f"do: expected one of {', '.join(VERBS)}, got {got}{hint}")
        if verb == "help":
            rows = {name: getattr(kind, "__struct_fields__", kind) for name, kind in VERBS.items()}
            return {"id": tree.get("id"), "do": rows}
        if verb == "open":
            return self._open(decode(tree, Open, "body"))
        if verb in QUERIES and not (verb in _ON_CLUSTER and self._is_open(tree)):
            return ask(verb, tree)
        known = self._known(tree.pop("state", ""))
        if verb in QUERIES:
            return ask(verb, tree, known)
        if verb == "change":
            body = decode(tree, Parts, "body")
            made = Decision(known.status, known.model, known.dispatchers).make(body)
            known.status, made.answer.id = made.status, body.id
            return made.answer
        found = Present.of(known)
        found.id = decode(tree, Body, "body").id
        return found

    def _is_open(self, tree: dict[str, Any]) -> bool:
        """Whether a request names a cluster in memory, or has none and one is open without name."""
        name = tree.get("state", "")
        return not (
            "snapshot" in tree or isinstance(name, dict) or (name == "" and "" not in self.clusters)
        )

    def _known(self, name: Any) -> Known:
        found = self.clusters.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(sorted(filter(None, self.clusters))) or "none has a name"
            got = format_json(name)
            raise InputError(f"state: expected the name of an open cluster ({known}), got {got}")
        return found

    def _open(self, body: Open) -> Changed:
        if (body.state is None) == (body.snapshot is None):
            raise InputError("state: expected either state or snapshot")
        before = self.clusters.get(body.name)
        if body.snapshot is not None:
            if body.cluster is not None:
                raise InputError("snapshot: has a cluster, expected none beside it")
            found, model = snapshot_of(body.snapshot, body.model)
        else:
            model = None if before is None else before.model
            if model is None or not body.cluster is body.model is None:
                model = model_of(body.cluster, body.model)
            found = ClusterSnapshot(documents.state_from_tree(body.state, model.cluster, "state"))
        self.clusters[body.name] = known = Known(found, model)
        return Changed(id=body.id, version=0, free=len(known.status.state.free))


def _line(given: Id, reply: Reply) -> bytes:
    """Return the answer, or the refusal with id and the status code of HTTP."""
    if reply.status == 200:
        content = reply.content  # documents in it may have several lines
        return (msgspec.json.format(content, indent=-1) if b"\n" in content else content) + b"\n"
    head = b"" if given is None else b'"id":%b,' % msgspec.json.encode(given)
    return b'{%b"code":%d,%b\n' % (head, reply.status, reply.content[1:])
