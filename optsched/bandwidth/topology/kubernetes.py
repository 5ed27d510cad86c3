"""Nodes of Kubernetes: whole GPUs, whether they take work, and the pods that hold them."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from optsched.bandwidth.topology.foreign import looks_like, parsed
from optsched.bandwidth.topology.usage import DOWN, Usage
from optsched.errors import InputError
from optsched.io.strict_json import decode, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.state import ClusterState

_COUNT = re.compile(r"[0-9]{1,6}")

RESOURCES: Final = {
    "nvidia.com/gpu": ("nvidia.com/gpu.product",),
    "amd.com/gpu": ("amd.com/gpu.product-name", "beta.amd.com/gpu.product-name"),
}
"""GPUs, and labels of the product: of GPU feature discovery, and of AMD's node labeller."""

_CLOUDS: Final = (
    "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name",
    "k8s.amazonaws.com/accelerator", "node.kubernetes.io/instance-type",
)  # fmt: skip
"""Labels that distinguish products where nothing has discovered them."""

_GPU_LABELS: Final = {
    "nvidia.com/gpu.count": "0*[1-9].*", "karpenter.k8s.aws/instance-gpu-count": "0*[1-9].*",
    "nvidia.com/gpu.present": "true", "cloud.google.com/gke-accelerator": ".+",
} | {label: ".+" for labels in RESOURCES.values() for label in labels}  # fmt: skip
"""Labels with values of nodes that have GPUs, whatever is free for work."""

_PARTS: Final = re.compile(r"nvidia\.com/mig-.+|amd\.com/.+_nps\d(\.shared)?")
"""Resources that are parts of GPUs."""

_PART_LABELS: Final = {
    "nvidia.com/gpu.product": ".*-MIG-.*", "cloud.google.com/gke-gpu-partition-size": ".+",
    "nvidia.com/mig.config": "(?!all-disabled$).+",
    "amd.com/gpu.compute-memory-partition": "(?!spx).+",
    "beta.amd.com/gpu.compute-memory-partition": "(?!spx).+",
}  # fmt: skip
"""Labels with values where the resource of whole GPUs counts parts."""

_REPLICAS: Final = ("nvidia.com/gpu.replicas", "cloud.google.com/gke-max-shared-clients-per-gpu")
_SHARED_LABELS: Final = {
    "nvidia.com/gpu.product": ".*-SHARED", "nvidia.com/gpu.sharing-strategy": "time-slicing|mps",
    "cloud.google.com/gke-gpu-sharing-strategy": ".+",
}  # fmt: skip
"""Labels with values where a GPU counts several times: time slicing, MPS."""

_SHARES: Final = re.compile(
    r"hami\.io/node-(nvidia-)?register|aliyun\.com/gpu-mem|volcano\.sh/v?gpu-(number|memory)"
)
"""Annotations and resources of plugins that give out shares of GPUs."""

_TAINTS: Final = re.compile(
    r"node\.(cloudprovider\.)?kubernetes\.io/.*|ToBeDeleted.*|karpenter\.sh/(disrupt|unregistered).*|"
    r".*/agent-not-ready|.*/impending-node-termination|aws-node-termination-handler/.*|"
    r"node-role\.kubernetes\.io/(control-plane|master)"
)
"""Taints that keep all work away, not only work without GPUs."""


_GANGS: Final = (
    "jobset.sigs.k8s.io/jobset-name", "leaderworkerset.sigs.k8s.io/name",
    "training.kubeflow.org/job-name", "ray.io/cluster", "volcano.sh/job-name",
    "batch.kubernetes.io/job-name", "job-name", "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io", "scheduling.k8s.io/group-name", "pod-group-name",
)  # fmt: skip
"""Labels and annotations with the name of the job that a pod is part of, the widest first."""

_SINGLE: Final = ("ReplicaSet", "DaemonSet", "Node")
"""Kinds of owners with pods that do not work together."""


class _Owner(msgspec.Struct):
    kind: str
    name: str
    controller: bool = False


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    namespace: str = "default"
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[_Owner] = []
    deletion_timestamp: str | None = None


class _Taint(msgspec.Struct):
    key: str
    effect: str = ""


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Resources(msgspec.Struct):
    limits: dict[str, str | int] = {}
    requests: dict[str, str | int] = {}


