"""Scheduler extender of Kubernetes: filters and ranks nodes for the pods of gangs."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import msgspec
from anyio import to_thread

from optsched.bandwidth import (
    BottleneckBandwidth,
    Cluster,
    ClusterState,
    Dispatcher,
    Host,
    HostType,
    Policy,
)  # fmt: skip
from optsched.bandwidth.topology.cliques import joined
from optsched.bandwidth.topology.kubernetes import Item, gang_name, requested_gpus
from optsched.errors import Infeasible, InputError
from optsched.formats.host_domains import from_nodes
from optsched.io.strict_json import decode, shortened
from optsched.plan import ClusterSnapshot, PlanJob
from optsched.plan.starts import start_one
from optsched.service.answers import read_tree
from optsched.service.routes import Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from optsched.bandwidth import BandwidthModel
    from optsched.service.known import Known
    from optsched.service.live import Live

PODS: Final = (
    "optsched/pods", "leaderworkerset.sigs.k8s.io/size",
    "pod-group.scheduling.sigs.k8s.io/min-available",
)  # fmt: skip
"""Labels and annotations of a pod with the number of pods with GPUs in its gang."""

LEVEL: Final = "optsched/level"
"""Label or annotation of a pod: one domain of this level must hold its gang."""

LEVELS: Final = (
    "topology.kubernetes.io/zone", "cloud.google.com/gce-topology-block",
    "cloud.google.com/gce-topology-subblock", "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2", "topology.k8s.aws/network-node-layer-3",
    "network.topology.nvidia.com/spine", "network.topology.nvidia.com/leaf",
)  # fmt: skip
"""Labels of nodes that are levels where all nodes of a request have them, widest first."""

WIDER: Final = 0.9
"""Share of bandwidth that labels, which name no rates, leave to GPUs across one level more."""

HOLD: Final = 300.0
"""Seconds after its last request until the choice for a gang is dropped."""

DEADLINE: Final = 0.1
"""Seconds to rank the nodes for a pod without a gang."""


class NodeList(msgspec.Struct):
    """Nodes as they are sent."""

    items: list[dict[str, Any]] | None = None


class ExtenderArgs(msgspec.Struct):
    """A pod, and its candidates: nodes, or their names with ``nodeCacheCapable``."""

    Pod: Item
    Nodes: NodeList | None = None
    NodeNames: list[str] | None = None


class FilterResult(msgspec.Struct):
    """Nodes that pass, in the form of the request, and the reasons of the others."""

    Nodes: NodeList | None = None
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
    """Choose nodes for pods, for those of one gang together.

    Parameters
    ----------
    live
        Returns a cluster in memory; None: the nodes of the requests are the cluster, and all GPUs
        of candidates count as free.
    """

    def __init__(self, live: Callable[[], Known | None]) -> None:
        self.live = live
        self.gangs: dict[str, _Gang] = {}
        self._lock = Lock()
        self._nodes: dict[str, Any] = {}
        self._model: BandwidthModel | None = None

    def filter(self, tree: Any) -> FilterResult:
        """Pass the nodes with GPUs for the pod; of the choice for a gang, the one for the pod."""
        args = decode(tree, ExtenderArgs, "body")
        nodes = _by_name(args)
        try:
            scores, failed, final = self._judged(args.Pod, nodes, rank=False)
        except (InputError, Infeasible) as error:  # a status other than 200 would hide the reason
            return FilterResult(Error=f"optsched: {error}")
        if args.NodeNames is not None:
            return FilterResult(None, [*scores], failed, final)
        return FilterResult(NodeList([nodes[name] for name in scores]), None, failed, final)

    def prioritize(self, tree: Any) -> list[HostPriority]:
        """Rank nodes by the bandwidth of the pod, or of its gang; equal ones by packing."""
        args = decode(tree, ExtenderArgs, "body")
        scores = self._judged(args.Pod, nodes := _by_name(args), rank=True)[0]
        return [HostPriority(name, scores.get(name, 0)) for name in nodes]

    def _judged(
        self, item: Item, nodes: dict[str, Any], *, rank: bool
    ) -> tuple[dict[str, int], dict[str, str], dict[str, str]]:
        """Return priorities of the nodes that pass, and the reasons of the others."""
        pod, place = item.metadata, f"pod {item.metadata.name:.60}"
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
            live = self.live()
            model, state = (live.model, live.status.state) if live else self._of_nodes(nodes)
            gang = self._gang(pod.name, job)
            state, failed, final = self._confined(state, nodes, job)
            names = [name for name in nodes if name not in failed and name not in final]
            held, scores = _held(state, job.name, gang), dict.fromkeys(names, 0)
            if names and job.gpus > gpus:
                node = gang.pods.get(pod.name, "")
                if node not in scores:
                    try:
                        node = _chosen(model, state, job, gang, held, names)
                    except Infeasible as error:
                        return {}, failed, final | dict.fromkeys(names, str(error))
                    gang.pods[pod.name] = node
                some = shortened([*dict.fromkeys([*gang.pods.values(), *gang.spare])])
                text = f"gang {job.name} gets {some}; {place} goes to {node}"
                return {node: 10}, failed, final | dict.fromkeys(scores.keys() - {node}, text)
            if names and rank:
                scores = _ranked(model, state, gpus, held, names)
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
        self, state: ClusterState, nodes: dict[str, Any], job: PlanJob
    ) -> tuple[ClusterState, dict[str, str], dict[str, str]]:
        """Keep GPUs free that are on nodes with enough of them and not chosen for other gangs.

        The reasons of the other nodes: those that end with the jobs of a node, and those that stay.
        """
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

    def _of_nodes(self, nodes: dict[str, Any]) -> tuple[BandwidthModel, ClusterState]:
        """Make the cluster of these nodes and those of gangs; GPUs of the candidates are free."""
        if not all(nodes.values()):
            raise InputError("NodeNames: the service has no cluster: name one in urlPrefix, or "
                             "set nodeCacheCapable: false")  # fmt: skip
        seen = {
            name: {"metadata": {"name": name, "labels": node["metadata"].get("labels") or {}},
                   "status": {"capacity": node.get("status", {}).get("capacity") or {}}}
            for name, node in nodes.items()
        }  # fmt: skip
        if self._model is None or not seen.items() <= self._nodes.items():
            used = {
                node for one in self.gangs.values() for node in (*one.pods.values(), *one.spare)
            }
            self._nodes = {one: self._nodes[one] for one in used & self._nodes.keys()} | seen
            items = [*self._nodes.values()]
            levels = [one for one in LEVELS if all(n["metadata"]["labels"].get(one) for n in items)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # nodes without whole GPUs do not pass
                found = from_nodes({"items": items}, "Nodes", levels)
            types = {kind: HostType(kind, gpus) for kind, gpus in found.kinds.values()}
            rows = [Host(name, found.kinds[name][0], path) for name, path in found.of.items()]
            hosts, kinds = joined(rows, types, found.levels, found.cliques)
            wider = ("cluster", *found.levels)
            factors = {level: WIDER ** (len(levels) - i) for i, level in enumerate(wider)}
            self._model = BottleneckBandwidth(
                Cluster(tuple(hosts), tuple(kinds), found.levels, factors=factors)
            )
        cluster = self._model.cluster
        free = [gpu for name in nodes for gpu in _ids(cluster, name)]
        return self._model, ClusterState.with_free(cluster, free)


def _by_name(args: ExtenderArgs) -> dict[str, Any]:
    """Return the candidates by name, None where only names are sent."""
    if args.NodeNames is not None:
        return dict.fromkeys(args.NodeNames)
    items = (args.Nodes.items if args.Nodes else None) or []
    return {decode(one, Item, f"Nodes.items[{i}]").metadata.name: one
            for i, one in enumerate(items)}  # fmt: skip


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


def _chosen(
    model: BandwidthModel, state: ClusterState, job: PlanJob, gang: _Gang, held: set[int],
    names: list[str],
) -> str:  # fmt: skip
    """Return the node for the next pod: of the choice for all, else the best next to the others."""
    cluster = state.cluster
    if not held:
        verdict = start_one(ClusterSnapshot(state), job, model)
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
    scores = _ranked(model, state, gang.gpus, held, names)
    return max(scores, key=scores.__getitem__)


def _ranked(
    model: BandwidthModel, state: ClusterState, gpus: int, held: set[int], names: list[str]
) -> dict[str, int]:
    """Return priorities by bandwidth: with the GPUs of the gang, else in the best choice."""
    cluster = state.cluster
    if not held:
        ranker = Dispatcher(cluster, model, policy=Policy(required="host"))
        found = ranker.scores(state, gpus, DEADLINE)
        return {one: found.get(one, 0) // 10 for one in names}
    free = set(state.free)
    sets = [held.union(sorted(free.intersection(_ids(cluster, one)))[:gpus]) for one in names]
    values = model.of_sets([tuple(sorted(one)) for one in sets])
    return {one: 10 * n // max(1, *values) for one, n in zip(names, values, strict=True)}


def routes(live: Live | None) -> list[Route]:
    """Return the endpoints, with the nodes of requests as cluster or with a live cluster."""
    extenders = {"": Extender(lambda: None)}

    def call(verb: str) -> Callable[[Request, bytes], Awaitable[Any]]:
        async def answer(request: Request, data: bytes) -> Any:
            name = request.path_params.get("name", "")
            if live is not None and name:
                live.find(name)
                extenders.setdefault(name, Extender(lambda: live.find(name)))
            run = getattr(extenders[name], verb)
            return await to_thread.run_sync(lambda: run(read_tree(data)))

        return answer

    prefixes = ["/v1/kubernetes"] + ["/v1/clusters/{name}/kubernetes"] * (live is not None)
    return [
        Route("POST", f"{prefix}/{verb}", f"Scheduler extender of Kubernetes: {verb}.",
              ExtenderArgs, kind, call(verb), (404, 409))
        for prefix in prefixes
        for verb, kind in (("filter", FilterResult), ("prioritize", list[HostPriority]))
    ]  # fmt: skip
