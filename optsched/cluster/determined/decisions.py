"""Determined's two schedulers as pure functions of one pool; what they share is one kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from optsched.cluster.determined.columns import COLUMNS, columns
from optsched.cluster.determined.documented import offer_by_docs, settle, settle_by_docs
from optsched.cluster.determined.fitting import find, put, reset
from optsched.cluster.determined.levels import by_level
from optsched.cluster.determined.reasons import explain, reasons
from optsched.cluster.determined.shares import divide, fill, hand_out
from optsched.cluster.determined.state import State, Task, check_blocked
from optsched.errors import InputError
from optsched.io.values import boolean, format_value, one_of
from optsched.kernels.compile import INT, entry, helper
from optsched.kernels.plain_python import run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.cluster.determined.columns import Columns
    from optsched.cluster.world.reasons import Reason

VARIANTS: Final = ("code", "docs")

# steps of `decide`
DIVIDE: Final = 1
FILL: Final = 2
HAND_OUT: Final = 4
LEVELS: Final = 8
LOOK: Final = 16
SETTLE: Final = 32
EXPLAIN: Final = 64
FAIR_SHARE: Final = DIVIDE | FILL | HAND_OUT | LOOK
PRIORITY: Final = LEVELS | LOOK

_SMALL: Final = 5_000_000
"""Tasks times agents of a pool that is decided in Python until the kernel is compiled."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Who starts where, and who is to give its slots back.

    Slots come free only when a released task has stopped: nothing in `start` waits for that.
    """

    start: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task -> {agent: slots}, in the order of the decision.

    They fit together: each on the cluster as the earlier ones leave it, with nothing released yet.
    """
    release: tuple[str, ...] = ()
    """Running tasks to be preempted, in the order of the decision."""
    backfilled: tuple[str, ...] = ()
    """Those of `start` that pass a task of a better priority that does not fit."""
    postponed: tuple[str, ...] = ()
    """Tasks that the scheduler meant to start, but that no longer fit when their turn came.

    Determined's resource pool looks for agents a second time, in order; what fits nowhere then
    waits for the next decision. Fair share as documented: those for which room is made.
    """
    waiting: Mapping[str, Reason] = field(default_factory=dict)
    """Why every waiting task that does not start waits, in the scheduler's order."""

    def __bool__(self) -> bool:
        return bool(self.start or self.release)


@helper(INT, COLUMNS, INT, counted=False)
def decide_steps(c, steps):  # type: ignore[no-untyped-def]
    """The answer of a scheduler; its steps are bits."""
    if steps & DIVIDE:
        divide(c)
    if steps & FILL:
        fill(c)
    if steps & HAND_OUT:
        hand_out(c)
    if steps & LEVELS:
        c.pool[0].starts = c.pool[0].releases = c.pool[0].passing = 0
        by_level(c, 0)
        by_level(c, 1)
    if steps & SETTLE:
        settle(c)
    if steps & LOOK:
        _look(c)
    if steps & EXPLAIN:
        explain(c)
    return c.pool[0].starts + c.pool[0].releases


@helper(INT, COLUMNS, counted=False)
def _look(c):  # type: ignore[no-untyped-def]
    """Where the tasks of `start` really start, looked at again one after the other.

    Determined's resource pool (``allocateResources``) does so before it releases anybody.
    """
    to = 0
    if c.pool[0].starts > 0:
        reset(c)
    for s in range(c.pool[0].starts):
        i = c.start[s]
        rows = put(c, find(c, c.task[i].kind, c.task[i].first))
        for r in range(rows):
            c.rows[to].where, c.rows[to].count = c.fit[r].where, c.fit[r].count
            to += 1
        c.end[s] = to
    return to


@entry(INT, COLUMNS, INT, counted=False)
def _decide(c, steps):  # type: ignore[no-untyped-def]
    return decide_steps(c, steps)


def decide_columns(c: Columns, steps: int, variant: str = "code") -> None:
    """Put a scheduler's answer into the columns of a pool."""
    small = len(c.task) * max(1, len(c.node)) <= _SMALL
    c.pool["docs"] = variant == "docs"
    if variant == "code" or not steps & FILL:
        run(_decide, c, steps, is_small=small)
        return
    run(_decide, c, DIVIDE, is_small=small)
    if not offer_by_docs(c):
        run(_decide, c, FILL, is_small=small)
    if steps & HAND_OUT:
        settle_by_docs(c, lambda: run(_decide, c, SETTLE, is_small=small))


