"""A pool as records of integers: what the compiled schedulers read, and where they write."""

from __future__ import annotations

from hashlib import md5
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.world.layout import HELD, NODE
from optsched.kernels.compile import INTS, record, records

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from optsched.cluster.determined.state import State, Task
    from optsched.model.schedule import IntArray

    Records = npt.NDArray[np.void]

TASK: Final = record(
    "slots group kind preemptible level position first registered runs held following stops"
)
"""A task; their numbers are task order: job submit time, request time, name.

`first`: where the ring begins for it. `registered`: grows with the submit time. `held`: its first
row in `Columns.held`, -1 if none. `following`: the next task of its group that counts, -1. Scratch:
`stops` (1: to be released).
"""
KIND: Final = record("slots single barred pieces pending left fits dead level own")
"""Tasks that fit alike: slots, one agent only, row of blocked agents (-1: none), and whether such a
gang goes anywhere in pieces (1, only in simulations).

`pending`: tasks that wait. Scratch: `fits` (-1: not known), and of the walk over levels those that
are `left`, whether there is no hope for them, and where releases could not help (`level`, `own`).
"""
GROUP: Final = record(
    "limit demand active fixed smallest offer off credit registered head tail key most"
)
"""`limit`: most slots, -1: none. The others are of the division of slots: `fixed` running slots
cannot be preempted, `smallest` is the least pending task (-1: none), `off` is left out. As the
documentation divides, a running preemptible task counts in `smallest`, `most` is what the group can
use, and `credit` what it holds above its offer (below 0: what it lacks)."""
FIT: Final = record("where count")
"""So many slots of an agent; 0: a zero-slot unit."""
POOL: Final = record(
    "pending running heterogeneous positions preemption backfill capacity starts releases shares "
    "undone passing victims gone docs"
)
"""Lengths in use of the columns named so (`passing`: of `Columns.backfilled`; `gone`: of `victim`,
to be released); settings, 1 or 0 (`positions`: some task has one; `docs`: fair share as
documented); all slots that count."""


class Columns(NamedTuple):
    """A pool, and the answer."""

    pool: Records
    """`POOL`, one row."""
    best: IntArray
    """1: fullest agents first; shape (1,)."""
    given: Records
    """`NODE`: the agents as they are."""
    node: Records
    """The same, while tasks are put and taken."""
    ring: IntArray
    """Agents by hash, descending, then by name. From a task's own hash downwards and round, they
    come in the order in which ties are broken: md5(task) - md5(agent) mod 2^64, ascending."""
    kind: Records
    barred: npt.NDArray[np.bool_]
    """Agents that row r of blocked ones names: from r times the number of agents."""
    task: Records
    pending: IntArray
    """Waiting tasks in order: of submission, or of the priority scheduler."""
    running: IntArray
    held: Records
    """`HELD`: where tasks run."""
    group: Records
    weight: npt.NDArray[np.float64]
    """Of every group."""
    share: IntArray
    """Groups that take part in the division."""
    latest: IntArray
    scratch: IntArray
    fit: Records
    """`FIT`: what `find` has found."""
    undo: Records
    start: IntArray
    """Tasks that are to start; then those that do."""
    end: IntArray
    """Where the rows of these end in `rows`."""
    rows: Records
    """`FIT`: agents of the tasks that start; none: it fits nowhere any more."""
    release: IntArray
    backfilled: IntArray
    victim: IntArray
    """Whom everybody displaces first: running tasks of the worst level first, there the last."""


COLUMNS: Final[Any] = types.NamedTuple(
    [records(POOL), INTS, records(NODE), records(NODE), INTS, records(KIND),
     types.Array(types.boolean, 1, "C"), records(TASK), INTS, INTS, records(HELD), records(GROUP),
     types.Array(types.float64, 1, "C"), INTS, INTS, INTS, records(FIT), records(FIT), INTS, INTS,
     records(FIT), INTS, INTS, INTS],
    Columns,
)  # fmt: skip


def hashes(names: Iterable[str]) -> npt.NDArray[np.uint64]:
    """The first 8 bytes of every name's md5, little-endian."""
    digests = [md5(name.encode(), usedforsecurity=False).digest()[:8] for name in names]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def ring(agents: Sequence[str], tasks: Iterable[str]) -> tuple[IntArray, IntArray]:
    """Agents in the order of the ring, and where it begins for every task."""
    own = hashes(agents)
    order = np.array(sorted(range(len(agents)), key=lambda a: (-int(own[a]), agents[a])), np.int64)
    first = len(own) - np.searchsorted(np.sort(own), hashes(tasks), "right")
    return order, first.astype(np.int64) % max(1, len(own))


