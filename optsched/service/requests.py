"""Bodies of queries, which answer themselves, and their answers."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

import optsched
from optsched.bandwidth import BottleneckBandwidth, Dispatcher
from optsched.bandwidth.models import model_document
from optsched.bandwidth.placement.document import policy_from_tree
from optsched.bandwidth.search.dispatcher import PACKING
from optsched.bandwidth.topology import documents
from optsched.bandwidth.topology.rates import KILOBYTES
from optsched.errors import InputError
from optsched.formats import read_problem
from optsched.io.strict_json import placed
from optsched.io.values import integer
from optsched.model.document import from_tree as schedule_from_tree
from optsched.model.document import write
from optsched.model.verify import verify
from optsched.plan import snapshot as snapshot_document
from optsched.plan.clearing import alternatives
from optsched.plan.expected import POLICY
from optsched.plan.starts import plan

if TYPE_CHECKING:
    from optsched.bandwidth import BandwidthModel, ClusterState
    from optsched.plan import ClusterSnapshot
    from optsched.service.known import Known


def schema_of(name: str) -> msgspec.Meta:
    """Return the note on a field that is a document."""
    return msgspec.Meta(extra_json_schema={"$ref": f"#/components/schemas/{name}"})


Id = int | str | None
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Document = dict[str, Any]
ClusterDocument = Annotated[Document, schema_of("cluster")]
StateDocument = Annotated[Document, schema_of("state")]
ModelDocument = Annotated[Document, schema_of("bandwidth")]
PolicyDocument = Annotated[Document, schema_of("subset.Policy")]
ScheduleDocument = Annotated[Document, schema_of("schedule")]
SnapshotDocument = Annotated[Document, schema_of("snapshot")]


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Any request."""

    id: Id = None
    """Comes back with the answer."""


class Answer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Any answer."""

    id: Id = None


class OnCluster(Body, kw_only=True):
    """GPUs, running jobs and rules of a question about them."""

    state: StateDocument | None = None
    """Needed where no cluster in memory is meant."""
    cluster: ClusterDocument | None = None
    """Not needed with a model."""
    model: ModelDocument | None = None
    policy: PolicyDocument | None = None
    """Rules such as ``{"required": "rack", "max_hosts": 2}``."""
    traffic: str = "given"
    """Demands of running jobs: given, idle, moderate, heavy."""
    deadline: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Seconds after which the best choice so far is taken; over HTTP 1."""


class Choose(OnCluster, kw_only=True):
    """Choose the free GPUs with the highest bandwidth next to the running jobs."""

    gpus: int
    best: int | None = None
    """Number of choices, the best first."""
    explain: bool = False

    def answer(self, known: Known | None) -> Chosen:
        """Answer."""
        chooser, state = _dispatcher(self, known)
        if self.best is not None and self.explain:
            raise InputError("explain: expected false with best, got true")
        rows: list[Choice] = []
        if self.best is None:
            gpus, value = chooser.choose(state, self.gpus, self.deadline)
            first = Choice(state.written(gpus), value / KILOBYTES)
        else:
            integer("best", self.best, 1, 1000)
            found = chooser.best(state, self.gpus, self.best, self.deadline)
            rows = [Choice(state.written(one.gpus), one.value / KILOBYTES) for one in found]
            first = rows[0]
        return Chosen(
            gpus=first.gpus, bandwidth=first.bandwidth, choices=rows, assumed=chooser.model.assumed,
            explain=chooser.explain(state, self.gpus, self.deadline).splitlines()
            if self.explain else [],
        )  # fmt: skip


class Choice(msgspec.Struct):
    """GPUs and their bandwidth in GB/s."""

    gpus: str
    bandwidth: float | None


class Chosen(Answer, kw_only=True):
    """The choice, or several."""

    gpus: str
    bandwidth: float | None
    choices: list[Choice] = []
    explain: list[str] = []
    assumed: tuple[str, ...] = ()


class Gang(OnCluster, kw_only=True):
    """Choose GPUs for several jobs that start together."""

    jobs: dict[str, int]
    """Numbers of GPUs by name."""

    def answer(self, known: Known | None) -> Ganged:
        """Answer."""
        chooser, state = _dispatcher(self, known)
        found = chooser.gang(state, self.jobs, self.deadline)
        rows = {name: Choice(state.written(one.gpus), one.value / KILOBYTES)
                for name, one in found.items()}  # fmt: skip
        return Ganged(jobs=rows, assumed=chooser.model.assumed)


class Ganged(Answer, kw_only=True):
    """The choices by name."""

    jobs: dict[str, Choice]
    assumed: tuple[str, ...] = ()


