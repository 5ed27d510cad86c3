"""The state of a cluster from ``scontrol show node -d`` and ``squeue --json``."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from optsched.bandwidth.topology.foreign import looks_like, parsed
from optsched.bandwidth.topology.names import expand, local_ids
from optsched.bandwidth.topology.usage import Usage
from optsched.errors import InputError
from optsched.io.strict_json import decode, shortened

if TYPE_CHECKING:
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.state import ClusterState

_FIELD = re.compile(
    r"(?:^|\s)(NodeName|State|Gres|GresUsed|CPUAlloc|CPUEfctv|CPUTot|CfgTRES|AllocTRES|Partitions)"
    r"=(\S*)"
)
_GRES = re.compile(r"(\w[\w-]*)(?::(\(null\)|[^:(),]+))??:(\d{1,6})(?:\(([^()]*)\))?(?:,|$)")
_PRODUCT = re.compile(r"\bgpu:(?!\d+(?:[(,]|$))([^:=,()]+)")
_OTHER = re.compile(r"(?!(?:gpu|shard|mps):)[^:(),]+(?::[^:(),]+)*(?:\([^()]*\))?(?:,|$)")
_MIG = re.compile(r"(?:.*[_.-])?\d+g\.\d+gb.*", re.IGNORECASE)
_STATE = re.compile(r"([A-Z_]+)([*~#!%$@^+-]*)")

_OPEN: Final = re.compile(
    "IDLE|ALLOC(ATED)?|MIX(ED)?|COMP(LETING)?|CLOUD|DYNAMIC_(NORM|FUTURE)|PLANNED|PERFCTRS|RESUME|"
    "UNDRAIN|EXTERNAL"
)
"""States of nodes that take work."""

_CLOSED: Final = re.compile(
    "DOWN|DRAIN(ED|ING)?|FAIL(ING)?|ERROR|UNKNOWN|FUTURE|MAINT(ENANCE)?|RES(ERVED)?|INVAL(ID_REG)?|"
    "NOT?_RESPOND(ING)?|POWER(ED|ING)?_(DOWN|UP|DRAIN)|REBOOT(_ISSUED|_REQUESTED)?|BLOCKED"
)
_ENDED: Final = re.compile(
    "PENDING|COMPLETED|CANCELLED|(BOOT_|NODE_)?FAIL(ED)?|TIMEOUT|PREEMPTED|DEADLINE|OUT_OF_MEMORY|"
    "REVOKED|SUSPENDED|SPECIAL_EXIT"
)
"""States of jobs that hold no GPU; what a suspended job keeps is in use on its node."""


_HELD: Final = re.compile("JobHeld|Dependency|BeginTime|BadConstraints|Partition(Down|Inactive)")
"""Reasons for which a pending job cannot start, whatever is free."""

_LIMITS: Final = re.compile(
    "Assoc|QOS|Max|Invalid|Licenses|Reserv|ReqNodeNotAvail|AccountNotAllowed|Partition.*Limit"
)
"""Reasons of limits that only Slurm knows."""

_UNMODELED: Final = {
    "state_reason": "limits of Slurm are not modeled: left out; remove the field to plan them",
    "resv_name": "reservations are not modeled: left out; remove the field to plan them",
    "licenses": "not modeled, these jobs may start later in Slurm",
    "features": "not modeled, Slurm may need other nodes; use types of GPUs or partitions",
    "qos": "limits and preemption of QOS are not modeled; give limits as quotas of accounts",
    "array_task_string": "all these tasks count as one job; list them as jobs of their own",
}
"""What warnings say about fields of pending jobs."""

_MOST_WARNINGS: Final = 8


class _UnusableNode(InputError):
    """A node on which free GPUs cannot be told; the others can be used."""


class _Job(msgspec.Struct):
    job_id: int
    job_state: str | list[str] = ""
    nodes: str | None = None
    gres_detail: list[str | None] | None = None
    tres_alloc_str: str | None = None
    job_resources: Any = None


class _Jobs(msgspec.Struct):
    jobs: list[_Job]


class _Pending(msgspec.Struct):
    job_id: int
    state_reason: str | None = None
    resv_name: str | None = None
    licenses: str | None = None
    features: str | None = None
    qos: str | None = None
    array_task_string: str | None = None


class _Queue(msgspec.Struct):
    jobs: list[_Pending]


class _Gpus(NamedTuple):
    """GPUs of a list of generic resources: their number, local ids, and GPUs that are shared."""

    number: int
    ids: set[int]
    shared: set[int]
    """GPUs of which shards or MPS are in use; -1: of a GPU without a known id."""


def from_slurm(cluster: Cluster, nodes: str, jobs: Any, file: str, jobs_file: str) -> ClusterState:
    """Read the state of a cluster; see `ClusterState.from_slurm`."""
    usage = Usage(cluster, file)
    used: dict[str, _Gpus] = {}
    other: list[str] = []
    unusable: list[str] = []
    for record in _records(nodes, file):
        node = record["NodeName"]
        place = f"{file}: node {node:.60}"
        if node in usage.names:
            size = usage.add(node, place)
            try:
                used[node] = _used(record, size, place)
                usage.closed |= {node} if _closed(record, place) else set()
            except _UnusableNode as error:
                usage.closed.add(node)
                unusable.append(str(error))
        elif "gpu" in record.get("Gres", ""):
            other.append(node)
    for text in unusable[:_MOST_WARNINGS]:
        more = len(unusable) - _MOST_WARNINGS
        also = f" (and {more} nodes more)" * (more > 0 and text is unusable[_MOST_WARNINGS - 1])
        warnings.warn(f"{text}; its free GPUs are taken as down{also}", stacklevel=3)
    if other:
        warnings.warn(f"{file}: GPU nodes outside the cluster: {shortened(other)}", stacklevel=3)
    for job in () if jobs is None else _jobs(jobs, jobs_file):
        _hold(usage, job, f"{jobs_file}: job {job.job_id}")
    leftover = [node for node, gpus in used.items() if _hold_leftover(usage, node, gpus)]
    if leftover:
        why = "without jobs (squeue --json)" if jobs is None else f"held by no job of {jobs_file}"
        names = shortened(leftover)
        text = f"{file}: GPUs in use {why} are taken as one job a node: {names}"
        warnings.warn(text, stacklevel=3)
    return usage.state()


def _records(text: str, file: str) -> list[dict[str, str]]:
    """The fields of every node, the first of a name."""
    parts = re.split(r"^(?=\s*NodeName=)", text, flags=re.MULTILINE)
    records = [dict(reversed(_FIELD.findall(part))) for part in parts]
    records = [fields for fields in records if "NodeName" in fields]
    if not records:
        what = "the output of `scontrol show node -d`" + ", without --json" * ("{" in text[:9])
        raise InputError(f"{file}: expected {what}{looks_like(text)}")
    return records


def _closed(record: dict[str, str], place: str) -> bool:
    """Whether a node takes no work, by its state or since no CPU is left."""
    closed = False
    for part in record.get("State", "").split("+"):
        found = _STATE.fullmatch(part)
        shut = found is not None and _CLOSED.fullmatch(found[1]) is not None
        if found is None or not (shut or _OPEN.fullmatch(found[1])):
            got = record.get("State", "no State")
            raise _UnusableNode(f"{place}: State: expected states of Slurm, got {got!r:.60}")
        closed |= shut or bool(set(found[2]) & set("*~#!%$@^"))
    cpus = record.get("CPUEfctv", record.get("CPUTot", ""))
    taken = record.get("CPUAlloc", "")
    return closed or (taken.isdecimal() and cpus.isdecimal() and int(taken) >= int(cpus) > 0)


def _used(record: dict[str, str], size: int, place: str) -> _Gpus:
    """GPUs in use on a node, after a check of how many it has."""
    total = _gpus(record.get("Gres", ""), size, f"{place}: Gres").number
    if total != size:
        raise _UnusableNode(f"{place}: Gres: has {total} GPUs, the cluster {size}")
    if "GresUsed" in record:
        return _gpus(record["GresUsed"], size, f"{place}: GresUsed")
    if "gres/gpu" not in record.get("CfgTRES", ""):
        raise InputError(f"{place}: has no GresUsed: print `scontrol show node -d`")
    return _Gpus(requested_gpus(record.get("AllocTRES", "")), set(), set())


def requested_gpus(tres: str) -> int:
    """Count GPUs of trackable resources: ``cpu=4,gres/gpu=2``; by type ``gres/gpu:h100=2``."""
    found = re.findall(r"gres/gpu(:[^=,]+)?=(\d{1,6})", tres)
    whole = [int(count) for kind, count in found if not kind]
    return max(whole, default=sum(int(count) for _, count in found))


def host_types(cluster: Cluster, nodes: str) -> dict[str, set[str]]:
    """Host types by product of their GPUs (``gpu:h100``; without one ``gpu:``), by partition."""
    kinds = cluster.type_by_machine()
    found: dict[str, set[str]] = defaultdict(set)
    for record in _records(nodes, "scontrol"):
        if kind := kinds.get(record["NodeName"]):
            for product in _PRODUCT.findall(record.get("Gres", "")) or [""]:
                found[f"gpu:{product}"].add(kind)
            for partition in record.get("Partitions", "").split(","):
                found[partition].add(kind)
    return found


def requested_types(types: dict[str, set[str]], tres: str, partitions: str) -> set[str]:
    """Host types of `host_types` that have the GPUs of a request, in one of its partitions."""
    allowed = set().union(*types.values())
    for product in _PRODUCT.findall(tres):
        allowed &= types.get(f"gpu:{product}", set()) | types.get("gpu:", set())
    if partitions and any(not name.startswith("gpu:") and name for name in types):
        allowed &= set().union(*(types.get(name, set()) for name in partitions.split(",")))
    return allowed


class Waiting:
    """Pending jobs with requirements that plans do not model."""

    def __init__(self, tree: Any) -> None:
        self.jobs = {job.job_id: job for job in decode(tree, _Queue, "squeue").jobs}
        self.found: dict[str, list[str]] = defaultdict(list)

    def can_start(self, job_id: int) -> bool:
        """Whether free GPUs are all that a job needs; record what is not modeled."""
        given = {key: getattr(self.jobs[job_id], key) or "" for key in _UNMODELED}
        if _HELD.match(given["state_reason"]):
            return False
        if not _LIMITS.match(given["state_reason"]):
            given["state_reason"] = ""
        keys = [key for key, value in given.items() if value and (key, value) != ("qos", "normal")]
        left_out = keys[:1] in (["state_reason"], ["resv_name"])
        for key in keys[:1] if left_out else keys:
            self.found[key].append(f"{job_id} ({given[key]:.40})")
        return not left_out

    def warn(self) -> None:
        """Warn of every field with its jobs and values."""
        for key, jobs in self.found.items():
            text = f"squeue: {key}: {_UNMODELED[key]}: job {shortened(jobs)}"
            warnings.warn(text, stacklevel=3)


def _gpus(text: str, size: int, place: str) -> _Gpus:
    """Read generic resources: ``gpu:h100:3(IDX:0-1,4),shard:h100:2(2/4,0/4)``."""
    number, at, ids, shared = 0, 0, set[int](), set[int]()
    text = "" if text in ("(null)", "N/A") else text
    while at < len(text):
        if other := _OTHER.match(text, at):
            at = other.end()
            continue
        match = _GRES.match(text, at)
        if match is None:
            raise InputError(f"{place}: expected gpu:TYPE:COUNT(IDX:0-3), got {text!r:.80}")
        at, count, detail = match.end(), int(match[3]), match[4] or ""
        if match[1] == "gpu":
            if _MIG.fullmatch(match[2] or ""):
                raise _UnusableNode(f"{place}: gpu:{match[2]:.60} is a part of a GPU (MIG)")
            number += count
            if detail.startswith("IDX:") and count:
                found = local_ids(detail[4:], size, text, place)
                if len(found) != count or ids & set(found):
                    raise InputError(f"{place}: {count} GPUs, but IDX has others: {text!r:.80}")
                ids |= set(found)
        elif count:
            parts = [part.partition("/")[0] for part in detail.split(",")]
            busy = {i for i, part in enumerate(parts) if part.isdecimal() and int(part)}
            # shares of some GPUs, or by type, are counted from the first GPU that has them
            shared |= busy if "/" in detail and busy and len(parts) == size else {-1}
    return _Gpus(number, ids, shared)


def _jobs(given: Any, file: str) -> list[_Job]:
    """The jobs that hold resources."""
    tree = parsed(given, file)
    if not isinstance(tree, dict) or "jobs" not in tree:
        hint = looks_like(given) if isinstance(given, str) else ""
        raise InputError(f"{file}: expected the output of `squeue --json`{hint}")
    found = []
    for job in decode(tree, _Jobs, file).jobs:
        states = [job.job_state] if isinstance(job.job_state, str) else job.job_state
        if "COMPLETING" in states or not any(map(_ENDED.fullmatch, states)):
            found.append(job)
    return sorted(found, key=lambda job: "COMPLETING" in job.job_state)


def _hold(usage: Usage, job: _Job, place: str) -> None:
    """Give the job its GPUs on nodes of the cluster."""
    nodes, details = _nodes(job, place), job.gres_detail or []
    if not details and (count := requested_gpus(job.tres_alloc_str or "")):
        if count % max(1, len(nodes)):
            raise InputError(f"{place}: gres_detail: missing, {count} GPUs on several nodes")
        details = [f"gpu:{count // len(nodes)}"] * len(nodes)
    completing = "COMPLETING" in job.job_state  # `nodes` are those that it has not left
    if details and len(details) != len(nodes):
        if completing:
            return
        raise InputError(f"{place}: gres_detail: {len(details)} entries for {len(nodes)} nodes")
    for node, detail in zip(nodes, details, strict=False):
        if node in usage.owner:
            owner = usage.owner[node]
            try:
                found = _gpus(detail or "", len(owner), f"{place}: gres_detail: node {node:.60}")
            except _UnusableNode:
                usage.closed.add(node)
                continue
            free = {i for i, one in enumerate(owner) if one is None}
            ids = found.ids & free if completing else found.ids
            number = 0 if completing else found.number - len(found.ids)
            usage.hold(node, str(job.job_id), ids | (found.shared & free), number)


def _nodes(job: _Job, place: str) -> list[str]:
    """Nodes of a job in the order of its details, as data parsers 0.0.39 to 0.0.43 write them."""
    given = job.job_resources if isinstance(job.job_resources, dict) else {}
    inner = given.get("nodes")
    tree = inner if isinstance(inner, dict) else {"list": inner}
    rows = given.get("allocated_nodes") or tree.get("allocation") or ()
    rows = rows.values() if isinstance(rows, dict) else rows
    names = [row.get("nodename", row.get("name", "")) for row in rows if isinstance(row, dict)]
    if names and all(isinstance(name, str) and name for name in names):
        return [str(name) for name in names]
    text = tree.get("list") or job.nodes
    return expand(text, f"{place}: nodes") if isinstance(text, str) and text.strip() else []


def _hold_leftover(usage: Usage, node: str, used: _Gpus) -> bool:
    """Give GPUs in use that no job holds to a job of the node; whether there are any."""
    before, job, numbers = usage.held(node), f"slurm:{node}", usage.numbers[node]
    free = {i for i, one in enumerate(usage.owner[node]) if one is None}
    if used.number == len(used.ids):
        left = sorted(used.ids & free)
        for name, number in [*numbers.items()]:  # jobs without ids have some of these
            usage.hold(node, name, left[:number])
            numbers[name] -= len(left[:number])
            left = left[number:]
        usage.hold(node, job, left)
    else:
        usage.hold(node, job, (), max(0, used.number - before))
    usage.hold(node, job, (used.shared & free) - used.ids)
    usage.closed |= {node} if -1 in used.shared else set()  # nothing says which GPU has shares
    return usage.held(node) > before