def fair_share(state: State, variant: Literal["code", "docs"] = "code") -> Decision:
    """Divide the slots among groups, and say who starts and who is released.

    Every group is offered slots (`fair_share_offers`); one that holds more releases preemptible
    tasks, one that holds less starts waiting ones, in order of submission; smaller tasks may pass.
    Tasks without slots start as long as they fit.

    Parameters
    ----------
    state
        One pool; it is not changed.
    variant
        ``"code"``: as Determined's master decides (equal shares, weights as multiples).
        ``"docs"``: as its documentation says (shares in proportion to demand times weight, for
        which tasks of groups above theirs are released).

    Returns
    -------
    Decision
        The scheduler looks at each task alone: two may want the same slots. Who comes too late when
        agents are sought in order is in `postponed`.

    Raises
    ------
    InputError
        Not a `State`, or no such variant.

    Notes
    -----
    Source: determined-ai/determined, ``master/internal/rm/agentrm/fair_share.go``.
    """
    c, tasks = columns(checked(state))
    decide_columns(c, FAIR_SHARE, one_of("variant", variant, VARIANTS))
    return _named(c, state, tasks, fair=True)


def fair_share_offers(state: State, variant: Literal["code", "docs"] = "code") -> dict[str, int]:
    """Slots that every group is offered, by name; groups without a task to consider are left out.

    A task without a group is a group of its own, which has the name of the task.

    Raises
    ------
    InputError
        Not a `State`, no such variant, or a task without a group has the name of another's group.
    """
    c, tasks = columns(told_apart(state))
    decide_columns(c, DIVIDE | FILL, one_of("variant", variant, VARIANTS))
    groups = c.group[c.share[: int(c.pool["shares"][0])]]
    heads = [tasks[i] for i in groups["head"].tolist()]
    offers = zip(heads, groups["offer"].tolist(), strict=True)
    return {task.group or task.name: offer for task, offer in offers}


def priority(
    state: State, preemption: bool = False, variant: Literal["code", "docs"] = "code"
) -> Decision:
    """Start tasks level by level, from priority 1 to 99, and release others that stand in the way.

    Parameters
    ----------
    state
        One pool; it is not changed.
    preemption
        Whether running preemptible tasks of worse levels are released for a task that does not fit;
        off by default, as in Determined.
    variant
        ``"code"``: a worse level may be backfilled, with preemptible tasks and if there is
        preemption, where a better one does not fit. ``"docs"``: after a misfit no worse level
        starts (the older text of the documentation).

    Returns
    -------
    Decision
        Once anything is to be released, no further level starts. Agents are those of a second
        look, in order and without the tasks that were only placed for later: now and then not the
        first choice, and rarely (see `postponed`) none at all.

    Raises
    ------
    InputError
        Not a `State`, or no such variant.

    Notes
    -----
    Source: determined-ai/determined, ``master/internal/rm/agentrm/priority.go``.
    """
    from optsched.cluster.determined.waiting import ordered

    c, tasks = columns(checked(state))
    c.pool["backfill"] = one_of("variant", variant, VARIANTS) == "code"
    c.pool["preemption"] = boolean("preemption", preemption)
    order = ordered(c, tasks)
    n, running = len(order), c.task["runs"][order] == 1
    c.running[: int(running.sum())] = order[running]
    c.pending[: n - int(running.sum())] = order[~running]
    decide_columns(c, PRIORITY)
    return _named(c, state, tasks, fair=False)


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
    check_blocked(task, {agent.name for agent in checked(state).agents})
    c, _ = columns(state, [task])
    c.pool["starts"] = 1
    decide_columns(c, LOOK)
    where = started(c)[0]
    return {state.agents[a].name: slots for a, slots in where.items()}


def checked(state: State) -> State:
    """The state, or a sentence."""
    if not isinstance(state, State):
        raise InputError(f"state: expected a State, got {state!r:.60}")
    return state


def told_apart(state: State) -> State:
    """A state in whose answers by group a name stands for one group; otherwise a sentence."""
    groups = {task.group for task in checked(state).tasks}
    for task in state.tasks:
        if task.group is None and task.name in groups:
            raise InputError(
                f"task {format_value(task.name)}: group: it has none, so that its own has its "
                "name, but other tasks name a group so; rename the task or the group"
            )
    return state


def started(c: Columns) -> dict[int, dict[int, int]]:
    """Tasks of an answer that start, in order: number -> {agent: slots}; none: it is postponed."""
    n = int(c.pool["starts"][0])
    ends = c.end[:n].tolist()
    rows: list[Any] = c.rows[: ends[-1] if n else 0].tolist()
    return {
        i: dict(rows[first:end])
        for i, first, end in zip(c.start[:n].tolist(), [0, *ends], ends, strict=False)
    }


def _named(c: Columns, state: State, tasks: list[Task], fair: bool) -> Decision:
    """The answer, names for numbers."""
    agents, found = state.agents, started(c)
    decide_columns(c, EXPLAIN, "docs" if c.pool["docs"][0] else "code")
    releases, passing = int(c.pool["releases"][0]), int(c.pool["passing"][0])
    return Decision(
        {
            tasks[i].name: {agents[a].name: slots for a, slots in where.items()}
            for i, where in found.items()
            if where
        },
        tuple(tasks[i].name for i in c.release[:releases].tolist()),
        tuple(tasks[i].name for i in c.backfilled[:passing].tolist() if found[i]),
        tuple(tasks[i].name for i, where in found.items() if not where),
        reasons(c, tasks, found, fair),
    )
