"""The extender of kube-scheduler: bodies of its types, gangs on one choice, reasons."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from optsched.bandwidth import BottleneckBandwidth, Cluster, ClusterState, Host, HostType, Job
from optsched.errors import Infeasible, InputError
from optsched.plan import ClusterSnapshot, PlanJob
from optsched.plan.starts import start_one
from optsched.service.app import create_app
from optsched.service.extender import Extender
from optsched.service.known import Known
from optsched.service.live import Create, Live
from optsched.service.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

GPU = "nvidia.com/gpu"
NAMES = ("n0", "n1", "n2", "n3", "n4", "n5")
RACKS = Cluster(
    tuple(Host(name, "h100", (f"r{i // 3}",)) for i, name in enumerate(NAMES)),
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
    """The part of kube-scheduler around an extender; `free` has GPUs by node."""

    def __init__(self, *free: int) -> None:
        ids = {name: RACKS.machine(name) for name in NAMES}
        self.down = {gpu for name, n in zip(NAMES, free, strict=True) for gpu in ids[name][n:]}
        self.owner: dict[int, str] = {}
        self.extender = Extender(Known(ClusterSnapshot(self.state())))

    def free(self, name: str) -> list[int]:
        """Free GPUs of a node."""
        return [gpu for gpu in RACKS.machine(name) if gpu not in self.down | self.owner.keys()]

    def state(self) -> ClusterState:
        """The state that a service with all pods would have."""
        jobs: dict[str, list[int]] = {}
        for gpu, job in self.owner.items():
            jobs.setdefault(f"team-a/{job}", []).append(gpu)
        free = [gpu for name in NAMES for gpu in self.free(name)]
        held = tuple(Job(name, tuple(ids)) for name, ids in jobs.items())
        return ClusterState(RACKS, tuple(free), held, tuple(self.down))

    def end(self, job: str, nodes: Iterable[str] = NAMES) -> None:
        """End the pods of a job on some nodes."""
        gone = {gpu for name in nodes for gpu in RACKS.machine(name)}
        self.owner = {g: name for g, name in self.owner.items() if g not in gone or name != job}

    def filter(self, one: dict[str, Any], names: Iterable[str] = NAMES) -> dict[str, Any]:
        """The answer about the nodes that fit."""
        need = int(one["spec"]["containers"][0]["resources"]["limits"][GPU])
        fit = [name for name in names if name not in NAMES or len(self.free(name)) >= need]
        self.follow()
        body = {"Pod": one, "Nodes": None, "NodeNames": fit}
        found: dict[str, Any] = msgspec.to_builtins(self.extender.filter(body))
        scores = found["Error"] or msgspec.to_builtins(self.extender.prioritize(body))
        return found | {"fit": fit, "passed": found["NodeNames"], "scores": scores}

    def follow(self) -> None:
        """Make the cluster of the service the real one."""
        known = self.extender.known
        known.status = known.status._replace(state=self.state())

    def schedule(self, one: dict[str, Any]) -> str | None:
        """Filter, prioritize, bind; None if no node passes."""
        found = self.filter(one)
        if not found["fit"]:
            return None  # kube-scheduler makes no request
        assert not found["Error"], found
        reasons = found["FailedNodes"] | found["FailedAndUnresolvableNodes"]
        assert sorted([*found["passed"], *reasons]) == sorted(found["fit"])
        scores = {row["Host"]: row["Score"] for row in found["scores"]}
        assert [*scores] == found["fit"] and {*scores.values()} <= {*range(11)}
        if not found["passed"]:
            return None
        best = max(found["passed"], key=scores.__getitem__)
        gpus = self.free(best)[: int(one["spec"]["containers"][0]["resources"]["limits"][GPU])]
        self.owner |= dict.fromkeys(gpus, one["metadata"]["name"].rpartition("-")[0])
        return best


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0, 2, 4, 8]), min_size=6, max_size=6),
    st.lists(st.tuples(st.sampled_from([2, 4, 8]), st.integers(2, 4)), min_size=1, max_size=2),
    st.randoms(use_true_random=False),
)
def test_gangs_get_one_choice(free: list[int], gangs: list[tuple[int, int]], order: Any) -> None:
    """Pods of two gangs in any order: the first gets the GPUs that a plan of it alone has."""
    kube = Kube(*free)
    queue = [pod(f"g{g}-{i}", k, n) for g, (k, n) in enumerate(gangs) for i in range(n)]
    order.shuffle(queue)
    name = queue[0]["metadata"]["name"][:2]
    gpus, pods = gangs[int(name[1])]
    small = [g for one in NAMES if len(kube.free(one)) < gpus for g in kube.free(one)]
    job, snapshot = (PlanJob(name=name, gpus=gpus * pods, pod=gpus),
                     ClusterSnapshot(kube.state().without(small)))  # fmt: skip
    chosen = start_one(snapshot, job, BottleneckBandwidth(RACKS), {}).gpus
    for one in queue:
        kube.schedule(one)
    got = [gpu for gpu, owner in kube.owner.items() if owner == name]
    assert (RACKS.counts(got) == RACKS.counts(chosen)).all()


def test_levels_and_replaced_pods() -> None:
    """A required level holds for pods of any time; after a restart pods stay with the others."""
    kube, level = Kube(8, 8, 0, 8, 8, 8), {"optsched/level": "rack"}
    assert {kube.schedule(pod(f"a-{i}", 8, 3, **level)) for i in range(3)} == {*NAMES[3:]}
    found = kube.filter(pod("b-0", 8, 3, **level))
    assert found["passed"] == [] and "needs 24 GPUs, free are 16" in str(found)
    assert kube.filter(pod("c-0", 4, 4, **level))["passed"] in (["n0"], ["n1"])
    kube.end("a", ["n4"])
    kube.extender.gangs.clear()
    assert kube.schedule(pod("a-9", 8, 3, **level)) == "n4"
    assert kube.schedule(pod("a-10", 8, 3, **level)) is None
    found = Kube(8, 8, 0, 8, 0, 0).filter(pod("b-0", 8, 3, **level))
    assert found["passed"] == [] and "fit only across several racks" in str(found)
    kube = Kube(0, 0, 4, 0, 4, 0)
    assert {kube.schedule(pod(f"d-{i}", 4, 2)) for i in range(2)} == {"n2", "n4"}
    kube.end("d")
    assert kube.schedule(pod("x-0", 4)) and kube.schedule(pod("d-2", 4, 2))  # one starts again


def test_single_pods_are_ranked_by_bandwidth_and_packing() -> None:
    """Nodes in use come first; a pod of a running job without a size goes next to it."""
    kube = Kube(8, 8, 8, 8, 8, 8)
    kube.owner = dict.fromkeys(RACKS.parse("n4:0-3"), "x")
    assert kube.schedule(pod("a-0", 4)) == "n4"
    kube.owner |= dict.fromkeys(RACKS.parse("n3"), "job")
    scores = {row["Host"]: row["Score"] for row in kube.filter(pod("job-1", 8))["scores"]}
    assert scores["n5"] == 10 > scores["n0"]


def test_reasons() -> None:
    """Reasons say what is missing, and whether evicting pods of the node would help."""
    kube = Kube(8, 8, 8, 8, 8, 8)
    kube.owner = dict.fromkeys(RACKS.parse("n0:0-5"), "x")
    kube.follow()
    body = {"Pod": pod("a-0", 4), "NodeNames": ["n0", "n1", "cpu-1"]}
    found = kube.extender.filter(body)
    assert (found.NodeNames, found.Error) == (["n1"], "")
    assert found.FailedNodes == {"n0": "requested 4 GPUs, free are 2 of 8; jobs: team-a/x"}
    assert "not in the cluster" in found.FailedAndUnresolvableNodes["cpu-1"]
    assert kube.extender.filter(body | {"Pod": pod("web", 0)}).NodeNames == body["NodeNames"]
    found = kube.extender.filter({"Pod": pod("a-0", 4), "Nodes": {"items": []}})
    assert "nodeCacheCapable: true" in found.Error and found.NodeNames is None


@pytest.mark.parametrize("body", [
    None, [], 3, {}, {"Pod": None}, {"Pod": {}}, {"Pod": {"metadata": {"name": 3}}},
    {"Pod": pod("a", 1), "NodeNames": "n0"}, {"Pod": pod("a", 1), "NodeNames": [1]},
    {"Pod": pod("a", 1), "Nodes": {"items": [{}]}},
    {"Pod": pod("a-1", 1) | {"spec": {"containers": [{"resources": {"limits": {GPU: "x"}}}]}}},
    {"Pod": pod("a-1", 1, 2, **{"optsched/pods": "-1"}), "NodeNames": ["n0"]},
    {"Pod": pod("a-1", 1, 2, **{"optsched/pods": "9" * 99}), "NodeNames": ["n0"]},
    {"Pod": pod("a-1", 1, 2, **{"optsched/level": "galaxy"}), "NodeNames": ["n0"]},
])  # fmt: skip
def test_hostile_bodies(body: Any) -> None:
    """A refusal or an answer with an error or with reasons, never another exception."""
    extender = Kube(8, 8, 8, 8, 8, 8).extender
    for call in (extender.filter, extender.prioritize):
        try:
            found = call(body)
        except (InputError, Infeasible):
            continue
        assert isinstance(found, list) or found.Error or found.FailedAndUnresolvableNodes


def test_endpoints(tmp_path: Path) -> None:
    """Over HTTP, for a live cluster."""
    live = Live(tmp_path)
    snapshot = json.loads(ClusterSnapshot(ClusterState.idle(RACKS)).to_json())
    asyncio.run(live.create("main", Create(id="1", snapshot=snapshot)))
    app = create_app(Settings(workers=1), live)  # no worker is started
    client = TestClient(app, base_url="http://localhost")
    body: dict[str, Any] = {"Pod": pod("a-0", 8, 3), "Nodes": None, "NodeNames": [*NAMES]}
    found = client.post("/v1/clusters/main/kubernetes/filter", json=body)
    assert found.status_code == 200 and found.json()["NodeNames"] == ["n0"]
    found = client.post("/v1/clusters/main/kubernetes/prioritize", json=body)
    assert [row["Score"] for row in found.json()] == [10, 0, 0, 0, 0, 0]
    assert client.post("/v1/clusters/other/kubernetes/filter", json=body).status_code == 404
    body = {"Pod": {"metadata": {"name": 3}}}
    found = client.post("/v1/clusters/main/kubernetes/filter", json=body)
    assert found.status_code == 400 and found.json()["error"]["field"] == "Pod.metadata.name"
    paths = client.get("/v1/openapi.json").json()["paths"]
    assert "/v1/clusters/{name}/kubernetes/prioritize" in paths
