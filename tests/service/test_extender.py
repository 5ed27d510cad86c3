"""The extender of kube-scheduler: bodies of its types, gangs on one choice, reasons."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from optsched.bandwidth import BottleneckBandwidth, Cluster, ClusterState, Host, HostType
from optsched.errors import Infeasible, InputError
from optsched.plan import ClusterSnapshot, PlanJob
from optsched.plan.starts import start_one
from optsched.service.app import create_app
from optsched.service.extender import Extender, routes
from optsched.service.settings import Settings

GPU = "nvidia.com/gpu"
RACKS = Cluster(
    tuple(Host(f"n{i}", "h100", (f"r{i // 3}",)) for i in range(6)), 
    (HostType("h100", 8, nic_rate=50.0),), ("rack",), uplinks={"rack": 25.0},
)  # fmt: skip


def pod(name: str, gpus: int, pods: int = 1, **texts: str) -> dict[str, Any]:
    """A pod of an Indexed Job as kube-scheduler marshals a v1.Pod."""
    job = name.rpartition("-")[0] or name
    annotations = {"optsched/pods": str(pods)} | texts if pods > 1 else texts
    return {
        "metadata": {
            "name": name, "generateName": f"{job}-", "namespace": "team-a",
            "uid": f"6b7d2a0e-{name}", "resourceVersion": "1234", "creationTimestamp": None,
            "labels": {"batch.kubernetes.io/job-name": job, "job-name": job},
            "annotations": annotations,
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": job,
                                 "uid": "a1", "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": {
            "volumes": [{"name": "kube-api-access", "projected": {"defaultMode": 420}}],
            "containers": [{
                "name": "main", "image": "train:1", "terminationMessagePath": "/dev/log",
                "resources": {"limits": {"cpu": "8", GPU: str(gpus)},
                              "requests": {"cpu": "8", GPU: str(gpus)}},
            }],
            "restartPolicy": "Never", "schedulerName": "default-scheduler", "priority": 0,
            "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
        },
        "status": {"phase": "Pending", "qosClass": "Burstable"},
    }  # fmt: skip


def node(name: str, rack: str, gpus: int = 8) -> dict[str, Any]:
    """A v1.Node."""
    amounts = {"cpu": "96", "memory": "2113361676Ki", "pods": "110", GPU: str(gpus)}
    return {
        "metadata": {
            "name": name, "uid": f"5c0f-{name}", "creationTimestamp": "2026-01-05T09:12:44Z",
            "labels": {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": rack,
                       "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        },
        "spec": {"podCIDR": "10.244.1.0/24", "taints": [{"key": GPU, "effect": "NoSchedule"}]},
        "status": {
            "capacity": amounts, "allocatable": dict(amounts),
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": None}],
            "images": [{"names": ["train:1"], "sizeBytes": 12345678901}],
        },
    }  # fmt: skip


class Kube:
    """The part of kube-scheduler around an extender: counts of free GPUs by node."""

    def __init__(self, free: dict[str, int], live: bool) -> None:
        self.free, self.by_name = dict(free), live
        self.at: dict[str, list[tuple[str, int]]] = {}
        model = BottleneckBandwidth(RACKS)
        self.extender = Extender(lambda: (model, self.state()) if live else None)

    def state(self) -> ClusterState:
        """The state that a service with all pods would have."""
        jobs: dict[str, list[int]] = {}
        first = {name: RACKS.machine(name)[0] for name in self.free}
        down = [g for name in first for g in RACKS.machine(name)]
        for job, placed in self.at.items():
            for name, gpus in placed:
                jobs.setdefault(f"team-a/{job}", []).extend(range(first[name], first[name] + gpus))
                first[name] += gpus
        free = [g for name, n in self.free.items() for g in range(first[name], first[name] + n)]
        held = {name: RACKS.written(ids) for name, ids in jobs.items()}
        down = set(down).difference(free, *jobs.values())
        return ClusterState.parse(RACKS, RACKS.written(free), held, RACKS.written(down))

    def body(self, one: dict[str, Any]) -> dict[str, Any]:
        """An ExtenderArgs with the nodes that fit."""
        need = int(one["spec"]["containers"][0]["resources"]["limits"][GPU])
        fit = [name for name, free in self.free.items() if free >= need]
        items = [node(name, f"r{int(name[1]) // 3}") for name in fit]
        if self.by_name:
            return {"Pod": one, "Nodes": None, "NodeNames": fit}
        return {"Pod": one, "Nodes": {"metadata": {}, "items": items or None}, "NodeNames": None}

    def filter(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer as Go decodes it."""
        found: dict[str, Any] = msgspec.to_builtins(self.extender.filter(body))
        return found

    def schedule(self, one: dict[str, Any]) -> str | None:
        """Filter, prioritize, bind; None if no node passes."""
        body = self.body(one)
        if not (body["NodeNames"] or (body["Nodes"] or {}).get("items")):
            return None  # kube-scheduler makes no request
        found = self.filter(body)
        assert not found["Error"], found
        nodes = found["NodeNames"] if self.by_name else found["Nodes"]["items"]
        names = nodes if self.by_name else [item["metadata"]["name"] for item in nodes]
        if not self.by_name:
            assert all(item in body["Nodes"]["items"] for item in nodes)
        given = (
            body["NodeNames"]
            if self.by_name
            else [item["metadata"]["name"] for item in body["Nodes"]["items"] or []]
        )
        reasons = found["FailedNodes"] | found["FailedAndUnresolvableNodes"]
        assert {*names} | {*reasons} == {*given} and not {*names} & {*reasons}
        scores = msgspec.to_builtins(self.extender.prioritize(body))
        assert [row["Host"] for row in scores] == given
        assert all(type(row["Score"]) is int and 0 <= row["Score"] <= 10 for row in scores)
        if not names:
            return None
        best = max((row for row in scores if row["Host"] in names), key=lambda row: row["Score"])
        need = int(one["spec"]["containers"][0]["resources"]["limits"][GPU])
        self.free[best["Host"]] -= need
        assert self.free[best["Host"]] >= 0
        self.at.setdefault(one["metadata"]["name"].rpartition("-")[0], []).append(
            (best["Host"], need)
        )
        return best["Host"]


