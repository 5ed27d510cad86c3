"""Independent check of logs: shares no code with simulator and executor."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.serving.log import Log
from optsched.serving.tables import NEVER

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from optsched.serving.scenario import Scenario
    from optsched.serving.tables import FloatArray, Server

SLACK: Final = 1  # ns
TOLERANCE: Final = 1e-6  # of the summary, relative or absolute


def check(scenario: Scenario, log: Log | Mapping[str, Any] | str | os.PathLike[str]) -> list[str]:
    """Check that a log obeys the rules of its scenario and that its summary agrees.

    All values are computed again from the rows of the log and the fields of the scenario. For logs
    of a wall clock, durations of the model (batches, loads, links, router) are not checked.

    Parameters
    ----------
    log
        A log, its document as parsed JSON, or its file.

    Returns
    -------
    list
        One sentence per violation.

    Examples
    --------
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, seconds=0.1)
    >>> serving.check(scenario, serving.simulate(scenario).log)
    []
    """
    found = log if isinstance(log, Log) else Log.read(log, scenario)
    if found.scenario.sha256 != scenario.sha256:
        ours, given = scenario.sha256, found.scenario.sha256
        raise InputError(f"the log is of another scenario: {given:.12}, this one is {ours:.12}")
    facts = _Facts(scenario, found)
    rules = [_instances, _memory, _batches, _parallel, _completeness, _shed, _order, _fifo]
    rules += [_summary]
    if not found.wall_clock:
        rules += [_durations, _router]
    return [sentence for rule in rules for sentence in rule(facts)]


class _Facts:
    """Columns of a log."""

    def __init__(self, scenario: Scenario, log: Log) -> None:
        self.scenario, self.log = scenario, log
        self.batch, self.instance = log.batches, log.instances.copy()
        self.instance["unload"][self.instance["unload"] < 0] = NEVER
        self.horizon = NEVER if log.horizon is None else log.horizon
        row = {(s, i): row for row, (s, i, *_) in enumerate(self.instance.tolist())}
        self.host = np.array([row[s, i] for s, i, *_ in self.batch.tolist()], np.int64)
        # columns of the entries: batch, request, queue time, segment
        self.of = np.repeat(np.arange(len(self.batch)), self.batch["images"])
        self.r, self.queued = log.entries["request"], log.entries["queued"]
        self.k = self.batch["segment"][self.of]

    @cached_property
    def times(self) -> Any:
        """Number of runs, [request][segment]."""
        n, k = self.scenario.n_requests, self.scenario.n_segments
        return np.bincount(self.r * k + self.k, minlength=n * k).reshape(n, k)

    @cached_property
    def batch_of(self) -> Any:
        """Batch, [request][segment]; -1: none."""
        found = np.full((self.scenario.n_requests, self.scenario.n_segments), -1)
        found[self.r, self.k] = self.of
        return found

    @cached_property
    def inputs(self) -> tuple[Any, Any, Any]:
        """Columns of the entries: width of the input, its time, duration of its transfer."""
        k, r = self.k, self.r
        row = np.where(k > 0, self.batch_of[r, k - 1], -1)
        before = self.batch[np.maximum(row, 0)]
        width = np.where(row >= 0, before["width"], 0)
        exists = np.where(row >= 0, before["end"], np.where(k > 0, 0, self.scenario.arrival[r]))
        moved = np.zeros(len(k))
        link = self.scenario.link
        if link is not None and not self.log.wall_clock:
            took = link.latency_ms + np.asarray(link.activation_mb, np.float64) * link.ms_per_mb
            away = (row >= 0) & (before["server"] != self.batch["server"][self.of])
            moved[away] = took[k[away] - 1, width[away]] * 1e6
        return width, exists, moved

    def server(self, s: int) -> str:
        """Name in messages."""
        return f"server {self.scenario.servers[s].id!r}"

    def request(self, r: int) -> str:
        """Name in messages."""
        return f"request {self.scenario.ids[r]!r}"

    def the_instance(self, i: int) -> str:
        """Name and columns in messages."""
        row = self.instance[i]
        end = f", unloaded at {_ms(row['unload'])}" if row["unload"] < NEVER else ""
        return (
            f"instance {row['id']} of {self.server(row['server'])} (segment "
            f"{row['segment']}, width {row['width']}, ready at {_ms(row['ready'])}{end})"
        )

    def the_batch(self, b: int) -> str:
        """Number and columns in messages."""
        row = self.batch[b]
        return (
            f"batch {b} (segment {row['segment']}, width {row['width']}, {row['images']} requests, "
            f"{_ms(row['start'])} to {_ms(row['end'])})"
        )


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.6f}".rstrip("0").rstrip(".") + " ms"


def _instances(f: _Facts) -> Iterator[str]:
    """Loads take their time; an instance is unloaded after it is ready."""
    for i, (s, _, _, _, load, ready, unload) in enumerate(f.instance.tolist()):
        least = 0.0 if f.log.wall_clock else (f.scenario.servers[s].load_ms or 0) * 1e6
        if ready - load < (0 if load == ready == 0 else least - SLACK):
            yield f"{f.the_instance(i)} is loaded from {_ms(load)} on, a load takes {_ms(least)}"
        if not ready <= unload:
            yield f"{f.the_instance(i)} is unloaded before it is ready"
        if load > f.horizon:
            yield f"{f.the_instance(i)} is loaded after the horizon, {_ms(f.horizon)}"


def _memory(f: _Facts) -> Iterator[str]:
    """Instances fit into VRAM at all times; at equal times unloads come first."""
    for s, server in enumerate(f.scenario.servers):
        rows = f.instance[f.instance["server"] == s]
        size = f.scenario.vram[rows["segment"], rows["width"]]
        at = np.concatenate([rows["load"], rows["unload"]])
        change = np.concatenate([size, -size])
        order = np.lexsort((change, at))
        held = np.cumsum(change[order])
        over = held > round(server.vram_mb * 1000)
        for i in np.flatnonzero(over & ~np.roll(over, 1)):
            yield (
                f"{f.server(s)} holds {held[i] / 1000:g} MB of instances at "
                f"{_ms(at[order[i]])}, it has {server.vram_mb:g} MB"
            )


def _batches(f: _Facts) -> Iterator[str]:
    """Batches have a legal size, fit their instance, and run one at a time on it."""
    ran, on, most = f.batch, f.instance[f.host], f.scenario.max_batch
    order = np.lexsort((ran["end"], ran["start"], f.host))
    before, after = order[:-1], order[1:]
    same = f.host[before] == f.host[after]
    shared = np.zeros(len(ran), np.bool_)
    shared[after] = same & (ran["start"][after] < ran["end"][before] - SLACK)
    for wrong, what in (
        ((ran["images"] < 1) | (ran["images"] > most), f"has not 1 to {most} requests"),
        (ran["end"] < ran["start"], "ends before it starts"),
        (ran["start"] > f.horizon, f"starts after the horizon, {_ms(f.horizon)}"),
        (on["segment"] != ran["segment"], "is of another segment than its instance"),
        (on["width"] < ran["width"], "is wider than its instance"),
        (ran["start"] < on["ready"] - SLACK, "starts before its instance is ready"),
        (ran["end"] > on["unload"] + SLACK, "ends after its instance is unloaded"),
        (shared, "starts while another batch runs on its instance"),
    ):
        for b in np.flatnonzero(wrong).tolist():
            yield f"{f.the_batch(b)} {what}: {f.the_instance(f.host[b])}"


def _parallel(f: _Facts) -> Iterator[str]:
    """A server runs as many batches at a time as it may."""
    for s, server in enumerate(f.scenario.servers):
        rows = np.flatnonzero(f.batch["server"] == s)
        start, end = (np.sort(f.batch[key][rows]) for key in ("start", "end"))
        begun = np.searchsorted(start, f.batch["start"][rows], "right")
        running = begun - np.searchsorted(end, f.batch["start"][rows] + SLACK, "right")
        for b in rows[running > (server.parallel or len(rows))].tolist():
            yield f"{f.the_batch(b)} is above the limit of {server.parallel} on {f.server(s)}"


def _completeness(f: _Facts) -> Iterator[str]:
    """Every request runs every segment once; before a horizon or if shed, a prefix of them."""
    again: dict[tuple[int, int], list[int]] = defaultdict(list)
    for e in np.flatnonzero(f.times[f.r, f.k] > 1):
        again[int(f.r[e]), int(f.k[e])].append(int(f.of[e]))
    for (r, k), rows in again.items():
        yield f"{f.request(r)} runs segment {k} {len(rows)} times, in batches {str(rows)[1:-1]}"
    missing = f.times == 0
    later = np.cumsum(f.times[:, ::-1], axis=1)[:, ::-1] > 0
    stopped = np.full(len(missing), f.log.horizon is not None)
    stopped[f.log.sheds["request"]] = True
    missing &= later | ~stopped[:, None]
    for r, k in np.argwhere(missing):
        yield f"{f.request(r)} never runs segment {k}"


def _shed(f: _Facts) -> Iterator[str]:
    """Requests that are shed have a deadline, and are shed once, while they wait for a segment."""
    due, shed = f.scenario.deadline_ms, set[int]()
    for r, at in f.log.sheds.tolist():
        ends = f.batch["end"][f.of[f.r == r]]
        since = max(int(f.scenario.arrival[r]), int(ends.max(initial=0)))
        name = f"{f.request(r)}, shed at {_ms(at)},"
        if due is None or due[r] == math.inf:
            yield f"{name} has no deadline"
        if r in shed:
            yield f"{name} was shed before"
        if f.times[r].all():
            yield f"{name} runs all segments"
        if at < since - SLACK:
            yield f"{name} is in a batch until {_ms(since)}"
        if at > f.horizon:
            yield f"{name} is shed after the horizon, {_ms(f.horizon)}"
        shed.add(r)


def _order(f: _Facts) -> Iterator[str]:
    """A request is queued after its input has arrived, and starts after it is queued."""
    b, queued = f.of, f.queued
    arrived, start = f.inputs[1] + f.inputs[2], f.batch["start"][b]
    for wrong, what, at in (
        (queued < arrived - SLACK, "before its input is there, at", arrived),
        (queued > start + SLACK, "after that starts, at", start),
    ):
        for e in np.flatnonzero(wrong):
            yield (
                f"{f.request(f.r[e])} queues at {_ms(queued[e])} for "
                f"{f.the_batch(b[e])}, {what} {_ms(at[e])}"
            )


def _fifo(f: _Facts) -> Iterator[str]:
    """Requests of a server, segment and width start in the order of their queue times."""
    size, queued = f.batch["images"], f.queued
    by_age = np.lexsort((queued, f.of))
    rows = np.flatnonzero(size > 0)
    stop = np.cumsum(size)[rows]
    oldest, youngest = by_age[stop - size[rows]], by_age[stop - 1]
    ran = f.batch[rows]
    keys = [ran[name] for name in ("start", "width", "segment", "server")]
    order = np.lexsort((queued[youngest], queued[oldest], *keys))
    same = np.all([np.diff(key[order]) == 0 for key in keys[1:]], axis=0)
    for i in np.flatnonzero(same & (queued[oldest[order][1:]] < queued[youngest[order][:-1]])):
        x, y = order[i], order[i + 1]
        first, late = (
            f"{f.request(f.r[e])}, queued at {_ms(queued[e])}" for e in (youngest[x], oldest[y])
        )
        yield (
            f"{first}, overtakes {late}, on {f.server(ran['server'][x])}: "
            f"{f.the_batch(rows[x])} starts before {f.the_batch(rows[y])}"
        )


def _durations(f: _Facts) -> Iterator[str]:
    """A batch takes at least its launch and the work of its requests, inputs perhaps padded."""
    ran, b = f.batch, f.of
    cost = np.array([_cost_ms(f.scenario, one) for one in f.scenario.servers]) * 1e6
    work = cost[ran["server"][b], f.k, f.inputs[0], ran["width"][b]]
    launch = np.array([one.launch_ms * 1e6 for one in f.scenario.servers])
    least = launch[ran["server"]] + np.bincount(b, work, minlength=len(ran))
    short = ran["end"] - ran["start"] < least * (1 - 1e-12) - SLACK
    for i in np.flatnonzero(short).tolist():
        yield f"{f.the_batch(i)} needs at least {_ms(least[i])} on {f.server(ran['server'][i])}"


def _cost_ms(scenario: Scenario, server: Server) -> FloatArray:
    """Least time of an image, [segment][input width][width], over inputs padded to any width."""
    cost = scenario.mmac * server.ms_per_mmac
    if server.cost_ms is not None:
        first, *others = [np.asarray(part, np.float64) for part in server.cost_ms]
        cost = np.array([np.broadcast_to(first[:1], cost[0].shape), *others])
    padded: FloatArray = np.minimum.accumulate(cost[:, ::-1], axis=1)[:, ::-1]
    return padded


def _blocks(f: _Facts) -> FloatArray:
    """Decision times of all blocks: entries of one server, segment, width and queue time."""
    key = [f.queued, *(f.batch[name][f.of] for name in ("width", "segment", "server"))]
    order = np.lexsort(key)
    new = np.any([np.diff(column[order], prepend=-1) != 0 for column in key], axis=0)
    if not len(order):
        return np.zeros(0)
    moved = np.maximum.reduceat(f.inputs[2][order], np.flatnonzero(new))
    return np.sort(f.queued[order][new] - moved)


def _router(f: _Facts) -> Iterator[str]:
    """Decisions are `router_ms` apart, and begin with a request in a queue."""
    takes = (f.scenario.router_ms or 0) * 1e6
    if takes <= 2 * SLACK:
        return
    decided = _blocks(f)
    for i in np.flatnonzero(np.diff(decided) < takes - SLACK):
        yield (
            f"the router decides at {_ms(decided[i])} and at {_ms(decided[i + 1])}; a decision "
            f"takes {_ms(takes)}"
        )
    inner = f.k < f.scenario.n_segments - 1
    arrived = np.concatenate([f.scenario.arrival, f.batch["end"][f.of[inner]]])
    left = f.queued - f.inputs[2]
    begin = decided - takes + SLACK
    waiting = [np.searchsorted(np.sort(at), begin, "right") for at in (arrived, left)]
    for i in np.flatnonzero(waiting[0] <= waiting[1]):
        yield (
            f"the router decides at {_ms(decided[i])}; a decision takes {_ms(takes)}, and nothing "
            f"waited at {_ms(decided[i] - takes)}"
        )


def _summary(f: _Facts) -> Iterator[str]:
    """The summary equals the values computed from the log."""
    given = msgspec.structs.asdict(f.log.summary)
    row = np.flatnonzero((f.batch_of >= 0).all(axis=1))
    row = row[f.batch["end"][f.batch_of[row, -1]] <= f.horizon]
    finish = f.batch["end"][f.batch_of[row, -1]]
    left = [*finish.tolist(), *f.log.sheds["at"].tolist()]
    end = max(left, default=0) if f.log.horizon is None else f.horizon
    n, of, seconds = len(row), f.scenario.n_requests, end / 1e9
    joules: float | None
    joules, variance, spread = _integrals(f, end)
    if f.log.wall_clock:  # energy is not measured; batches of dead servers are not in the log
        joules, variance, spread = None, given["gpu_variance"], given["gpu_variance_sd"]
    idle = sum(one.idle_w for one in f.scenario.servers) * seconds
    found: dict[str, Any] = dict.fromkeys(given)
    found |= {
        "completed": n, "energy_j": joules, "gpu_variance": variance, "gpu_variance_sd": spread,
        "dynamic_energy_j": None if joules is None else joules - idle,
        "throughput_per_s": n / seconds if seconds else None, "completion": n / of if of else None,
    }  # fmt: skip
    if n:
        latency = sorted(((finish - f.scenario.arrival[row]) / 1e6).tolist())
        mean = math.fsum(latency) / n
        digits = f.batch["width"][f.batch_of[row]]
        percent = f.scenario.accuracy.reshape((f.scenario.n_widths,) * f.scenario.n_segments)
        found |= {
            "mean_ms": mean, "sd_ms": math.sqrt(math.fsum((x - mean) ** 2 for x in latency) / n),
            "p50_ms": latency[(n + 1) // 2 - 1], "p99_ms": latency[(99 * n + 99) // 100 - 1],
            "accuracy": math.fsum(percent[tuple(digits.T)]) / n,
        }  # fmt: skip
    found |= {"shed": len(f.log.sheds), "late": 0}
    if f.scenario.deadline_ms is not None:
        due = f.scenario.arrival + np.ceil(f.scenario.deadline_ms * 1e6 - 1e-3)
        late = finish > due[row]
        closed = np.isfinite(due) & (due <= end)
        done = np.concatenate([row, f.log.sheds["request"]])
        closed[done] = np.isfinite(due[done])
        kept = np.isfinite(due[row]) & ~late
        found["late"] = int(late.sum())
        if closed.any():
            found["attainment"] = 100 * int(kept.sum()) / int(closed.sum())
    least = len(_blocks(f))
    most = len(f.of) if f.log.horizon is None and not f.log.wall_clock else 2**53
    if most < 2**53 and f.scenario.link is None and (f.scenario.router_ms or 0) * 1e6 > 2 * SLACK:
        most = least  # decisions have different times
    found["decisions"] = max(least, min(given["decisions"], most))
    for key, value in found.items():
        exact = value is None or given[key] is None
        tolerance = {"rel_tol": TOLERANCE, "abs_tol": TOLERANCE}
        if not (given[key] is value if exact else math.isclose(given[key], value, **tolerance)):
            yield f"summary.{key}: says {given[key]}, the log comes to {value}"


def _integrals(f: _Facts, end: int) -> tuple[float, float, float]:
    """Joules, and mean and standard deviation over time of the variance of min(U, 1)."""
    ran, servers = f.batch, f.scenario.servers
    widest = np.zeros(len(ran), np.int64)
    np.maximum.at(widest, f.of, f.inputs[0])
    work = (f.scenario.mmac[ran["segment"], widest, ran["width"]] * ran["images"]).tolist()
    at = np.concatenate([ran["start"], ran["end"]])
    of = ran["server"].tolist()
    running, load = [0] * len(servers), [0.0] * len(servers)
    level, watts = [0.0] * len(servers), [one.idle_w for one in servers]
    now, joules, mean, square, variance = 0, 0.0, 0.0, 0.0, 0.0
    for i in [*np.argsort(at, kind="stable").tolist(), None]:
        span = (end if i is None else min(int(at[i]), end)) - now
        joules += sum(watts) * span * 1e-9
        mean += variance * span / max(end, 1)
        square += variance**2 * span / max(end, 1)
        now += span
        if i is None:
            break
        b, sign = i % len(of), 1 if i < len(of) else -1
        s, server = of[b], servers[of[b]]
        running[s] += sign
        x = work[b] / server.sat_mmac if server.sat_mmac else math.inf
        load[s] += sign * (1 / (1 + 1 / x) + 0.02 if x else 0.02)
        u = (load[s] if server.sat_mmac else 1.0) if running[s] else 0.0
        level[s] = min(u, 1.0)
        watts[s] = server.idle_w + (server.peak_w - server.idle_w) * level[s]
        if server.contention is not None and u > server.contention.knee:
            watts[s] *= 1 + 0.5 * min(1.0, (u - server.contention.knee) / 0.16)
        middle = sum(level) / len(level)
        variance = sum((one - middle) ** 2 for one in level) / len(level)
    return joules, mean, math.sqrt(max(0.0, square - mean * mean))
