"""States of running clusters: written as Slurm and Kubernetes print them, and read back."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.documents import state_from_tree, state_json
from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.errors import InputError
from optsched.formats.host_domains import from_nodes

if TYPE_CHECKING:
    from program import Cli

KINDS = (HostType("h100", 8), HostType("a100", 4), HostType("rack", 8, tray=4))
CLUSTER = Cluster(
    (
        Host("n01", "h100"),
        Host("n02", "h100"),
        Host("m-3", "a100"),
        Host("q", "rack", (), ("t1", "t2")),
    ),
    KINDS,
)
MACHINES = ("n01", "n02", "m-3", "t1", "t2")
GPU = "nvidia.com/gpu"


@st.composite
def states(draw: st.DrawFn) -> ClusterState:
    """Jobs anywhere; machines that take no work have no free GPU, others none down."""
    jobs: dict[str, list[int]] = {}
    free, down = [], []
    for name in MACHINES:
        closed = draw(st.booleans())
        for gpu in CLUSTER.machine(name):
            job = draw(st.sampled_from(["", "", "7", "12", "300"]))
            (jobs.setdefault(job, []) if job else down if closed else free).append(gpu)
    held = tuple(Job(name, tuple(jobs[name])) for name in sorted(jobs, key=lambda n: jobs[n][0]))
    return ClusterState(CLUSTER, tuple(free), held, tuple(down))


def ranges(ids: list[int], style: int) -> str:
    """Indices as Slurm prints them: single, or joined to a range where they are neighbours."""
    if style and len(ids) > 1 and ids == list(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]}-{ids[-1]}"
    return ",".join(map(str, ids)) or "N/A"


def slurm(state: ClusterState, draw: Any) -> tuple[str, str]:
    """What `scontrol show node -d` and `squeue --json` print of it."""
    style, version = draw(st.integers(0, 1)), draw(st.sampled_from([39, 40, 41, 43]))
    records, details = [], {job.name: {} for job in state.jobs}  # type: ignore[var-annotated]
    for name in MACHINES:
        gpus = CLUSTER.machine(name)
        held = {job.name: [g - gpus[0] for g in job.gpus if g in gpus] for job in state.jobs}
        used = sorted(i for ids in held.values() for i in ids)
        for job, ids in held.items():
            if ids:
                details[job][name] = f"gpu:h:{len(ids)}(IDX:{ranges(ids, style)})"
        closed = not set(gpus) & set(state.free) and bool(set(gpus) & set(state.down))
        word = draw(st.sampled_from(
            ["IDLE+DRAIN", "DOWN*", "MIXED+DRAIN", "IDLE+MAINT+RESERVED", "DOWN+NOT_RESPONDING"]
            if closed else ["IDLE", "MIXED", "IDLE+CLOUD", "MIXED+PLANNED", "IDLE+DYNAMIC_NORM"]
        ))  # fmt: skip
        split = draw(st.integers(0, len(gpus))) if draw(st.booleans()) else len(gpus)
        types = [("h", 0, split), ("(null)", split, len(gpus))]
        have = [f"gpu:{kind}:{b - a}(S:0-1)" for kind, a, b in types if b > a]
        use = [
            f"gpu:{kind}:{len(part)}(IDX:{ranges(part, style)})"
            for kind, a, b in types if b > a for part in [[i for i in used if a <= i < b]]
        ]  # fmt: skip
        text = (f"NodeName={name} Arch=x86_64 CPUAlloc=3 CPUEfctv=64 CPUTot=64 "
                f"Gres={','.join(have)},shard:h:8(S:0-1) GresDrain=N/A "
                f"GresUsed={','.join(use)},shard:h:0(0/4,0/4) "
                f"State={word} Partitions=p Comment=State=DOWN")  # fmt: skip
        records.append(text.replace(" Gres", "\n   Gres") if draw(st.booleans()) else text)
    records.append("NodeName=cpu-1 Gres=(null) State=IDLE")
    listed = [{"job_id": 1, "job_state": "PENDING", "nodes": "", "gres_detail": []}]
    for job in state.jobs:
        where = details[job.name]
        nodes: Any = {"list": ",".join(where), "allocation": [{"name": n} for n in where]}
        made: dict[str, Any] = {"nodes": nodes}
        if version < 41:
            made = {"nodes": ",".join(where), "allocated_nodes": [{"nodename": n} for n in where]}
        listed.append({
            "job_id": int(job.name), "job_state": "RUNNING" if version < 40 else ["RUNNING"],
            "nodes": ",".join(where), "gres_detail": [*where.values()], "job_resources": made,
            "tres_alloc_str": "cpu=3,gres/gpu=99", "array_job_id": {"set": True, "number": 0},
        })  # fmt: skip
    return "\n".join(records) + "\n", json.dumps({"meta": {}, "jobs": listed, "errors": []})


@given(states(), st.data())
def test_slurm_round_trip(state: ClusterState, data: st.DataObject) -> None:
    """The state that was written; without squeue the same GPUs are free."""
    nodes, jobs = slurm(state, data.draw)
    found = ClusterState.from_slurm(CLUSTER, nodes, jobs)
    by_name = {job.name: job.gpus for job in found.jobs}
    assert by_name == {job.name: job.gpus for job in state.jobs}
    assert (found.free, found.down, found.unknown) == (state.free, state.down, frozenset())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        alone = ClusterState.from_slurm(CLUSTER, nodes)
    assert (alone.free, alone.down) == (state.free, state.down)
    assert bool(said) == bool(state.jobs) == any("without jobs" in str(w.message) for w in said)


def kubernetes(state: ClusterState, draw: Any) -> tuple[str, str]:
    """What `kubectl get nodes -o json` and `kubectl get pods -A -o json` print of it."""
    items, pods = [], [{"kind": "Pod", "metadata": {"name": "dns", "namespace": "kube-system"},
                        "spec": {"nodeName": "n01", "containers": [{"name": "c"}]}}]  # fmt: skip
    for name in MACHINES:
        gpus = CLUSTER.machine(name)
        down = sum(g in gpus for g in state.down)
        lost = bool(set(gpus) & set(state.free)) and down
        amounts = {GPU: str(len(gpus)), "cpu": "96"}
        spec: dict[str, Any] = {}
        ready = [{"type": "Ready", "status": "True"}]
        if down and not lost:
            how = draw(st.integers(0, 2))
            spec = {"unschedulable": True} if how == 0 else {}
            ready = [{"type": "Ready", "status": "Unknown"}] if how == 1 else ready
            if how == 2:
                spec = {
                    "taints": [{"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}]
                }
        items.append({
            "kind": "Node", "metadata": {"name": name, "labels": {}}, "spec": spec,
            "status": {"capacity": amounts, "allocatable": amounts, "conditions": ready},
        })  # fmt: skip
        for job in state.jobs:
            left = sum(g in gpus for g in job.gpus)
            while left:
                part = draw(st.integers(1, left))
                pods.append(pod(f"p{len(pods)}", name, part, job.name, draw(st.integers(0, 4))))
                left -= part
            pods.append(pod(f"old{len(pods)}", name, 8, "old", 0) | {"status": {"phase": "Failed"}})
    return json.dumps({"kind": "List", "items": items}), json.dumps({"kind": "List", "items": pods})


def pod(name: str, node: str, gpus: int, job: str, how: int) -> dict[str, Any]:
    """A running pod of a job, which one of several labels, or its owner, names."""
    labels = [{"batch.kubernetes.io/job-name": job}, {"ray.io/cluster": job}, {},
              {"training.kubeflow.org/job-name": job, "job-name": "inner"}, {}][how]  # fmt: skip
    found: dict[str, Any] = {"name": name, "namespace": "a", "labels": labels}
    if how == 2:
        found["ownerReferences"] = [{"kind": "Job", "name": job, "controller": True}]
    if how == 4:
        found["annotations"] = {"scheduling.k8s.io/group-name": job}
    ask = {"resources": {"limits": {GPU: str(gpus)}, "requests": {"cpu": "1"}}}
    before = {"resources": {"requests": {GPU: str(gpus)}}}
    return {
        "kind": "Pod", "metadata": found, "status": {"phase": "Running"},
        "spec": {"nodeName": node, "containers": [ask, {}], "initContainers": [before]},
    }  # fmt: skip


@given(states(), st.data())
def test_kubernetes_round_trip(state: ClusterState, data: st.DataObject) -> None:
    """The numbers by machine that were written; ids are placeholders everywhere."""
    nodes, pods = kubernetes(state, data.draw)
    found = ClusterState.from_kubernetes(CLUSTER, nodes, pods)
    for name in MACHINES:
        gpus = set(CLUSTER.machine(name))
        for key in ("free", "down"):
            assert len(gpus & set(getattr(found, key))) == len(gpus & set(getattr(state, key)))
        for job in state.jobs:
            theirs = next(one for one in found.jobs if one.name == f"a/{job.name}")
            assert len(gpus & set(theirs.gpus)) == len(gpus & set(job.gpus))
    assert len(found.jobs) == len(state.jobs) and found.unknown == set(MACHINES)
    for part in found.written(found.free).split():
        name, ids = part.split(":")
        assert re.fullmatch(r"x\d", ids) or part == CLUSTER.written(CLUSTER.machine(name))
    both = json.dumps({"items": json.loads(nodes)["items"] + json.loads(pods)["items"]})
    assert ClusterState.from_kubernetes(CLUSTER, both) == found
    again = state_from_tree(json.loads(state_json(found)), CLUSTER, "s")
    assert again == found and again.unknown == found.unknown
    assert ClusterState(CLUSTER, found.free, found.jobs, found.down) != found
    assert not found.free or found.take(found.free, "x").unknown == found.unknown


def test_numbers_of_slurm() -> None:
    """Counts without indices, shards, nodes without CPUs, and old files without GresUsed."""
    rows = {
        "n01": "CPUAlloc=1 CPUTot=9 Gres=gpu:h:8 GresUsed=gpu:h:3 State=MIXED",
        "n02": "CPUAlloc=9 CPUTot=9 Gres=gpu:h:8 GresUsed=gpu:h:6(IDX:0-5) State=ALLOCATED",
        "m-3": "Gres=gpu:4,shard:16 GresUsed=gpu:0(IDX:N/A),shard:3(0/4,2/4,1/4,0/4) State=MIXED",
        "t1": "Gres=gpu:4,mps:400 GresUsed=gpu:1(IDX:2),mps:50 State=MIXED",
        "t2": "Gres=gpu:4 State=MIXED CfgTRES=cpu=1,gres/gpu=4 AllocTRES=cpu=1,gres/gpu=1",
    }
    text = "\n".join(f"NodeName={name} {row}" for name, row in rows.items())
    jobs = [
        {"job_id": 5, "job_state": ["RUNNING"], "nodes": "n[01-02]",
         "gres_detail": ["gpu:h:2", "gpu:h:6(IDX:0-5)"]},
        {"job_id": 6, "job_state": ["RUNNING"], "nodes": "t2", "tres_alloc_str": "gres/gpu=1"},
        {"job_id": 7, "job_state": ["SUSPENDED"], "nodes": "t1", "gres_detail": ["gpu:1(IDX:2)"]},
    ]  # fmt: skip
    with pytest.warns(UserWarning, match="held by no job of squeue .* n01, m-3, t1"):
        state = ClusterState.from_slurm(CLUSTER, text, json.dumps({"jobs": jobs}))
    held = {job.name: state.written(job.gpus) for job in state.jobs}
    assert held == {"5": "n01:x2 n02:0-5", "slurm:n01": "n01:x1", "slurm:m-3": "m-3:1,2",
                    "slurm:t1": "t1:2", "6": "t2:x1"}  # fmt: skip
    assert state.written(state.free) == "n01:x5 m-3:0,3 t2:x3"
    assert state.written(state.down) == "n02:6,7 t1:0,1,3"


GOOD = "\n".join(f"NodeName={name} Gres=gpu:{len(CLUSTER.machine(name))} GresUsed=gpu:0 State=IDLE"
                 for name in MACHINES)  # fmt: skip
RUNNING = {"job_id": 1, "job_state": ["RUNNING"], "nodes": "n01"}
LEFT = {"job_state": ["COMPLETED", "COMPLETING"], "nodes": "n02", "job_id": 1}
SLURM_HELD: list[tuple[str, list[dict[str, Any]], str]] = [
    ("Gres=gpu:8 CfgTRES=gres/gpu:h=8 AllocTRES=cpu=1,gres/gpu:h=3", [], "x3 of slurm:n01"),
    ("Gres=gpu:h:4,gpu:i:4 CfgTRES=gres/gpu:h=4 AllocTRES=gres/gpu:h=1,gres/gpu:i=2", [],
     "x3 of slurm:n01"),
    ("Gres=gpu:8,scratch:3840000,lic:a:no_consume:4G GresUsed=gpu:1(IDX:4),scratch:1T", [],
     "4 of slurm:n01"),
    ("Gres=gpu:h:4,gpu:i:4 GresUsed=gpu:0,shard:h:0(0/4,0/4,0/4,0/4),shard:i:1(0/4,1/4,0/4,0/4)",
     [], ""),
    ("Gres=gpu:8 GresUsed=gpu:2(IDX:0-1)", [RUNNING | {"gres_detail": ["gpu:2(IDX:0-1)", None],
     "nodes": "n[01-02]"}], "0,1 of 1"),
    ("Gres=gpu:8 GresUsed=gpu:2(IDX:0-1)", [RUNNING | {"gres_detail": ["gpu:2(IDX:0-1)"],
     "job_resources": {"allocated_nodes": {"0": {"cpus": 8}}}}], "0,1 of 1"),
    ("Gres=gpu:8 GresUsed=gpu:2(IDX:0-1)",
     [LEFT | {"gres_detail": ["gpu:2(IDX:0-1)"] * 2, "job_resources": {"allocated_nodes": [
         {"nodename": "n01"}, {"nodename": "n02"}]}},
      RUNNING | {"job_id": 2, "gres_detail": ["gpu:2(IDX:0-1)"]}], "0,1 of 2"),
    ("Gres=gpu:8 GresUsed=gpu:2(IDX:0-1)", [LEFT | {"gres_detail": ["gpu:2(IDX:0-1)"] * 2},
      RUNNING | {"job_id": 2, "gres_detail": ["gpu:2(IDX:0-1)"]}], "0,1 of 2"),
    ("Gres=gpu:8,shard:32 GresUsed=gpu:0,shard:1(0/4,1/4,0/4,0/4,0/4,0/4,0/4,0/4)",
     [RUNNING | {"gres_detail": ["shard:1(0/4,1/4,0/4,0/4,0/4,0/4,0/4,0/4)"]}], "1 of 1"),
]  # fmt: skip
"""A record of n01, jobs, and who holds what on it; empty: it is down."""


@pytest.mark.filterwarnings("ignore:.*GPUs in use")
@pytest.mark.parametrize(("record", "jobs", "held"), SLURM_HELD)
def test_slurm_held(record: str, jobs: list[dict[str, Any]], held: str) -> None:
    """Nothing that a node or a job has is free, however a version of Slurm prints it."""
    text = GOOD.replace("Gres=gpu:8 GresUsed=gpu:0", record, 1)
    state = ClusterState.from_slurm(CLUSTER, text, json.dumps({"jobs": jobs}))
    of = {job.name: [gpu for gpu in job.gpus if gpu < 8] for job in state.jobs}
    found = [f"{state.written(gpus)[4:]} of {name}" for name, gpus in of.items() if gpus]
    assert "; ".join(found) == held
    assert bool(held) != (state.down == tuple(range(8)))


def test_held_in_kubernetes() -> None:
    """Sidecars beside an init container count; shares and taints close nodes; claims warn."""
    asks = [{"resources": {"limits": {GPU: str(n)}}} for n in (1, 2, 1)]
    before = [asks[2] | {"restartPolicy": "Always"}, asks[1]]
    spec = {"nodeName": "n01", "containers": asks[:1], "initContainers": before}
    spec["resourceClaims"] = [{"name": "g"}]
    nodes: list[dict[str, Any]] = [
        {"kind": "Node", "metadata": {"name": n}, "status": {
            "capacity": {GPU: str(len(CLUSTER.machine(n)))}}} for n in MACHINES]  # fmt: skip
    nodes[2]["metadata"]["annotations"] = {"hami.io/node-nvidia-register": "[]"}
    nodes[3]["spec"] = {"taints": [{"key": "a.b/agent-not-ready", "effect": "NoExecute"}]}
    nodes[4]["status"]["capacity"]["aliyun.com/gpu-mem"] = "64"
    pods = [{"kind": "Pod", "metadata": {"name": "p", "namespace": n}, "spec": s}
            for n, s in (("a", spec), ("b", {}))]  # fmt: skip
    with pytest.warns(UserWarning, match="f: GPUs that pods hold by resourceClaims .*: p"):
        state = ClusterState.from_kubernetes(CLUSTER, {"items": nodes + pods}, None, ("f", ""))
    assert state.written(state.free) == "n01:x5 n02:0-7"
    assert state.written(state.jobs[0].gpus) == "n01:x3" and len(state.down) == 12
    part = {"items": nodes + pods, "metadata": {"continue": "abc"}}
    with pytest.raises(InputError, match=r"f: metadata\.continue: a part of a list"):
        ClusterState.from_kubernetes(CLUSTER, part, None, ("f", ""))
    with pytest.raises(InputError, match=r"f: metadata\.continue"):
        from_nodes(part, "f")


def test_numbers_of_kubernetes() -> None:
    """Unhealthy GPUs are down, of time slices each may be another GPU, parts are no GPUs."""

    def node(name: str, count: int, healthy: int, **labels: str) -> dict[str, Any]:
        keys = {f"nvidia.com/{key.replace('_', '.')}": value for key, value in labels.items()}
        return {"kind": "Node", "metadata": {"name": name, "labels": keys}, "status": {
            "capacity": {GPU: str(count)}, "allocatable": {GPU: str(healthy)}}}  # fmt: skip

    items = [node("n01", 8, 6), node("n02", 32, 32, gpu_replicas="4"), node("m-3", 4, 4),
             node("t1", 28, 28, gpu_product="A100-MIG-1g.5gb"), node("t2", 3, 3),
             pod("a", "n01", 5, "j", 0), pod("b", "n02", 3, "j", 0), pod("c", "m-3", 4, "k", 3),
             {"kind": "Pod", "metadata": {"name": "d", "namespace": "kube-system"},
              "spec": {"containers": [{"resources": {"limits": {GPU: 8}}}]}}]  # fmt: skip
    state = ClusterState.from_kubernetes(CLUSTER, json.dumps({"items": items}))
    assert state.written(state.free) == "n01:x1 n02:x5 t2:x3"
    assert state.written(state.down) == "n01:x2 t1:0-3 t2:x1"
    assert {job.name: state.written(job.gpus) for job in state.jobs} == {
        "a/j": "n01:x5 n02:x3", "a/k": "m-3:0-3"}  # fmt: skip


SLURM: list[tuple[str, str, Any, str]] = [
    ("", "PARTITION  AVAIL", None, "f: expected the output of `scontrol.*looks like `sinfo`"),
    ("", "", " JOBID PARTITION\n 1 gpu", "j:1:.*the table of `squeue`: print `squeue --json`"),
    ("NodeName=n02", "NodeName=n01", None, "node n01: is there twice"),
    ("NodeName=n02", "NodeName=zz", None, "has not 1 of the .*: n02"),
    ("gpu:8", "gpu:a:b:8", None, "node n01: Gres: expected gpu:TYPE:COUNT"),
    (" GresUsed=gpu:0", "", None, "node n01: has no GresUsed: print `scontrol show node -d`"),
    ("gpu:0", "gpu:2(IDX:0-8)", None, r"n01: GresUsed: 'gpu:2\(IDX:0-8\)': expected ids in 0..7"),
    ("gpu:0", "gpu:2(IDX:0-2)", None, "node n01: GresUsed: 2 GPUs, but IDX has others"),
    ("gpu:0", "gpu:9", None, "node n01: jobs hold more than its 8 GPUs"),
    ("", "", "{}", "j: expected the output of `squeue --json`"),
    ("", "", {"job_id": "7"}, r"j: jobs\[0\]\.job_id: expected"),
    ("", "", {"gres_detail": ["gpu:1"] * 3}, "j: job 7: gres_detail: 3 entries for 2 nodes"),
    ("", "", {"gres_detail": ["gpu:1(IDX:9)", ""]}, "j: job 7: gres_detail: node n01: .*0..7"),
    ("", "", {"gres_detail": [], "tres_alloc_str": "gres/gpu=3"}, "j: job 7: gres_detail: missing"),
    ("", "", {"gres_detail": ["gpu:9", ""]}, "node n01: jobs hold more than its 8 GPUs"),
]  # fmt: skip


UNUSABLE = (
    ("State=IDLE", "State=BANANA", "node n01: State: expected states of Slurm, got 'BANANA'"),
    (" State=IDLE", "", "node n01: State: .*'no State'"),
    ("gpu:8", "gpu:7", "node n01: Gres: has 7 GPUs, the cluster 8"),
    ("gpu:8", "gpu:h:7,gpu:h_1g.10gb:1", r"n01: Gres: gpu:h_1g.10gb is a part of a GPU"),
)


@pytest.mark.parametrize(("old", "new", "message"), UNUSABLE)
def test_a_node_that_cannot_be_read_is_down(old: str, new: str, message: str) -> None:
    """With a warning; the others can be used."""
    with pytest.warns(UserWarning, match=message):
        state = ClusterState.from_slurm(CLUSTER, GOOD.replace(old, new, 1), None, ("f", "j"))
    good = ClusterState.from_slurm(CLUSTER, GOOD, None, ("f", "j"))
    assert not set(state.free) & set(CLUSTER.machine("n01")) and state.free
    assert set(state.down) - set(good.down) <= set(CLUSTER.machine("n01"))
    with pytest.warns(UserWarning, match=message):  # a job there too
        job = {"job_id": 7, "job_state": "RUNNING", "nodes": "n01", "gres_detail": ["gpu:1g.5gb:1"]}
        again = ClusterState.from_slurm(
            CLUSTER, GOOD.replace(old, new, 1), json.dumps({"jobs": [job]}), ("f", "j")
        )
    assert again.free == state.free


@pytest.mark.parametrize("at", range(len(SLURM)))
def test_slurm_refused(at: int) -> None:
    """File, node or job, field and value."""
    old, new, job, message = SLURM[at]
    text = GOOD.replace(old, new, 1) if old else new or GOOD
    base = {"job_id": 7, "job_state": ["RUNNING"], "nodes": "n[01-02]"}
    jobs = (
        job if isinstance(job, str) else json.dumps({"jobs": [base | (job or {})] if job else []})
    )
    with pytest.raises(InputError, match=message):
        ClusterState.from_slurm(CLUSTER, text, jobs, ("f", "j"))
    two = [base | {"job_id": i, "gres_detail": ["gpu:1(IDX:3)", ""]} for i in (7, 8)]
    with pytest.raises(InputError, match="node n01: GPU 3 is held by jobs 7 and 8"):
        ClusterState.from_slurm(CLUSTER, GOOD, json.dumps({"jobs": two}), ("f", "j"))


def test_kubernetes_refused() -> None:
    """File, item, node or pod, and value."""
    nodes = [
        {
            "kind": "Node",
            "metadata": {"name": n},
            "status": {"capacity": {GPU: str(len(CLUSTER.machine(n)))}},
        }
        for n in MACHINES
    ]
    pods = [pod("p", "n01", 3, "j", 0), pod("q", "none", 1, "j", 1)]
    pods[1]["metadata"]["namespace"] = "b"
    for items, message in (
        (nodes[1:] + pods, "f: has not 1 of the cluster's 5 nodes, the first: n01"),
        (nodes, "f: has no pods: print `kubectl get nodes,pods -A -o json`"),
        ([*nodes, {"kind": "Service"}], r"f: items\[5\]: expected a Node or a Pod, got 'Service'"),
        ([*nodes, nodes[0], *pods], r"items\[5\] \(node n01\): is there twice"),
        ([*nodes, pod("p", "n01", 9, "j", 0), *pods], r"node n01: jobs hold more than its 8 GPUs"),
        ([nodes[0] | {"status": {"capacity": {GPU: "9"}}}, *nodes[1:], *pods], "has 9 GPUs, the"),
        ([*nodes, {"kind": "Pod", "metadata": {}}], r"items\[5\]: .*name"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            ClusterState.from_kubernetes(CLUSTER, json.dumps({"items": items}), None, ("f", "g"))
    with pytest.warns(UserWarning, match="f: all pods are in namespace a: print all with -A"):
        ClusterState.from_kubernetes(
            CLUSTER, json.dumps({"items": nodes + pods[:1]}), None, ("f", "")
        )


def test_commands(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """`topology state` writes what was read; `show` draws it, in the terminal and as a file."""
    monkeypatch.setenv("COLUMNS", "100")
    CLUSTER.write("c.json")
    text = GOOD.replace("gpu:0", "gpu:3(IDX:0-1,5)", 1).replace("State=IDLE", "State=IDLE+DRAIN", 1)
    Path("n.txt").write_text(text)
    jobs = [
        {"job_id": 7, "job_state": "RUNNING", "nodes": "n01", "gres_detail": ["gpu:3(IDX:0-1,5)"]}
    ]
    Path("j.json").write_text(json.dumps({"jobs": jobs}))
    words = ("gpus", "topology", "state", "--cluster", "c.json", "-o", "s.json")
    ran = cli(*words, "--slurm", "n.txt", "--jobs", "j.json")
    assert ran.out == "wrote s.json: 20 GPUs free, 3 held by 1 jobs, 5 down\n" and not ran.err
    state = ClusterState.read("s.json", CLUSTER)
    assert state.jobs == (Job("7", (0, 1, 5)),) and state.down == (2, 3, 4, 6, 7)
    out = cli("gpus", "topology", "show", "c.json", "--state", "s.json", "--gpus", "t2:0-1").out
    assert "n01 ##xxx#xx ........ .... .... @@.." in out
    assert (
        cli("gpus", "topology", "show", "c.json", "--state", "s.json", "-o", "m.svg").out
        == "wrote m.svg\n"
    )
    assert Path("m.svg").read_text().count("<path") > CLUSTER.n_gpus
    nodes = [{"kind": "Node", "metadata": {"name": n}, "status": {
        "capacity": {GPU: str(len(CLUSTER.machine(n)))}}} for n in MACHINES]  # fmt: skip
    Path("n.json").write_text(json.dumps({"items": nodes}))
    Path("p.json").write_text(json.dumps({"items": [pod("p", "n01", 2, "j", 0)]}))
    ran = cli(*words, "--kubernetes", "n.json", "--kubernetes", "p.json")
    assert ran.out.endswith("26 GPUs free, 2 held by 1 jobs, 0 down, ids unknown on 5 machines\n")
    given = ("gpus", "choose", "--cluster", "c.json", "--state", "s.json", "--gpus", 6)
    assert cli(*given).out == "n01:x6\n" and cli(*given, "--hostfile").out == "n01 slots=6\n"
    assert json.loads(cli(*given, "--json").out)["ranks"] == ["n01"] * 6
    pairs = (("X", "NV2", "SYS"), ("NV2", "X", "SYS"), ("SYS", "SYS", "X"))
    Cluster.uniform(HostType("h", 3, pairs), 1).write("d.json")
    items = [{"kind": "Node", "metadata": {"name": "n01"}, "status": {"capacity": {GPU: "3"}}}]
    Path("n.json").write_text(json.dumps({"items": items}))
    ran = cli(*words[:4], "d.json", *words[5:], "--kubernetes", "n.json", "--kubernetes", "p.json")
    assert "types[h]: pairs of GPUs differ, and ids are unknown" in ran.err
    assert "give --slurm [--jobs], or --kubernetes" in cli.refused(*words)
    assert cli.refused(*words, "--slurm", "c.json").startswith(
        "c.json: expected the output of `scon"
    )
    Path("r.json").write_text('{"format": "optsched.state/1", "free": "rest", "down": "n01:1"}')
    assert len(ClusterState.read("r.json", CLUSTER).free) == CLUSTER.n_gpus - 1
