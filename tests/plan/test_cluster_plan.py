"""Plans of a snapshot: starts, reasons, expected starts, documents, the command."""

from __future__ import annotations

import json
import random
import re
import warnings
from dataclasses import replace
from typing import Any

import move_oracle
import pytest
from program import Cli

from optsched import cluster, verify
from optsched.bandwidth import BottleneckBandwidth, Cluster, ClusterState, Host, HostType, synthetic
from optsched.errors import InputError
from optsched.model.schedule import Schedule
from optsched.plan import (
    ClusterSnapshot,
    Plan,
    PlanJob,
    from_kubernetes,
    from_run,
    from_slurm,
    past_jobs,
    plan,
)  # fmt: skip


def leaves() -> Cluster:
    """Four hosts of 4 GPUs, two a leaf."""
    hosts = tuple(Host(f"n{h}", "t", (f"l{h // 2}",)) for h in range(4))
    return Cluster(hosts, (HostType("t", 4),), ("leaf",), factors={"cluster": 0.5})


def busy(*jobs: PlanJob, quotas: dict[str, int] | None = None) -> ClusterSnapshot:
    """Each host has one GPU in use, n0 three."""
    held = {"a": "n0:0-2", "b": "n1:0", "c": "n2:0", "d": "n3:0"}
    state = ClusterState.parse(leaves(), "n0:3 n1:1-3 n2:1-3 n3:1-3", held)
    facts = [PlanJob(name=n, gpus=3 if n == "a" else 1, group="g", time_left=100 * (i + 1))
             for i, n in enumerate(held)]  # fmt: skip
    return ClusterSnapshot(state, (*facts, *jobs), quotas or {})


@pytest.mark.parametrize(
    ("job", "quotas", "why", "text"),
    [
        (PlanJob(name="w", gpus=17), {}, "never", "needs 17 GPUs, the cluster has 16"),
        (PlanJob(name="w", gpus=12), {}, "space", "needs 12 GPUs, free are 10"),
        (PlanJob(name="w", gpus=8, pod=4), {}, "space",
         "needs 2 x 4 GPUs, each 4 on one host, free are 0 x 4"),
        (PlanJob(name="w", gpus=7, level="leaf"), {}, "level",
         "7 GPUs fit only across several leafs, free are 6 in one"),
        (PlanJob(name="w", gpus=4, level="host"), {}, "level",
         "4 GPUs fit only across several hosts, free are 3 in one"),
        (PlanJob(name="w", gpus=2, group="g"), {"g": 7}, "quota",
         "group g holds 6 of its quota of 7 GPUs, 2 more exceed it"),
        (PlanJob(name="w", gpus=8, group="g"), {"g": 7}, "never",
         "needs 8 GPUs, the quota of group g is 7"),
    ],
)  # fmt: skip
def test_reasons(job: PlanJob, quotas: dict[str, int], why: str, text: str) -> None:
    """One request that cannot start now, and the first reason."""
    (verdict,) = plan(busy(job, quotas=quotas), sigma=0).verdicts
    assert (verdict.why, verdict.text) == (why, text)
    assert not verdict.gpus
    assert (verdict.expected is None) == (why == "never")


def test_bandwidth_and_order() -> None:
    """GPUs that are too slow, and requests ahead."""
    slow = PlanJob(name="slow", gpus=4, bandwidth=100, priority=1)
    none = PlanJob(name="none", gpus=6, bandwidth=3000, priority=1)
    first = PlanJob(name="first", gpus=8, priority=2)
    last = PlanJob(name="last", gpus=4, priority=3)
    found = {one.job.name: one for one in plan(busy(slow, none, first, last), sigma=0).verdicts}
    assert found["slow"].why == "bandwidth"
    assert (found["none"].why, found["none"].expected) == ("never", None)
    assert "it needs 100" in found["slow"].text
    assert len(found["first"].gpus) == 8
    assert (found["last"].why, found["last"].text) == ("order", "ahead of it first get the GPUs")


