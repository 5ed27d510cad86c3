"""Requests as lines of JSON: every query, and states of GPUs that requests change."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from time import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.bandwidth import BottleneckBandwidth, Dispatcher, Policy
from optsched.bandwidth.models import model_document
from optsched.bandwidth.placement.document import policy_from_tree
from optsched.bandwidth.topology import documents
from optsched.bandwidth.topology.rates import KILOBYTES, kilobytes
from optsched.errors import Infeasible, InputError
from optsched.io.strict_json import decode, format_json
from optsched.io.values import did_you_mean
from optsched.plan.snapshot import from_tree as snapshot_from_tree
from optsched.service import requests
from optsched.service.answers import Reply, replied
from optsched.service.changes import Change, Decision, Status
from optsched.service.requests import QUERIES, Document, Id

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from optsched.bandwidth import BandwidthModel, ClusterState
    from optsched.plan import ClusterSnapshot


class _OnState(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    state: str = ""
    """Name of an open state."""
    id: Id = None


class _Search(_OnState, kw_only=True):
    policy: Document | None = None
    deadline: float | None = None


class Open(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Name a state; later requests refer to it, and change it."""

    state: Document | None = None
    """``optsched.state/1``."""
    snapshot: Document | None = None
    """``optsched.snapshot/1`` instead: jobs with facts, which `Change` changes."""
    name: str = ""
    """By default, the state of requests that name none."""
    cluster: Document | None = None
    """Without cluster and model: those of the state that had the name."""
    model: Document | None = None
    policy: Document | None = None
    """Rules of requests without a policy."""
    traffic: str = "given"
    id: Id = None


class Choose(_Search, kw_only=True):
    """Choose free GPUs; with a job, it starts on them."""

    gpus: int
    job: str | None = None
    demand: float | None = None
    """GB/s of the job [default: what the GPUs reach alone]."""
    best: int | None = None
    explain: bool = False


class Gang(_Search, kw_only=True):
    """Choose for several jobs that all start, or none."""

    jobs: dict[str, int]


class Scores(_Search, kw_only=True):
    """Score every host."""

    gpus: int
    packing: float | None = None


class WhatIf(_Search, kw_only=True):
    """Compare a choice of free GPUs with the best one."""

    gpus: str


class Take(_OnState, kw_only=True):
    """Start a job on free GPUs."""

    job: str
    gpus: str
    demand: float | None = None


class Give(_OnState, kw_only=True):
    """End a job."""

    job: str


class Move(_OnState, kw_only=True):
    """Move a job to free GPUs, or resize it: to some of its own and free ones."""

    job: str
    gpus: str


class Fail(_OnState, kw_only=True):
    """GPUs are down, or up again."""

    gpus: str


class Read(_OnState, kw_only=True):
    """Return the state as a document."""


class _ChangeOf(Change, kw_only=True, frozen=True):
    """A change of a state that was opened from a snapshot."""

    state: str = ""
    id: int | str | None = None  # type: ignore[assignment]


