"""Nodes of Kubernetes: how many whole GPUs they have, and whether they take work."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
"""Labels that tell products apart where nothing has discovered them."""

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

_TAINTS: Final = re.compile(
    r"node\.(cloudprovider\.)?kubernetes\.io/.*|ToBeDeletedByClusterAutoscaler|karpenter\.sh/disrupt.*"
)
"""Taints that keep all work away, not only work without GPUs."""


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None


class _Taint(msgspec.Struct):
    key: str
    effect: str = ""


class _Spec(msgspec.Struct):
    unschedulable: bool = False
    taints: list[_Taint] | None = None


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Status(msgspec.Struct):
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] | None = None
    conditions: list[_Condition] | None = None


class Node(msgspec.Struct):
    """An item of ``kubectl get nodes -o json``; a dump without conditions counts as ready."""

    metadata: _Metadata
    status: _Status
    kind: str = "Node"
    spec: _Spec = msgspec.field(default_factory=_Spec)


class NodeGpus(NamedTuple):
    """Product and number of the whole GPUs of a node, or the reason why it is left out."""

    product: str
    number: int
    reason: str = ""


def gpus_of(node: Node, place: str) -> NodeGpus | None:
    """Count the whole GPUs of a node; None if it has none, no parts of any, and no label of some.

    Raises
    ------
    InputError
        An amount that is no number.
    """
    found = {
        key: _number(node.status.capacity, key, place) for key in node.status.capacity
        if key.removesuffix(".shared") in RESOURCES or _PARTS.fullmatch(key)
    }  # fmt: skip
    found = {key: count for key, count in found.items() if count}
    if not found:
        said = _matching(node.metadata.labels, _GPU_LABELS)
        why = (
            f"has no {' or '.join(RESOURCES)} in its capacity, but label {said[0]}" if said else ""
        )
        return NodeGpus("", 0, why) if said else None
    if reason := _unusable(node) or _unhealthy(node, found, place) or _parts(node, found):
        return NodeGpus("", 0, reason)
    whole = {key: count for key, count in found.items() if not _PARTS.fullmatch(key)}
    return _counted(whole, node.metadata.labels)


def _matching(labels: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Labels with their values that match a pattern."""
    return [f"{key}={labels[key]:.60}" for key, values in wanted.items()
            if re.fullmatch(values, labels.get(key, ""))]  # fmt: skip


def _number(amounts: Mapping[str, str], resource: str, place: str) -> int:
    count = amounts.get(resource, "0")
    if not _COUNT.fullmatch(count):
        raise InputError(f"{place}: {resource}: expected a number, got {count!r:.40}")
    return int(count)


def _unusable(node: Node) -> str:
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


def _unhealthy(node: Node, found: Mapping[str, int], place: str) -> str:
    if node.status.allocatable is not None:
        for key, count in found.items():
            healthy = _number(node.status.allocatable, key, place)
            if healthy < count:
                return f"{healthy} of {count} {key} are healthy (status.allocatable)"
    return ""


def _parts(node: Node, found: Mapping[str, int]) -> str:
    """Label or resource where a node has parts of GPUs only; empty if it has whole ones."""
    labels = node.metadata.labels
    mixed = labels.get("nvidia.com/mig.strategy") == "mixed"  # has a resource for each kind of part
    for said in _matching(labels, _PART_LABELS):
        if not (mixed and said.startswith("nvidia.com/mig.config=")):
            return f"has parts of GPUs (label {said})"
    if all(map(_PARTS.fullmatch, found)):
        return f"has parts of GPUs (resource {next(iter(found)):.60})"
    return ""


def _counted(whole: Mapping[str, int], labels: Mapping[str, str]) -> NodeGpus:
    """Whole GPUs, each once, of resources that may count them several times."""
    kinds = {key.removesuffix(".shared") for key in whole}
    if len(kinds) > 1:
        return NodeGpus("", 0, f"has GPUs of two kinds ({', '.join(whole)})")
    said = next((f"{label}={labels[label]}" for label in _REPLICAS if label in labels), "")
    renamed = [key for key in whole if key.endswith(".shared")]
    shared = [f"label {one}" for one in _matching(labels, _SHARED_LABELS)]
    shared += [f"resource {key}" for key in renamed]
    number = said.partition("=")[2] or "1"
    if not _COUNT.fullmatch(number) or int(number) < 1 or (shared and not said):
        got = f"label {said}" if said else shared[0]
        return NodeGpus("", 0, f"shares GPUs ({got:.99}), by no number in label {_REPLICAS[0]}")
    total = 0
    for key, count in whole.items():
        times = int(number) if key in renamed or not renamed else 1
        if count % times:
            return NodeGpus("", 0, f"{count} {key} are not a multiple of label {said:.80}")
        total += count // times
    most = labels.get("nvidia.com/gpu.count", "")
    mixed = labels.get("nvidia.com/mig.strategy") == "mixed"  # the label may count GPUs with MIG
    if _COUNT.fullmatch(most) and (total > int(most) or (total < int(most) and not mixed)):
        return NodeGpus("", 0, f"has {total} GPUs, but label nvidia.com/gpu.count={most}")
    named = (labels[key] for key in (*RESOURCES[kinds.pop()], *_CLOUDS) if labels.get(key))
    product = next(named, "gpu")
    return NodeGpus(product.removesuffix("-SHARED"), total)