class _Container(msgspec.Struct, rename="camel"):
    resources: _Resources = msgspec.field(default_factory=_Resources)
    restart_policy: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    unschedulable: bool = False
    taints: list[_Taint] | None = None
    containers: list[_Container] = []
    init_containers: list[_Container] = []
    resource_claims: list[Any] = []
    node_name: str = ""
    node_selector: dict[str, str] = {}
    affinity: dict[str, Any] | None = None


class _Status(msgspec.Struct):
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] | None = None
    conditions: list[_Condition] | None = None
    phase: str = ""


class Item(msgspec.Struct):
    """A node or a pod as kubectl prints it; a node without conditions counts as ready."""

    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)
    kind: str = "Node"
    spec: _Spec = msgspec.field(default_factory=_Spec)


class NodeGpus(NamedTuple):
    """Product and number of the whole GPUs of a node, and the reason why it is left out."""

    product: str
    number: int
    reason: str = ""
    lost: int = 0
    """GPUs that are not healthy, where that is the reason."""
    times: int = 1
    """How often each GPU is counted."""


def gpus_of(node: Item, place: str) -> NodeGpus | None:
    """Count the whole GPUs of a node; None if it has none, no parts, and no label of some."""
    found = {
        key: _number(node.status.capacity, key, place) for key in node.status.capacity
        if key.removesuffix(".shared") in RESOURCES or _PARTS.fullmatch(key)
    }  # fmt: skip
    found = {key: count for key, count in found.items() if count}
    if not found:
        hints = _matching(node.metadata.labels, _GPU_LABELS)
        why = f"has no {' or '.join(RESOURCES)} in its capacity, but label {''.join(hints[:1])}"
        return NodeGpus("", 0, why) if hints else None
    if reason := _parts(node, found):
        counted = NodeGpus("", 0, reason)
    else:
        whole = {key: count for key, count in found.items() if not _PARTS.fullmatch(key)}
        counted = _counted(whole, node.metadata.labels)
    if reason := _unusable(node):
        return counted._replace(reason=reason)
    lost, reason = _unhealthy(node, found, place)
    return counted._replace(reason=reason, lost=-(-lost // counted.times)) if lost else counted


def _matching(labels: Mapping[str, str], patterns: Mapping[str, str]) -> list[str]:
    """Labels with their values that match a pattern."""
    return [f"{key}={labels[key]:.60}" for key, values in patterns.items()
            if re.fullmatch(values, labels.get(key, ""))]  # fmt: skip


def _number(amounts: Mapping[str, Any], resource: str, place: str) -> int:
    count = str(amounts.get(resource, "0"))
    if not _COUNT.fullmatch(count):
        raise InputError(f"{place}: {resource}: expected a number, got {count!r:.40}")
    return int(count)


def _unusable(node: Item) -> str:
    """Why a node takes no work; empty if it does."""
    if node.metadata.deletion_timestamp is not None:
        return "is being deleted"
    if node.spec.unschedulable:
        return "is cordoned (spec.unschedulable)"
    conditions = node.status.conditions
    ready = [one.status for one in conditions or () if one.type == "Ready"]
    if conditions is not None and ready != ["True"]:
        return f"is not ready (condition Ready: {', '.join(ready) or 'missing'})"
    for taint in node.spec.taints or ():
        if taint.effect in ("NoSchedule", "NoExecute") and _TAINTS.fullmatch(taint.key):
            return f"has the taint {taint.key:.80}"
    return ""


def _unhealthy(node: Item, found: Mapping[str, int], place: str) -> tuple[int, str]:
    for key, count in found.items() if node.status.allocatable is not None else ():
        healthy = _number(node.status.allocatable or {}, key, place)
        if healthy < count:
            return count - healthy, f"{healthy} of {count} {key} are healthy (status.allocatable)"
    return 0, ""


def _parts(node: Item, found: Mapping[str, int]) -> str:
    """Label or resource where a node has parts of GPUs only; empty if it has whole GPUs."""
    labels = node.metadata.labels
    for key in (*node.metadata.annotations, *node.status.capacity):
        if _SHARES.fullmatch(key):
            return f"has shares of GPUs ({key})"
    mixed = labels.get("nvidia.com/mig.strategy") == "mixed"  # has a resource for each kind of part
    for text in _matching(labels, _PART_LABELS):
        if not (mixed and text.startswith("nvidia.com/mig.config=")):
            return f"has parts of GPUs (label {text})"
    if all(map(_PARTS.fullmatch, found)):
        return f"has parts of GPUs (resource {next(iter(found)):.60})"
    return ""


def _counted(whole: Mapping[str, int], labels: Mapping[str, str]) -> NodeGpus:
    """Whole GPUs, each once, of resources that may count them several times."""
    kinds = {key.removesuffix(".shared") for key in whole}
    if len(kinds) > 1:
        return NodeGpus("", 0, f"has GPUs of two kinds ({', '.join(whole)})")
    text = next((f"{label}={labels[label]}" for label in _REPLICAS if label in labels), "")
    renamed = [key for key in whole if key.endswith(".shared")]
    shared = [f"label {one}" for one in _matching(labels, _SHARED_LABELS)]
    shared += [f"resource {key}" for key in renamed]
    number = text.partition("=")[2] or "1"
    if not _COUNT.fullmatch(number) or int(number) < 1 or (shared and not text):
        got = f"label {text}" if text else shared[0]
        return NodeGpus("", 0, f"shares GPUs ({got:.99}), by no number in label {_REPLICAS[0]}")
    total = 0
    for key, count in whole.items():
        times = int(number) if key in renamed or not renamed else 1
        if count % times:
            return NodeGpus("", 0, f"{count} {key} are not a multiple of label {text:.80}")
        total += count // times
    most = labels.get("nvidia.com/gpu.count", "")
    mixed = labels.get("nvidia.com/mig.strategy") == "mixed"  # the label may count GPUs with MIG
    if _COUNT.fullmatch(most) and (total > int(most) or (total < int(most) and not mixed)):
        return NodeGpus("", 0, f"has {total} GPUs, but label nvidia.com/gpu.count={most}")
    named = (labels[key] for key in (*RESOURCES[kinds.pop()], *_CLOUDS) if labels.get(key))
    product = next(named, "gpu")
    return NodeGpus(product.removesuffix("-SHARED"), total, times=int(number) if shared else 1)


def from_kubernetes(
    cluster: Cluster, nodes: Any, pods: Any, file: str, pods_file: str
) -> ClusterState:
    """Read the state of a cluster; see `ClusterState.from_kubernetes`."""
    found = _items(nodes, file) + ([] if pods is None else _items(pods, pods_file))
    usage = Usage(cluster, file)
    usage.unknown |= set(usage.names)
    times: dict[str, int] = {}
    other: list[str] = []
    for place, kind, item in found:
        if kind == "Node":
            node = decode(item, Item, place)
            name, title = node.metadata.name, f"{place} (node {node.metadata.name:.60})"
            gpus = gpus_of(node, title) or NodeGpus("", 0, "has no GPU")
            if name in usage.names:
                _add(usage, name, gpus, title)
                times[name] = gpus.times
            elif not gpus.reason:
                other.append(name)
    if other:
        warnings.warn(f"{file}: GPU nodes outside the cluster: {shortened(other)}", stacklevel=3)
    spaces: set[str] = set()
    claims: list[str] = []
    for place, kind, item in found:
        if kind == "Pod":
            pod = decode(item, Item, place)
            spaces.add(pod.metadata.namespace)
            node_name, ended = pod.spec.node_name, pod.status.phase in ("Succeeded", "Failed")
            if node_name in times and not ended:
                units = requested_gpus(pod, f"{place} (pod {pod.metadata.name:.60})")
                if times[node_name] > 1:  # shares of GPUs, each perhaps of another one
                    units = min(units, len(usage.owner[node_name]) - usage.held(node_name))
                usage.hold(node_name, gang_name(pod), (), units)
                claims += [pod.metadata.name] * bool(pod.spec.resource_claims)
    if not spaces:
        raise InputError(f"{file}: has no pods: print `kubectl get nodes,pods -A -o json`")
    if len(spaces) == 1:
        text = f"{file}: all pods are in namespace {spaces.pop():.60}: print all with -A"
        warnings.warn(text, stacklevel=3)
    if claims:
        text = f"{file}: GPUs that pods hold by resourceClaims are not counted: {shortened(claims)}"
        warnings.warn(text, stacklevel=3)
    return usage.state()


def _add(usage: Usage, name: str, gpus: NodeGpus, place: str) -> None:
    """Add a node; down is what is not healthy, or all of one that takes no work on whole GPUs."""
    size = usage.add(name, place)
    if gpus.number > size:
        raise InputError(f"{place}: has {gpus.number} GPUs, the cluster {size}")
    if not gpus.number or (gpus.reason and not gpus.lost):
        usage.closed.add(name)
    else:
        usage.hold(name, DOWN, (), gpus.lost + size - gpus.number)


def check_whole(tree: Mapping[str, Any], file: str) -> None:
    """Refuse a list that the server has cut (``limit=500``)."""
    data = tree.get("metadata")
    if isinstance(data, dict) and data.get("continue"):
        raise InputError(f"{file}: metadata.continue: a part of a list: print it without limit")


def _items(given: Any, file: str) -> list[tuple[str, str, Any]]:
    """Place, kind and tree of every object of a list."""
    tree = parsed(given, file)
    if not isinstance(tree, dict) or not isinstance(tree.get("items"), list):
        hint = looks_like(given) if isinstance(given, str) else ""
        raise InputError(f"{file}: expected JSON of `kubectl get nodes,pods -A`{hint}")
    check_whole(tree, file)
    default = str(tree.get("kind", "")).removesuffix("List")
    found = []
    for i, item in enumerate(tree["items"]):
        kind = item.get("kind", default) if isinstance(item, dict) else ""
        if kind not in ("Node", "Pod"):
            raise InputError(f"{file}: items[{i}]: expected a Node or a Pod, got {kind!r:.40}")
        found.append((f"{file}: items[{i}]", kind, item))
    return found


def requested_gpus(pod: Item, place: str) -> int:
    """GPUs of a pod: of its containers and sidecars, or of one before them and sidecars so far."""

    def amount(one: _Container) -> int:
        both = {**one.resources.limits, **one.resources.requests}
        keys = [key for key in both if key.removesuffix(".shared") in RESOURCES]
        return sum(_number(both, key, place) for key in keys)

    sidecars = most = 0
    for one in pod.spec.init_containers:
        most = max(most, sidecars + amount(one))
        sidecars += amount(one) * (one.restart_policy == "Always")
    return max(most, sidecars + sum(map(amount, pod.spec.containers)))


def pending_gangs(cluster: Cluster, items: Sequence[Any]) -> dict[str, tuple[list[int], set[str]]]:
    """GPUs of pods without a node, and host types that all their node selectors allow, by job.

    Jobs with a pod that can run on no node are left out, and those that need several host types.
    """
    given = [decode(one, Item, f"kubectl: items[{i}]") for i, one in enumerate(items)]
    kinds = cluster.type_by_machine()
    labels = [(kinds[one.metadata.name], one.metadata.labels.items()) for one in given
              if one.kind == "Node" and one.metadata.name in kinds]  # fmt: skip

    @cache
    def allowed(selector: frozenset[tuple[str, str]]) -> set[str]:
        return {kind for kind, own in labels if selector <= own}

    found: dict[str, tuple[list[int], list[set[str]]]] = defaultdict(lambda: ([], []))
    pinned = list[str]()
    for i, pod in enumerate(given):
        if pod.kind != "Pod" or pod.spec.node_name or pod.status.phase not in ("", "Pending"):
            continue
        if gpus := requested_gpus(pod, f"kubectl: items[{i}]"):
            sizes, types = found[gang_name(pod)]
            sizes.append(gpus)
            types.append(allowed(frozenset(pod.spec.node_selector.items())))
            rules = pod.spec.affinity.get("nodeAffinity") if pod.spec.affinity else None
            if isinstance(rules, dict) and any(key.startswith("required") for key in rules):
                pinned.append(gang_name(pod))
    if pinned:
        text = "nodeAffinity: not read, plans may take hosts that it forbids; use nodeSelector"
        warnings.warn(f"kubectl: {text}: {shortened([*dict.fromkeys(pinned)])}", stacklevel=3)
    gangs = {name: (sizes, set.intersection(*types)) for name, (sizes, types) in found.items()}
    for name in [name for name, (_, types) in gangs.items() if not types]:
        if all(types := found[name][1]):
            warnings.warn(
                f"kubectl: nodeSelector: the pods of {name} need hosts of several types "
                f"({shortened(sorted(set.union(*types)))}), but a request has one: it is left out; "
                "give the pods of each type a job of their own", stacklevel=3,
            )  # fmt: skip
        del gangs[name]
    return gangs


def gang_name(pod: Item) -> str:
    """Return ``namespace/name`` of the job that the pod is part of, else of the pod."""
    data = pod.metadata
    texts = data.annotations | data.labels
    name = next((texts[key] for key in _GANGS if texts.get(key)), "")
    if index := texts.get("leaderworkerset.sigs.k8s.io/group-index", ""):
        name += f"-{index}"
    if not name:
        owners = [one.name for one in data.owner_references
                  if one.controller and one.kind not in _SINGLE]  # fmt: skip
        name = owners[0] if owners else data.name
    return f"{data.namespace}/{name}"
