"""Which runs of nccl-tests to make next: those that narrow a model's intervals most; the script."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.collectives import program_of
from optsched.bandwidth.models.fallback import best_within
from optsched.bandwidth.models.model import alone
from optsched.bandwidth.models.observations import BINDING, LEAST_RUNS
from optsched.bandwidth.models.patterns import automaton, n_patterns
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET, subset_sizes
from optsched.bandwidth.topology.names import written_gpus
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from optsched.bandwidth.models.gaussian import Floats
    from optsched.bandwidth.topology.cluster import Cluster, HostType
    from optsched.model.schedule import IntArray

Run = tuple[tuple[str, tuple[int, ...]], ...]
"""Host names with local ids."""

CANDIDATES: Final = 2_000
"""Patterns that are compared; of a large cluster those on few hosts."""
PAYLOAD: Final = 2 << 30
"""Bytes of a run if the model has none."""
STARTUP: Final = 20
"""Seconds of a run without its transfers: processes, topology detection, warm-up."""
REPEATS: Final = 20

_LONGEST: Final = 120  # characters of a log's name; file systems allow 255 bytes

_HEAD = """\
#!/usr/bin/env bash
# {runs} runs of {op}, {payload} bytes, one after another: about {minutes} minutes.
# Runs with a complete log are skipped, so that the script can be started again.
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


@dataclass(frozen=True)
class Plan:
    """Runs of a collective, of so many bytes: within hosts, across hosts, then across levels."""

    cluster: Cluster
    runs: tuple[Run, ...]
    op: str = "all_reduce"
    payload: int = PAYLOAD

    @property
    def patterns(self) -> tuple[tuple[int, ...], ...]:
        """Patterns of the runs across hosts, in order."""
        return tuple(tuple(len(ids) for _, ids in run) for run in self.runs if len(run) > 1)

    def script(self, logs: str = "logs") -> str:
        """Write a bash script for Open MPI and nccl-tests; a log exists only if its run succeeded.

        Runs follow each other: at once they would share the network. `logs` is the folder for
        their logs; the variable LOGS overrides it.
        """
        if not logs or not logs.isprintable():
            raise InputError(f"logs: expected the name of a folder, got {logs!r:.60}")
        seconds = len(self.runs) * (STARTUP + 2 * REPEATS * self.payload / 10e9)  # at 10 GB/s
        head = _HEAD.format(
            runs=len(self.runs), op=self.op, payload=self.payload, logs=logs,
            minutes=max(1, round(seconds / 60)), quoted=shlex.quote(logs),
            program=program_of(self.op),
        )  # fmt: skip
        return head + "".join(map(self._line, self.runs))

    def _line(self, run: Run) -> str:
        test = f'"$NCCL_TESTS"/{program_of(self.op)} -b {self.payload} -e {self.payload}'
        first = [int(self.cluster.first[self.cluster.host_index(host)]) for host, _ in run]
        gpus = [start + i for start, (_, ids) in zip(first, run, strict=True) for i in ids]
        parts = [
            f"-np {len(ids)} -host {shlex.quote(f'{machine}:{len(ids)}')} "
            f"-x CUDA_VISIBLE_DEVICES={','.join(map(str, ids))} {test} -n {REPEATS} -g 1"
            for machine, ids in self.cluster.by_machine(gpus).items()
        ]
        pattern = "_".join(str(len(ids)) for _, ids in run) if len(run) > 1 else "intra"
        name = "_".join([pattern, *(f"{host}.{'-'.join(map(str, ids))}" for host, ids in run)])
        if len(name) > _LONGEST:
            name = f"{name[:_LONGEST]}_{sha256(name.encode()).hexdigest()[:12]}"
        header = shlex.quote(written_gpus(run, "plan"))
        return f"run {shlex.quote(name)} {header} {' : '.join(parts)}\n"


def plan_measurements(model: BottleneckBandwidth, budget: int) -> Plan:
    """Plan the runs that narrow the 95 % intervals of a model most; no run is made.

    Each run across hosts is chosen after those before it, at most `budget`; all numbers of GPUs
    weigh the same. Added are one run for every class of alike subsets of a host that has neither
    table nor run, and three across every level without a factor.

    Examples
    --------
    >>> from optsched.bandwidth import BottleneckBandwidth, plan_measurements, synthetic
    >>> found = plan_measurements(BottleneckBandwidth(synthetic.cluster("nvswitch", 2)), budget=1)
    >>> len(found.patterns), found.script().splitlines()[0]
    (1, '#!/usr/bin/env bash')
    """
    integer("budget", budget, 0, CANDIDATES)
    if not isinstance(model, BottleneckBandwidth):
        raise InputError(
            f"model: expected one that learns (BottleneckBandwidth), got {type(model).__name__}"
        )
    cluster, runs, placed = model.cluster, _within(model), _Placement(model)
    rows, weight = _candidates(model)
    rows = rows[model.informative(rows, weight, budget)]
    found = [tuple(c for c in row if c) for row in rows.tolist()]
    runs += [placed.run(pattern) for pattern in found]
    names, most = cluster.network_levels.names, int(cluster.sizes.max())
    known = [*sorted(model.observations.known), *found, *((c, c) for c in range(most, 0, -1))]
    for level, name in enumerate(names[: None if len(cluster.fabrics) == 1 else -1]):
        if level and budget and name not in cluster.factors:
            across = (placed.run(pattern, level) for pattern in known)
            runs += islice(filter(None, across), LEAST_RUNS)
    return Plan(cluster, tuple(runs), model.op, model.payload or PAYLOAD)


