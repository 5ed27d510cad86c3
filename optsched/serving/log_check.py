"""An independent judge of histories: it reads the document, and shares no code with its makers."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.serving.document import LogDocument, check_scenario, log_document, log_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from optsched.serving.fields import FloatArray
    from optsched.serving.log import Log
    from optsched.serving.scenario import Scenario, Server

SLACK: Final = 1  # ns
CLOSE: Final = 1e-6  # of the summary, relative or absolute
NEVER: Final = 2**62


def check_log(
    scenario: Scenario, log: Log | Mapping[str, Any] | str | os.PathLike[str]
) -> list[str]:
    """Whether a history obeys the rules of its scenario, and its summary agrees.

    Everything is computed again from the numbers in the document and the fields of the scenario.
    Of a wall clock's log the durations of the model (batches, loads, links, router) are not asked.

    Parameters
    ----------
    scenario
        The scenario.
    log
        A history, its document as parsed JSON, or its file.

    Returns
    -------
    list
        A sentence for every violation; empty if there is none.

    Raises
    ------
    InputError
        No such document, or the log of another scenario.
    """
    said = log_document(log)
    check_scenario(scenario, said)
    try:
        history = _History(scenario, said)
    except InputError as error:  # a name that is not there, a time out of range
        return [str(error)]
    rules = [_instances, _memory, _batches, _completeness, _order, _first_come, _summary]
    if not said.wall_clock:
        rules += [_durations, _router]
    return [sentence for rule in rules for sentence in rule(history)]


class _History:
    """A log's document as arrays: indices instead of names, ns instead of ms."""

    def __init__(self, scenario: Scenario, said: LogDocument) -> None:
        self.scenario, self.said = scenario, said
        log = log_of(scenario, said)
        self.batch, self.instance = log.batches, log.instances.copy()
        self.instance["unload"][self.instance["unload"] < 0] = NEVER
        self.horizon = NEVER if log.horizon is None else log.horizon
        row = {(s, i): row for row, (s, i, *_) in enumerate(self.instance.tolist())}
        self.host = np.array([row[s, i] for s, i, *_ in self.batch.tolist()], np.int64)
        # of every request in every batch
        self.of = np.repeat(np.arange(len(self.batch)), self.batch["images"])
        self.r, self.queued = log.entries["request"], log.entries["queued"]
        self.k = self.batch["segment"][self.of]

    @cached_property
    def times(self) -> Any:
        """How often each request runs each segment."""
        n, k = self.scenario.n_requests, self.scenario.n_segments
        at = self.r * k + self.k
        return np.bincount(at, minlength=n * k).reshape(n, k)

    @cached_property
    def batch_of(self) -> Any:
        """In which batch, [request][segment]; -1: in none."""
        found = np.full((self.scenario.n_requests, self.scenario.n_segments), -1)
        found[self.r, self.k] = self.of
        return found

    @cached_property
    def inputs(self) -> tuple[Any, Any, Any]:
        """Of every entry the width of its input, when that is there, and what moving it takes."""
        k, r, b = self.k, self.r, self.of
        row = np.where(k > 0, self.batch_of[r, k - 1], -1)
        before = self.batch[np.maximum(row, 0)]
        width = np.where(row >= 0, before["width"], 0)
        exists = np.where(row >= 0, before["end"], np.where(k > 0, 0, self.scenario.arrival[r]))
        moved = np.zeros(len(k))
        link = self.scenario.link
        if link is not None and not self.said.wall_clock:
            took = link.latency_ms + np.asarray(link.activation_mb, np.float64) * link.ms_per_mb
            away = (row >= 0) & (before["server"] != self.batch["server"][b])
            moved[away] = took[k[away] - 1, width[away]] * 1e6
        return width, exists, moved

    def server(self, s: int) -> str:
        """A server's name."""
        return f"server {self.scenario.servers[s].id!r}"

    def request(self, r: int) -> str:
        """A request's name."""
        return f"request {self.scenario.ids[r]!r}"

    def the_instance(self, i: int) -> str:
        """An instance and what it is."""
        row = self.instance[i]
        gone = f", unloaded at {_ms(row['unload'])}" if row["unload"] < NEVER else ""
        return (
            f"instance {self.said.instances[i].id} of {self.server(row['server'])} (segment "
            f"{row['segment']}, width {row['width']}, ready at {_ms(row['ready'])}{gone})"
        )

    def the_batch(self, b: int) -> str:
        """A batch and what it is."""
        row = self.batch[b]
        return (
            f"batch {b} (segment {row['segment']}, width {row['width']}, {row['images']} requests, "
            f"{_ms(row['start'])} to {_ms(row['end'])})"
        )