def test_most_gpus_within_a_priority() -> None:
    """The quota plan prefers 6 + 4 GPUs to 7 that came earlier; lower priorities get the others."""
    jobs = [PlanJob(name=f"w{g}", gpus=g, submit=k) for k, g in enumerate((7, 6, 4))]
    found = plan(busy(*jobs), sigma=0)
    assert set(found.starts) == {"w6", "w4"}
    assert found.gap == 0


def test_group_quota_is_shared() -> None:
    """Requests of one group start together only within its quota."""
    jobs = [PlanJob(name=f"w{k}", gpus=2, group="g", submit=k) for k in range(3)]
    found = plan(busy(*jobs, quotas={"g": 10}), sigma=0)
    assert list(found.starts) == ["w0", "w1"]
    assert found.verdicts[2].text == "ahead of it w0, w1 use the quota of group g"


def test_expected_start_without_spread() -> None:
    """With exact durations, a request starts when the job that it needs to end has ended."""
    found = plan(busy(PlanJob(name="w", gpus=12)), sigma=0)
    assert found.verdicts[0].expected == (100, 100, 100)  # a ends: 13 GPUs
    found = plan(busy(PlanJob(name="w", gpus=15)), sigma=0)
    assert found.verdicts[0].expected == (300, 300, 300)
    quota = plan(busy(PlanJob(name="w", gpus=4, group="g"), quotas={"g": 7}), sigma=0)
    assert quota.verdicts[0].expected == (100, 100, 100)
    spread = plan(busy(PlanJob(name="w", gpus=15)), sigma=0.5, seed=1).verdicts[0].expected
    assert spread is not None and 100 <= spread[0] < spread[1] < spread[2]


def test_later_arrivals_of_a_history() -> None:
    """Past jobs that fill gaps delay a job of all GPUs; factors have the mean 1."""
    snapshot = busy(PlanJob(name="all", gpus=16, priority=7))
    trace = cluster.Workload.of(
        [cluster.Job(name=f"j{k}", submit=50 * k, sizes=(1,), work=(50 + k) * cluster.WORK)
         for k in range(100)],
        time_unit="s",
    )  # fmt: skip
    past = past_jobs(trace, snapshot)
    assert sum(past.factors) == pytest.approx(100)
    assert max(past.factors) == pytest.approx(149 / 99.5)
    assert {job.priority for row in past.arrivals for job in row} == {7}
    assert all(job.submit > snapshot.now for row in past.arrivals for job in row)
    alone, filled = (
        plan(snapshot, sigma=0, later=later).verdicts[0].expected for later in ((), past.arrivals)
    )
    assert alone == (400, 400, 400) and filled is not None and filled[0] > 400


def random_snapshot(seed: int) -> ClusterSnapshot:
    """Five hosts of two types with random jobs, requests and quotas."""
    rng = random.Random(seed)
    hosts = tuple(Host(f"n{h}", rng.choice("xy"), (f"l{h // 2}",)) for h in range(5))
    kinds = {host.type for host in hosts}
    types = tuple(HostType(k, 4, nic_rate=10.0) for k in sorted(kinds))
    topology = Cluster(hosts, types, ("rack",), factors={"cluster": 0.5})
    state, jobs = ClusterState.idle(topology), []
    if rng.random() < 0.2:
        state = state.fail([rng.randrange(topology.n_gpus)])
    for j in range(rng.randint(0, 5)):
        gpus = rng.sample(state.free, min(len(state.free), rng.randint(1, 4)))
        state = state.take(gpus, f"r{j}")
        jobs.append(
            PlanJob(name=f"r{j}", gpus=len(gpus), group=rng.choice("ab"),
                    time_left=rng.randint(1, 999), elapsed=rng.randint(0, 999))
        )  # fmt: skip
    for j in range(rng.randint(1, 7)):
        size = rng.choice((1, 2, 3, 4, 4, 8, 12))
        jobs.append(PlanJob(
            name=f"w{j}", gpus=size, pod=rng.choice([p for p in (1, 2, 4) if size % p == 0]),
            level=rng.choice((None, "rack", "host" if size <= 4 else "rack")), submit=j,
            type=rng.choice((None, *sorted(kinds))), priority=rng.choice((1, 2)),
            group=rng.choice("ab"), bandwidth=rng.choice((None, None, 12.0)) if size > 1 else None,
        ))  # fmt: skip
    return ClusterSnapshot(state, tuple(jobs), {"a": rng.randint(2, 20)} if seed % 2 else {})


