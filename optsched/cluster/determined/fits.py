"""Which agents a task is put on, asked directly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from optsched.cluster.determined import board
from optsched.cluster.determined.columns import columns
from optsched.cluster.determined.shares import checked
from optsched.cluster.determined.state import FITS, Agent, Task, check_blocked
from optsched.errors import InputError
from optsched.io.values import integer, one_of

if TYPE_CHECKING:
    from optsched.cluster.determined.state import State


def find_fit(state: State, task: Task) -> dict[str, int]:
    """The agents that a waiting task would be put on now, with its slots on each; empty if none.

    One agent with enough free slots (or a free zero-slot unit), by the pool's fit; else, for more
    than one slot and unless `single_agent`, idle agents of one size that divides the request, the
    largest size first; else, if the pool is `heterogeneous`, idle agents from the largest size
    down, without going back (idle agents of 8, 7 and 5 slots cannot serve 12).

    Parameters
    ----------
    state
        One pool; it is not changed, and the task need not be one of its own.
    task
        What to place. Whether it has an allocation does not matter.

    Notes
    -----
    Source: determined-ai/determined, ``master/internal/rm/agentrm/fitting.go``.
    """
    if not isinstance(task, Task):
        raise InputError(f"task: expected a Task, got {task!r:.60}")
    cols = columns(checked(state))
    names = cols.agents.names
    at = {name: a for a, name in enumerate(names)}
    check_blocked(task, at)
    blocked = frozenset(at[name] for name in task.blocked if name in at) or None
    found = board.Board(cols)
    fits = found.find((task.slots, task.single_agent, blocked), task.name)
    return {names[a]: slots for a, slots in fits}


def score(agent: Agent, slots: int, fit: Literal["best", "worst"] = "best") -> float:
    """How much Determined likes an agent for a task of so many slots, from 0 to 1.

    ``best``: 1 / (1 + free slots); ``worst``: free slots / slots. For a task without slots, on an
    agent none of whose slots is used, the zero-slot units count instead (0 if it has none).
    """
    if not isinstance(agent, Agent):
        raise InputError(f"agent: expected an Agent, got {agent!r:.60}")
    integer("slots", slots)
    one_of("fit", fit, FITS)
    used, zero_used = agent.used or 0, agent.zero_used or 0
    total, zero_total = agent.slots, agent.zero_slots
    if agent.drained:
        total, zero_total = used, zero_used
    elif agent.disabled:
        total = zero_total = used = zero_used = 0
    return board.score(fit == "best", slots, total, used, zero_total, zero_used)
