"""A log for people: the dashboard of its servers, and a batch in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.problems.routing.problem import NS_PER_MS

if TYPE_CHECKING:
    from optsched.problems.routing.log import Log

_LAST = 1024
"""Completions of which percentiles are taken."""


def telemetry(log: Log, every_ms: float = 100.0) -> list[dict[str, Any]]:
    """The state of every server at regular times.

    Returns
    -------
    list
        A row a moment: ``t_ms``, and per server ``utilisation`` (U), ``vram_mb``, ``power_w``,
        ``queue`` (requests that wait there, per segment), ``running`` (requests in batches), and
        ``p50_ms`` and ``p99_ms`` of the latencies of the last 1024 requests done there.
    """
    problem, batches, instances = log.problem, log.batches, log.instances
    times = np.arange(0, log.end + 1, round(every_ms * NS_PER_MS))
    of = np.repeat(np.arange(len(batches)), batches["images"])
    columns: list[dict[str, Any]] = []
    for s, server in enumerate(problem.servers):
        moments, load = log.loads[s]
        u = load[np.searchsorted(moments, times, side="right") - 1]
        there = instances[instances["server"] == s]
        size = problem.vram[there["segment"], there["width"]] / 1000
        gone = np.where(there["unload"] < 0, 2**62, there["unload"])
        own = batches[of]["server"] == s
        rows = batches[of][own]
        last = rows["segment"] == problem.n_segments - 1
        end = rows["end"][last]
        latency = (end - problem.arrival[log.entries["request"][own][last]]) / NS_PER_MS
        latency = latency[np.argsort(end, kind="stable")]
        queued = log.entries["queued"][own]
        columns.append({
            "id": server.id,
            "utilisation": u,
            "vram_mb": _alive(times, there["load"], gone, size),
            "power_w": log.watts(s, u),
            "queue": np.stack([
                _alive(times, queued[at], rows["start"][at])
                for at in (rows["segment"] == k for k in range(problem.n_segments))
            ], axis=1),
            "running": _alive(times, rows["start"], rows["end"]),
            "done": np.searchsorted(np.sort(end), times, side="right"),
            "latency": latency,
        })  # fmt: skip
    return [
        {"t_ms": t / NS_PER_MS, "servers": [_row(column, i) for column in columns]}
        for i, t in enumerate(times.tolist())
    ]


def _alive(times: Any, begin: Any, end: Any, size: Any = None) -> Any:
    """How much began and has not ended at each time."""
    order = [np.argsort(at, kind="stable") for at in (begin, end)]
    value = np.ones(len(begin)) if size is None else size
    total = [np.concatenate([[0.0], np.cumsum(value[one])]) for one in order]
    seen = [
        np.searchsorted(at[one], times, side="right")
        for at, one in zip((begin, end), order, strict=True)
    ]
    return total[0][seen[0]] - total[1][seen[1]]


def _row(column: dict[str, Any], i: int) -> dict[str, Any]:
    done = int(column["done"][i])
    recent = np.sort(column["latency"][max(0, done - _LAST) : done])
    ranks = {
        f"p{p}_ms": float(recent[-(-p * len(recent) // 100) - 1]) if len(recent) else None
        for p in (50, 99)
    }
    return {
        "id": column["id"],
        "utilisation": float(column["utilisation"][i]),
        "vram_mb": float(column["vram_mb"][i]),
        "power_w": float(column["power_w"][i]),
        "queue": [int(n) for n in column["queue"][i]],
        "running": int(column["running"][i]),
        **ranks,
    }


def explain(log: Log, batch: int) -> str:
    """A batch of a log in words.

    Parameters
    ----------
    log
        The history.
    batch
        Row of the batch.

    Returns
    -------
    str
        What ran, what it waited for, and where each of its requests has spent its time so far.

    Raises
    ------
    InputError
        There is no such batch.
    """
    problem, rows = log.problem, log.batches
    if not len(rows):
        raise InputError("batch: the log has none")
    b = integer("batch", batch, 0, len(rows) - 1)
    row = rows[b]
    entries = log.entries[row["first"] : row["first"] + row["images"]]
    s, k, w, start = (int(row[key]) for key in ("server", "segment", "width", "start"))
    there = log.instances[log.instances["server"] == s]
    own = there[there["id"] == row["instance"]][0]
    lines = [
        f"batch {b}: {len(entries)} request{'s' * (len(entries) > 1)}, segment {k} at width "
        f"{problem.widths[w]:g}, on server {problem.servers[s].id!r}, instance {row['instance']} "
        f"(width {problem.widths[int(own['width'])]:g}), {_ms(start)} to {_ms(int(row['end']))} ms"
    ]
    queued = int(entries["queued"].min())
    lines.append(
        f"its oldest block was queued at {_ms(queued)} ms and waited {_ms(start - queued)} ms: "
        + _reason(log, b, queued)
    )
    blocks = len(np.unique(entries["queued"]))
    lines.append(
        f"it took {blocks} block{'s' * (blocks > 1)}, whole ones in their order up to "
        f"{problem.max_batch} requests (max_batch) of what waited there"
    )
    for r, at in entries.tolist():
        lines.append(f"  request {problem.ids[r]!r}: {_journey(log, r, k, at, start)}")
    return "\n".join(lines)


def _reason(log: Log, b: int, queued: int) -> str:
    """What the batch waited for."""
    rows, row, own = log.batches, log.batches[b], log.instances
    if row["start"] == queued:
        return "an instance was free"
    s, k, w = (row[key] for key in ("server", "segment", "width"))
    hosts = own[(own["server"] == s) & (own["segment"] == k) & (own["width"] >= w)]
    loading = hosts[(hosts["ready"] == row["start"]) & (hosts["load"] < row["start"])]
    if len(loading):
        return f"instance {loading['id'][0]} was loaded from {_ms(int(loading['load'][0]))} ms on"
    ended = rows[(rows["server"] == s) & (rows["end"] == row["start"])]
    if (ended["instance"] == row["instance"]).any():
        gone = (hosts["unload"] >= 0) & (hosts["unload"] <= queued)
        n = int(((hosts["load"] <= queued) & ~gone).sum())
        return f"all {n} instances that can run it were busy or loading, this one until then"
    return "older blocks went first"


def _journey(log: Log, r: int, k: int, queued: int, start: int) -> str:
    """Where a request has spent its time before this batch."""
    of = np.repeat(np.arange(len(log.batches)), log.batches["images"])
    mine = log.batches[of[log.entries["request"] == r]]
    before = mine[mine["segment"] == k - 1]
    came = int(before["end"][0]) if k else int(log.problem.arrival[r])
    what = f"segment {k - 1} done at {_ms(came)}" if k else f"arrived at {_ms(came)}"
    return (
        f"{what} ms, {_ms(queued - came)} ms at the router and on the way, "
        f"{_ms(start - queued)} ms queued here"
    )


def _ms(ns: int) -> str:
    return f"{ns / NS_PER_MS:.3f}"