class OpenState:
    """A state and the dispatchers of its cluster, by rules."""

    def __init__(
        self,
        model: BandwidthModel,
        state: ClusterState,
        policy: Policy | None = None,
        traffic: Any = "given",
    ) -> None:
        self.model, self.state, self.traffic = model, state, traffic
        self._of = lru_cache(maxsize=256)(self._dispatcher)
        self.default = self._of(policy or Policy())

    def _dispatcher(self, policy: Policy) -> Dispatcher:
        return Dispatcher(self.model.cluster, self.model, policy=policy, traffic=self.traffic)

    def dispatcher(self, rules: Document | None) -> Dispatcher:
        """Return the dispatcher for the rules of a request."""
        if rules is None:
            return self.default
        return self._of(policy_from_tree(rules, "policy"))

    def check_change(self, verb: str) -> None:
        """Refuse a change that this state does not take."""

    def choose(self, body: Choose) -> Any:
        """Choose, and start the job if there is one."""
        chooser = self.dispatcher(body.policy)
        if body.job is not None:
            self.check_change("choose with a job")
        if body.best is not None and body.job is not None:
            raise InputError("job: expected none with best; a job starts on one choice")
        if body.demand is not None and body.job is None:
            raise InputError("demand: expected a job that it belongs to")
        demand = None if body.demand is None else kilobytes("demand", body.demand)
        if body.best is None and not body.explain:  # the path of a scheduler's loop
            gpus, value = chooser.choose(self.state, body.gpus, body.deadline)
            found: Any = {"gpus": self.state.written(gpus), "bandwidth": value / KILOBYTES}
            if chooser.model.assumed:
                found["assumed"] = chooser.model.assumed
        else:
            found = requests.chosen(body, chooser, self.state)
            gpus = self.state.free_ids(found.gpus) if body.job is not None else ()
        if body.job is not None:
            self.state = self.state.take(gpus, body.job, demand)
        return found

    def gang(self, body: Gang) -> Any:
        """Choose for all jobs, and start them."""
        self.check_change("gang")
        chooser, state = self.dispatcher(body.policy), self.state
        found = chooser.gang(state, body.jobs, body.deadline)
        for name, one in found.items():
            state = state.take(one.gpus, name)
        written, self.state = self.state.written, state
        rows = {name: {"gpus": written(one.gpus), "bandwidth": one.value / KILOBYTES}
                for name, one in found.items()}  # fmt: skip
        assumed = {"assumed": chooser.model.assumed} if chooser.model.assumed else {}
        return {"jobs": rows, **assumed}

    def scores(self, body: Scores) -> Any:
        """Score hosts."""
        return requests.scored(body, self.dispatcher(body.policy), self.state)

    def what_if(self, body: WhatIf) -> Any:
        """Compare."""
        return requests.compared(body, self.dispatcher(body.policy), self.state)

    def take(self, body: Take) -> Any:
        """Start a job."""
        demand = None if body.demand is None else kilobytes("demand", body.demand)
        return self._after("take", body.gpus, body.job, demand)

    def give(self, body: Give) -> Any:
        """End a job."""
        return self._after("give", body.job)

    def resize(self, body: Move) -> Any:
        """Change the number of GPUs of a job."""
        return self._after("resize", body.job, body.gpus)

    def move(self, body: Move) -> Any:
        """Move a job."""
        return self._after("move", body.job, body.gpus)

    def fail(self, body: Fail) -> Any:
        """Take GPUs out; their jobs keep the others."""
        hit = self.state.jobs_on(body.gpus)
        return {**self._after("fail", body.gpus), "jobs": hit}

    def repair(self, body: Fail) -> Any:
        """Put GPUs back."""
        return self._after("repair", body.gpus)

    def read(self, body: Read) -> Any:
        """Return the state."""
        return {"state": msgspec.Raw(documents.state_json(self.state))}

    def change(self, body: _ChangeOf) -> Any:
        """Make several changes or none."""
        raise InputError("do: change goes with a snapshot; this state has take, give, move, fail")

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the state."""
        self.state.write(path)

    def _after(self, verb: str, *given: Any) -> dict[str, Any]:
        """Change the state by one of its methods."""
        self.check_change(verb)
        if verb in ("fail", "repair") and not given[0]:
            raise InputError("gpus: expected GPUs such as 'n01:0-3 n02', got none")
        self.state = getattr(self.state, verb)(*given)
        return {"free": len(self.state.free)}


class OpenSnapshot(OpenState):
    """A live cluster in memory; the answers are those of the service to the same changes."""

    def __init__(self, snapshot: ClusterSnapshot, model: Document | None) -> None:
        known: BandwidthModel = BottleneckBandwidth(snapshot.cluster)
        if model is not None:
            known = model_document.from_tree(model, "model", snapshot.cluster)
            moved = replace(snapshot.state, cluster=known.cluster)
            snapshot = replace(snapshot, state=moved)
        super().__init__(known, snapshot.state)
        self.status, self.model_document = Status.of(snapshot, 0, int(time())), model
        self._by_policy: dict[Policy, Dispatcher] = {}

    def change(self, body: _ChangeOf) -> Any:
        """Make several changes or none."""
        if body.version not in (None, self.status.version):
            raise Infeasible(f"version: expected {self.status.version}, got {body.version}")
        made = Decision(self.status, self.model, self._by_policy).make(body)
        self.status, self.state = made.status, made.status.state
        return made.answer

    def read(self, body: Read) -> Any:
        """Return the snapshot of this moment, and its version."""
        return {"snapshot": msgspec.Raw(self.present()), "version": self.status.version}

    def present(self) -> bytes:
        """Return the snapshot of this moment as a document."""
        return self.status.snapshot("").to_json()

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshot of this moment."""
        self.status.snapshot("").write(path)

    def check_change(self, verb: str) -> None:
        """Refuse changes without facts of jobs."""
        raise InputError(f"do: expected change to change a snapshot, got {verb}")


