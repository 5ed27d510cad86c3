"""What has happened in a simulation: one row per uninterrupted stay of a job at one size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.cluster.world.layout import HALF_A, HALF_B, WHOLE, addressed, frozen

if TYPE_CHECKING:
    from optsched.cluster.world.layout import World
    from optsched.model.schedule import IntArray

__all__ = ["HALF_A", "HALF_B", "WHOLE", "Log", "grown", "log_of"]


class Log(NamedTuple):
    """Hold the stays of jobs on GPUs by start, then by job; times in the workload's unit.

    In ``[start, start + restart)`` the job holds its GPUs without progress.

    Examples
    --------
    >>> from optsched.cluster import Job, Nodes, simulate
    >>> log = simulate([Job(name="a", sizes=(8,), work=8 * 10**8)], "fifo", Nodes(1, gpus=8)).log
    >>> log.start.tolist(), log.end.tolist(), log.gpus.tolist()
    ([0], [100], [8])
    """

    job: IntArray
    start: IntArray
    end: IntArray
    restart: IntArray
    gpus: IntArray
    """0 for a zero-slot task."""
    half: IntArray
    """`WHOLE`: it has its GPUs alone; `HALF_A`, `HALF_B`: the half of each that it shares."""
    work: IntArray
    """Work done in the stay that counts (after losses by ``checkpoint="pass"``)."""
    node_ptr: IntArray
    node: IntArray
    count: IntArray  # type: ignore[assignment]  # tuple.count
    """The stay's GPUs by node: rows ``node_ptr[i]:node_ptr[i + 1]``, nodes ascending."""
    finished: IntArray
    """End of every job of the workload; -1 if it did not end. Shape (jobs,)."""
    preemptions: IntArray
    """Times a running job was taken off all its GPUs before its end. Shape (jobs,)."""
    partner: IntArray | None = None
    """For a stay put on the GPUs of a running one: the row of that stay; -1 for all others.

    None without packing. Both of a pair are halves, different ones, for their whole stays.
    """

    def __repr__(self) -> str:
        return f"<Log: {len(self.start)} stays of {len(self.finished)} jobs>"


def grown(w: World) -> World:
    """The same world with twice the room for the log."""
    log = np.concatenate((w.log, np.zeros_like(w.log)))
    nodes = np.concatenate((w.log_node, np.zeros_like(w.log_node)))
    return addressed(w._replace(log=log, log_node=nodes))


def log_of(w: World) -> Log:
    """What has happened so far; stays that are still open end now."""
    rows = int(w.state["log_rows"][0])
    log = w.log[:rows]
    if bool((log["end"] < 0).any()):
        log = log.copy()
        _close(w, log, np.flatnonzero(log["end"] < 0))
    instant = np.cumsum(np.diff(log["start"], prepend=0) != 0)  # starts never fall
    order = np.argsort(instant * len(w.job) + log["job"], kind="stable")
    first = log["first"][order]
    length = log["end_node"][order] - first
    ptr = np.zeros(rows + 1, np.int64)
    np.cumsum(length, out=ptr[1:])
    source = np.repeat(first - ptr[:-1], length) + np.arange(ptr[-1])
    values = {name: log[name][order] for name in Log._fields[:7]}
    if bool((values["half"] > 0).any()):
        place = np.full(rows + 1, -1)
        place[order] = np.arange(rows)
        values["partner"] = place[log["partner"][order]]
    values |= {
        "node_ptr": ptr, "node": w.log_node[source, 0], "count": w.log_node[source, 1],
        "finished": w.finished.copy(), "preemptions": w.job["preempted"].copy(),
    }  # fmt: skip
    return Log(**{name: frozen(column) for name, column in values.items()})


def _close(w: World, log: Any, rows: IntArray) -> None:
    """Let open stays end at the present time in this copy of the log (an interrupted run)."""
    now = int(w.state["time"][0])
    job = w.job[log["job"][rows]]
    done = job["done"] + job["rate"] * np.maximum(0, now - job["since"])
    done = np.minimum(done, w.given["work_total"][log["job"][rows]])
    log["end"][rows] = now
    log["restart"][rows] = np.minimum(log["restart"][rows], now - log["start"][rows])
    log["work"][rows] = done - job["stay_done"]
