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

    from optsched.bandwidth import BandwidthModel, ClusterState, Dispatcher
    from optsched.plan import ClusterSnapshot


def _schema(name: str) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema={"$ref": f"#/components/schemas/{name}"})


Id = int | str | None
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Document = dict[str, Any]
ClusterDocument = Annotated[Document, _schema("cluster")]
StateDocument = Annotated[Document, _schema("state")]
ModelDocument = Annotated[Document, _schema("bandwidth")]
PolicyDocument = Annotated[Document, _schema("subset.Policy")]
ScheduleDocument = Annotated[Document, _schema("schedule")]
SnapshotDocument = Annotated[Document, _schema("snapshot")]

_KEPT: Final = 16
"""Dispatchers in memory, by cluster and rules."""


class Query(NamedTuple):
    """A kind of request.

    Parameters
    ----------
    text
        What it does, a line.
    body, result
        Structs of request and answer, or names of documents, for schemas.
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
    example: Document
    quick: bool = False


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: Id = None
    """Comes back with the answer."""


class _Answer(msgspec.Struct, omit_defaults=True, kw_only=True):
    id: Id = None


class OnCluster(_Body, kw_only=True):
    """GPUs, running jobs and rules of a question about them."""

    state: StateDocument
    cluster: ClusterDocument | None = None
    """Not needed with a model."""
    model: ModelDocument | None = None
    policy: PolicyDocument | None = None
    """Rules such as ``{"required": "rack", "max_hosts": 2}``."""
    traffic: str = "given"
    deadline: Seconds = 1.0


class Choose(OnCluster, kw_only=True):
    """Choose the free GPUs with the highest bandwidth next to the running jobs."""

    gpus: int
    best: int | None = None
    """Number of choices, the best first."""
    explain: bool = False


class Choice(msgspec.Struct):
    """GPUs and their bandwidth in GB/s."""

    gpus: str
    bandwidth: float


class Chosen(_Answer, kw_only=True):
    """The choice, or several."""

    gpus: str
    bandwidth: float
    choices: list[Choice] = []
    explain: list[str] = []
    assumed: tuple[str, ...] = ()


_CACHE: OrderedDict[bytes, Dispatcher] = OrderedDict()


def choose(tree: Any, name: str) -> Chosen:
    """Answer a `Choose`."""
    body = decode(tree, Choose, name)
    chooser, state = _dispatcher(body, name)
    with placed(f"{name}: "):
        return chosen(body, chooser, state)


def chosen(body: Any, chooser: Dispatcher, state: ClusterState) -> Chosen:
    """Choose for a body with the fields of `Choose` beside cluster and state."""
    from optsched.bandwidth.topology.rates import KILOBYTES

    lines: list[str] = []
    if body.best is not None and body.explain:
        raise InputError("explain: expected false with best, got true")
    if body.best is None:
        found = [chooser.answer(state, body.gpus, body.deadline)]
    else:
        found = chooser.best(state, body.gpus, body.best, body.deadline)
    if body.explain:
        lines = chooser.explain(state, body.gpus, body.deadline).splitlines()
    rows = [Choice(state.written(one.gpus), one.value / KILOBYTES) for one in found]
    return Chosen(
        id=body.id, gpus=rows[0].gpus, bandwidth=rows[0].bandwidth, explain=lines,
        choices=[] if body.best is None else rows, assumed=chooser.model.assumed,
    )  # fmt: skip


class Scores(OnCluster, kw_only=True):
    """Score every host for a request of so many GPUs."""

    gpus: int
    packing: float | None = None
    """Weight of hosts in use, 0 to 1."""


class Scored(_Answer, kw_only=True):
    """Scores of hosts, 0 to 100; those that no allowed choice uses are left out."""

    scores: dict[str, int]


def scores(tree: Any, name: str) -> Scored:
    """Answer `Scores`."""
    body = decode(tree, Scores, name)
    chooser, state = _dispatcher(body, name)
    with placed(f"{name}: "):
        return scored(body, chooser, state)


def scored(body: Any, chooser: Dispatcher, state: ClusterState) -> Scored:
    """Score for a body with the fields of `Scores` beside cluster and state."""
    from optsched.bandwidth.search.dispatcher import PACKING

    weight = PACKING if body.packing is None else body.packing
    return Scored(id=body.id, scores=chooser.scores(state, body.gpus, body.deadline, weight))


class WhatIf(OnCluster, kw_only=True):
    """Compare a choice of free GPUs with the best one."""

    gpus: str
    """Such as ``n01:0-3 n02``."""


class Compared(_Answer, kw_only=True):
    """What the GPUs get, in GB/s, and what running jobs lose."""

    gpus: str
    bandwidth: float
    alone: float
    best: float | None
    regret: float | None
    victims: dict[str, float]
    fault: str | None
    """Rule of the policy that the GPUs break."""
    assumed: tuple[str, ...] = ()


def what_if(tree: Any, name: str) -> Compared:
    """Answer a `WhatIf`."""
    body = decode(tree, WhatIf, name)
    chooser, state = _dispatcher(body, name)
    with placed(f"{name}: "):
        return compared(body, chooser, state)


def compared(body: Any, chooser: Dispatcher, state: ClusterState) -> Compared:
    """Compare for a body with the fields of `WhatIf` beside cluster and state."""
    from optsched.bandwidth.topology.rates import KILOBYTES

    def rate(value: int | None) -> float | None:
        return None if value is None else value / KILOBYTES

    what = chooser.what_if(state, body.gpus, body.deadline)
    return Compared(
        id=body.id, gpus=state.written(what.gpus), bandwidth=what.share.value / KILOBYTES,
        alone=what.share.standalone / KILOBYTES, best=rate(what.best), regret=rate(what.regret),
        victims={job: lost / KILOBYTES for job, lost in what.victims.items()},
        fault=what.fault, assumed=what.assumed,
    )  # fmt: skip


def _dispatcher(body: OnCluster, name: str) -> tuple[Dispatcher, ClusterState]:
    """Return the dispatcher of a body, kept in memory by its cluster and rules, and the state."""
    from optsched.bandwidth import BottleneckBandwidth, Dispatcher
    from optsched.bandwidth.models import model_document
    from optsched.bandwidth.placement.document import policy_from_tree
    from optsched.bandwidth.topology import documents

    if (body.cluster is None) == (body.model is None):
        raise InputError(f"{name}: cluster: expected either cluster or model")
    key = msgspec.json.encode((body.cluster, body.model, body.policy, body.traffic))
    found = _CACHE.pop(key, None)
    if found is None:
        model: BandwidthModel
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


class Solve(_Body, kw_only=True):
    """Solve an instance."""

    problem: Document
    """A job shop, job array, quota plan, GPU placement, or a schedule without starts."""
    solver: str = "auto"
    objective: str | None = None
    time_limit: Seconds = 10.0
    iterations: int | None = None
    target: int | None = None
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    seed: int = 0
    options: Document = {}
    warm_start: ScheduleDocument | None = None


class Solved(_Answer, kw_only=True):
    """The result, with the schedule as a document."""

    status: str
    objective: int | None
    lower_bound: int | None
    gap: float | None
    seconds: float
    solver: str
    reason: str = ""
    missing: tuple[str, ...] = ()
    schedule: Annotated[Any, _schema("schedule")] = None


def solve(tree: Any, name: str) -> Solved:
    """Answer a `Solve`."""
    import optsched
    from optsched.model.document import from_tree

    body = decode(tree, Solve, name)
    problem = _problem(body.problem, f"{name}: problem", body.objective)
    start = None if body.warm_start is None else from_tree(body.warm_start, f"{name}: warm_start")
    with placed(f"{name}: "):
        found = optsched.solve(
            problem, body.solver, time_limit=body.time_limit, iterations=body.iterations,
            target=body.target, workers=body.workers, seed=body.seed, options=body.options,
            warm_start=start,
        )  # fmt: skip
    return Solved(
        id=body.id, status=found.status, objective=found.objective, gap=found.gap,
        lower_bound=found.lower_bound, seconds=found.seconds, solver=found.solver,
        reason=found.reason, missing=found.missing,
        schedule=None if found.schedule is None else _document(found.schedule),
    )  # fmt: skip


class Verify(_Body, kw_only=True):
    """Check a schedule independently of every solver."""

    schedule: ScheduleDocument
    problem: Document | None = None
    """The instance that it should solve; without it only its consistency is checked."""
    objective: str | None = None


class Violated(msgspec.Struct):
    """A broken rule."""

    kind: str
    message: str


class Verified(_Answer, kw_only=True):
    """Whether a schedule keeps all rules, and at most 100 that it breaks."""

    valid: bool
    count: int
    violations: list[Violated]


def verify(tree: Any, name: str) -> Verified:
    """Answer a `Verify`."""
    from optsched.model.document import from_tree
    from optsched.model.verify import verify as violations

    body = decode(tree, Verify, name)
    schedule = from_tree(body.schedule, f"{name}: schedule")
    problem = None
    if body.problem is not None:
        problem = _problem(body.problem, f"{name}: problem", body.objective)
    elif body.objective is not None:
        raise InputError(f"{name}: objective: expected a problem with it")
    with placed(f"{name}: schedule: "):
        found = violations(schedule, problem)
    rows = [Violated(one.kind, one.message) for one in found[:100]]
    return Verified(id=body.id, valid=not found, count=len(found), violations=rows)


class OnSnapshot(_Body, kw_only=True):
    """A live cluster and its bandwidths."""

    snapshot: SnapshotDocument
    model: ModelDocument | None = None


class Plan(OnSnapshot, kw_only=True):
    """Decide what starts now, and predict when the other requests start."""

    policy: str | None = None
    """Of expected starts, such as ``fifo:backfill=first_fit``."""
    sigma: float = 0.5
    samples: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50
    seed: int = 0
    schedule: bool = False
    """Whether the answer has a schedule."""


class Planned(_Answer, kw_only=True):
    """Verdicts on all waiting requests, in the order of the queue."""

    plan: list[Document]
    gap: float
    bound: int
    explain: list[str]
    assumed: tuple[str, ...] = ()
    schedule: Annotated[Any, _schema("schedule")] = None


def plan(tree: Any, name: str) -> Planned:
    """Answer a `Plan`."""
    from optsched.plan.expected import POLICY
    from optsched.plan.starts import plan as plan_snapshot

    body = decode(tree, Plan, name)
    snapshot, model = _snapshot(body, name)
    with placed(f"{name}: "):
        found = plan_snapshot(
            snapshot, model=model, policy=body.policy or POLICY, sigma=body.sigma,
            samples=body.samples, seed=body.seed,
        )  # fmt: skip
    schedule = found.schedule
    return Planned(
        id=body.id, plan=schedule.provenance["plan"], gap=found.gap, bound=found.bound,
        explain=found.explain(), assumed=found.assumed,
        schedule=_document(schedule) if body.schedule else None,
    )  # fmt: skip


class Clear(OnSnapshot, kw_only=True):
    """Find the cheapest evictions and moves after which a request can start."""

    request: str
    """Name of a waiting job."""
    best: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    """Number of plans, the cheapest first."""
    time_limit: Seconds = 10.0
    """For all plans together."""


class Moves(msgspec.Struct):
    """Evictions and moves, all at once; ``optimal``: no plan is cheaper than the cost."""

    cost: int
    bound: int
    status: str
    evict: tuple[str, ...]
    move: dict[str, str]
    gpus: str
    explain: list[str]


class Cleared(_Answer, kw_only=True):
    """Plans, the cheapest first; none: the time was too short to find any."""

    plans: list[Moves]


def clear(tree: Any, name: str) -> Cleared:
    """Answer a `Clear`."""
    from optsched.plan.clearing import alternatives

    body = decode(tree, Clear, name)
    snapshot, model = _snapshot(body, name)
    limit = body.time_limit / body.best
    with placed(f"{name}: "):
        found = alternatives(snapshot, body.request, body.best, model=model, time_limit=limit)
    written = snapshot.state.written
    return Cleared(id=body.id, plans=[
        Moves(one.cost, one.bound, one.status, one.evict,
              {job: written(gpus) for job, gpus in one.move.items()}, written(one.gpus),
              one.explain())
        for one in found
    ])  # fmt: skip


def _problem(tree: Document, name: str, objective: str | None) -> Any:
    """Read an instance; no files of this machine."""
    from optsched.formats.read_problem import from_tree

    if isinstance(model := tree.get("model"), dict) and "file" in model:
        raise InputError(f"{name}: model: expected a document, got the name of a file")
    problem = from_tree(tree, name)
    if objective is None:
        return problem
    if not hasattr(problem, "with_objective"):
        raise InputError("objective: expected none, only job shops and job arrays have a choice")
    with placed(f"{name}: "):
        return problem.with_objective(objective)


def _snapshot(body: OnSnapshot, name: str) -> tuple[ClusterSnapshot, BandwidthModel | None]:
    from optsched.bandwidth.models import model_document
    from optsched.plan import snapshot

    found, model = snapshot.from_tree(body.snapshot, f"{name}: snapshot"), None
    if body.model is not None:
        model = model_document.from_tree(body.model, f"{name}: model", found.cluster)
    return found, model


def _document(schedule: Any) -> msgspec.Raw:
    from optsched.model.document import write

    return msgspec.Raw(write(schedule))


_CLUSTER: Final = {
    "format": "optsched.cluster/1", "types": [{"name": "H100-SXM", "gpus": 4, "nic_rate": 50.0}],
    "hosts": [{"name": "n0", "type": "H100-SXM"}, {"name": "n1", "type": "H100-SXM"}],
}  # fmt: skip
_STATE: Final = {
    "format": "optsched.state/1", "free": "n0:2,3 n1:2,3",
    "jobs": [{"name": "a", "gpus": "n0:0,1"}, {"name": "b", "gpus": "n1:0,1"}],
}  # fmt: skip
_NOW: Final = {"cluster": _CLUSTER, "state": _STATE, "gpus": 2}
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
    "choose": Query("Choose the free GPUs with the highest bandwidth.", Choose, Chosen, choose,
                    _NOW, quick=True),
    "scores": Query("Score every host for a request.", Scores, Scored, scores, _NOW, quick=True),
    "what_if": Query("Compare a choice of GPUs with the best one.", WhatIf, Compared, what_if,
                     _NOW | {"gpus": "n0:2 n1:2"}, quick=True),
    "decide": Query("Decide as Determined's schedulers or Kubernetes do.", "decide", "decision",
                    decide, _POOL, quick=True),
    "verify": Query("Check a schedule independently of every solver.", Verify, Verified, verify,
                    {"schedule": _SCHEDULE}, quick=True),
    "solve": Query("Solve a job shop, job array, quota plan or GPU placement.", Solve, Solved,
                   solve, {"problem": _SHOP, "time_limit": 1}),
    "plan": Query("Decide what starts now and when the others do.", Plan, Planned, plan,
                  {"snapshot": _SNAPSHOT}),
    "clear": Query("Find the cheapest evictions and moves that make space for a request.", Clear,
                   Cleared, clear, {"snapshot": _SNAPSHOT, "request": "c"}),
}  # fmt: skip
"""Every query by its name."""
