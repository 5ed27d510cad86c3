"""What happened to every request: the history of a routing problem, and what it is worth."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.model.schedule import Arcs, Csr, Resource, Schedule
from optsched.problems.routing.problem import NS_PER_MS, POINTS

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray
    from optsched.problems.routing.problem import FloatArray, Routing


def _integers(names: str) -> np.dtype[Any]:
    return np.dtype([(name, "i8") for name in names.split()])


BATCH: Final = _integers("server instance segment width start end images first")
"""A batch, times in ns; its requests are ``entries[first:first + images]``."""

ENTRY: Final = _integers("request queued")
INSTANCE: Final = _integers("server id segment width load ready unload")
"""An instance; `unload` is -1 for what is still there in the end."""

_TABLES: Final = {"batches": BATCH, "entries": ENTRY, "instances": INSTANCE}
_KEPT = "history"
_LAST = 1024  # completions of which percentiles are taken


class Summary(msgspec.Struct, frozen=True):
    """What a history comes to; None where nothing was completed.

    Latencies are in ms, percentiles by nearest rank; energy is that of all servers from 0 to the
    end, `dynamic_energy_j` without what they take when idle; `gpu_variance` is the variance over
    servers of min(U, 1), its mean and standard deviation over time.
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
        problem: Routing,
        latency: IntArray,
        accuracy: IntArray,
        joules: float | None,
        variance: tuple[float, float],
        end: int,
        decisions: int,
    ) -> Summary:
        """From latencies (ns) and accuracies of what is done, and totals up to `end` (ns)."""
        ascending = np.sort(latency) / NS_PER_MS
        n, of, seconds = len(latency), problem.n_requests, end / 1e9
        idle = sum(one.idle_w for one in problem.servers) * seconds
        return cls(
            completed=n,
            mean_ms=float(ascending.mean()) if n else None,
            sd_ms=float(ascending.std()) if n else None,
            p50_ms=percentile(ascending, 50),
            p99_ms=percentile(ascending, 99),
            accuracy=float(accuracy.mean()) / POINTS if n else None,
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
    """A history of a routing problem.

    Parameters
    ----------
    problem
        Whose requests.
    batches, entries, instances
        Arrays of `BATCH`, `ENTRY` and `INSTANCE`.
    decisions
        Of the router.
    horizon
        When it was cut off, ns; None: when all was done.
    provenance
        How it came about.
    wall_clock
        Whether times were measured; then batches need not take what the model says.
    measured_j
        Energy, measured; None: that of the model, or none of a wall clock.
    """

    problem: Routing
    batches: Any
    entries: Any
    instances: Any
    decisions: int = 0
    horizon: int | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    wall_clock: bool = False
    measured_j: float | None = None

    # what follows for every request

    @cached_property
    def finish(self) -> IntArray:
        """When every request was done, ns; -1: never."""
        found = np.full(self.problem.n_requests, -1, np.int64)
        last = np.repeat(self.batches["segment"], self.batches["images"])
        end = np.repeat(self.batches["end"], self.batches["images"])
        done = last == self.problem.n_segments - 1
        if self.horizon is not None:
            done &= end <= self.horizon
        found[self.entries["request"][done]] = end[done]
        return found

    @cached_property
    def tuples(self) -> IntArray:
        """The tuple of every request, as far as it came; see `Routing.tuples`."""
        found = np.zeros(self.problem.n_requests, np.int64)
        k, n = self.problem.n_segments, self.problem.n_widths
        digit = self.batches["width"] * n ** (k - 1 - self.batches["segment"])
        np.add.at(found, self.entries["request"], np.repeat(digit, self.batches["images"]))
        return found

    @cached_property
    def latency(self) -> IntArray:
        """Of the requests that are done, in ns."""
        done = self.finish >= 0
        found: IntArray = (self.finish - self.problem.arrival)[done]
        return found

    @cached_property
    def end(self) -> int:
        """The last completion, or the horizon, ns."""
        return int(self.finish.max(initial=0)) if self.horizon is None else self.horizon

    # what follows for the servers

    @cached_property
    def loads(self) -> list[tuple[IntArray, FloatArray]]:
        """Per server the times when U changes, from 0 on, and U from then on."""
        found: list[tuple[IntArray, FloatArray]] = []
        widest = self._widest
        for s, server in enumerate(self.problem.servers):
            at = np.flatnonzero(self.batches["server"] == s)
            rows = self.batches[at]
            work = self.problem.mmac[rows["segment"], widest[at], rows["width"]] * rows["images"]
            if server.sat_mmac is None:
                load = np.ones(len(rows))
            else:
                x = work / server.sat_mmac
                load = np.rint((x / (1 + x) + 0.02) * 2**28) / 2**28  # as the core counts
            times = np.concatenate([[0], rows["start"], rows["end"]])
            change = np.concatenate([[0.0], load, -load])
            moments, where = np.unique(times, return_inverse=True)
            level: FloatArray = np.cumsum(np.bincount(where, change))
            found.append((moments, level if server.sat_mmac is not None else np.minimum(level, 1)))
        return found

    @property
    def _widest(self) -> IntArray:
        """The widest input of every batch."""
        before = np.zeros((self.problem.n_segments, self.problem.n_requests), np.int64)
        segment = np.repeat(self.batches["segment"], self.batches["images"])
        width = np.repeat(self.batches["width"], self.batches["images"])
        inner = segment < self.problem.n_segments - 1
        before[segment[inner] + 1, self.entries["request"][inner]] = width[inner]
        found = np.zeros(len(self.batches), np.int64)
        row = np.repeat(np.arange(len(self.batches)), self.batches["images"])
        np.maximum.at(found, row, before[segment, self.entries["request"]])
        return found

    @cached_property
    def energy(self) -> float:
        """Joules of all servers by the model, from 0 to the end."""
        total = 0.0
        for s, (moments, load) in enumerate(self.loads):
            total += float((self.watts(s, load) * self._spans(moments)).sum()) * 1e-9
        return total

    def watts(self, s: int, load: FloatArray) -> FloatArray:
        """Power of a server at values of U, by the model."""
        server = self.problem.servers[s]
        found = server.idle_w + (server.peak_w - server.idle_w) * np.minimum(load, 1)
        if server.contention is not None:
            found = found * (1 + 0.5 * np.clip((load - server.contention.knee) / 0.16, 0, 1))
        return found

    def _spans(self, moments: IntArray) -> IntArray:
        """How long every interval lasts until the end."""
        cut = np.minimum(moments, self.end)
        return np.diff(cut, append=max(self.end, int(cut[-1])))

    @cached_property
    def variance(self) -> tuple[float, float]:
        """Of min(U, 1) over servers: mean and standard deviation over time."""
        if not self.end:
            return 0.0, 0.0
        moments = np.unique(np.concatenate([moments for moments, _ in self.loads]))
        level = [
            np.minimum(load[np.searchsorted(at, moments, side="right") - 1], 1)
            for at, load in self.loads
        ]
        found, span = np.var(level, axis=0), self._spans(moments) / self.end
        mean = float((found * span).sum())
        return mean, float(np.sqrt(max(0.0, float((found**2 * span).sum()) - mean**2)))

    @property
    def accuracy(self) -> IntArray:
        """Of the requests that are done, in 1/`POINTS` of a percent."""
        found: IntArray = self.problem.accuracy[self.tuples[self.finish >= 0]]
        return found

    @cached_property
    def summary(self) -> Summary:
        """What it comes to."""
        joules = self.measured_j if self.wall_clock else self.energy
        return Summary.of(
            self.problem, self.latency, self.accuracy, joules, self.variance, self.end,
            self.decisions,
        )  # fmt: skip

    @cached_property
    def cost(self) -> int:
        """The objective; see `Routing`."""
        return self.problem.price(self.latency, self.accuracy, self.energy)

    # schedules

    def schedule(self) -> Schedule:
        """One operation a load and a batch, one resource an instance.

        Stage is the segment, family the width, job the row in the log; arcs lead from the batch of
        a request to its next one, and from a load to its instance's first batch. Which request was
        in which batch stands in the provenance.
        """
        problem, batches, instances = self.problem, self.batches, self.instances
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
        vram = problem.vram * 1000
        for row, ops in zip(instances, sequences, strict=True):
            acquire[ops[:1]] = vram[row["segment"], row["width"]]
        arrived = np.zeros(len(batches), np.int64)
        row = np.repeat(np.arange(len(batches)), batches["images"])
        np.maximum.at(arrived, row, problem.arrival[self.entries["request"]])
        arrived[batches["segment"] > 0] = 0
        return Schedule(
            name=problem.name,
            time_unit="ns",
            resources=tuple(
                Resource(f"s{s}/i{i}:k{k}w{w}", int(vram[k, w]))
                for s, i, k, w, *_ in instances.tolist()
            ),
            op_resources=Csr(np.arange(len(start) + 1), resource),
            duration=stop - start,
            arcs=Arcs.of([*first, *(self._followers(row) + len(loads)).tolist()]),
            job=np.concatenate([loads, np.arange(len(batches))]),
            stage=np.concatenate([instances["segment"][loads], batches["segment"]]),
            family=np.concatenate([instances["width"][loads], batches["width"]]),
            kind=np.array(["load"] * len(loads) + ["infer"] * len(batches), dtype=np.str_),
            release=np.concatenate([np.zeros(len(loads), np.int64), arrived]),
            acquire=acquire,
            sequences=Csr.of(ops.tolist() for ops in sequences),
            start=start,
            provenance={
                _KEPT: {
                    **{name: getattr(self, name).tolist() for name in _TABLES},
                    "decisions": self.decisions,
                    "horizon": self.horizon,
                }
            },
        )

    def _followers(self, row: IntArray) -> IntArray:
        """Pairs of batches that share a request, the earlier first."""
        order = np.lexsort((self.batches["segment"][row], self.entries["request"]))
        same = np.diff(self.entries["request"][order]) == 0
        pairs = np.stack([row[order][:-1][same], row[order][1:][same]], axis=1)
        return np.unique(pairs, axis=0)

    @classmethod
    def of_schedule(cls, problem: Routing, schedule: Schedule) -> Log:
        """The inverse of `schedule`.

        Raises
        ------
        InputError
            The schedule is not of these requests.
        """
        kept: Any = schedule.provenance.get(_KEPT)
        try:
            tables: dict[str, Any] = {
                name: np.array([tuple(row) for row in kept[name]], dtype)
                for name, dtype in _TABLES.items()
            }
            found = cls(problem, **tables, decisions=kept["decisions"], horizon=kept["horizon"])
            made = found.schedule()
        except (TypeError, ValueError, IndexError, KeyError, OverflowError):
            raise InputError("the schedule is no history of these requests") from None
        if not made.same_graph(schedule):
            raise InputError("the schedule belongs to another instance: its batches are others")
        return found

    # documents

    def to_json(self) -> bytes:
        """The document ``optsched.serving-log/1``."""
        from optsched.problems.routing.document import log_to_json

        return log_to_json(self)


def telemetry(log: Log, every_ms: float = 100.0) -> list[dict[str, Any]]:
    """The state of every server at regular times.

    Returns
    -------
    list
        A row a moment: ``t_ms``, and per server ``utilisation`` (U), ``vram_mb``, ``power_w``,
        ``queue`` (requests that wait there, per segment), ``running`` (requests in batches), and
        ``p50_ms`` and ``p99_ms`` of the latencies of the last 1024 requests done there.
    """
    moments = range(0, log.end + 1, round(every_ms * NS_PER_MS))
    states = [_states(log, s, moments) for s in range(len(log.problem.servers))]
    return [
        {"t_ms": t / NS_PER_MS, "servers": list(row)}
        for t, row in zip(moments, zip(*states, strict=True), strict=True)
    ]


def _states(log: Log, s: int, moments: range) -> list[dict[str, Any]]:
    """The state of one server at these times."""
    problem, k = log.problem, log.problem.n_segments
    changes, load = log.loads[s]
    there = log.instances[log.instances["server"] == s]
    size = problem.vram[there["segment"], there["width"]] / 1000
    gone = np.where(there["unload"] < 0, 2**62, there["unload"])
    of = np.repeat(log.batches, log.batches["images"])
    own = of["server"] == s
    of, entries = of[own], log.entries[own]
    last = of["segment"] == k - 1
    done = of["end"][last]
    order = np.argsort(done, kind="stable")
    latency = ((done - problem.arrival[entries["request"][last]]) / NS_PER_MS)[order]
    done = done[order]
    found = []
    for t in moments:
        u = load[[np.searchsorted(changes, t, side="right") - 1]]
        n = int(np.searchsorted(done, t, side="right"))
        recent = np.sort(latency[max(0, n - _LAST) : n])
        waits = (entries["queued"] <= t) & (of["start"] > t)
        found.append({
            "id": problem.servers[s].id,
            "utilisation": float(u[0]),
            "vram_mb": float(size[(there["load"] <= t) & (gone > t)].sum()),
            "power_w": float(log.watts(s, u)[0]),
            "queue": np.bincount(of["segment"][waits], minlength=k).tolist(),
            "running": int(((of["start"] <= t) & (of["end"] > t)).sum()),
            "p50_ms": percentile(recent, 50),
            "p99_ms": percentile(recent, 99),
        })  # fmt: skip
    return found


def percentile(ascending: FloatArray, percent: int) -> float | None:
    """By nearest rank: the ceil(p n)-th smallest."""
    if not len(ascending):
        return None
    return float(ascending[-(-percent * len(ascending) // 100) - 1])
