"""Nodes of Kubernetes: whole GPUs, each once, of nodes that take work; others are named."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.errors import InputError
from optsched.formats.host_domains import from_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.bandwidth.topology.domain_trees import Domains

PRODUCT, REPLICAS = "nvidia.com/gpu.product", "nvidia.com/gpu.replicas"
CLOUDS = (
    "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name",
    "node.kubernetes.io/instance-type", "k8s.amazonaws.com/accelerator",
)  # fmt: skip
GPU, SHARED, MIG = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb"


def node(name: str, amounts: dict[str, int], labels: dict[str, str] | None = None) -> Any:
    """A node that takes work, with its amounts as kubectl prints them."""
    written = {key: str(count) for key, count in ({"cpu": 96} | amounts).items()}
    return {
        "kind": "Node", "metadata": {"name": name, "labels": {PRODUCT: "A100"} | (labels or {})},
        "spec": {"taints": [{"key": GPU, "effect": "NoSchedule"}]},
        "status": {
            "capacity": written, "allocatable": dict(written),
            "conditions": [{"type": "DiskPressure", "status": "False"},
                           {"type": "Ready", "status": "True"}],
        },
    }  # fmt: skip


WHOLE: dict[str, Callable[[str, int], Any]] = {
    "whole": lambda name, n: node(name, {GPU: n}),
    "counted": lambda name, n: node(
        name, {GPU: n}, {REPLICAS: "1", "nvidia.com/gpu.sharing-strategy": "none",
                         "nvidia.com/gpu.count": str(n), "nvidia.com/mig.strategy": "single",
                         "nvidia.com/mig.config": "all-disabled"}),
    "time slicing": lambda name, n: node(
        name, {GPU: 4 * n}, {REPLICAS: "4", PRODUCT: "A100-SHARED"}),
    "time slicing, counted": lambda name, n: node(
        name, {GPU: 10 * n}, {REPLICAS: "10", "nvidia.com/gpu.count": str(n)}),
    "renamed": lambda name, n: node(name, {GPU: 0, SHARED: 3 * n}, {REPLICAS: "3"}),
    "MPS": lambda name, n: node(
        name, {GPU: 2 * n}, {REPLICAS: "2", "nvidia.com/gpu.sharing-strategy": "mps",
                             PRODUCT: "A100-SHARED"}),
    "GKE": lambda name, n: node(
        name, {GPU: 5 * n}, {"cloud.google.com/gke-gpu-sharing-strategy": "time-sharing",
                             "cloud.google.com/gke-max-shared-clients-per-gpu": "5"}),
    "mixed MIG": lambda name, n: node(
        name, {GPU: n, MIG: 7}, {"nvidia.com/mig.strategy": "mixed",
                                 "nvidia.com/mig.config": "some"}),
}  # fmt: skip
LEFT_OUT: dict[str, tuple[dict[str, int], dict[str, str], str]] = {
    "MIG": ({GPU: 7}, {PRODUCT: "A100-MIG-1g.5gb"}, f"label {PRODUCT}=A100-MIG-1g.5gb"),
    "MIG config": (
        {GPU: 7},
        {"nvidia.com/mig.config": "all-1g.5gb"},
        "label nvidia.com/mig.config",
    ),
    "MIG alone": ({GPU: 0, MIG: 7}, {"nvidia.com/mig.strategy": "mixed"}, f"resource {MIG}"),
    "CPX": ({"amd.com/gpu": 64}, {"amd.com/gpu.compute-memory-partition": "cpx_nps4"}, "cpx_nps4"),
    "by how many": ({GPU: 8}, {PRODUCT: "A100-SHARED"}, f"label {PRODUCT}=A100-SHARED"),
    "strategy": ({GPU: 8}, {"nvidia.com/gpu.sharing-strategy": "mps"}, "sharing-strategy=mps"),
    "renamed": ({SHARED: 8}, {}, f"resource {SHARED}"),
    "no multiple": ({GPU: 8}, {REPLICAS: "3"}, f"8 {GPU} are not a multiple of label {REPLICAS}=3"),
    "count": ({GPU: 10}, {"nvidia.com/gpu.count": "1"}, "label nvidia.com/gpu.count=1"),
    "not yet shared": ({GPU: 4}, {REPLICAS: "4", "nvidia.com/gpu.count": "4"}, "gpu.count=4"),
    "two kinds": ({GPU: 8, "amd.com/gpu": 8}, {}, "has GPUs of two kinds"),
}
TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable",
          "node.kubernetes.io/unschedulable", "node.kubernetes.io/disk-pressure",
          "node.kubernetes.io/out-of-service", "node.cloudprovider.kubernetes.io/uninitialized",
          "node.cloudprovider.kubernetes.io/shutdown", "ToBeDeletedByClusterAutoscaler",
          "karpenter.sh/disrupted", "karpenter.sh/disruption")  # fmt: skip


def changed(path: str, value: Any) -> Any:
    """A node of 8 GPUs with one field set."""
    found = node("n", {GPU: 8})
    *way, last = path.split("/")
    place = found
    for key in way:
        place = place[key]
    place[last.replace("|", "/")] = value
    return found


UNUSABLE = {
    "is cordoned": changed("spec/unschedulable", True),
    "is being deleted": changed("metadata/deletionTimestamp", "2026-01-01T00:00:00Z"),
    "not ready .condition Ready: False": changed(
        "status/conditions", [{"type": "Ready", "status": "False"}]),
    "not ready .condition Ready: Unknown": changed(
        "status/conditions", [{"type": "Ready", "status": "Unknown"}]),
    "not ready .condition Ready: missing": changed(
        "status/conditions", [{"type": "DiskPressure", "status": "False"}]),
    "condition Ready: missing": changed("status/conditions", []),
    f"7 of 8 {GPU} are healthy": changed("status/allocatable/nvidia.com|gpu", "7"),
    f"0 of 8 {GPU} are healthy": changed("status/allocatable", {"cpu": "8"}),
} | {
    f"has the taint {key}": changed("spec/taints", [{"key": "x", "effect": "NoSchedule"}, {
        "key": key, "effect": ("NoSchedule", "NoExecute")[i % 2], "timeAdded": ""}])
    for i, key in enumerate(TAINTS)
}  # fmt: skip


def read(*nodes: Any) -> tuple[Domains, str]:
    """Domains, and the warning."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = from_nodes({"kind": "List", "items": list(nodes)}, "f")
    return found, "".join(str(one.message) for one in said)