def fast_enough(snapshot: ClusterSnapshot) -> Any:
    """Whether the first GPUs of hosts reach the bandwidth of a job: all of a host are alike."""
    model, first = BottleneckBandwidth(snapshot.cluster), snapshot.cluster.first.tolist()

    def fast(job: PlanJob, place: dict[int, int]) -> bool:
        gpus = [first[h] + i for h, n in place.items() for i in range(n)]
        return job.bandwidth is None or model.of(gpus) >= job.bandwidth * 1e6

    return fast


def check_rules(found: Plan) -> None:
    """Starts keep type, level, pods, bandwidth and quotas; the document is accepted."""
    snapshot = found.snapshot
    topology, used = snapshot.cluster, {g: snapshot.used(g) for g in "ab"}
    model = BottleneckBandwidth(topology)
    for one in found.verdicts:
        job = one.job
        if not one.gpus:
            continue
        used[job.group] += job.gpus
        held = [topology.hosts[topology.host_of[g]] for g in one.gpus]
        assert len(one.gpus) == job.gpus and len({host.type for host in held}) == 1
        assert job.type in (None, held[0].type)
        assert job.level != "host" or len(set(held)) == 1
        assert job.level != "rack" or len({host.domains for host in held}) == 1
        size = job.gpus if job.level == "host" else job.pod
        assert all(held.count(host) % size == 0 for host in held)
        assert model.of(one.gpus) >= (job.bandwidth or 0) * 1e6
    assert all(used[g] <= max(n, snapshot.used(g)) for g, n in snapshot.quotas.items())
    assert found.state.free == tuple(
        g for g in snapshot.state.free if not any(g in gpus for gpus in found.starts.values())
    )
    assert not verify(found.schedule)
    assert len(found.explain()) == len(snapshot.waiting)


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed: int) -> None:
    """The requests that start, and the reasons of the others, as by trying everything."""
    snapshot = random_snapshot(seed)
    found, fast = plan(snapshot, sigma=0), fast_enough(snapshot)
    check_rules(found)
    best = move_oracle.starts(snapshot, fast)
    assert found.starts.keys() == {job.name for same in best for job in same}
    assert found.gap == 0
    for one in found.verdicts:
        assert one.gpus or one.why == move_oracle.reason(snapshot, one.job, fast), one


def after_event(snapshot: ClusterSnapshot, event: str) -> ClusterSnapshot:
    """The snapshot when a job has ended, a host has failed, or an urgent job has arrived."""
    state, jobs = snapshot.state, list(snapshot.jobs)
    if event == "ends" and state.jobs:
        name = state.jobs[0].name
        state, jobs = state.give(name), [job for job in jobs if job.name != name]
    if event == "fails" and state.free:
        host = state.cluster.host_of[state.free[0]]
        state = state.fail([g for g in state.free if state.cluster.host_of[g] == host])
    if event == "urgent":
        jobs.append(PlanJob(name="urgent", gpus=4, priority=0, group="b"))
    return ClusterSnapshot(state, tuple(jobs), snapshot.quotas, snapshot.now)


def test_rails() -> None:
    """Requests on several hosts get equal local ids, or are waiting for them."""
    cluster = Cluster((Host("a", "t"), Host("b", "t")), (HostType("t", 4),), rails=True)
    state = ClusterState.parse(cluster, "a:0,1 b:1-3", {"x": "a:2,3 b:0"})
    jobs = [PlanJob(name="w", gpus=4), PlanJob(name="v", gpus=2, submit=1)]
    found = plan(ClusterSnapshot(state, jobs), sigma=0)
    assert found.verdicts[0].why == "space" and "local ids" in found.verdicts[0].text
    first, second = found.starts["v"]
    assert first // 4 == second // 4 or first % 4 == second % 4