def _ms(ns: float) -> str:
    """A time for messages."""
    return f"{ns / 1e6:.6f}".rstrip("0").rstrip(".") + " ms"


def _instances(h: _History) -> Iterator[str]:
    """Loads take their time, and come before unloads."""
    for i, (s, _, _, _, load, ready, unload) in enumerate(h.instance.tolist()):
        least = 0.0 if h.said.wall_clock else (h.scenario.servers[s].load_ms or 0) * 1e6
        if ready - load < (0 if load == ready == 0 else least - SLACK):
            yield f"{h.the_instance(i)} is loaded from {_ms(load)} on, a load takes {_ms(least)}"
        if not ready <= unload:
            yield f"{h.the_instance(i)} is unloaded before it is ready"
        if load > h.horizon:
            yield f"{h.the_instance(i)} is loaded after the horizon, {_ms(h.horizon)}"


def _memory(h: _History) -> Iterator[str]:
    """Instances fit into VRAM at all times; at equal times unloads come first."""
    for s, server in enumerate(h.scenario.servers):
        there = h.instance[h.instance["server"] == s]
        size = h.scenario.vram[there["segment"], there["width"]]
        at = np.concatenate([there["load"], there["unload"]])
        change = np.concatenate([size, -size])
        order = np.lexsort((change, at))
        held = np.cumsum(change[order])
        over = held > round(server.vram_mb * 1000)
        for i in np.flatnonzero(over & ~np.roll(over, 1)):
            yield (
                f"{h.server(s)} holds {held[i] / 1000:g} MB of instances at "
                f"{_ms(at[order[i]])}, it has {server.vram_mb:g} MB"
            )


def _batches(h: _History) -> Iterator[str]:
    """Batches have their size, fit their instance, and run there one at a time."""
    ran, on, most = h.batch, h.instance[h.host], h.scenario.max_batch
    order = np.lexsort((ran["end"], ran["start"], h.host))
    before, after = order[:-1], order[1:]
    same = h.host[before] == h.host[after]
    shared = np.zeros(len(ran), np.bool_)
    shared[after] = same & (ran["start"][after] < ran["end"][before] - SLACK)
    for wrong, what in (
        ((ran["images"] < 1) | (ran["images"] > most), f"has not 1 to {most} requests"),
        (ran["end"] < ran["start"], "ends before it starts"),
        (ran["start"] > h.horizon, f"starts after the horizon, {_ms(h.horizon)}"),
        (on["segment"] != ran["segment"], "is of another segment than its instance"),
        (on["width"] < ran["width"], "is wider than its instance"),
        (ran["start"] < on["ready"] - SLACK, "starts before its instance is ready"),
        (ran["end"] > on["unload"] + SLACK, "ends after its instance is unloaded"),
        (shared, "starts while another batch runs on its instance"),
    ):
        for b in np.flatnonzero(wrong).tolist():
            yield f"{h.the_batch(b)} {what}: {h.the_instance(h.host[b])}"


def _completeness(h: _History) -> Iterator[str]:
    """Every request runs every segment once; before a horizon the first ones."""
    again: dict[tuple[int, int], list[int]] = defaultdict(list)
    for e in np.flatnonzero(h.times[h.r, h.k] > 1):
        again[int(h.r[e]), int(h.k[e])].append(int(h.of[e]))
    for (r, k), rows in again.items():
        yield f"{h.request(r)} runs segment {k} {len(rows)} times, in batches {str(rows)[1:-1]}"
    missing = h.times == 0
    if h.said.horizon_ms is not None:
        missing &= np.cumsum(h.times[:, ::-1], axis=1)[:, ::-1] > 0
    for r, k in np.argwhere(missing):
        yield f"{h.request(r)} never runs segment {k}"