ON_STATE: Final[dict[str, tuple[Any, Callable[[OpenState, Any], Any]]]] = {
    "choose": (Choose, OpenState.choose), "gang": (Gang, OpenState.gang),
    "scores": (Scores, OpenState.scores), "what_if": (WhatIf, OpenState.what_if),
    "take": (Take, OpenState.take), "give": (Give, OpenState.give),
    "resize": (Move, OpenState.resize), "move": (Move, OpenState.move),
    "fail": (Fail, OpenState.fail), "repair": (Fail, OpenState.repair),
    "read": (Read, lambda found, body: found.read(body)),
    "change": (_ChangeOf, lambda found, body: found.change(body)),
}  # fmt: skip
"""Bodies and functions of the requests to an open state."""

VERBS: Final = dict.fromkeys((*QUERIES, "open", *ON_STATE, "help"))
"""Values of ``do``."""


class Session:
    """Answers lines of requests; keeps the open states."""

    def __init__(self) -> None:
        self.states: dict[str, OpenState] = {}
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
            found = self._call(tree)
            if given is not None and isinstance(found, dict):
                return {"id": given, **found}
            return found

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
            return {"do": {name: _fields(name) for name in VERBS}}
        if verb == "open":
            return self._open(decode(tree, Open, "body"))
        if verb in ("plan", "clear") and "snapshot" not in tree:
            live = self._state(tree.pop("state", ""))
            if not isinstance(live, OpenSnapshot):
                raise InputError("state: expected one that was opened from a snapshot")
            tree |= {"snapshot": msgspec.json.decode(live.present()), "model": live.model_document}
        if verb not in ON_STATE or (verb in QUERIES and not self._is_open(tree.get("state", ""))):
            return QUERIES[verb].answer(tree, "body")
        kind, function = ON_STATE[verb]
        body = decode(tree, kind, "body")
        return function(self._state(body.state), body)

    def _state(self, name: Any) -> OpenState:
        found = self.states.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(sorted(filter(None, self.states))) or "none has a name"
            got = format_json(name)
            raise InputError(f"state: expected the name of an open state ({known}), got {got}")
        return found

    def _is_open(self, name: Any) -> bool:
        return isinstance(name, str) and (name != "" or "" in self.states)

    def _open(self, body: Open) -> Any:
        if (body.state is None) == (body.snapshot is None):
            raise InputError("state: expected either state or snapshot")
        if body.snapshot is not None:
            if body.cluster is not None or body.policy is not None or body.traffic != "given":
                raise InputError("snapshot: expected neither cluster, policy nor traffic with it")
            found = OpenSnapshot(snapshot_from_tree(body.snapshot, "snapshot"), body.model)
            self.states[body.name] = found
            return {"version": 0, "free": len(found.state.free)}
        before = self.states.get(body.name)
        model: BandwidthModel
        if body.model is not None:
            cluster = None if body.cluster is None else _cluster(body.cluster)
            model = model_document.from_tree(body.model, "model", cluster)
        elif body.cluster is not None:
            model = BottleneckBandwidth(_cluster(body.cluster))
        elif before is not None:
            model = before.model
        else:
            raise InputError("cluster: expected a cluster or a model, got none")
        state = documents.state_from_tree(body.state, model.cluster, "state")
        policy = None if body.policy is None else policy_from_tree(body.policy, "policy")
        self.states[body.name] = OpenState(model, state, policy, body.traffic)
        return {"free": len(state.free)}


def _fields(verb: str) -> list[str]:
    """Return the fields of a request."""
    kinds = [QUERIES[verb].body] if verb in QUERIES else []
    kinds += [ON_STATE[verb][0]] if verb in ON_STATE else []
    kinds += [Open] if verb == "open" else []
    names = ["state"] if verb in ("plan", "clear") else []
    return list(dict.fromkeys([*names, *(name for one in kinds for name in one.__struct_fields__)]))


def _cluster(tree: Document) -> Any:
    return documents.cluster_from_tree(tree, "cluster")


def _line(given: Id, reply: Reply) -> bytes:
    """Return the answer, or the refusal with id and the status code of HTTP."""
    if reply.status == 200:
        content = reply.content  # documents in it may have several lines
        return (msgspec.json.format(content, indent=-1) if b"\n" in content else content) + b"\n"
    head = b"" if given is None else b'"id":%b,' % msgspec.json.encode(given)
    return b'{%b"code":%d,%b\n' % (head, reply.status, reply.content[1:])