@pytest.mark.parametrize(("quota", "start"), [(5, 100), (3, 200), (1, 400)])
def test_expected_start_of_a_group_beyond_its_quota(quota: int, start: int) -> None:
    """The quota was lowered to less than running jobs hold: enough of them have to end."""
    found = plan(busy(PlanJob(name="w", gpus=1, group="g"), quotas={"g": quota}), sigma=0)
    assert found.verdicts[0].expected == (start,) * 3


@pytest.mark.parametrize("event", ["nothing", "ends", "fails", "urgent"])
@pytest.mark.parametrize("seed", range(12))
def test_second_plan(seed: int, event: str) -> None:
    """It starts as many GPUs as without the first, keeps what it can, explains each difference."""
    first = plan(random_snapshot(seed), sigma=0)
    snapshot = after_event(first.snapshot, event)
    found, fresh = plan(snapshot, sigma=0, previous=first), plan(snapshot, sigma=0)
    check_rules(found)
    for p in (0, 1, 2):
        totals = [sum(len(one.gpus) for one in made.verdicts if one.job.priority == p)
                  for made in (found, fresh)]  # fmt: skip
        assert totals[0] == totals[1]
    explained = {one.job for one in found.changes}
    for one in found.verdicts:
        if one.gpus != first.starts.get(one.job.name, ()):
            assert one.job.name in explained
    same = plan(snapshot, sigma=0, previous=first.schedule)
    assert (same.starts, same.changes) == (found.starts, found.changes)
    if event == "nothing":
        assert found.changes == () and found.starts == first.starts


