"""Snapshots from the output of Slurm and Kubernetes, or from a moment of the simulator."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from optsched.bandwidth import Cluster, ClusterState, Host, HostType
from optsched.bandwidth import Job as StateJob
from optsched.bandwidth.topology import slurm_state
from optsched.bandwidth.topology.foreign import parsed
from optsched.bandwidth.topology.kubernetes import pending_gangs
from optsched.errors import InputError
from optsched.io.strict_json import decode
from optsched.io.values import integer
from optsched.plan.snapshot import ClusterSnapshot, PlanJob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.cluster import Run, Stay


class _Number(msgspec.Struct):
    number: int = 0
    set: bool = True
    infinite: bool = False


_Amount = _Number | int | None


class _SlurmJob(msgspec.Struct):
    job_id: int
    job_state: str | list[str] = ""
    account: str | None = None
    priority: _Amount = None
    submit_time: _Amount = None
    start_time: _Amount = None
    time_limit: _Amount = None
    node_count: _Amount = None
    tres_req_str: str | None = None
    tres_per_job: str | None = None
    tres_per_node: str | None = None
    partition: str | None = None
    minimum_switches: _Amount = None  # until data parser 0.0.40
    required_switches: _Amount = None


class _SlurmJobs(msgspec.Struct):
    jobs: list[_SlurmJob]


def from_slurm(
    cluster: Cluster, nodes_text: str, jobs_json: Any, *, now: int,
    quotas: Mapping[str, int] | None = None,
) -> ClusterSnapshot:  # fmt: skip
    """Read a snapshot from ``scontrol show node -d`` and ``squeue --json``.

    Pending jobs with GPUs are the requests, except those that are held, depend on others or on a
    time, or request GPUs or a partition that the cluster has not. Warnings name jobs with
    reservations, licenses, features or a QOS, which are not modeled. Accounts are the groups, time
    limits the expected durations. The GPUs of a job on one node stay together; ``--switches=1`` is
    the lowest level. Jobs can be neither evicted nor moved until costs are given.

    The JSON may be parsed already; `now` is the time of the output, seconds since 1970.

    Examples
    --------
    >>> from optsched import bandwidth, plan
    >>> nodes = "NodeName=n01 Gres=gpu:8 GresUsed=gpu:0 State=IDLE CfgTRES=gres/gpu=8"
    >>> job = {"job_id": 2, "job_state": ["PENDING"], "tres_req_str": "gres/gpu=4"}
    >>> cluster = bandwidth.synthetic.cluster("nvswitch", 1)
    >>> plan.from_slurm(cluster, nodes, {"jobs": [job]}, now=1000).waiting[0].gpus
    4
    """
    integer("now", now)
    tree = parsed(jobs_json, "squeue")
    state = ClusterState.from_slurm(cluster, nodes_text, tree)
    held = {job.name: len(job.gpus) for job in state.jobs}
    given = decode(tree, _SlurmJobs, "squeue").jobs
    urgency = sorted({_number(job.priority, 0) for job in given}, reverse=True)
    types, found = slurm_state.host_types(cluster, nodes_text), []
    waiting = slurm_state.Waiting(tree)
    for job in given:
        name, pending = str(job.job_id), "PENDING" in job.job_state
        gpus = held.get(name, slurm_state.requested_gpus(job.tres_req_str or "") if pending else 0)
        tres = f"{job.tres_req_str},{job.tres_per_job},{job.tres_per_node}"
        kinds = slurm_state.requested_types(types, tres, job.partition or "")
        if gpus == 0 or (pending and not (kinds and waiting.can_start(job.job_id))):
            continue
        switches = _number(job.required_switches, 0) or _number(job.minimum_switches, 0)
        nodes = max(1, _number(job.node_count, 1))
        limit = 60 * _number(job.time_limit, 60)
        elapsed = 0 if pending else max(0, now - _number(job.start_time, now))
        found.append(PlanJob(
            name=name, gpus=gpus, pod=1 if gpus % nodes else gpus // nodes,
            type=_type(f"squeue: job {name}", kinds, cluster) if pending else None,
            level=cluster.levels[-1] if pending and switches == 1 and cluster.levels else None,
            priority=urgency.index(_number(job.priority, 0)), group=job.account or "",
            submit=_number(job.submit_time, 0), elapsed=elapsed,
            time_left=max(1, limit - elapsed),
        ))  # fmt: skip
    waiting.warn()
    return ClusterSnapshot(state, tuple(found), quotas or {}, now)


def _type(place: str, kinds: set[str], cluster: Cluster) -> str | None:
    """Type of a request for hosts of these types: one of several types is not modeled."""
    if 1 < len(kinds) < len(cluster.types):
        text = "type: a plan takes any hosts, not only those of the types"
        warnings.warn(f"{place}: {text} {', '.join(sorted(kinds))}: name one", stacklevel=3)
    return next(iter(kinds)) if len(kinds) == 1 < len(cluster.types) else None


def _number(given: _Amount, default: int) -> int:
    """Return a number of Slurm, which newer versions write as an object."""
    if isinstance(given, _Number):
        return given.number if given.set and not given.infinite else default
    return default if given is None else given


def from_kubernetes(
    cluster: Cluster, objects: Any, *, now: int = 0, quotas: Mapping[str, int] | None = None
) -> ClusterSnapshot:
    """Read a snapshot from ``kubectl get nodes,pods -A -o json``, as text or parsed.

    Pods without a node are waiting; those of one job or other controller form one request, each
    pod on one host, of the type that alone has the labels of its node selector. Namespaces are the
    groups. Durations are unknown: one hour each.

    Examples
    --------
    >>> from optsched import bandwidth, plan
    >>> gpus = {"nvidia.com/gpu": "8"}
    >>> spec = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]}
    >>> pods = [{"kind": "Pod", "metadata": {"name": "p", "namespace": team}, "spec": spec}
    ...         for team in ("a", "b")]
    >>> node = {"kind": "Node", "metadata": {"name": "n01"},
    ...         "status": {"capacity": gpus, "allocatable": gpus,
    ...                    "conditions": [{"type": "Ready", "status": "True"}]}}
    >>> cluster = bandwidth.synthetic.cluster("nvswitch", 1)
    >>> [job.name for job in plan.from_kubernetes(cluster, {"items": [node, *pods]}).waiting]
    ['a/p', 'b/p']
    """
    tree = parsed(objects, "kubectl")
    state = ClusterState.from_kubernetes(cluster, tree)
    rows: list[Any] = [(job.name, len(job.gpus), 1, None) for job in state.jobs]
    held = {job.name for job in state.jobs}
    for name, (pods, kinds) in pending_gangs(cluster, tree["items"]).items():
        full = f"{name}+" if name in held else name  # more pods of a job that runs already
        pod = pods[0] if len({*pods}) == 1 else 1
        rows.append((full, sum(pods), pod, _type(f"kubectl: {name}", kinds, cluster)))
    jobs = [PlanJob(name=name, gpus=gpus, pod=pod, type=kind, group=name.partition("/")[0])
            for name, gpus, pod, kind in rows]  # fmt: skip
    return ClusterSnapshot(state, tuple(jobs), quotas or {}, now)


def from_run(run: Run, time: int, cluster: Cluster | None = None) -> ClusterSnapshot:
    """Take the snapshot of a simulation just before the decisions of an instant.

    Evicting a preemptible job costs the GPU time of its present stay, moving it the GPU time of
    its restart. Elastic jobs without GPUs request their smallest size. Local ids of GPUs are
    assigned from the lowest. A `cluster` has the names of the nodes as hosts; without one there
    are no levels.

    Examples
    --------
    >>> from optsched import cluster, plan
    >>> queue = [cluster.Job(name=name, sizes=(8,), work=8 * 10**8) for name in ("a", "b")]
    >>> jobs = cluster.Workload.of(queue, time_unit="s")
    >>> snapshot = plan.from_run(cluster.simulate(jobs, "fifo", cluster.Nodes(1, gpus=8)), 50)
    >>> [job.name for job in snapshot.waiting]
    ['b']
    """
    workload, nodes = run.workload, run.nodes
    if workload.time_unit != "s":
        raise InputError(f"run: expected times in s, got {workload.time_unit}")
    if run.settings.changes:
        raise InputError("run: expected one without changes of nodes")
    topology = _topology(run) if cluster is None else cluster
    number = {name: j for j, name in enumerate(workload.names)}
    done = np.zeros(len(workload), np.int64)
    open_stays: dict[int, tuple[Stay, int]] = {}
    free = {name: [*topology.machine(name)]
            for name, n in zip(nodes.names, nodes.gpus, strict=True) if n}  # fmt: skip
    jobs, held = [], []
    for stay in run.at(time).stays:
        j = number[stay.job]
        kind = nodes.types[next(iter(stay.nodes))] if stay.nodes else ""
        size = workload.sizes_of(j).tolist().index(sum(stay.nodes.values()))
        speed = int(workload.rates_on(kind)[workload.size_ptr[j] + size])
        end = time if stay.end is None else stay.end
        work = speed * max(0, end - stay.start - stay.restart) if stay.work is None else stay.work
        done[j] += work
        if stay.end is None:
            open_stays[j] = stay, speed
            ids = [free[nodes.names[n]].pop(0) for n, c in stay.nodes.items() for _ in range(c)]
            held += [StateJob(stay.job, tuple(ids))] if ids else []
    for j in np.flatnonzero(workload.submit <= time).tolist():
        finished = int(run.log.finished[j])
        if 0 <= finished <= time or not workload.sizes_of(j).any():
            continue
        gpus, speed, elapsed = int(workload.sizes_of(j)[0]), int(workload.rates_of(j)[0]), 0
        if j in open_stays:
            stay, speed = open_stays[j]
            gpus, elapsed = sum(stay.nodes.values()), int(done[j]) // speed
        cost = int(workload.restart_cost[j])
        restart = run.settings.restart_cost if cost < 0 else cost
        can = elapsed > 0 and bool(workload.preemptible[j])
        jobs.append(PlanJob(
            name=workload.names[j], gpus=gpus, priority=int(workload.priority[j]),
            group=workload.groups[workload.group[j]].name if workload.groups else "",
            submit=int(workload.submit[j]), elapsed=elapsed,
            time_left=max(1, -(-(int(workload.estimate[j]) - int(done[j])) // speed)),
            estimate=max(1, int(workload.estimate[j]) // speed) if elapsed else None,
            evict=gpus * (time - open_stays[j][0].start) if can else None,
            move=gpus * restart if can else None,
        ))  # fmt: skip
    quotas = {g.name: g.max_slots for g in workload.groups if g.max_slots is not None}
    idle = set(range(topology.n_gpus)).difference(*(job.gpus for job in held))
    state = ClusterState(topology, tuple(idle), tuple(held))
    return ClusterSnapshot(state, tuple(jobs), quotas, time, workload.name)


def _topology(run: Run) -> Cluster:
    """Make hosts of the nodes with GPUs, a type for every product and size."""
    rows = [row for row in zip(run.nodes.names, run.nodes.gpus, run.nodes.types, strict=True)
            if row[1]]  # fmt: skip
    types = {(kind, gpus): HostType(f"{kind or 'gpu'}-x{gpus}", gpus) for _, gpus, kind in rows}
    hosts = tuple(Host(name, types[kind, gpus].name) for name, gpus, kind in rows)
    return Cluster(hosts, tuple(types.values()))