class Scores(OnCluster, kw_only=True):
    """Score every host for a request of so many GPUs."""

    gpus: int
    packing: float = PACKING
    """Weight of hosts in use, 0 to 1."""

    def answer(self, known: Known | None) -> Scored:
        """Answer."""
        chooser, state = _dispatcher(self, known)
        return Scored(scores=chooser.scores(state, self.gpus, self.deadline, self.packing))


class Scored(Answer, kw_only=True):
    """Scores of hosts, 0 to 100; those that no allowed choice uses are left out."""

    scores: dict[str, int]


class WhatIf(OnCluster, kw_only=True):
    """Compare a choice of free GPUs with the best one."""

    gpus: str
    """Such as ``n01:0-3 n02``."""

    def answer(self, known: Known | None) -> Compared:
        """Answer."""

        def rate(value: int | None) -> float | None:
            return None if value is None else value / KILOBYTES

        chooser, state = _dispatcher(self, known)
        what = chooser.what_if(state, self.gpus, self.deadline)
        return Compared(
            gpus=state.written(what.gpus), bandwidth=what.share.value / KILOBYTES,
            alone=what.share.standalone / KILOBYTES, best=rate(what.best), regret=rate(what.regret),
            victims={job: lost / KILOBYTES for job, lost in what.victims.items()},
            fault=what.fault, assumed=what.assumed,
        )  # fmt: skip


class Compared(Answer, kw_only=True):
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


def _dispatcher(body: OnCluster, known: Known | None) -> tuple[Dispatcher, ClusterState]:
    """Return the dispatcher of a body and the state: of a cluster in memory, or of the body."""
    if known is not None:
        if not (body.state is body.cluster is body.model is None):
            raise InputError("cluster: expected state, cluster and model together, or none of them")
        return known.dispatcher(body.policy, body.traffic), known.status.state
    if body.state is None:
        raise InputError("state: expected an object with it, got nothing")
    found = _kept(msgspec.json.encode((body.cluster, body.model, body.policy, body.traffic)))
    return found, documents.state_from_tree(body.state, found.cluster, "state")


@lru_cache(maxsize=16)
def _kept(content: bytes) -> Dispatcher:
    """Return the dispatcher of a cluster, model, policy and traffic, as JSON."""
    cluster, model, policy, traffic = msgspec.json.decode(content)
    known = model_of(cluster, model)
    rules = None if policy is None else policy_from_tree(policy, "policy")
    return Dispatcher(known.cluster, known, policy=rules, traffic=traffic)


def model_of(cluster: Document | None, model: Document | None) -> BandwidthModel:
    """Return the model of a document, or that of the links and network cards of a cluster."""
    if (cluster is None) == (model is None):
        raise InputError("cluster: expected either cluster or model")
    if model is not None:
        return model_document.from_tree(model, "model")
    return BottleneckBandwidth(documents.cluster_from_tree(cluster, "cluster"))


def snapshot_of(
    tree: Document | None, model: Document | None, place: str = ""
) -> tuple[ClusterSnapshot, BandwidthModel | None]:
    """Return a snapshot and the model of its cluster, if there is one."""
    if tree is None:
        raise InputError("snapshot: expected an object with it, got nothing")
    found = snapshot_document.from_tree(tree, f"{place}snapshot")
    if model is None:
        return found, None
    return found, model_document.from_tree(model, f"{place}model", found.cluster)


class Solve(Body, kw_only=True):
    """Solve a job shop, job array, quota plan or GPU placement."""

    problem: Document
    """An instance, or a schedule without starts."""
    solver: str = "auto"
    objective: str | None = None
    time_limit: Seconds = 10.0
    iterations: int | None = None
    target: int | None = None
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    seed: int = 0
    options: Document = {}
    warm_start: ScheduleDocument | None = None

    def answer(self, known: Known | None) -> Solved:
        """Answer."""
        problem = _problem(self.problem, self.objective)
        start = None
        if self.warm_start is not None:
            start = schedule_from_tree(self.warm_start, "warm_start")
        found = optsched.solve(
            problem, self.solver, time_limit=self.time_limit, iterations=self.iterations,
            target=self.target, workers=self.workers, seed=self.seed, options=self.options,
            warm_start=start,
        )  # fmt: skip
        answer = msgspec.convert(found, Solved, from_attributes=True)
        answer.schedule = None if found.schedule is None else _document(found.schedule)
        return answer


class Solved(Answer, kw_only=True):
    """The result, with the schedule as a document."""

    status: str
    objective: int | None
    lower_bound: int | None
    gap: float | None
    seconds: float
    solver: str
    reason: str = ""
    missing: tuple[str, ...] = ()
    schedule: Annotated[Any, schema_of("schedule")] = None


