"""The state of a cluster from ``scontrol show node -d`` and ``squeue --json``."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from optsched.bandwidth.topology.foreign import looks_like
from optsched.bandwidth.topology.machine_use import MachineUse, assembled
from optsched.bandwidth.topology.names import expand, local_ids
from optsched.errors import InputError
from optsched.io.strict_json import decode, parse, shortened

if TYPE_CHECKING:
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.state import ClusterState

_FIELD = re.compile(
    r"(?:^|\s)(NodeName|State|Gres|GresUsed|CPUAlloc|CPUEfctv|CPUTot|CfgTRES|AllocTRES)=(\S*)"
)
_GRES = re.compile(r"(\w[\w-]*)(?::(\(null\)|[^:(),]+))??:(\d{1,6})(?:\(([^()]*)\))?(?:,|$)")
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


class _Job(msgspec.Struct):
    job_id: int
    job_state: str | list[str] = ""
    nodes: str = ""
    gres_detail: list[str] = []
    tres_alloc_str: str = ""
    job_resources: Any = None


class _Jobs(msgspec.Struct):
    jobs: list[_Job]


class _Gpus(NamedTuple):
    """GPUs of a list of generic resources: their number, local ids, and GPUs that are shared."""

    number: int
    ids: set[int]
    shared: set[int]
    """GPUs of which shards or MPS are in use; -1: of a GPU that the list does not name."""


def from_slurm(
    cluster: Cluster, nodes: str, jobs: str | None, file: str, jobs_file: str
) -> ClusterState:
    """Read the state of a cluster; see `ClusterState.from_slurm`."""
    known = {name for h in range(cluster.n_hosts) for name in cluster.machines_of(h)}
    uses: dict[str, MachineUse] = {}
    used: dict[str, _Gpus] = {}
    other: list[str] = []
    for record in _records(nodes, file):
        name = record["NodeName"]
        place = f"{file}: node {name:.60}"
        if name not in known:
            other += [name] * ("gpu" in record.get("Gres", ""))
            continue
        if name in uses:
            raise InputError(f"{place}: is there twice")
        size = len(cluster.machine(name))
        uses[name] = MachineUse(size, place, closed=_closed(record, place))
        used[name] = _used(record, size, place)
    if other:
        warnings.warn(
            f"{file}: nodes with GPUs that the cluster has not: {shortened(other)}", stacklevel=3
        )
    if jobs is not None:
        _hold(uses, jobs, jobs_file)
    for name, use in uses.items():
        _fill(use, used[name], f"slurm:{name}")
    leftover = [name for name, use in uses.items() if f"slurm:{name}" in {*use.ids, *use.numbers}]
    if leftover:
        why = "without jobs (squeue --json)" if jobs is None else f"held by no job of {jobs_file}"
        warnings.warn(
            f"{file}: GPUs in use {why} are taken as one job a node: {shortened(leftover)}",
            stacklevel=3,
        )
    return assembled(cluster, uses, file)


def _records(text: str, file: str) -> list[dict[str, str]]:
    """The fields of every node, the first of a name."""
    records = []
    for part in re.split(r"^(?=\s*NodeName=)", text, flags=re.MULTILINE):
        fields: dict[str, str] = {}
        for key, value in _FIELD.findall(part):
            fields.setdefault(key, value)
        if "NodeName" in fields:
            records.append(fields)
    if not records:
        raise InputError(
            f"{file}: expected the output of `scontrol show node -d`{looks_like(text)}"
        )
    return records


def _closed(record: dict[str, str], place: str) -> bool:
    """Whether a node takes no work, by its state or since no CPU is left."""
    if "State" not in record:
        raise InputError(f"{place}: has no State")
    closed = False
    for word in record["State"].split("+"):
        found = _STATE.fullmatch(word)
        shut = found is not None and _CLOSED.fullmatch(found[1]) is not None
        if found is None or not (shut or _OPEN.fullmatch(found[1])):
            got = record["State"]
            raise InputError(f"{place}: State: expected states of Slurm, got {got!r:.60}")
        closed |= shut or bool(set(found[2]) & set("*~#!%$@^"))
    cpus = record.get("CPUEfctv", record.get("CPUTot", ""))
    taken = record.get("CPUAlloc", "")
    return closed or (taken.isdecimal() and cpus.isdecimal() and int(taken) >= int(cpus) > 0)


def _used(record: dict[str, str], size: int, place: str) -> _Gpus:
    """GPUs in use on a node, after a check of how many it has."""
    total = _gpus(record.get("Gres", "(null)"), size, f"{place}: Gres").number
    if total != size:
        raise InputError(f"{place}: Gres: has {total} GPUs, the cluster {size}")
    if "GresUsed" in record:
        return _gpus(record["GresUsed"], size, f"{place}: GresUsed")
    if "gres/gpu" not in record.get("CfgTRES", ""):
        raise InputError(f"{place}: has no GresUsed: print `scontrol show node -d`")
    count = re.search(r"gres/gpu=(\d{1,6})", record.get("AllocTRES", ""))
    return _Gpus(0 if count is None else int(count[1]), set(), set())


def _gpus(text: str, size: int, place: str) -> _Gpus:
    """Read generic resources: ``gpu:h100:3(IDX:0-1,4),shard:h100:2(2/4,0/4)``."""
    number, at, ids, shared = 0, 0, set[int](), set[int]()
    text = "" if text in ("(null)", "N/A") else text
    while at < len(text):
        match = _GRES.match(text, at)
        if match is None:
            raise InputError(f"{place}: expected gpu:TYPE:COUNT(IDX:0-3), got {text!r:.80}")
        at, count, detail = match.end(), int(match[3]), match[4] or ""
        if match[1] == "gpu":
            number += count
            if detail.startswith("IDX:") and count:
                found = local_ids(detail[4:], size, text, place)
                if len(found) != count or ids & set(found):
                    raise InputError(f"{place}: {count} GPUs, but IDX has others: {text!r:.80}")
                ids |= set(found)
        elif match[1] in ("shard", "mps") and count:
            parts = [part.partition("/")[0] for part in detail.split(",")]
            busy = {i for i, part in enumerate(parts) if part.isdecimal() and int(part)}
            shared |= busy if "/" in detail and busy and max(busy) < size else {-1}
    if number > size and "Used" in place:
        raise InputError(f"{place}: {number} GPUs in use, the cluster has {size}")
    return _Gpus(number, ids, shared)


def _hold(uses: dict[str, MachineUse], text: str, file: str) -> None:
    """Give the GPUs of running jobs to them."""
    tree = parse(text, file)
    if not isinstance(tree, dict) or "jobs" not in tree:
        raise InputError(f"{file}: expected the output of `squeue --json`{looks_like(text)}")
    for job in decode(tree, _Jobs, file).jobs:
        states = {job.job_state} if isinstance(job.job_state, str) else set(job.job_state)
        place, name = f"{file}: job {job.job_id}", str(job.job_id)
        nodes = _nodes(job, place)
        ended = any(map(_ENDED.fullmatch, states)) and "COMPLETING" not in states
        if ended or not nodes:
            continue
        details = job.gres_detail
        if not details and (count := re.search(r"gres/gpu=(\d{1,6})", job.tres_alloc_str)):
            part, odd = divmod(int(count[1]), len(nodes))
            if odd:
                raise InputError(f"{place}: gres_detail: missing, {count[1]} GPUs on several nodes")
            details = [f"gpu:{part}"] * len(nodes)
        if details and len(details) != len(nodes):
            raise InputError(f"{place}: gres_detail: {len(details)} entries for {len(nodes)} nodes")
        for node, detail in zip(nodes, details, strict=False):
            if (use := uses.get(node)) is not None:
                found = _gpus(detail, use.gpus, f"{place}: gres_detail: node {node:.60}")
                use.hold(name, found.ids, found.number - len(found.ids))


def _nodes(job: _Job, place: str) -> list[str]:
    """Nodes of a job in the order of its details, as data parsers 0.0.39 to 0.0.43 write them."""
    given = job.job_resources if isinstance(job.job_resources, dict) else {}
    inner = given.get("nodes")
    tree = inner if isinstance(inner, dict) else {"list": inner}
    rows = given.get("allocated_nodes") or tree.get("allocation")
    rows = list(rows.values()) if isinstance(rows, dict) else rows
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        names = [row.get("nodename", row.get("name")) for row in rows]
        if names and all(isinstance(name, str) for name in names):
            return names
    listed = tree.get("list")
    text = listed if isinstance(listed, str) and listed else job.nodes
    return expand(text, f"{place}: nodes") if text.strip() else []


def _fill(use: MachineUse, used: _Gpus, name: str) -> None:
    """Give GPUs in use that no job of the list holds to a job of the node."""
    held, counted = use.held, sum(use.numbers.values())
    if used.number > len(used.ids) or counted:
        use.hold(name, set(), max(0, used.number - len(held) - counted))
    else:
        use.hold(name, used.ids - held)
    if used.shared:
        use.hold(name, used.shared - held - {-1})
        use.closed |= -1 in used.shared  # nothing says on which GPU
