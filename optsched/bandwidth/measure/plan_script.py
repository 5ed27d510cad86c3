"""A measurement plan as a shell script around nccl-tests."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from optsched.bandwidth.models.collectives import program_of
from optsched.bandwidth.topology.names import written_gpus
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.bandwidth.topology.cluster import Cluster

Run = tuple[tuple[str, tuple[int, ...]], ...]
"""Host names with local ids."""

PAYLOAD: Final = 2 << 30
"""Bytes of a run if the model has none."""
STARTUP: Final = 20
"""Seconds of a run without its transfers: processes, topology detection, warm-up."""
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


@dataclass(frozen=True)
class Plan:
    """Runs of a collective to make, one after another: at once they would share the network.

    Parameters
    ----------
    cluster
        Cluster of the hosts.
    runs
        Within hosts first, then across hosts, then across levels.
    op, payload
        Collective, and bytes.
    """

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

        Parameters
        ----------
        logs
            Folder for logs; the variable LOGS overrides it.

        Raises
        ------
        InputError
            `logs` is not the name of a folder.
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