class Verify(Body, kw_only=True):
    """Check a schedule independently of every solver."""

    schedule: ScheduleDocument
    problem: Document | None = None
    """The instance that it should solve; without it only its consistency is checked."""
    objective: str | None = None

    def answer(self, known: Known | None) -> Verified:
        """Answer."""
        schedule = schedule_from_tree(self.schedule, "schedule")
        problem = None
        if self.problem is not None:
            problem = _problem(self.problem, self.objective)
        elif self.objective is not None:
            raise InputError("objective: expected a problem with it")
        with placed("schedule: "):
            found = verify(schedule, problem)
        rows = msgspec.convert(found[:100], list[Violated], from_attributes=True)
        return Verified(valid=not found, count=len(found), violations=rows)


class Violated(msgspec.Struct):
    """A broken rule."""

    kind: str
    message: str


class Verified(Answer, kw_only=True):
    """Whether a schedule keeps all rules, and at most 100 that it breaks."""

    valid: bool
    count: int
    violations: list[Violated]


class OnSnapshot(Body, kw_only=True):
    """A live cluster and its bandwidths."""

    snapshot: SnapshotDocument | None = None
    """Needed where no cluster in memory is meant."""
    model: ModelDocument | None = None


class Plan(OnSnapshot, kw_only=True):
    """Decide what starts now, and predict when the other requests start."""

    policy: Annotated[str, msgspec.Meta(pattern="^[^:]*(:[^:=]+=.*)?$")] = POLICY
    """Of expected starts, such as ``fifo:backfill=first_fit``; not ``module:Class``."""
    sigma: float = 0.5
    samples: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50
    seed: int = 0
    schedule: bool = False
    """Whether the answer has a schedule."""

    def answer(self, known: Known | None) -> Planned:
        """Answer."""
        snapshot, model = _snapshot(self, known)
        found = plan(
            snapshot, model=model, policy=self.policy, sigma=self.sigma,
            samples=self.samples, seed=self.seed,
        )  # fmt: skip
        schedule = found.schedule
        return Planned(
            plan=schedule.provenance["plan"], gap=found.gap, bound=found.bound,
            explain=found.explain(), assumed=found.assumed,
            schedule=_document(schedule) if self.schedule else None,
        )  # fmt: skip


class Planned(Answer, kw_only=True):
    """Verdicts on all waiting requests, in the order of the queue."""

    plan: list[Document]
    gap: float
    bound: int
    explain: list[str]
    assumed: tuple[str, ...] = ()
    schedule: Annotated[Any, schema_of("schedule")] = None


class Clear(OnSnapshot, kw_only=True):
    """Find the cheapest evictions and moves after which a request can start."""

    request: str
    """Name of a waiting job."""
    best: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    """Number of plans, the cheapest first."""
    time_limit: Seconds = 10.0
    """For all plans together."""

    def answer(self, known: Known | None) -> Cleared:
        """Answer."""
        snapshot, model = _snapshot(self, known)
        limit = self.time_limit / self.best
        found = alternatives(snapshot, self.request, self.best, model=model, time_limit=limit)
        written = snapshot.state.written
        return Cleared(plans=[
            Moves(one.cost, one.bound, one.status, one.evict,
                  {job: written(gpus) for job, gpus in one.move.items()}, written(one.gpus),
                  one.explain())
            for one in found
        ])  # fmt: skip


class Moves(msgspec.Struct):
    """Evictions and moves, all at once; ``optimal``: no plan is cheaper than the cost."""

    cost: int
    bound: int
    status: str
    evict: tuple[str, ...]
    move: dict[str, str]
    gpus: str
    explain: list[str]


class Cleared(Answer, kw_only=True):
    """Plans, the cheapest first; none: the time was too short to find any."""

    plans: list[Moves]


def _problem(tree: Document, objective: str | None) -> Any:
    """Read an instance; no files of this machine."""
    if isinstance(model := tree.get("model"), dict) and "file" in model:
        raise InputError("problem.model: expected a document, got the name of a file")
    problem = read_problem.from_tree(tree, "problem")
    if objective is None:
        return problem
    if not hasattr(problem, "with_objective"):
        raise InputError("objective: expected none, only job shops and job arrays have a choice")
    return problem.with_objective(objective)


def _snapshot(
    body: OnSnapshot, known: Known | None
) -> tuple[ClusterSnapshot, BandwidthModel | None]:
    if known is None:
        return snapshot_of(body.snapshot, body.model)
    if body.snapshot is not None or body.model is not None:
        raise InputError("snapshot: expected snapshot and model together, or none of them")
    return known.status.snapshot(), known.model


def _document(schedule: Any) -> msgspec.Raw:
    return msgspec.Raw(write(schedule))