def subset_classes(kind: HostType) -> tuple[IntArray, ...]:
    """Classes of subsets, as masks, in which the GPUs have the same links within the subset.

    Without links, or above 16 GPUs, the lowest ids of every size. By size, then by lowest mask.
    """
    n = kind.gpus
    if kind.links is None or n > MOST_BY_SUBSET:
        return tuple(np.array([(1 << size) - 1], object) for size in range(2, n + 1))
    _, color = np.unique(kind.links, return_inverse=True)
    bits = np.arange(1 << n)[:, None] >> np.arange(n) & 1
    links = np.where(bits, bits @ (n + 1) ** color.reshape(n, n), -1)  # by GPU, coded by number
    links.sort(axis=1)
    _, of = np.unique(links, axis=0, return_inverse=True)
    order = np.argsort(of, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(of[order])) + 1)
    found = [group for group in groups if int(group[0]).bit_count() > 1]
    return tuple(sorted(found, key=lambda group: (int(group[0]).bit_count(), int(group[0]))))


def _candidates(model: BottleneckBandwidth) -> tuple[IntArray, Floats]:
    """Unmeasured patterns that a network may limit and a fabric holds, and their weights."""
    cluster, most = model.cluster, int(model.cluster.sizes.max())
    hosts = cluster.n_hosts
    while hosts > 2 and n_patterns(hosts, most) > CANDIDATES:
        hosts -= 1
    rows = automaton(hosts, most).patterns
    fits = np.zeros(len(rows), np.bool_)
    for fabric in cluster.fabrics:
        sizes = -np.sort(-cluster.sizes[[*fabric]])[:hosts]
        fits |= (rows <= np.pad(sizes, (0, hosts - len(sizes)))).all(axis=1)
    rows = rows[fits & ~alone(rows)]
    low = model.network(rows, "low")
    ceiling = np.where(rows >= 2, best_within(cluster, model.table)[rows], MOST).min(axis=1)
    useful = ~model.is_measured(rows) & (low > 0) & (low < BINDING * ceiling)
    rows = rows[useful]
    total = rows.sum(axis=1)
    return rows, 1 / np.bincount(total)[total]  # all numbers of GPUs weigh the same


def _within(model: BottleneckBandwidth) -> list[Run]:
    """A run of the lowest subset of every class in which nothing is measured."""
    cluster = model.cluster
    found: list[Run] = []
    for t in sorted(set(cluster.type_of)):
        kind, host = cluster.types[t], cluster.hosts[cluster.type_of.index(t)].name
        low, high = model.intra_of(t, "low"), model.intra_of(t, "high")
        for masks in subset_classes(kind):
            ids = _ids(int(masks[0]))
            keys = masks if len(low) > kind.gpus + 1 else [len(ids)]
            if (low[keys] < high[keys]).all():
                found.append(((host, ids),))
    return found


class _Placement:
    """Hosts and local ids on which to run patterns."""

    def __init__(self, model: BottleneckBandwidth) -> None:
        self.cluster = model.cluster
        self.best: list[list[tuple[int, tuple[int, ...]]]] = []
        """By type of host and count the bandwidth and the local ids of the best subset."""
        for t, kind in enumerate(model.cluster.types):
            values, n = model.intra_of(t), kind.gpus
            masks = [(1 << count) - 1 for count in range(n + 1)]
            if by_subset := len(values) > n + 1:
                sizes = subset_sizes(n)
                masks = [int(np.argmax(np.where(sizes == c, values, -1))) for c in range(n + 1)]
            self.best.append([
                (int(values[mask if by_subset else count]), _ids(mask))
                for count, mask in enumerate(masks)
            ])  # fmt: skip

    def run(self, pattern: tuple[int, ...], level: int = 0) -> Run:
        """A run in one domain of the lowest level possible, or from level 1 on across the level.

        Larger counts take the host with the fastest subset, so that hosts hardly limit the network.
        """
        cluster, domain = self.cluster, self.cluster.network_levels.domain
        for number in (level,) if level else range(len(domain)):
            for d in range(int(domain[number].max()) + 1):
                hosts = np.flatnonzero(domain[number] == d).tolist()
                part = domain[max(level - 1, 0), hosts].tolist()
                turn = {h: part[:i].count(part[i]) * bool(level) for i, h in enumerate(hosts)}
                run: list[int] = []
                for count in pattern:
                    able = [h for h in hosts if cluster.sizes[h] >= count and h not in run]
                    rank = {h: (turn[h], -self.best[cluster.type_of[h]][count][0]) for h in able}
                    run += [min(able, key=rank.__getitem__)] if able else []
                across = not level or len({*domain[level - 1, run].tolist()}) > 1
                if len(run) == len(pattern) and across:
                    return tuple(
                        (cluster.hosts[h].name, self.best[cluster.type_of[h]][count][1])
                        for h, count in zip(run, pattern, strict=True)
                    )
        return ()


def _ids(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)
