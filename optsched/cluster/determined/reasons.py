"""Why tasks wait after a decision: what all schedulers have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from optsched.cluster.world.policy import Reason, Why
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from optsched.cluster.determined.fitting import Agents, Kind, Outcome, Tasks

    Explain: TypeAlias = Callable[[Sequence[str]], dict[int, Reason]]
    """Reason of every waiting task by number, if all tasks have these names."""

NEXT_TIME: Final = Reason(Why.ORDER, "fits; the next decision tries it again")
_LATE: Final = Reason(Why.ORDER, "the tasks that start before it leave it no free slots")


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


def freed(
    after: Agents, tasks: Tasks, outcome: Outcome, schedule: Callable[[Agents, Tasks], Outcome]
) -> Collection[int]:
    """Tasks that the next decision starts, when the released tasks have stopped."""
    if not outcome.release:
        return ()
    running = tasks.running.copy()
    running[[*outcome.start]] = True
    running[outcome.release] = False
    later = replace(
        after.copy(outcome.release), held=lambda i: outcome.start.get(i) or after.held(i)
    )
    return schedule(later, replace(tasks, running=running)).start


def explained(
    names: Sequence[str],
    outcome: Outcome,
    misfits: Mapping[int, Reason | None],
    freed: Collection[int],
    special: Callable[[int, Reason | None], Reason | None],
) -> dict[int, Reason]:
    """Reasons of these tasks: the first that holds.

    They never fit; they start after a release (`freed`); they are postponed; the scheduler's
    `special` reason; they do not fit now.
    """
    stopping = ", ".join(format_value(names[i]) for i in outcome.release[:3])
    more = len(outcome.release) - 3
    stop = f"starts after the stop of {stopping}" + f" and {more} more" * (more > 0)
    answer = {}
    for i, misfit in misfits.items():
        if misfit and misfit.why is Why.NEVER:
            answer[i] = misfit
        elif i in freed:
            answer[i] = Reason(Why.RELEASE, stop)
        elif i in outcome.postponed:
            answer[i] = _LATE
        else:
            answer[i] = special(i, misfit) or misfit or NEXT_TIME
    return answer


def _misfit(kind: Kind, agents: Agents, after: Agents) -> Reason | None:
    """Why tasks of a kind never fit these agents, or not now; None: they fit."""
    usable = agents.takes_work.copy()
    usable[list(kind.blocked)] = False
    sizes, free = agents.capacity[usable], np.maximum(after.free[usable], 0)
    request = f"requests {in_slots(kind.slots)}"
    if not agents.idle().fits(kind):
        if kind.slots == 0:
            return Reason(Why.NEVER, "no agent that it may use has a zero-slot unit")
        one = "on one agent" if kind.single_agent or len(sizes) == 1 else _whole(kind, agents)
        has = f"those it may use have {sizes.sum()} in all, at most {sizes.max(initial=0)} each"
        return Reason(Why.NEVER, f"{request} {one}, {has}")
    if after.fits(kind):
        return None
    if kind.slots == 0:
        return Reason(Why.ROOM, "no zero-slot unit is free")
    if kind.slots > free.sum():
        return Reason(Why.ROOM, f"{request}, {free.sum()} are free")
    where = "on one agent"
    if not kind.single_agent and kind.slots > sizes.max():
        where = _whole(kind, agents)
    largest = f"{free.sum()} are free, at most {free.max()} on one"
    return Reason(Why.GANG, f"{request} {where}; {largest}")


def _whole(kind: Kind, agents: Agents) -> str:
    """Which agents a task gets that no single agent can serve."""
    alike = "" if agents.heterogeneous else f" of one size that divides {kind.slots}"
    return f"on wholly idle agents{alike}"


def in_slots(count: int) -> str:
    """A number of slots as text."""
    return f"{count} slot{'' if count == 1 else 's'}"
