"""Log of a simulated or real run: instances, batches, their requests, and a summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.model.schedule import Arcs, Csr, Resource, Schedule
from optsched.serving.fields import NS_PER_MS, POINTS

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray
    from optsched.serving.fields import FloatArray
    from optsched.serving.scenario import Scenario


def _integers(names: str) -> np.dtype[Any]:
    return np.dtype([(name, "i8") for name in names.split()])


BATCH: Final = _integers("server instance segment width start end images first")
"""A batch, times in ns; its requests are ``entries[first:first + images]``."""

ENTRY: Final = _integers("request queued")
INSTANCE: Final = _integers("server id segment width load ready unload")
"""An instance; `unload` is -1 for those resident at the end."""


class Summary(msgspec.Struct, frozen=True):
    """Totals of a run; None where no request was completed.

    Latencies are in ms, percentiles by nearest rank; energy is that of all servers from 0 to the
    end, `dynamic_energy_j` without idle power; `gpu_variance` is the variance over servers of
    min(U, 1), its mean and standard deviation over time.
    """

    completed: int
    mean_ms: float | None
    sd_ms: float | None
    p50_ms: float | None
    p99_ms: float | None
    accuracy: float | None
    energy_j: float | None
    dynamic_energy_j: float | None
    gpu_variance: float
    gpu_variance_sd: float
    throughput_per_s: float | None
    completion: float | None
    decisions: int

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        latency: IntArray,
        points: IntArray,
        joules: float | None,
        variance: tuple[float, float],
        end: int,
        decisions: int,
    ) -> Summary:
        """Compute from latencies (ns) and accuracies of completed requests, totals up to `end`."""
        ascending = np.sort(latency) / NS_PER_MS
        n, of, seconds = len(latency), scenario.n_requests, end / 1e9
        idle = sum(one.idle_w for one in scenario.servers) * seconds
        return cls(
            completed=n,
            mean_ms=float(ascending.mean()) if n else None,
            sd_ms=float(ascending.std()) if n else None,
            p50_ms=percentile(ascending, 50),
            p99_ms=percentile(ascending, 99),
            accuracy=float(points.mean()) / POINTS if n else None,
            energy_j=joules,
            dynamic_energy_j=None if joules is None else joules - idle,
            gpu_variance=variance[0],
            gpu_variance_sd=variance[1],
            throughput_per_s=n / seconds if seconds else None,
            completion=n / of if of else None,
            decisions=decisions,
        )


@dataclass(frozen=True, eq=False)
class Log:
    """History of a scenario.

    Parameters
    ----------
    scenario
        Servers and requests.
    batches, entries, instances
        Arrays of `BATCH`, `ENTRY` and `INSTANCE`.
    summary
        Totals.
    horizon
        Time at which the run was stopped, ns; None: all requests were completed.
    provenance
        Seed, router, plan and settings.
    wall_clock
        Whether times were measured; then durations need not follow the model.
    """

    scenario: Scenario
    batches: Any
    entries: Any
    instances: Any
    summary: Summary
    horizon: int | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    wall_clock: bool = False

    def to_json(self) -> bytes:
        """Return the document ``optsched.serving-log/1``."""
        from optsched.serving.document import log_to_json

        return log_to_json(self)

    def schedule(self) -> Schedule:
        """Return one operation per load and per batch, one resource per instance.

        Stage is the segment, family the width, job the row in the log; arcs lead from the batch of
        a request to its next one, and from a load to the first batch of its instance.
        """
        scenario, batches, instances = self.scenario, self.batches, self.instances
        loads = np.flatnonzero(instances["ready"] > 0)
        at = {(row["server"], row["id"]): i for i, row in enumerate(instances)}
        on = [at[row["server"], row["instance"]] for row in batches]
        resource = np.array([*loads.tolist(), *on], np.int64)
        start = np.concatenate([instances["load"][loads], batches["start"]])
        stop = np.concatenate([instances["ready"][loads], batches["end"]])
        order = np.lexsort((start, resource))
        ends = np.cumsum(np.bincount(resource, minlength=len(instances)))
        sequences = np.split(order, ends[:-1])[: len(instances)]
        first = [ops[:2].tolist() for ops in sequences if len(ops) > 1 and ops[0] < len(loads)]
        acquire = np.zeros(len(start), np.int64)
        vram = scenario.vram * 1000
        for row, ops in zip(instances, sequences, strict=True):
            acquire[ops[:1]] = vram[row["segment"], row["width"]]
        arrived = np.zeros(len(batches), np.int64)
        row = np.repeat(np.arange(len(batches)), batches["images"])
        np.maximum.at(arrived, row, scenario.arrival[self.entries["request"]])
        arrived[batches["segment"] > 0] = 0
        return Schedule(
            name=scenario.name,
            time_unit="ns",
            resources=tuple(
                Resource(f"s{s}/i{i}:k{k}w{w}", int(vram[k, w]))
                for s, i, k, w, *_ in instances.tolist()
            ),
            op_resources=Csr(np.arange(len(start) + 1), resource),
            duration=stop - start,
            arcs=Arcs.of([*first, *(self._successors(row) + len(loads)).tolist()]),
            job=np.concatenate([loads, np.arange(len(batches))]),
            stage=np.concatenate([instances["segment"][loads], batches["segment"]]),
            family=np.concatenate([instances["width"][loads], batches["width"]]),
            kind=np.array(["load"] * len(loads) + ["infer"] * len(batches), dtype=np.str_),
            release=np.concatenate([np.zeros(len(loads), np.int64), arrived]),
            acquire=acquire,
            sequences=Csr.of(ops.tolist() for ops in sequences),
            start=start,
        )

    def _successors(self, row: IntArray) -> IntArray:
        """Pairs of consecutive batches of a request; `row` is the batch of every entry."""
        order = np.lexsort((self.batches["segment"][row], self.entries["request"]))
        same = np.diff(self.entries["request"][order]) == 0
        pairs = np.stack([row[order][:-1][same], row[order][1:][same]], axis=1)
        return np.unique(pairs, axis=0)


def percentile(ascending: FloatArray, percent: int) -> float | None:
    """Return the percentile by nearest rank: the ceil(p n)-th smallest."""
    if not len(ascending):
        return None
    return float(ascending[-(-percent * len(ascending) // 100) - 1])
