"""What ``optsched simulate`` is given: policies, cluster, workload, changes of nodes."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any, Final

from optsched.cli.options import parse_options
from optsched.cluster.nodes import NodeChange, Nodes
from optsched.errors import InputError
from optsched.io.files import read_bytes
from optsched.io.values import file_label

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from optsched.cluster.packing_table import PackingTable
    from optsched.cluster.policy import Policy
    from optsched.cluster.workload import Workload

_PER_NODE: Final = 8
MOST_JOBS: Final = 10**7
"""Jobs of a generated workload."""

_GENERATED: Final = re.compile(r"(synthetic|entropy):([0-9]+)")


def packing(pairs: Path | None, types: Path | None) -> PackingTable | None:
    """Speeds of jobs that share GPUs, from CSV files."""
    if pairs is None:
        if types is not None:
            raise InputError("packing-types: there is no --packing that it belongs to")
        return None
    from optsched.cluster.packing_table import PackingTable

    return PackingTable.read(pairs, types)


def inputs(
    trace: str, estimate_error: float, pairs: Path | None, types: Path | None
) -> dict[str, Any]:
    """What a metrics document says about where its numbers come from."""
    packed = {"pairs": pairs, "types": types}
    tables = {key: _fingerprint(path) for key, path in packed.items() if path is not None}
    return {
        "trace": file_label(trace), "estimate_error": estimate_error, "packing": tables or None,
    }  # fmt: skip


def _fingerprint(path: Path) -> dict[str, str]:
    """Name and SHA-256 of a file."""
    return {
        "file": file_label(str(path)), "sha256": hashlib.sha256(read_bytes(path)).hexdigest(),
    }  # fmt: skip


def policies(
    first: Sequence[str],
    more: Sequence[str],
    options: Sequence[str],
    table: PackingTable | None = None,
) -> dict[str, Policy]:
    """Policies by name, with their options; those of ``POLICY.KEY`` for one alone."""
    from optsched.cluster.policies import get

    words = [word.strip() for text in (*first, *more) for word in text.split(",")]
    names = list(dict.fromkeys(word for word in words if word))
    if not names:
        raise InputError("policy: expected names, separated by commas")
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in parse_options(options).items():
        owner, dot, rest = key.partition(".")
        if dot and owner not in own:
            raise InputError(f"option: {owner!r:.60} is none of the policies {', '.join(names)}")
        for name in [owner] if dot else names:
            own[name][rest if dot else key] = value
    if table is not None:
        if "lucid" not in own:
            raise InputError("packing: only the policy lucid packs jobs, and it is not asked for")
        own["lucid"]["table"] = table
    return {name: get(name, **own[name]) for name in names}


def cluster(nodes: str | None, gpus: int | None) -> Nodes:
    """``16x8``, ``8,8,4``, or so many GPUs in nodes of 8 (the last one smaller)."""
    if nodes is None and gpus is None:
        raise InputError("nodes: how large is the cluster? give --nodes 16x8 or --gpus 128")
    if nodes is not None and gpus is not None:
        raise InputError("nodes: there are --nodes and --gpus; give one of them")
    if gpus is not None:
        if gpus < 1:
            raise InputError(f"gpus: expected a number >= 1, got {gpus}")
        whole, rest = divmod(gpus, _PER_NODE)
        if whole > 2**20:
            raise InputError(f"gpus: expected at most 2^22, got {gpus}")
        return Nodes.of([_PER_NODE] * whole + [rest] * (rest > 0))
    assert nodes is not None
    if found := re.fullmatch(r"([0-9]+)[xX]([0-9]+)", nodes):
        return Nodes(_number("nodes", found[1]), gpus=_number("gpus", found[2]))
    if re.fullmatch(r"[0-9]+(,[0-9]+)*", nodes):
        return Nodes.of([_number("nodes", text) for text in nodes.split(",")])
    raise InputError(f"nodes: expected 16x8 or 8,8,4, got {nodes!r:.60}")


def _number(field: str, digits: str) -> int:
    """These digits as a number, unless nothing could hold it."""
    if len(digits.lstrip("0")) > 16:
        raise InputError(f"{field}: the number {digits:.40} is too large")
    return int(digits)


def changes(texts: Sequence[str]) -> tuple[NodeChange, ...]:
    """``TIME:KIND:NODE``, NODE counted from 0."""
    found = []
    for text in texts:
        parts = re.fullmatch(r"([0-9]{1,16}):(add|drain|remove):([0-9]{1,9})", text)
        if not parts:
            raise InputError(
                f"change: expected TIME:KIND:NODE such as 3600:remove:2, got {text!r:.60}"
            )
        found.append(NodeChange(int(parts[1]), int(parts[3]), parts[2]))  # type: ignore[arg-type]
    return tuple(found)


def workload(
    trace: str,
    nodes: Nodes,
    *,
    seed: int,
    estimate_error: float,
    micro_factor: float,
    amdahl: float | None,
    sizes: str | None,
    passes: int | None,
    load: float | None,
    rigid: bool,
    time_unit: str,
    **reading: Any,
) -> Workload:
    """The trace, or a generated workload for this cluster."""
    from optsched.cluster.speedup import Amdahl
    from optsched.formats.trace_csv import read_trace

    if passes is not None:
        reading["passes"] = passes
    law = None if amdahl is None else Amdahl(amdahl)
    allowed = None if sizes is None else _sizes(sizes)
    word = _GENERATED.fullmatch(trace)
    if word is None:
        if load is not None or rigid:
            raise InputError("trace: --load and --rigid are for synthetic:N and entropy:N")
        found = read_trace(trace, nodes, time_unit=time_unit, speedup=law, sizes=allowed, **reading)
    else:
        for key, value in reading.items():
            if value not in (None, False, "priority", "source"):
                raise InputError(
                    f"trace: {trace} is generated, --{key.replace('_', '-')} is of files"
                )
        found = _generated(
            word[1], _jobs(trace, word[2]), nodes.total, seed, law, allowed, load, rigid, time_unit
        )
    if micro_factor != 1.0:
        found = found.with_micro_factor(micro_factor)
    return found.with_estimate_error(estimate_error, seed) if estimate_error else found


def _jobs(trace: str, digits: str) -> int:
    """Jobs of a generated workload."""
    if len(digits.lstrip("0")) > 8 or int(digits) > MOST_JOBS:
        raise InputError(f"trace: {trace:.60}: too many jobs, expected at most {MOST_JOBS:,}")
    return int(digits)


def _generated(
    kind: str,
    jobs: int,
    gpus: int,
    seed: int,
    law: Any,
    sizes: tuple[int, ...] | None,
    load: float | None,
    rigid: bool,
    time_unit: str,
) -> Workload:
    from optsched.cluster.synthetic import entropy_workload, synthetic

    if kind == "entropy":
        share = {} if law is None else {"c": law.c}
        return entropy_workload(
            jobs, seed, gpus=gpus, sizes=sizes, rigid=rigid, load=load, time_unit=time_unit, **share
        )
    if rigid or sizes is not None:
        raise InputError("trace: --rigid and --sizes are not for synthetic:N, its jobs are rigid")
    return synthetic(
        jobs, 0.9 if load is None else load, seed, gpus=gpus, speedup=law, time_unit=time_unit
    )


def _sizes(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise InputError(f"sizes: expected numbers such as 1,2,4,8, got {text!r:.60}")
    return tuple(_number("sizes", part) for part in text.split(","))
