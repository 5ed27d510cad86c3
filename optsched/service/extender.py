"""Scheduler extender of Kubernetes: filters and ranks nodes for the pods of gangs."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import msgspec
from anyio import to_thread

from optsched.bandwidth.topology.kubernetes import Item, gang_name, requested_gpus
from optsched.errors import Infeasible, InputError
from optsched.io.strict_json import decode, shortened
from optsched.plan import ClusterSnapshot, PlanJob
from optsched.plan.starts import start_one
from optsched.service.answers import read_tree
from optsched.service.routes import Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from optsched.bandwidth import Cluster, ClusterState, Dispatcher, Policy
    from optsched.service.known import Known
    from optsched.service.live import Live

PODS: Final = (
    "optsched/pods", "leaderworkerset.sigs.k8s.io/size",
    "pod-group.scheduling.sigs.k8s.io/min-available",
)  # fmt: skip
"""Labels and annotations of a pod with the number of pods with GPUs in its gang."""

LEVEL: Final = "optsched/level"
"""Label or annotation of a pod: one domain of this level must hold its gang."""

HOLD: Final = 300.0
"""Seconds after its last request until the choice for a gang is dropped."""

DEADLINE: Final = 0.1
"""Seconds to rank the nodes for a pod without a gang."""


class ExtenderArgs(msgspec.Struct):
    """A pod and the names of its candidates, as with ``nodeCacheCapable: true``."""

    Pod: Item
    NodeNames: list[str] | None = None


class FilterResult(msgspec.Struct):
    """Nodes that pass, and the reasons of the others."""

    NodeNames: list[str] | None = None
    FailedNodes: dict[str, str] = {}
    FailedAndUnresolvableNodes: dict[str, str] = {}
    """Nodes where the eviction of pods would not help."""
    Error: str = ""


class HostPriority(msgspec.Struct):
    """A node and its priority, 0 to 10."""

    Host: str
    Score: int


@dataclass
class _Gang:
    """Nodes for the pods of one job."""

    gpus: int
    pods: dict[str, str] = field(default_factory=dict)
    spare: list[str] = field(default_factory=list)
    """Nodes chosen for pods without a request so far."""
    used: float = 0.0
    again: bool = False
    """Whether pods of the gang have been replaced: one may start without the others."""


class Extender:
    """Choose nodes of a cluster for pods, for those of one gang together."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.gangs: dict[str, _Gang] = {}
        self._lock = Lock()
        self._dispatchers: dict[Policy, Dispatcher] = {}

    def filter(self, tree: Any) -> FilterResult:
        """Pass the nodes with GPUs for the pod; of the choice for a gang, the one for the pod."""
        args = decode(tree, ExtenderArgs, "body")
        try:
            scores, failed, final = self._judged(args, rank=False)
        except (InputError, Infeasible) as error:  # a status other than 200 would hide the reason
            return FilterResult(Error=f"optsched: {error}")
        return FilterResult([*scores], failed, final)

    def prioritize(self, tree: Any) -> list[HostPriority]:
        """Rank nodes by the bandwidth of the pod, or of its gang; equal ones by packing."""
        args = decode(tree, ExtenderArgs, "body")
        scores = self._judged(args, rank=True)[0]
        return [HostPriority(name, scores.get(name, 0)) for name in args.NodeNames or ()]

    def _judged(
        self, args: ExtenderArgs, *, rank: bool
    ) -> tuple[dict[str, int], dict[str, str], dict[str, str]]:
        """Return priorities of the nodes that pass, and the reasons of the others."""
        item, nodes = args.Pod, args.NodeNames
        pod, place = item.metadata, f"pod {item.metadata.name:.60}"
        if nodes is None:
            raise InputError("NodeNames: expected names of nodes: set nodeCacheCapable: true")
        if not (gpus := requested_gpus(item, place)):
            return dict.fromkeys(nodes, 0), {}, {}
        texts = pod.annotations | pod.labels
        number = next((texts[key] for key in PODS if key in texts), "1")
        if not number.isdecimal() or not 1 <= int(number[:7]) <= 10**5:
            raise InputError(f"{place}: expected 1 to 100,000 pods, got {number!r:.60}")
        job = PlanJob(
            name=gang_name(item), gpus=int(number) * gpus, pod=gpus, level=texts.get(LEVEL)
        )
        with self._lock:
            gang = self._gang(pod.name, job)
            state, failed, final = self._confined(nodes, job)
            names = [name for name in nodes if name not in failed and name not in final]
            held, scores = _held(state, job.name, gang), dict.fromkeys(names, 0)
            if names and job.gpus > gpus:
                node = gang.pods.get(pod.name, "")
                if node not in scores:
                    try:
                        node = self._chosen(state, job, gang, held, names)
                    except Infeasible as error:
                        return {}, failed, final | dict.fromkeys(names, str(error))
                    gang.pods[pod.name] = node
                some = shortened([*dict.fromkeys([*gang.pods.values(), *gang.spare])])
                text = f"gang {job.name} gets {some}; {place} goes to {node}"
                return {node: 10}, failed, final | dict.fromkeys(scores.keys() - {node}, text)
            if names and rank:
                scores = self._ranked(state, gpus, held, names)
            return scores, failed, final

    def _gang(self, pod: str, job: PlanJob) -> _Gang:
        """Return the choice for a gang, an empty one if other pods replace its pods."""
        now = time.monotonic()
        self.gangs = {name: one for name, one in self.gangs.items() if one.used > now - HOLD}
        gang = self.gangs.get(job.name)
        full = gang is not None and len(gang.pods) * gang.gpus >= job.gpus
        if gang is None or gang.gpus != job.pod or (full and pod not in gang.pods):
            gang = self.gangs[job.name] = _Gang(job.pod, again=full)
        gang.used = now
        return gang

    def _confined(
        self, nodes: list[str], job: PlanJob
    ) -> tuple[ClusterState, dict[str, str], dict[str, str]]:
        """Keep GPUs free that are on nodes with enough of them and not chosen for other gangs.

        The reasons of the other nodes: those that end with the jobs of a node, and those that stay.
        """
        state = self.known.status.state
        cluster, free = state.cluster, set(state.free)
        owner = {gpu: one.name for one in state.jobs for gpu in one.gpus}
        for name, gang in self.gangs.items():
            for node, pods in Counter(gang.spare if name != job.name else ()).items():
                kept = sorted(free.intersection(_ids(cluster, node)))[-pods * gang.gpus :]
                free.difference_update(kept)
                owner |= dict.fromkeys(kept, name)
        failed, final, candidates = dict[str, str](), dict[str, str](), set[int]()
        for node in nodes:
            ids = _ids(cluster, node)
            count = len(free.intersection(ids))
            if len(ids) < job.pod:
                has = f"{len(ids)} GPUs" if ids else "no whole GPUs, or is not in the cluster"
                final[node] = f"requested {job.pod} GPUs, the node has {has}"
            elif count < job.pod:
                jobs = shortened([*dict.fromkeys(owner[one] for one in ids if one in owner)])
                failed[node] = f"requested {job.pod} GPUs, free are {count} of {len(ids)}" + (
                    f"; jobs: {jobs}" if jobs else ""
                )
            else:
                candidates.update(ids)
        return state.without(set(state.free) - (free & candidates)), failed, final

    def _chosen(
        self, state: ClusterState, job: PlanJob, gang: _Gang, held: set[int], names: list[str]
    ) -> str:
        """Return the node for the next pod: of the choice for all, else the best next to others."""
        cluster = state.cluster
        if not held:
            verdict = start_one(ClusterSnapshot(state), job, self.known.model, self._dispatchers)
            if not verdict.gpus and not gang.again:
                raise Infeasible(f"gang {job.name} cannot start: {verdict.text}")
            rows = cluster.by_machine(verdict.gpus).items()
            gang.spare = [node for node, ids in rows for _ in range(len(ids) // gang.gpus)]
        if node := next((one for one in gang.spare if one in names), ""):
            gang.spare.remove(node)
            return node
        gang.spare = []
        if job.level is not None and held:
            groups = cluster.domains(cluster.level(job.level)).values()
            hosts = {int(h) for h in cluster.host_of[[*held]]}
            inside = {h for group in groups if hosts.intersection(group) for h in group}
            names = [one for one in names if int(cluster.host_of[_ids(cluster, one)[0]]) in inside]
            if not names:
                raise Infeasible(f"gang {job.name}: no node in its {job.level} has free GPUs")
        scores = self._ranked(state, gang.gpus, held, names)
        return max(scores, key=scores.__getitem__)

    def _ranked(
        self, state: ClusterState, gpus: int, held: set[int], names: list[str]
    ) -> dict[str, int]:
        """Return priorities by bandwidth: with the GPUs of the gang, else in the best choice."""
        if not held:
            ranker = self.known.dispatcher({"required": "host"}, "given")
            found = ranker.scores(state, gpus, DEADLINE)
            return {one: found.get(one, 0) // 10 for one in names}
        free = set(state.free)
        sets = [
            held.union(sorted(free.intersection(_ids(state.cluster, one)))[:gpus]) for one in names
        ]
        values = self.known.model.of_sets([tuple(sorted(one)) for one in sets])
        return {one: 10 * n // max(1, *values) for one, n in zip(names, values, strict=True)}


def _ids(cluster: Cluster, node: str) -> range:
    """Return the GPUs of a node; none if the cluster does not have it."""
    try:
        return cluster.machine(node)
    except InputError:
        return range(0)


def _held(state: ClusterState, name: str, gang: _Gang) -> set[int]:
    """Return the GPUs of running pods of a gang, and as many as its placed pods will get."""
    held = {gpu for job in state.jobs if job.name == name for gpu in job.gpus}
    for node, pods in Counter(gang.pods.values()).items():
        ids = _ids(state.cluster, node)
        missing = max(0, pods * gang.gpus - len(held.intersection(ids)))
        held.update([gpu for gpu in ids if gpu not in held][:missing])
    return held


def routes(live: Live) -> list[Route]:
    """Return the endpoints, which are about live clusters."""
    extenders: dict[str, Extender] = {}

    def call(verb: str) -> Callable[[Request, bytes], Awaitable[Any]]:
        async def answer(request: Request, data: bytes) -> Any:
            known = live.find(request.path_params["name"])
            run = getattr(extenders.setdefault(known.name, Extender(known)), verb)
            return await to_thread.run_sync(lambda: run(read_tree(data)))

        return answer

    return [
        Route("POST", f"/v1/clusters/{{name}}/kubernetes/{verb}",
              f"Scheduler extender of Kubernetes: {verb}.", ExtenderArgs, kind, call(verb),
              (404, 409))
        for verb, kind in (("filter", FilterResult), ("prioritize", list[HostPriority]))
    ]  # fmt: skip