def test_sentences_of_changes() -> None:
    """A host fails, an urgent request takes GPUs, a job ends: each with its cause."""
    first = plan(busy(PlanJob(name="w", gpus=3, level="host"),
                      PlanJob(name="v", gpus=10, priority=60)), sigma=0)  # fmt: skip
    place = first.snapshot.state.written(first.starts["w"])
    failed = plan(ClusterSnapshot(first.snapshot.state.fail(first.starts["w"][:1]),
                                  first.snapshot.jobs), sigma=0, previous=first)  # fmt: skip
    moved = {one.kind: one.text for one in failed.changes}["moves"]
    assert moved.startswith("w starts on ") and f"not on {place}" in moved and "failed." in moved
    urgent = PlanJob(name="u", gpus=9, priority=1)
    taken = plan(ClusterSnapshot(first.snapshot.state, (*first.snapshot.jobs, urgent)), sigma=0,
                 previous=first)  # fmt: skip
    assert [one.text for one in taken.changes][:2] == [
        "u is new and starts on n1:1-3 n2:1-3 n3:1-3.",
        "w no longer starts: ahead of it u get the GPUs.",
    ]
    small = PlanJob(
        name="s", gpus=3, level="host", priority=1
    )  # as fast elsewhere: planned starts stay
    spared = plan(ClusterSnapshot(first.snapshot.state, (*first.snapshot.jobs, small)), sigma=0,
                  previous=first)  # fmt: skip
    assert spared.starts["w"] == first.starts["w"] and "s" in spared.starts
    ended = plan(after_event(first.snapshot, "ends"), sigma=0, previous=first)
    texts = [one.text for one in ended.changes]
    assert texts[0] == "a has left n0:0-2." and texts[1].startswith("v starts now on ")
    with pytest.raises(InputError, match="policy: expected a name, got None"):
        plan(busy(), policy=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="jobs: expected jobs, got PlanJob"):
        ClusterSnapshot(busy().state, PlanJob(name="a", gpus=1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="previous: expected a Plan or its Schedule"):
        plan(first.snapshot, previous=first.starts)  # type: ignore[arg-type]


@pytest.mark.parametrize("clique", [False, True])
def test_former_starts_on_machines(clique: bool) -> None:
    """Plans are kept where only numbers of GPUs are known, and on machines of a clique."""
    cluster, names = synthetic.cluster("nvswitch", 2), frozenset({"n01", "n02"})
    if clique:
        hosts = tuple(Host(h, "t", (), (f"{h}1", f"{h}2")) for h in "ab")
        cluster, names = Cluster(hosts, (HostType("t", 8, tray=4),)), frozenset[str]()
    state = ClusterState(cluster, tuple(range(16)), unknown=names)
    jobs = [PlanJob(name=f"w{k}", gpus=3, submit=k) for k in range(4)]
    first = plan(ClusterSnapshot(state, jobs), sigma=0)
    again = plan(ClusterSnapshot(state, jobs[1:]), sigma=0, previous=first)
    assert {name: state.written(gpus) for name, gpus in again.starts.items()} == {
        job.name: state.written(first.starts[job.name]) for job in jobs[1:]
    }
    assert [one.kind for one in again.changes] == ["gone"]
    unnamed = replace(first.schedule, provenance={**first.schedule.provenance, "jobs": []})
    assert plan(ClusterSnapshot(state, jobs), sigma=0, previous=unnamed).starts.keys()


def test_document_round_trip(tmp_path: Any) -> None:
    """A snapshot reads back as it was written, and its plan is the same."""
    snapshot = busy(PlanJob(name="w", gpus=3, level="leaf", bandwidth=1.5), quotas={"g": 9})
    snapshot.write(tmp_path / "s.json")
    back = ClusterSnapshot.read(tmp_path / "s.json")
    assert (back.jobs, back.quotas, back.now) == (snapshot.jobs, snapshot.quotas, 0)
    assert back.to_json() == snapshot.to_json()
    assert plan(back).explain() == plan(snapshot).explain()


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (PlanJob(name="a", gpus=2), "jobs['a'].gpus: 2, but it holds 3"),
        (PlanJob(name="w", gpus=3, pod=2), "jobs['w'].pod: 3 GPUs are not a multiple of 2"),
        (PlanJob(name="w", gpus=0), "jobs['w']: gpus: expected"),
        (PlanJob(name="w", gpus=1, level="row"), "jobs['w'].level: expected one of leaf, host"),
        (PlanJob(name="w", gpus=1, type="z"), "jobs['w'].type: expected one of t, got \"z\""),
        (PlanJob(name="w", gpus=1, evict=-1), "jobs['w']: evict: expected"),
        (PlanJob(name="", gpus=1), "jobs: expected distinct names"),
    ],
)
def test_refusals(job: PlanJob, message: str) -> None:
    """Fields are refused with the job and the field."""
    state = busy().state
    with pytest.raises(InputError) as error:
        ClusterSnapshot(state, [job])
    assert message in str(error.value)


def test_moment_of_a_simulation() -> None:
    """Running and waiting jobs of a run, with what is left of them."""
    queue = [
        cluster.Job(name=f"j{k}", sizes=(8,), work=8 * 100 * cluster.WORK, group="g", submit=k)
        for k in range(3)
    ]
    run = cluster.simulate(
        cluster.Workload.of(queue, time_unit="s"), "fifo", cluster.Nodes(2, gpus=8)
    )
    snapshot = from_run(run, 41)
    assert [job.name for job, _ in snapshot.running] == ["j0", "j1"]
    assert [(job.elapsed, job.time_left) for job, _ in snapshot.running] == [(41, 59), (40, 60)]
    assert [job.name for job in snapshot.waiting] == ["j2"]
    assert snapshot.running[0][0].evict == 8 * 41
    found = plan(snapshot, sigma=0, policy="fifo").verdicts[0]
    assert found.expected == (59, 59, 59)  # the run says 100 as well


