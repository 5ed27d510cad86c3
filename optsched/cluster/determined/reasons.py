"""Why tasks wait after a decision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.world.reasons import Reason, Why
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.determined.fair_share_scheduler import Shares
    from optsched.cluster.determined.fitting import Agents, Kind, Outcome, Tasks
    from optsched.model.schedule import IntArray


def reasons(
    agents: Agents, tasks: Tasks, names: Sequence[str], outcome: Outcome,
    order: IntArray, shares: Shares | None = None, docs: bool = False,
) -> dict[int, Reason]:  # fmt: skip
    """Reasons of all waiting tasks that do not start, in this order.

    Parameters
    ----------
    order
        All tasks as the scheduler looks at them.
    shares, docs
        Of fair share.
    """
    after = agents.copy()
    for places in outcome.start.values():
        after.place(places)
    waiting = [i for i in order[~tasks.running[order]].tolist() if not outcome.start.get(i)]
    after_releases = {i for i in outcome.start if tasks.slots[i]} if docs else set()
    if shares is None:
        after_releases = _fitting_after_releases(after, tasks, outcome, waiting)
    text = never_or_not_now(agents, after, {int(tasks.kind[i]) for i in waiting}, tasks.kinds)
    beyond = {} if shares is None else _beyond_shares(tasks, shares, outcome)
    stopping = ", ".join(format_value(names[i]) for i in outcome.release[:3])
    stopping += f" and {len(outcome.release) - 3} more" if len(outcome.release) > 3 else ""
    first: dict[bool, int] = {}
    answer = {}
    for i in waiting:
        reason, share = text.get(int(tasks.kind[i])), beyond.get(i)
        ahead = first.setdefault(tasks.slots[i] == 0, i)
        if reason is not None and reason.why is Why.NEVER:
            pass
        elif i in after_releases:
            reason = Reason(Why.RELEASE, f"starts after the stop of {stopping}")
        elif i in outcome.start:
            reason = Reason(Why.ORDER, "the tasks that start before it leave it no free slots")
        elif share and (docs or reason is None or "max_slots" in share):
            reason = Reason(Why.SHARE, share)
        elif reason is None and (shares is not None or ahead == i):
            reason = Reason(Why.ORDER, "fits; the next decision tries it again")
        elif reason is None:
            task = f"{format_value(names[ahead])} of priority {tasks.level[ahead]}"
            reason = Reason(Why.ORDER, f"fits, but waits for {task}")
        answer[i] = reason
    return answer


def _fitting_after_releases(
    after: Agents, tasks: Tasks, outcome: Outcome, waiting: Sequence[int]
) -> set[int]:
    """Tasks that fit, one after the other, once the released tasks have stopped."""
    found: set[int] = set()
    full: set[int] = set()
    later = after.copy()
    for i in outcome.release:
        later.release(i)
    for i in waiting if outcome.release else ():
        k = int(tasks.kind[i])
        places = [] if k in full else later.find(tasks.kinds[k], int(tasks.first[i]))
        later.place(places)
        if places:
            found.add(i)
        else:
            full.add(k)
    return found


def _beyond_shares(tasks: Tasks, shares: Shares, outcome: Outcome) -> dict[int, str]:
    """Waiting tasks that exceed what fair share gives their group."""
    row = {int(g): at for at, g in enumerate(tasks.group[shares.head].tolist())}
    taken = np.zeros(len(row), np.int64)
    for i in {*np.flatnonzero(tasks.running).tolist(), *outcome.start}.difference(outcome.release):
        if (at := row.get(int(tasks.group[i]))) is not None:
            taken[at] += tasks.slots[i]
    found = {}
    for i in np.flatnonzero(~tasks.running & (tasks.slots > 0)).tolist():
        at, request = row.get(int(tasks.group[i])), _slots(tasks.slots[i])
        if 0 <= tasks.limit[i] < tasks.slots[i]:
            found[i] = f"requests {request}, its group's max_slots is {tasks.limit[i]}"
        elif at is not None and shares.excluded[at]:
            found[i] = "its group is excluded: its share is smaller than its smallest task"
        elif at is not None and taken[at] + tasks.slots[i] > shares.offer[at]:
            share = f"{_slots(shares.offer[at])}, {taken[at]} of them taken"
            found[i] = f"requests {request}, its group's share is {share}"
    return found


def never_or_not_now(
    agents: Agents, after: Agents, present: set[int], kinds: Sequence[Kind]
) -> dict[int, Reason]:
    """Why tasks of these kinds never fit, or not now; those that fit are left out."""
    idle, found = agents.idle(), {}
    for k in present:
        kind, usable = kinds[k], agents.takes_work.copy()
        usable[list(kind.blocked)] = False
        sizes, free = agents.capacity[usable], np.maximum(after.free[usable], 0)
        request = f"requests {_slots(kind.slots)}"
        if not idle.fits(kind):
            one = " of one size" * (not agents.heterogeneous)
            text = f"{request}, which no idle agents{one} make up"
            if not usable.any():
                text = "there is no agent that takes work and is not blocked"
            elif kind.slots == 0:
                text = "no agent that takes work and is not blocked has a zero-slot unit"
            elif kind.slots > sizes.sum():
                text = f"{request}, the agents it may use have {sizes.sum()} in all"
            elif kind.single_agent:
                text = f"{request} on one agent, the largest has {sizes.max()}"
            found[k] = Reason(Why.NEVER, text)
        elif not after.fits(kind):
            where = "one agent" if kind.single_agent or kind.slots <= sizes.max() else "idle agents"
            largest = f"{free.sum()} are free, at most {free.max()} on one"
            found[k] = Reason(Why.GANG, f"{request} on {where}; {largest}")
            if kind.slots == 0:
                found[k] = Reason(Why.ROOM, "no zero-slot unit is free")
            elif kind.slots > free.sum():
                found[k] = Reason(Why.ROOM, f"{request}, {free.sum()} are free")
    return found


def _slots(count: int) -> str:
    return f"{count} slot{'' if count == 1 else 's'}"
