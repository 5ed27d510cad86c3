"""Why tasks wait after an answer: a kernel tries every kind of task, sentences are made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.cluster.determined.columns import COLUMNS
from optsched.cluster.determined.fitting import find, put, reset, take
from optsched.cluster.world.reasons import Reason, Why
from optsched.io.values import format_value
from optsched.kernels.compile import INT, helper

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.cluster.determined.columns import Columns
    from optsched.cluster.determined.state import Task


@helper(INT, COLUMNS, counted=False)
def explain(c):  # type: ignore[no-untyped-def]
    """What every kind fits: the idle cluster (`own`), and what the starts leave free (`fits`).

    Tasks that fit in turn what is free when the releases have stopped have `stops` 2.
    """
    pool, row = c.pool[0], 0
    reset(c)
    for a in range(len(c.node)):
        c.node[a].free, c.node[a].free_units = c.node[a].capacity, c.node[a].units
    for k in range(len(c.kind)):
        c.kind[k].own = 1 if find(c, k, 0) > 0 else 0
    reset(c)
    for i in range(len(c.task)):
        c.task[i].stops = 0
    for s in range(pool.starts):
        c.task[c.start[s]].stops = 1
        while row < c.end[s]:
            node = c.node[c.rows[row].where]
            node.free -= c.rows[row].count
            node.free_units -= 1 if c.rows[row].count == 0 else 0
            row += 1
    for k in range(len(c.kind)):
        c.kind[k].fits, c.kind[k].dead = 1 if find(c, k, 0) > 0 else 0, 0
    for r in range(pool.releases):
        take(c, c.release[r])
    for at in range(pool.pending if pool.releases > 0 else 0):
        i = c.pending[at]
        kind = c.kind[c.task[i].kind]
        if c.task[i].stops == 1 or kind.dead == 1:
            continue
        rows = find(c, c.task[i].kind, c.task[i].first)
        c.task[i].stops, kind.dead = 2 if rows > 0 else 0, 1 if rows == 0 else 0
        put(c, rows)
    return 0


def reasons(
    c: Columns, tasks: Sequence[Task], found: Mapping[int, Any], fair: bool
) -> dict[str, Reason]:
    """Why every waiting task waits that is not `found` with agents; `fair`: slots were divided."""
    docs, release = bool(c.pool["docs"][0]), c.release[: int(c.pool["releases"][0])].tolist()
    running = c.running[: int(c.pool["running"][0])].tolist()
    held = dict.fromkeys(c.share[: int(c.pool["shares"][0])].tolist(), 0) if fair else {}
    for i in {*running, *found}.difference(release):
        if (g := int(c.task["group"][i])) in held:
            held[g] += tasks[i].slots
    stopping = ", ".join(format_value(tasks[i].name) for i in release[:3])
    stopping += f" and {len(release) - 3} more" if len(release) > 3 else ""
    fits = [_fits(c, k) for k in range(len(c.kind))]
    answer: dict[str, Reason] = {}
    ahead: dict[bool, int] = {}
    for i in c.pending[: int(c.pool["pending"][0])].tolist():
        if found.get(i):
            continue
        k, slots = int(c.task["kind"][i]), tasks[i].slots
        before = ahead.setdefault(slots == 0, i)
        made = i in found and slots > 0 if fair and docs else not fair and c.task["stops"][i] == 2
        share = _share(c, i, held) if fair and slots else ""
        if fits[k].why is Why.NEVER:
            reason = fits[k]
        elif made:
            reason = Reason(Why.RELEASE, f"starts after the stop of {stopping}")
        elif i in found:
            reason = Reason(Why.ORDER, "the tasks that start before it leave it no room")
        elif share and (docs or c.kind["fits"][k] or "max_slots" in share):
            reason = Reason(Why.SHARE, share)
        elif not c.kind["fits"][k]:
            reason = fits[k]
        elif fair or before == i:
            reason = Reason(Why.ORDER, "fits; the next decision looks at it again")
        else:
            level = c.task["level"][before]
            text = f"fits, but waits for {format_value(tasks[before].name)} of priority {level}"
            reason = Reason(Why.ORDER, text)
        answer[tasks[i].name] = reason
    return answer


def _share(c: Columns, i: int, held: Mapping[int, int]) -> str:
    """Why task i is beyond what its group may have; empty: it is not."""
    slots, g = int(c.task["slots"][i]), int(c.task["group"][i])
    offer = int(c.group["key" if c.pool["docs"][0] else "offer"][g])
    if 0 <= c.group["limit"][g] < slots:
        return f"asks for {_slots(slots)}, its group's max_slots is {c.group['limit'][g]}"
    if g in held and c.group["off"][g]:
        return "its group is left out: its share is smaller than its smallest task"
    if g not in held or held[g] + slots <= offer:
        return ""
    return (
        f"asks for {_slots(slots)}, its group's share is {_slots(offer)}, {held[g]} of them taken"
    )


def _slots(count: int) -> str:
    return f"{count} slot{'s' * (count != 1)}"


def _fits(c: Columns, k: int) -> Reason:
    """Why tasks of a kind find no room, or never do; says nothing of those that find it."""
    kind, agents = c.kind[k], np.arange(len(c.node))
    open_ = c.given["takes"] == 1
    if kind["barred"] >= 0:
        open_ &= ~c.barred[int(kind["barred"]) * len(agents) + agents]
    slots, sizes = int(kind["slots"]), c.given["capacity"][open_]
    if kind["own"] == 0:
        if slots == 0 or not open_.any():
            what = "no agent that takes work and is not blocked"
            text = f"{what} has a zero-slot unit" if slots == 0 else f"there is {what}"
        elif slots > sizes.sum():
            text = f"asks for {_slots(slots)}, the agents it may use have {sizes.sum()} in all"
        elif kind["single"]:
            text = f"asks for {_slots(slots)} on one agent, the largest has {sizes.max()}"
        else:
            kind_of = "" if c.pool["heterogeneous"][0] else " of one size"
            text = f"asks for {_slots(slots)}, which no idle agents{kind_of} make up"
        return Reason(Why.NEVER, text)
    taken = np.zeros(len(agents), np.int64)
    rows = c.rows[: int(c.end[int(c.pool["starts"][0]) - 1]) if c.pool["starts"][0] else 0]
    np.add.at(taken, rows["where"], rows["count"])
    free = np.maximum(c.given["free"] - taken, 0)[open_]
    if slots == 0:
        return Reason(Why.ROOM, "no zero-slot unit is free")
    if slots > free.sum():
        return Reason(Why.ROOM, f"asks for {_slots(slots)}, {free.sum()} are free")
    where = "one agent" if kind["single"] or slots <= sizes.max() else "idle agents"
    rest = f"{free.sum()} are free, at most {free.max()} on one"
    return Reason(Why.GANG, f"asks for {_slots(slots)} on {where}; {rest}")