SLURM_NODES = """\
NodeName=n01 Gres=gpu:8(S:0-1) GresUsed=gpu:8(IDX:0-7) State=ALLOCATED CfgTRES=gres/gpu=8
NodeName=n02 Gres=gpu:8(S:0-1) GresUsed=gpu:0(IDX:N/A) State=IDLE CfgTRES=gres/gpu=8
"""
SLURM_JOBS = {
    "jobs": [
        {"job_id": 1, "job_state": ["RUNNING"], "nodes": "n01", "gres_detail": ["gpu:8(IDX:0-7)"],
         "account": "x", "priority": {"set": True, "infinite": False, "number": 5},
         "start_time": {"set": True, "infinite": False, "number": 900},
         "time_limit": {"set": True, "infinite": False, "number": 10}},
        {"job_id": 2, "job_state": ["PENDING"], "account": "y", "node_count": 2,
         "priority": 9, "tres_req_str": "gres/gpu:h100=16", "time_limit": 5, "submit_time": 950},
    ]
}  # fmt: skip
PODS = {
    "items": [
        {"kind": "Node", "metadata": {"name": "n01"}, "status": {
            "capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"},
            "conditions": [{"type": "Ready", "status": "True"}]}},
        *({"kind": "Pod", "metadata": {"name": f"p{k}", "namespace": space,
                                       "labels": {"job-name": "train"}},
           "spec": {"nodeName": node, "containers": [
               {"resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
           "status": {"phase": phase}}
          for k, space, node, phase in (
              (0, "u", "n01", "Running"), (1, "v", "", "Pending"), (2, "v", "", "Pending"))),
    ]
}  # fmt: skip


def test_slurm_and_kubernetes() -> None:
    """Pending jobs become requests, with the sizes of their parts on one node."""
    found = from_slurm(synthetic.cluster("nvswitch", 2), SLURM_NODES, SLURM_JOBS, now=1000)
    (running, _), (waiting,) = found.running[0], found.waiting
    assert (running.name, running.elapsed, running.time_left) == ("1", 100, 500)
    assert (waiting.name, waiting.gpus, waiting.pod, waiting.time_left) == ("2", 16, 8, 300)
    assert (waiting.priority, running.priority, waiting.group) == (0, 1, "y")
    found = from_kubernetes(synthetic.cluster("nvswitch", 1), PODS)
    assert [(job.name, job.gpus) for job, _ in found.running] == [("u/train", 2)]
    assert [(j.name, j.gpus, j.pod, j.group) for j in found.waiting] == [("v/train", 4, 2, "v")]
    assert plan(found).starts.keys() == {"v/train"}


def test_requests_of_slurm_keep_their_products_partitions_and_switches() -> None:
    """Types of hosts follow from products or partitions; requests for other nodes are left out."""
    hosts = tuple(Host(f"n{i}", "ab"[i > 1], (f"s{i % 2}",)) for i in range(4))
    kinds = (HostType("a", 8), HostType("b", 8))
    cluster = Cluster(hosts, kinds, ("leaf",), factors={"cluster": 1})
    nodes = "\n".join(
        f"NodeName=n{i} Gres=gpu:{kind}:8(S:0-1) GresUsed=gpu:{kind}:0(IDX:N/A) State=IDLE "
        f"Partitions={kind},all" for i, kind in enumerate(("h100", "h100", "a100", "a100"))
    )  # fmt: skip
    for facts, expected in (
        ({"tres_per_node": "gres/gpu:h100:8"}, ("a", None)),
        ({"tres_per_node": "gres:gpu:8", "partition": "a100"}, ("b", None)),
        ({"tres_req_str": "cpu=4,gres/gpu=8,gres/gpu:a100=8", "partition": "all"}, ("b", None)),
        ({"partition": "all,h100", "minimum_switches": 1}, (None, "leaf")),
        ({"partition": "h100", "required_switches": 1}, ("a", "leaf")),
        ({"partition": "h100", "required_switches": 2}, ("a", None)),
        ({"tres_per_node": "gres/gpu:h200:8"}, None),
        ({"tres_per_node": "gres/gpu:h100:8", "partition": "a100"}, None),
        ({"partition": "other"}, None), ({"state_reason": "PartitionDown"}, None),
    ):  # fmt: skip
        job = {"job_id": 1, "job_state": ["PENDING"], "tres_req_str": "gres/gpu=8"} | facts
        found = from_slurm(cluster, nodes, {"jobs": [job]}, now=0).waiting
        assert [(one.type, one.level) for one in found] == ([expected] if expected else []), facts


def test_pods_keep_their_node_selector() -> None:
    """A selector of one type of hosts gives the type; one that no node fits leaves the pod out."""
    hosts = tuple(Host(f"n{i}", "ab"[i]) for i in range(2))
    cluster = Cluster(hosts, (HostType("a", 8), HostType("b", 8)))
    nodes = [{"kind": "Node", "metadata": {"name": f"n{i}", "labels": {"gpu": "ab"[i], "x": "1"}},
              "status": {"capacity": {"nvidia.com/gpu": "8"}}} for i in range(2)]  # fmt: skip
    other = {"kind": "Pod", "metadata": {"name": "q", "namespace": "w"}}
    for selector, expected in (({"gpu": "b"}, ["b"]), ({"x": "1"}, [None]), ({}, [None]),
                               ({"gpu": "b", "x": "2"}, [])):  # fmt: skip
        limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
        pod = {"kind": "Pod", "metadata": {"name": "p", "namespace": "v"},
               "spec": {"containers": [limits], "nodeSelector": selector}}  # fmt: skip
        found = from_kubernetes(cluster, {"items": [*nodes, pod, other]})
        assert [job.type for job in found.waiting] == expected, selector


def test_pods_of_one_job_on_several_types_of_hosts() -> None:
    """All pods of a request have one type: the one that all selectors allow, else a warning."""
    hosts = tuple(Host(f"n{i}", "abc"[i]) for i in range(3))
    cluster = Cluster(hosts, tuple(HostType(name, 8) for name in "abc"))
    nodes = [{"kind": "Node", "status": {"capacity": {"nvidia.com/gpu": "8"}},
              "metadata": {"name": f"n{i}", "labels": {"gpu": "abc"[i], "ab": str(i < 2)}}}
             for i in range(3)]  # fmt: skip
    other = {"kind": "Pod", "metadata": {"name": "q", "namespace": "w"}}
    limits = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}
    for one, two, expected, warning in (
        ({"gpu": "a"}, {"gpu": "b"}, [], r"v/j need hosts of several types \(a, b\)"),
        ({"gpu": "a"}, {"ab": "True"}, ["a"], ""), ({"gpu": "a"}, {"gpu": "z"}, [], ""),
        ({"ab": "True"}, {}, [None], "v/j: type: a plan takes any hosts, .* a, b: name one"),
        ({}, {}, [None], "kubectl: nodeAffinity: not read, .*use nodeSelector: v/j$"),
    ):  # fmt: skip
        rule = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
        affinity = {"nodeAffinity": rule} if "nodeAffinity" in warning else None
        pods = [{"kind": "Pod", "spec": {"containers": [limits], "nodeSelector": selector,
                                         "affinity": affinity},
                 "metadata": {"name": name, "namespace": "v", "labels": {"job-name": "j"}}}
                for name, selector in (("p", one), ("r", two))]  # fmt: skip
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            snapshot = from_kubernetes(cluster, {"items": [*nodes, *pods, other]})
        assert [job.type for job in snapshot.waiting] == expected, (one, two)
        texts = "; ".join(str(text.message) for text in found)
        assert re.search(warning, texts) if warning else not texts, texts


def test_what_plans_do_not_model_of_slurm_is_named() -> None:
    """Limits, reservations, licenses, features, QOS and arrays of pending jobs: a warning each."""
    facts: list[dict[str, Any]] = [
        {"qos": "normal", "state_reason": "Priority"}, {"qos": "high"}, {"licenses": "matlab:2"},
        {"resv_name": "maint"}, {"features": "ib"}, {"state_reason": "QOSMaxGRESPerUser"},
        {"state_reason": "JobHeldUser", "qos": "low"}, {"array_task_string": "1-9"},
    ]  # fmt: skip
    jobs = [{"job_id": i, "job_state": ["PENDING"], "tres_req_str": "gres/gpu=4"} | one
            for i, one in enumerate(facts)]  # fmt: skip
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        snapshot = from_slurm(
            synthetic.cluster("nvswitch", 2), SLURM_NODES.replace("gpu:8(IDX:0-7)", "gpu:0"),
            {"jobs": jobs}, now=0,
        )  # fmt: skip
    assert [job.name for job in snapshot.waiting] == ["0", "1", "2", "4", "7"]
    texts = [str(one.message) for one in found]
    for key, job in (("qos", "1 (high)"), ("licenses", "2 (matlab:2)"), ("resv_name", "3 (maint)"),
                     ("features", "4 (ib)"), ("state_reason", "5 (QOSMaxGRESPerUser)"),
                     ("array_task_string", "7 (1-9)")):  # fmt: skip
        text = next(text for text in texts if text.startswith(f"squeue: {key}: "))
        assert text.endswith(f": job {job}"), text
    assert len(texts) == 6


def test_command(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    """The plan as text, JSON and schedule; clear and defragment; other inputs; exit codes."""
    monkeypatch.chdir(tmp_path)
    run = Cli(tmp_path, monkeypatch, capsys)
    job = PlanJob(name="w", gpus=8, level="leaf")
    facts = [PlanJob(name="a", gpus=3, move=7, evict=70), PlanJob(name="c", gpus=1, move=1),
             PlanJob(name="d", gpus=1, move=1)]  # fmt: skip
    state = busy().state
    ClusterSnapshot(state, (*facts, job)).write(tmp_path / "s.json")
    done = run("plan", "s.json", "-o", "p.schedule.json")
    assert done.code == 0 and "0 of 1 start now" in done.out, done
    assert not verify(Schedule.read(tmp_path / "p.schedule.json"))
    done = run("plan", "s.json", "--json")
    assert json.loads(done.out)["plan"][0]["why"] == "level"
    done = run("plan", "s.json", "--clear", "w", "--best", "2", "-o", "after.json")
    assert done.code == 0 and "Total cost 2; no plan is cheaper (proved)." in done.out, done
    assert ClusterState.read(tmp_path / "after.json", leaves()).job("w")
    done = run("plan", "s.json", "--defragment", "5", "--json")
    assert json.loads(done.out)[0]["status"] == "optimal"
    assert run("plan", "s.json", "--clear", "w", "--time", "1e30").code == 0
    for line in ("--clear a", "--clear w --defragment 1", "--clear w --level leaf", "--best 2",
                 "--clear w --policy fifo", "--train t -o q.json --save q2.json", "--now 5",
                 "--clear w --jobs 2", "--clear w --engine ray", "--policy none --save q.json",
                 "--clear a --save q.json"):  # fmt: skip
        assert run("plan", "s.json", *line.split()).code == 2, line
    assert not [*tmp_path.glob("q*.json")]
    with monkeypatch.context() as patch:
        patch.setattr("optsched.plan.clearing.alternatives", lambda *_, **__: [])
        done = run("plan", "s.json", "--clear", "w", "--json")
        assert (done.code, done.out) == (1, "") and done.err.startswith("unknown: no plan for w")
    (tmp_path / "nodes.txt").write_text(SLURM_NODES)
    (tmp_path / "jobs.json").write_text(json.dumps(SLURM_JOBS))
    synthetic.cluster("nvswitch", 2).write(tmp_path / "c.json")
    for name in ("nodes.txt", "-"):
        run.feed(SLURM_NODES)
        done = run("plan", name, "--slurm", "jobs.json", "--cluster", "c.json", "--now", "1000",
                   "--save", f"s{name}.json")  # fmt: skip
        assert done.code == 0, done
        read = ClusterSnapshot.read(tmp_path / f"s{name}.json")
        assert [job.name for job in read.waiting] == ["2"]
    assert run("plan", "nodes.txt", "--slurm", "jobs.json").code == 2
