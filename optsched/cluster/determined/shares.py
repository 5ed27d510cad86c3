"""Determined's fair share: pure, for one pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from optsched.cluster.determined.answer import Decision
from optsched.cluster.determined.board import Board
from optsched.cluster.determined.columns import columns
from optsched.cluster.determined.offers import GroupShare, offer_by_code, offer_by_docs
from optsched.cluster.determined.state import State
from optsched.errors import InputError
from optsched.io.values import format_value, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.cluster.determined.columns import Columns, Fits, Kind, TaskColumns

VARIANTS: Final = ("code", "docs")


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
        ``"docs"``: as its documentation says (shares in proportion to demand times weight).

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
    cols = columns(checked(state))
    one_of("variant", variant, VARIANTS)
    start, release = decide_fair_share(cols, variant)
    return named(cols, start, release)


def fair_share_offers(state: State, variant: Literal["code", "docs"] = "code") -> dict[str, int]:
    """Slots that every group is offered, by name; groups without a task to consider are left out.

    A task without a group is a group of its own, which has the name of the task.

    Raises
    ------
    InputError
        Not a `State`, no such variant, or a task without a group has the name of another's group.
    """
    cols = columns(told_apart(state))
    one_of("variant", variant, VARIANTS)
    board = Board(cols)
    shares, tasks = _divided(cols, board, variant)
    group_of = {task.name: task.group for task in state.tasks}
    return {
        group_of[name] or name: share.offer
        for share in shares
        for name in [cols.tasks.names[tasks[share.group][0]]]
    }


def decide_fair_share(cols: Columns, variant: str) -> tuple[list[int], list[int]]:
    """Numbers of the tasks that are to start, each of which fits alone, and of those to release."""
    tasks = cols.tasks
    board = Board(cols)
    start = [
        i
        for i, slots in enumerate(tasks.slots)
        if slots == 0 and not tasks.running[i] and board.has(tasks.kind[i])
    ]
    release: list[int] = []
    shares, rows = _divided(cols, board, variant)
    for share in shares:
        if share.active > share.offer:
            release += _above(share, rows[share.group], tasks)
        elif share.active < share.offer:
            start += _below(share, rows[share.group], tasks)
    return start, release


def _divided(
    cols: Columns, board: Board, variant: str
) -> tuple[list[GroupShare], dict[int, list[int]]]:
    """The groups' shares in their order, and the numbers of the tasks that count, by group."""
    tasks, capacity = cols.tasks, board.capacity
    fitting: dict[Kind, bool] = {}
    shares: dict[int, GroupShare] = {}
    rows: dict[int, list[int]] = {}
    for i, (slots, kind, running, g) in enumerate(
        zip(tasks.slots, tasks.kind, tasks.running, tasks.group, strict=True)
    ):
        if slots == 0 or slots > capacity:
            continue
        if not running:
            if (fits := fitting.get(kind)) is None:
                fits = fitting[kind] = board.has(kind)
            if not fits:
                continue
        share = shares.get(g)
        if share is None:
            share = shares[g] = GroupShare(g, tasks.submitted[i], cols.weight[g])
            rows[g] = []
        rows[g].append(i)
        share.demand += slots
        if running:
            share.active += slots
            share.fixed += 0 if tasks.preemptible[i] else slots
        elif share.smallest is None or slots < share.smallest:
            share.smallest = slots
    for g, share in shares.items():
        if cols.max_slots[g] >= 0:
            share.demand = min(share.demand, cols.max_slots[g])
    found = sorted(shares.values(), key=lambda share: (share.demand, share.registered))
    (offer_by_code if variant == "code" else offer_by_docs)(found, capacity)
    return found, rows


def _above(share: GroupShare, rows: list[int], tasks: TaskColumns) -> list[int]:
    """Preemptible tasks in task order, until the group holds no more than its offer."""
    active, released = share.active, []
    for i in rows:
        if active <= share.offer:
            break
        if tasks.running[i] and tasks.preemptible[i]:
            released.append(i)
            active -= tasks.slots[i]
    return released


def _below(share: GroupShare, rows: list[int], tasks: TaskColumns) -> list[int]:
    """Waiting tasks in task order that fit what is left of the offer."""
    budget, started = share.offer - share.active, []
    for i in rows:
        if budget <= 0:
            break
        if not tasks.running[i] and tasks.slots[i] <= budget:
            started.append(i)
            budget -= tasks.slots[i]
    return started


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
                "name, but "
                "other tasks name a group so; rename the task or the group"
            )
    return state


def in_order(cols: Columns, start: Iterable[int]) -> tuple[list[tuple[int, Fits]], list[int]]:
    """Where the tasks really start, looked at again one after the other; and those that cannot.

    Determined's resource pool (``allocateResources``) does so before it releases anybody.
    """
    tasks, board = cols.tasks, Board(cols)
    begun, late = [], []
    for i in start:
        if fits := board.find(tasks.kind[i], tasks.names[i]):
            board.put(fits)
            begun.append((i, fits))
        else:
            late.append(i)
    return begun, late


def named(
    cols: Columns, start: list[int], release: list[int], backfilled: Iterable[int] = ()
) -> Decision:
    """The starts in order, and names for numbers."""
    tasks, agents = cols.tasks.names, cols.agents.names
    begun, late = in_order(cols, start)
    return Decision(
        {tasks[i]: {agents[a]: slots for a, slots in fits} for i, fits in begun},
        tuple(tasks[i] for i in release),
        tuple(tasks[i] for i in backfilled if i not in late),
        tuple(tasks[i] for i in late),
    )