def _order(h: _History) -> Iterator[str]:
    """A request queues when its input is there, and starts after that."""
    b, queued = h.of, h.queued
    there, start = h.inputs[1] + h.inputs[2], h.batch["start"][b]
    for wrong, what, at in (
        (queued < there - SLACK, "before its input is there, at", there),
        (queued > start + SLACK, "after that starts, at", start),
    ):
        for e in np.flatnonzero(wrong):
            yield (
                f"{h.request(h.r[e])} queues at {_ms(queued[e])} for "
                f"{h.the_batch(b[e])}, {what} {_ms(at[e])}"
            )


def _first_come(h: _History) -> Iterator[str]:
    """Per server, segment and width who queues first starts first."""
    size, queued = h.batch["images"], h.queued
    by_age = np.lexsort((queued, h.of))
    rows = np.flatnonzero(size > 0)
    stop = np.cumsum(size)[rows]
    oldest, youngest = by_age[stop - size[rows]], by_age[stop - 1]
    ran = h.batch[rows]
    keys = [ran[name] for name in ("start", "width", "segment", "server")]
    order = np.lexsort((queued[youngest], queued[oldest], *keys))
    same = np.all([np.diff(key[order]) == 0 for key in keys[1:]], axis=0)
    for i in np.flatnonzero(same & (queued[oldest[order][1:]] < queued[youngest[order][:-1]])):
        x, y = order[i], order[i + 1]
        first, late = (
            f"{h.request(h.r[e])}, queued at {_ms(queued[e])}" for e in (youngest[x], oldest[y])
        )
        yield (
            f"{first}, overtakes {late}, on {h.server(ran['server'][x])}: "
            f"{h.the_batch(rows[x])} starts before {h.the_batch(rows[y])}"
        )


def _durations(h: _History) -> Iterator[str]:
    """A batch takes its launch and the work of its requests, whose inputs may be padded."""
    ran, b = h.batch, h.of
    cost = np.array([_cost_ms(h.scenario, one) for one in h.scenario.servers]) * 1e6
    own = cost[ran["server"][b], h.k, h.inputs[0], ran["width"][b]]
    launch = np.array([one.launch_ms * 1e6 for one in h.scenario.servers])
    least = launch[ran["server"]] + np.bincount(b, own, minlength=len(ran))
    short = ran["end"] - ran["start"] < least * (1 - 1e-12) - SLACK
    for i in np.flatnonzero(short).tolist():
        yield f"{h.the_batch(i)} needs at least {_ms(least[i])} on {h.server(ran['server'][i])}"


def _cost_ms(scenario: Scenario, server: Server) -> FloatArray:
    """Least time of an image, [segment][input width][width], over inputs padded to any width."""
    cost = scenario.mmac * server.ms_per_mmac
    if server.cost_ms is not None:
        first, *rest = [np.asarray(part, np.float64) for part in server.cost_ms]
        cost = np.array([np.broadcast_to(first[:1], cost[0].shape), *rest])
    padded: FloatArray = np.minimum.accumulate(cost[:, ::-1], axis=1)[:, ::-1]
    return padded


def _blocks(h: _History) -> FloatArray:
    """When every block was decided; those of one server, segment, width and queue time are one."""
    b, queued = h.of, h.queued
    key = [queued, *(h.batch[name][b] for name in ("width", "segment", "server"))]
    order = np.lexsort(key)
    new = np.any([np.diff(column[order], prepend=-1) != 0 for column in key], axis=0)
    moved = h.inputs[2][order]
    found = queued[order][new] - np.maximum.reduceat(moved, np.flatnonzero(new)) if len(b) else []
    return np.sort(found)


