"""A batch of a log in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.problems.routing.problem import NS_PER_MS

if TYPE_CHECKING:
    from optsched.problems.routing.log import Log


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
