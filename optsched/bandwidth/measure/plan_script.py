"""A measurement plan as a shell script around nccl-tests."""

from __future__ import annotations

import shlex
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.models.fallback import intra_estimate
from optsched.bandwidth.models.patterns import written_pattern
from optsched.bandwidth.topology.names import written_gpus
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.bandwidth.measure.planner import Plan, Subset
    from optsched.bandwidth.measure.value_of_information import Pattern
    from optsched.bandwidth.topology.cluster import Cluster

PAYLOAD: Final = 2 << 30
"""Bytes of a run if the plan does not say."""

STARTUP: Final = 20
"""Seconds that a run takes besides its transfers: processes, topology detection, warm-up."""

REPEATS: Final = 20

_LONGEST: Final = 120  # characters of a log's name; file systems allow 255 bytes

_HEAD = """\
#!/usr/bin/env bash
# {runs} runs of {op}, {payload} bytes, one after another: about {minutes} minutes.
# Runs whose log is complete are skipped, so that the script can be started again.
# Read the logs: MeasurementTable.from_nccl_logs("{logs}/*.log", op="{op}", payload={payload})
set -u
NCCL_TESTS=${{NCCL_TESTS:-./nccl-tests/build}}
MPIRUN=${{MPIRUN:-mpirun}}
LOGS=${{LOGS:-{quoted}}}
mkdir -p "$LOGS" || exit 1

# run NAME GPUS ARGUMENTS: one MPI process a GPU; the log begins with our numbers of the GPUs
run() {{
  local name=$1 gpus=$2
  shift 2
  if [ -e "$LOGS/$name.log" ]; then
    echo "$name: done before"
    return
  fi
  echo "$name"
  printf '# optsched gpus: %s\\n# {program}\\n' "$gpus" > "$LOGS/$name.part"
  if "$MPIRUN" "$@" >> "$LOGS/$name.part" 2>&1; then
    mv "$LOGS/$name.part" "$LOGS/$name.log"
  else
    echo "$name: failed, see $LOGS/$name.part" >&2
  fi
}}
"""


def script(plan: Plan, logs: str) -> str:
    """The runs of a plan as a bash script for Open MPI and nccl-tests.

    One run at a time, since runs beside each other would share the network; a run whose log exists
    is skipped, and a log exists only if its run succeeded.

    Parameters
    ----------
    plan
        Subsets within hosts come first, then patterns across hosts in order.
    logs
        Folder for logs; the variable LOGS overrides it.

    Raises
    ------
    InputError
        No name of a folder, or a pattern for which the cluster has no room.
    """
    if not logs or not logs.isprintable():
        raise InputError(f"logs: expected the name of a folder, got {logs!r:.60}")
    payload = plan.payload or PAYLOAD
    runs: list[tuple[str, tuple[Subset, ...]]] = [
        (_name("intra", (subset,)), (subset,)) for subset in plan.subsets
    ]
    for pattern in plan.patterns:
        places = placement(plan.cluster, pattern)
        runs.append((_name(written_pattern(pattern).replace("+", "_"), places), places))
    lines = []
    total = 0.0
    for name, places in runs:
        seconds = duration(places, payload)
        total += seconds
        lines.append(f"{_command(name, places, plan.op, payload)}  # about {seconds:.0f} s")
    head = _HEAD.format(
        runs=len(runs), op=plan.op, payload=payload, minutes=max(1, round(total / 60)), logs=logs,
        quoted=shlex.quote(logs), program=_program(plan.op),
    )  # fmt: skip
    return head + "\n" + "\n".join(lines) + ("\n" if lines else "")


def placement(cluster: Cluster, pattern: Pattern) -> tuple[Subset, ...]:
    """See `Plan.placement`."""
    wanted = sorted(pattern, reverse=True)
    unused: list[int] = []
    for hosts in cluster.fabrics:
        room = sorted(cluster.sizes[[*hosts]].tolist(), reverse=True)
        if len(room) >= len(wanted) and all(a >= b for a, b in zip(room, wanted, strict=False)):
            unused = unused or [*hosts]
    if not unused:
        raise InputError(f"pattern: {written_pattern(pattern)} does not fit {cluster!r}")
    best = {t: _best_subsets(cluster, t) for t in set(cluster.type_of)}
    found = []
    for count in wanted:
        roomy = [h for h in unused if int(cluster.sizes[h]) >= count]
        host = max(roomy, key=lambda h: (best[cluster.type_of[h]][count][0], -h))
        unused.remove(host)
        found.append((cluster.hosts[host].name, best[cluster.type_of[host]][count][1]))
    return tuple(found)


def duration(places: tuple[Subset, ...], payload: int) -> float:
    """Seconds that a run may take: start-up and transfers at a slow 10 GB/s."""
    return STARTUP + 2 * REPEATS * payload / 10e9 + 0.1 * sum(len(ids) for _, ids in places)


def _best_subsets(cluster: Cluster, kind: int) -> list[tuple[int, tuple[int, ...]]]:
    """By count the bandwidth and the local ids of the best subset, lowest ids first."""
    values, n = intra_estimate(cluster, kind, ()), cluster.types[kind].gpus
    found = [(0, tuple(range(count))) for count in range(n + 1)]
    if len(values) == n + 1:
        return [(int(values[count]), ids) for count, (_, ids) in enumerate(found)]
    order = np.argsort(-values, kind="stable")
    done: set[int] = set()
    for mask in order.tolist():
        count = mask.bit_count()
        if count > 1 and count not in done:
            done.add(count)
            found[count] = (int(values[mask]), tuple(i for i in range(n) if mask >> i & 1))
    return found


def _name(kind: str, places: tuple[Subset, ...]) -> str:
    words = [f"{host}.{'-'.join(map(str, ids))}" for host, ids in places]
    name = "_".join([kind, *words])
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}_{sha256(name.encode()).hexdigest()[:12]}"


def _command(name: str, places: tuple[Subset, ...], op: str, payload: int) -> str:
    parts = [
        f"-np {len(ids)} -host {shlex.quote(f'{host}:{len(ids)}')} "
        f"-x CUDA_VISIBLE_DEVICES={','.join(map(str, ids))} "
        f'"$NCCL_TESTS"/{_program(op)} -b {payload} -e {payload} -n {REPEATS} -g 1'
        for host, ids in places
    ]
    gpus = shlex.quote(written_gpus(places, "plan"))
    return f"run {shlex.quote(name)} {gpus} " + " : ".join(parts)


def _program(op: str) -> str:
    return {"all_to_all": "alltoall_perf"}.get(op, f"{op}_perf")