def _router(h: _History) -> Iterator[str]:
    """Decisions follow each other in the router's time, and begin when something waits."""
    takes = (h.scenario.router_ms or 0) * 1e6
    if takes <= 2 * SLACK:
        return
    decided = _blocks(h)
    for i in np.flatnonzero(np.diff(decided) < takes - SLACK):
        yield (
            f"the router decides at {_ms(decided[i])} and at {_ms(decided[i + 1])}; a decision "
            f"takes {_ms(takes)}"
        )
    inner = h.k < h.scenario.n_segments - 1
    there = np.concatenate([h.scenario.arrival, h.batch["end"][h.of[inner]]])
    gone = h.queued - h.inputs[2]
    begin = decided - takes + SLACK
    waiting = [np.searchsorted(np.sort(at), begin, "right") for at in (there, gone)]
    for i in np.flatnonzero(waiting[0] <= waiting[1]):
        yield (
            f"the router decides at {_ms(decided[i])}; a decision takes {_ms(takes)}, and nothing "
            f"waited at {_ms(decided[i] - takes)}"
        )


def _summary(h: _History) -> Iterator[str]:
    """What the summary says is what the log comes to."""
    said = msgspec.structs.asdict(h.said.summary)
    row = np.flatnonzero((h.batch_of >= 0).all(axis=1))
    row = row[h.batch["end"][h.batch_of[row, -1]] <= h.horizon]
    finish = h.batch["end"][h.batch_of[row, -1]]
    end = int(finish.max(initial=0)) if h.said.horizon_ms is None else h.horizon
    n, of, seconds = len(row), h.scenario.n_requests, end / 1e9
    modelled, variance, spread = _integrals(h, end)
    joules: float | None = modelled
    if h.said.wall_clock:  # energy is not measured; batches of dead servers are not in the log
        joules, variance, spread = None, said["gpu_variance"], said["gpu_variance_sd"]
    idle = sum(one.idle_w for one in h.scenario.servers) * seconds
    found: dict[str, Any] = dict.fromkeys(said)
    found |= {
        "completed": n, "energy_j": joules, "gpu_variance": variance, "gpu_variance_sd": spread,
        "dynamic_energy_j": None if joules is None else joules - idle,
        "throughput_per_s": n / seconds if seconds else None, "completion": n / of if of else None,
    }  # fmt: skip
    if n:
        latency = sorted(((finish - h.scenario.arrival[row]) / 1e6).tolist())
        mean = math.fsum(latency) / n
        digits = h.batch["width"][h.batch_of[row]]
        points = h.scenario.points.reshape((h.scenario.n_widths,) * h.scenario.n_segments)
        found |= {
            "mean_ms": mean, "sd_ms": math.sqrt(math.fsum((x - mean) ** 2 for x in latency) / n),
            "p50_ms": latency[(n + 1) // 2 - 1], "p99_ms": latency[(99 * n + 99) // 100 - 1],
            "accuracy": math.fsum(points[tuple(digits.T)]) / 10_000 / n,
        }  # fmt: skip
    least = len(_blocks(h))
    most = len(h.of) if h.said.horizon_ms is None and not h.said.wall_clock else 2**53
    if most < 2**53 and h.scenario.link is None and (h.scenario.router_ms or 0) * 1e6 > 2 * SLACK:
        most = least  # no two decisions at a time
    found["decisions"] = max(least, min(said["decisions"], most))
    for key, value in found.items():
        if not _agree(said[key], value):
            yield f"summary.{key}: says {said[key]}, the log comes to {value}"


def _agree(said: float | None, found: float | None) -> bool:
    if said is None or found is None:
        return said is found
    return math.isclose(said, found, rel_tol=CLOSE, abs_tol=CLOSE)


def _integrals(h: _History, end: int) -> tuple[float, float, float]:
    """Joules, and mean and standard deviation over time of the variance of min(U, 1)."""
    ran, servers = h.batch, h.scenario.servers
    widest = np.zeros(len(ran), np.int64)
    np.maximum.at(widest, h.of, h.inputs[0])
    work = (h.scenario.mmac[ran["segment"], widest, ran["width"]] * ran["images"]).tolist()
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