CASES = {
    "free": st.lists(st.sampled_from([0, 2, 4, 8]), min_size=6, max_size=6),
    "gangs": st.lists(st.tuples(st.sampled_from([2, 4, 8]), st.integers(2, 4)), min_size=1,
                      max_size=2),
    "order": st.randoms(use_true_random=False),
}  # fmt: skip


@pytest.mark.parametrize("live", [True, False])
@settings(deadline=None)
@given(**CASES)
def test_gangs_get_one_choice(
    live: bool, free: list[int], gangs: list[tuple[int, int]], order: Any
) -> None:
    """Pods of two gangs in any order: the first gets the GPUs that a plan of it alone has."""
    kube = Kube({f"n{i}": n for i, n in enumerate(free)}, live)
    queue = [pod(f"g{g}-{i}", k, n) for g, (k, n) in enumerate(gangs) for i in range(n)]
    order.shuffle(queue)
    name = queue[0]["metadata"]["name"].split("-")[0]
    gpus, pods = gangs[int(name[1])]
    state = kube.state()
    need = [g for n in RACKS.hosts for g in RACKS.machine(n.name) if free[int(n.name[1])] < gpus]
    job = PlanJob(name=name, gpus=gpus * pods, pod=gpus)
    chosen = start_one(ClusterSnapshot(state.without(need)), job, BottleneckBandwidth(RACKS)).gpus
    for one in queue:
        kube.schedule(one)
    if live:
        got = {at: gpus * n for at, n in Counter(at for at, _ in kube.at.get(name, ())).items()}
        assert got == {at: len(ids) for at, ids in RACKS.by_machine(chosen).items()}
    elif sum(n // gpus for n in free) >= pods and len(gangs) == 1:
        assert len(kube.at[name]) == pods  # guesses at free GPUs are corrected pod by pod


def test_levels_and_replaced_pods() -> None:
    """A required level holds for pods of any time; after a restart pods stay with the others."""
    kube = Kube({"n0": 8, "n1": 8, "n2": 0, "n3": 8, "n4": 8, "n5": 8}, live=True)
    level = {"optsched/level": "rack"}
    assert {kube.schedule(pod(f"a-{i}", 8, 3, **level)) for i in range(3)} == {"n3", "n4", "n5"}
    found = kube.filter(kube.body(pod("b-0", 8, 3, **level)))
    assert found["NodeNames"] == [] and "needs 24 GPUs, free are 16" in str(found)
    found = kube.filter(kube.body(pod("c-0", 4, 4, **level)))
    assert found["NodeNames"] in (["n0"], ["n1"])
    kube.free["n4"], kube.at["a"] = 8, [at for at in kube.at["a"] if at[0] != "n4"]
    kube.extender.gangs.clear()
    assert kube.schedule(pod("a-9", 8, 3, **level)) == "n4"
    assert kube.schedule(pod("a-10", 8, 3, **level)) is None
    for i in range(2):
        assert kube.schedule(pod(f"d-{i}", 4, 2))
    kube.at, kube.free = {}, {f"n{i}": 4 * (i == 2) for i in range(6)}  # of d, one pod starts again
    assert kube.schedule(pod("d-2", 4, 2)) == "n2"
    kube = Kube({"n0": 8, "n1": 8, "n2": 0, "n3": 8, "n4": 0, "n5": 0}, live=True)
    found = kube.filter(kube.body(pod("b-0", 8, 3, **level)))
    assert found["NodeNames"] == [] and "fit only across several racks" in str(found)


def test_single_pods_are_ranked_by_bandwidth_and_packing() -> None:
    """Nodes in use come first; a pod of a running job without a size goes next to it."""
    kube = Kube({f"n{i}": 8 for i in range(6)} | {"n4": 4}, live=True)
    assert kube.schedule(pod("a-0", 4)) == "n4"
    kube.at["job"], kube.free["n3"] = [("n3", 8)], 0
    rows = kube.extender.prioritize(kube.body(pod("job-1", 8)))
    scores = {row.Host: row.Score for row in rows}
    assert scores["n5"] == 10 > scores["n0"]


def test_reasons() -> None:
    """Reasons say what is missing, and whether evicting pods of the node would help."""
    kube = Kube({f"n{i}": 8 for i in range(6)}, live=True)
    kube.at, kube.free["n0"] = {"x": [("n0", 6)]}, 2
    body = {"Pod": pod("a-0", 4), "Nodes": None, "NodeNames": ["n0", "n1", "cpu-1"]}
    found = kube.filter(body)
    assert found["NodeNames"] == ["n1"] and found["Error"] == ""
    assert found["FailedNodes"] == {"n0": "requested 4 GPUs, free are 2 of 8; jobs: team-a/x"}
    assert "not in the cluster" in found["FailedAndUnresolvableNodes"]["cpu-1"]
    assert kube.filter(body | {"Pod": pod("web", 0)})["NodeNames"] == body["NodeNames"]
    alone = msgspec.to_builtins(Extender(lambda: None).filter(body))
    assert "nodeCacheCapable: false" in alone["Error"] and alone["NodeNames"] is None


@pytest.mark.parametrize("body", [
    None, [], 3, {}, {"Pod": None}, {"Pod": {}}, {"Pod": {"metadata": {"name": 3}}},
    {"Pod": pod("a", 1), "NodeNames": "n0"}, {"Pod": pod("a", 1), "NodeNames": [1]},
    {"Pod": pod("a", 1), "Nodes": []}, {"Pod": pod("a", 1), "Nodes": {"items": [3]}},
    {"Pod": pod("a", 1), "Nodes": {"items": 3}}, {"Pod": pod("a", 1), "Nodes": {"items": [{}]}},
    {"Pod": pod("a-1", 1) | {"spec": {"containers": [{"resources": {"limits": {GPU: "x"}}}]}}},
    {"Pod": pod("a-1", 1, 2, **{"optsched/pods": "-1"}), "NodeNames": ["n0"]},
    {"Pod": pod("a-1", 1, 2, **{"optsched/pods": "9" * 99}), "NodeNames": ["n0"]},
    {"Pod": pod("a-1", 1, 2, **{"optsched/level": "galaxy"}), "NodeNames": ["n0"]},
])  # fmt: skip
def test_hostile_bodies(body: Any) -> None:
    """A refusal or an answer with an error or with reasons, never another exception."""
    for extender in (Kube({f"n{i}": 8 for i in range(6)}, live=True).extender,
                     Extender(lambda: None)):  # fmt: skip
        for call in (extender.filter, extender.prioritize):
            try:
                found = call(body)
            except (InputError, Infeasible):
                continue
            assert isinstance(found, list) or found.Error or found.FailedAndUnresolvableNodes


def test_endpoints() -> None:
    """Both forms over HTTP, for the nodes of the request and for a live cluster."""
    kube = Kube({f"n{i}": 8 for i in range(6)}, live=True)

    def live(name: str) -> tuple[BottleneckBandwidth, ClusterState]:
        if name != "main":
            raise InputError(f"cluster: no cluster {name!r}")
        return BottleneckBandwidth(RACKS), kube.state()

    app = create_app(Settings(workers=1), [routes(live)])  # no worker is started
    client = TestClient(app, base_url="http://localhost")
    body = kube.body(pod("a-0", 8, 3))
    found = client.post("/v1/clusters/main/kubernetes/filter", json=body)
    assert found.status_code == 200 and found.json()["NodeNames"] == ["n0"]
    nodes = [node(f"n{i}", f"r{i % 2}") for i in range(5)]
    body = {"Pod": pod("a-0", 8, 3), "Nodes": {"items": nodes}, "NodeNames": None}
    found = client.post("/v1/kubernetes/prioritize", json=body)
    assert [row["Score"] for row in found.json()] == [10, 0, 0, 0, 0]
    found = client.post("/v1/kubernetes/filter", json=body)
    assert found.json()["Nodes"]["items"] == nodes[:1] and "n0, n2, n4" in found.text
    assert client.post("/v1/clusters/other/kubernetes/filter", json=body).status_code == 400
    found = client.post("/v1/kubernetes/filter", json={"Pod": {"metadata": {"name": 3}}})
    assert found.status_code == 400 and found.json()["error"]["field"] == "Pod.metadata.name"
    paths = client.get("/v1/openapi.json").json()["paths"]
    assert "/v1/clusters/{name}/kubernetes/prioritize" in paths