@pytest.mark.parametrize("reason", UNUSABLE)
def test_unusable(reason: str) -> None:
    """A node that takes no work is left out with the reason; a list of such is refused."""
    usable, unusable = node("m", {GPU: 8}), UNUSABLE[reason]
    found, warning = read(usable, unusable)
    assert found.kinds == {"m": ("A100-x8", 8)}
    assert warning.startswith("f: 1 of 2 nodes with GPUs are left out: n ")
    with pytest.raises(InputError, match=f"^f: no node takes work on whole GPUs: n .*{reason}"):
        read(unusable)


@pytest.mark.parametrize("case", LEFT_OUT)
def test_parts(case: str) -> None:
    """What is no whole GPU is never counted as one; the label or resource is named."""
    amounts, labels, reason = LEFT_OUT[case]
    found, warning = read(node("m", {GPU: 2}), node("n", amounts, labels))
    assert list(found.kinds) == ["m"] and reason in warning
    with pytest.raises(InputError) as error:
        read(node("n", amounts, labels))
    assert reason in str(error.value)


@given(st.data())
def test_any_fleet(data: st.DataObject) -> None:
    """Every node is counted once with its whole GPUs, or named; no type depends on sharing."""
    want, away, items = {}, set(), []
    for i in range(data.draw(st.integers(1, 6))):
        name, n = f"n{i}", data.draw(st.integers(1, 16))
        kind = data.draw(st.sampled_from(["cpu", "unusable", "parts", *WHOLE]))
        if kind == "cpu":
            items.append(node(name, {GPU: 0} if n % 2 else {}))
            del items[-1]["metadata"]["labels"][PRODUCT]
        elif kind in WHOLE:
            items.append(WHOLE[kind](name, n))
            want[name] = (f"A100-x{n}", n)
        else:
            away.add(name)
            bad = data.draw(st.sampled_from([*UNUSABLE.values()]))
            amounts, labels, _ = data.draw(st.sampled_from([*LEFT_OUT.values()]))
            part = node(name, amounts, labels)
            items.append(
                part if kind == "parts" else bad | {"metadata": bad["metadata"] | {"name": name}}
            )
    if not want:
        with pytest.raises(InputError, match=r"no node (has|takes)"):
            read(*items)
        return
    found, warning = read(*items)
    assert found.kinds == want and found.of.keys() == want.keys()
    assert bool(warning) == bool(away) and all(f" {name} " in warning for name in away)


def test_dumps_without_state() -> None:
    """A list with names and capacity alone has no state to judge; other objects are no nodes."""
    bare = {"metadata": {"name": "n"}, "status": {"capacity": {GPU: "4"}}}
    assert read(bare)[0].kinds == {"n": ("gpu-x4", 4)}
    with pytest.raises(InputError, match=r"^f: items\[0\]: expected a Node, got a Pod"):
        read({"kind": "Pod", "metadata": {"name": "p"}, "status": {}})
    many = [UNUSABLE["is cordoned"] | {"metadata": {"name": f"n{i}"}} for i in range(30)]
    assert "n7 is cordoned (spec.unschedulable); and 22 more" in read(bare | {
        "metadata": {"name": "m"}}, *many)[1]  # fmt: skip


@given(st.permutations(CLOUDS), st.integers(1, len(CLOUDS)))
def test_products_without_discovery_are_told_apart(keys: list[str], many: int) -> None:
    """Where nothing discovers products, labels of clouds keep hosts of two kinds two types."""
    items = [node(name, {GPU: 8}, dict.fromkeys(keys[:many], name)) for name in "ab"]
    for item in items:
        del item["metadata"]["labels"][PRODUCT]
    assert from_nodes({"items": items}, "f").kinds == {"a": ("a-x8", 8), "b": ("b-x8", 8)}
