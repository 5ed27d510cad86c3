"""Why jobs of a simulation wait: at an instant, and for how long for want of free GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.results.held import absences, held
from optsched.cluster.world.reasons import Reason, Why, of_free_gpus
from optsched.io.values import integer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.results.held import Held
    from optsched.cluster.workload.nodes import NodeChange, Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.model.schedule import IntArray


def reasons(
    w: Workload, nodes: Nodes, changes: Sequence[NodeChange], log: Log, policy: str,
    time: int | None,
) -> dict[str, Reason]:  # fmt: skip
    """Why every job that has come and not ended is without GPUs; see `Run.waiting`."""
    begin, finish = span(w, log)
    now = finish if time is None else integer("time", time)
    ended = (log.finished >= 0) & (log.finished <= now)
    # stays that a Ctrl-C left open end with the log
    last = (log.end == finish) & (now >= finish) & ~ended[log.job]
    stays = np.flatnonzero((log.start <= now) & ((log.end > now) | last))
    taken = log.gpus[stays]
    if log.partner is not None:
        taken = np.where(np.isin(log.partner[stays], stays), 0, taken)  # its partner's GPUs
    away = absences(nodes, changes, held(log), begin, max(finish, now + 1))
    there = nodes.total - int(away.count[(away.start <= now) & (away.end > now)].sum())
    shown, used = np.zeros((2, len(w.groups)), np.int64)
    np.add.at(used, w.group[log.job[stays]], log.gpus[stays])
    answer = {}
    for j in np.flatnonzero((w.submit <= now) & ~ended).tolist():
        g = int(w.group[j])
        group, shown[g], least = w.groups[g], shown[g] + 1, int(w.size[w.size_ptr[j]])
        if j in log.job[stays]:
            continue
        reason = of_free_gpus(least, there - int(taken.sum()), there, policy)
        if group.max_concurrent is not None and shown[g] > group.max_concurrent:
            text = f"only {group.max_concurrent} jobs of its group may be active at once"
            reason = Reason(Why.SHARE, text)
        elif group.max_slots is not None and used[g] + least > group.max_slots:
            text = f"its group holds {used[g]} of the {group.max_slots} GPUs it may have"
            reason = Reason(Why.SHARE, text)
        answer[w.names[j]] = reason
    return answer


def span(w: Workload, log: Log) -> tuple[int, int]:
    """First submit, and when the log ends."""
    begin = int(w.submit[0])
    return begin, max(int(log.end.max(initial=begin)), int(log.finished.max(initial=begin)))


def for_room(w: Workload, nodes: Nodes, log: Log, taken: Held, away: Held) -> IntArray:
    """Time of every job without GPUs while fewer were free than its smallest size.

    From its arrival to its end, or to that of the log. The rest of its waiting is the policy's.
    """
    begin, finish = span(w, log)
    time = np.concatenate((taken.start, away.start, taken.end, away.end, [begin, finish]))
    change = np.concatenate((taken.count, away.count, -taken.count, -away.count, [0, 0]))
    order = np.argsort(time, kind="stable")
    time = time[order]
    free = nodes.total - np.cumsum(change[order])[:-1]
    lasts = np.diff(time)
    least = w.size[w.size_ptr[:-1]]
    end = np.where(log.finished >= 0, log.finished, np.maximum(finish, w.submit))
    found = np.zeros(len(w), np.int64)
    for size in np.unique(least).tolist():
        short = np.concatenate(([0], np.cumsum(np.where(free < size, lasts, 0))))

        def up_to(moment: IntArray, short: IntArray = short, size: int = size) -> IntArray:
            """Time with too few free GPUs up to then."""
            k = np.clip(np.searchsorted(time, moment, side="right") - 1, 0, len(time) - 1)
            inside = np.append(free, nodes.total)[k] < size
            return short[k] + np.where(inside, moment - time[k], 0)

        own, stays = least == size, least[log.job] == size
        found[own] = up_to(end[own]) - up_to(w.submit[own])
        on_gpus = up_to(log.end[stays]) - up_to(log.start[stays])
        np.subtract.at(found, log.job[stays], on_gpus)
    return found