def empty(
    agents: int, kinds: int, tasks: int, groups: int, held: int, settings: tuple[bool, bool]
) -> Columns:
    """Columns of this size, to be filled; settings: best, heterogeneous."""
    best, heterogeneous = settings
    pool = np.zeros(1, POOL)
    pool["heterogeneous"] = heterogeneous

    def ints(n: int) -> IntArray:
        return np.zeros(n, np.int64)

    kind, rows = np.zeros(kinds, KIND), agents + tasks + 1
    kind["barred"] = -1
    group = np.zeros(groups, GROUP)
    group["limit"] = -1
    return Columns(
        pool, np.array([best], np.int64), np.zeros(agents, NODE), np.zeros(agents, NODE),
        ints(agents), kind, np.zeros(0, np.bool_), np.zeros(tasks, TASK), ints(tasks), ints(tasks),
        np.zeros(held, HELD), group, np.ones(groups), ints(groups), ints(groups),
        ints(groups + 257), np.zeros(agents + 1, FIT), np.zeros(held + 1, FIT), ints(tasks),
        ints(tasks), np.zeros(rows, FIT), ints(tasks), ints(tasks), ints(tasks),
    )  # fmt: skip


def columns(state: State, tasks: Sequence[Task] | None = None) -> tuple[Columns, list[Task]]:
    """The columns of a state, and its tasks by number; or these tasks on its agents."""
    rows = state.tasks if tasks is None else tasks
    rows = sorted(rows, key=lambda task: (task.submitted, task.requested, task.name))
    names = [agent.name for agent in state.agents]
    at = {name: a for a, name in enumerate(names)}
    groups: dict[str, int] = {group.name: g for g, group in enumerate(state.groups)}
    kinds: dict[tuple[int, bool, frozenset[str]], int] = {}
    held = [(i, at[n], s) for i, t in enumerate(rows) for n, s in (t.allocation or {}).items()]
    group, kind = [], []
    for i, task in enumerate(rows):
        # none of its own, and no name: a number that no other group has
        key = f"\0{i}" if task.group is None else task.group
        group.append(groups.setdefault(key, len(groups)))
        single = (task.slots, task.single_agent, task.blocked)
        kind.append(kinds.setdefault(single, len(kinds)))
    c = empty(
        len(names), len(kinds), len(rows), len(groups), len(held),
        (state.fit == "best", state.heterogeneous),
    )  # fmt: skip
    c.ring[:], first = ring(names, (task.name for task in rows))
    c = c._replace(barred=_kinds(c, list(kinds), at))
    level = np.full(len(groups), 42)
    for g, own in enumerate(state.groups):
        c.weight[g], level[g] = own.weight, own.priority
        c.group["limit"][g] = -1 if own.max_slots is None else own.max_slots
    positions = [task.position or 0 for task in rows]
    runs = np.array([task.is_running for task in rows], bool)
    c.pool["positions"] = any(positions)
    for name, values in (
        ("slots", [task.slots for task in rows]), ("group", group), ("kind", kind),
        ("preemptible", [task.preemptible for task in rows]), ("level", level[group]),
        ("position", np.unique(positions, return_inverse=True)[1]), ("first", first),
        ("registered", np.unique([t.submitted for t in rows], return_inverse=True)[1]),
        ("runs", runs), ("held", -1),
    ):  # fmt: skip
        c.task[name] = values
    for row, (i, a, slots) in reversed(list(enumerate(held))):
        c.held[row] = a, slots, c.task["held"][i]
        c.task["held"][i] = row
    _agents(c, state, at)
    listed(c, np.flatnonzero(~runs), np.flatnonzero(runs))
    return c, rows


def listed(c: Columns, pending: IntArray, running: IntArray) -> None:
    """Put in who waits and who runs, in order."""
    c.pool["pending"], c.pool["running"] = len(pending), len(running)
    c.pending[: len(pending)], c.running[: len(running)] = pending, running
    c.kind["pending"] = np.bincount(c.task["kind"][pending], minlength=len(c.kind))


def _kinds(c: Columns, kinds: list[tuple[int, bool, frozenset[str]]], at: dict[str, int]) -> Any:
    """Fill the kinds; returns the rows of blocked agents."""
    blocked = {names: row for row, names in enumerate({k[2]: 0 for k in kinds if k[2]})}
    barred = np.zeros((len(blocked), len(at)), np.bool_)
    for names, row in blocked.items():
        barred[row, [at[name] for name in names]] = True
    for k, (slots, single, names) in enumerate(kinds):
        row = blocked.get(names, -1)
        c.kind["slots"][k], c.kind["single"][k], c.kind["barred"][k] = slots, single, row
    return barred.ravel()


def _agents(c: Columns, state: State, at: dict[str, int]) -> None:
    """Fill the agents: a drained one takes nothing, a disabled one is not there."""
    used, units = np.zeros((2, len(at)), np.int64)
    for task in state.tasks:
        for name, slots in (task.allocation or {}).items():
            used[at[name]] += slots
            units[at[name]] += slots == 0
    for a, agent in enumerate(state.agents):
        shown = used[a] if agent.used is None else agent.used
        busy = units[a] if agent.zero_used is None else agent.zero_used
        there = not agent.disabled or agent.drained
        row = c.given[a]
        row["capacity"] = agent.slots if there else 0
        row["free"] = agent.slots - shown if there else 0
        row["units"], row["free_units"] = agent.zero_slots, agent.zero_slots - busy
        row["takes"] = not (agent.drained or agent.disabled)
