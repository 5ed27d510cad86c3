"""Why tasks wait after a decision: what all schedulers have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.cluster.world.reasons import Reason, Why
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.cluster.determined.fitting import Agents, Kind, Outcome, Tasks

POSTPONED: Final = Reason(Why.ORDER, "the tasks that start before it leave it no free slots")
NEXT_TIME: Final = Reason(Why.ORDER, "fits; the next decision tries it again")


def unplaced(
    agents: Agents, tasks: Tasks, outcome: Outcome, order: Iterable[int]
) -> tuple[Agents, dict[int, Reason | None]]:
    """The agents after the starts, and why waiting tasks do not fit there; None: they fit.

    `order` are all tasks as the scheduler looks at them.
    """
    after = agents.copy()
    for places in outcome.start.values():
        after.place(places)
    waiting = [int(i) for i in order if not tasks.running[i] and i not in outcome.start]
    kind = tasks.kind.tolist()
    found = {k: _misfit(tasks.kinds[k], agents, after) for k in {kind[i] for i in waiting}}
    return after, {i: found[kind[i]] for i in waiting}


def after_release(names: Sequence[str], outcome: Outcome) -> Reason:
    """The reason of tasks for which others are released."""
    stopping = ", ".join(format_value(names[i]) for i in outcome.release[:3])
    more = len(outcome.release) - 3
    return Reason(
        Why.RELEASE, f"starts after the stop of {stopping}" + f" and {more} more" * (more > 0)
    )


def _misfit(kind: Kind, agents: Agents, after: Agents) -> Reason | None:
    """Why tasks of a kind never fit these agents, or not now; None: they fit."""
    usable = agents.takes_work.copy()
    usable[list(kind.blocked)] = False
    sizes, free = agents.capacity[usable], np.maximum(after.free[usable], 0)
    request = f"requests {in_slots(kind.slots)}"
    if not agents.idle().fits(kind):
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
        return Reason(Why.NEVER, text)
    if after.fits(kind):
        return None
    if kind.slots == 0:
        return Reason(Why.ROOM, "no zero-slot unit is free")
    if kind.slots > free.sum():
        return Reason(Why.ROOM, f"{request}, {free.sum()} are free")
    where = "one agent" if kind.single_agent or kind.slots <= sizes.max() else "idle agents"
    largest = f"{free.sum()} are free, at most {free.max()} on one"
    return Reason(Why.GANG, f"{request} on {where}; {largest}")


def in_slots(count: int) -> str:
    """A number of slots as text."""
    return f"{count} slot{'' if count == 1 else 's'}"
