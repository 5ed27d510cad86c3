"""Determined's fair share: pure, for one pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from optsched.cluster.determined.answer import Decision
from optsched.cluster.determined.board import Board
from optsched.cluster.determined.columns import columns
from optsched.cluster.determined.offers import GroupShare, offer_by_code, offer_by_docs
from optsched.cluster.determined.state import State
from optsched.cluster.job_checks import one_of
from optsched.errors import InputError

if TYPE_CHECKING:
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
        Each start fits alone on the cluster as it is: two may want the same slots, and whoever
        starts them looks again, in the order given (see `apply`).

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
    return named(cols, start, release, [])


def fair_share_offers(state: State, variant: Literal["code", "docs"] = "code") -> dict[str, int]:
    """Slots that every group is offered, by name; groups without a task to consider are left out.

    A group that no task names explicitly has the name of its task.
    """
    cols = columns(checked(state))
    one_of("variant", variant, VARIANTS)
    board = Board(cols)
    shares, tasks = _divided(cols, board, variant)
    group_of = {task.name: task.group for task in state.tasks}
    return {
        group_of[name] or name: share.offer
        for share in shares
        for name in [cols.tasks.names[tasks[share.group][0]]]
    }


def decide_fair_share(cols: Columns, variant: str) -> tuple[list[tuple[int, Fits]], list[int]]:
    """Numbers of the tasks that start, with their agents, and of those to release."""
    tasks = cols.tasks
    board = Board(cols)
    start = [
        (i, fits)
        for i, slots in enumerate(tasks.slots)
        if slots == 0 and not tasks.running[i]
        if (fits := board.find(tasks.kind[i], tasks.names[i]))
    ]
    release: list[int] = []
    shares, rows = _divided(cols, board, variant)
    for share in shares:
        if share.active > share.offer:
            release += _above(share, rows[share.group], tasks)
        elif share.active < share.offer:
            start += _below(share, rows[share.group], tasks, board)
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


def _below(
    share: GroupShare, rows: list[int], tasks: TaskColumns, board: Board
) -> list[tuple[int, Fits]]:
    """Waiting tasks in task order that fit what is left of the offer."""
    budget, started = share.offer - share.active, []
    for i in rows:
        if budget <= 0:
            break
        if not tasks.running[i] and tasks.slots[i] <= budget:
            started.append((i, board.find(tasks.kind[i], tasks.names[i])))
            budget -= tasks.slots[i]
    return started


def checked(state: State) -> State:
    """The state, or a sentence."""
    if not isinstance(state, State):
        raise InputError(f"state: expected a State, got {state!r:.60}")
    return state


def named(
    cols: Columns, start: list[tuple[int, Fits]], release: list[int], backfilled: list[int]
) -> Decision:
    """Names for numbers."""
    tasks, agents = cols.tasks.names, cols.agents.names
    return Decision(
        {tasks[i]: {agents[a]: slots for a, slots in fits} for i, fits in start},
        tuple(tasks[i] for i in release),
        tuple(tasks[i] for i in backfilled),
    )
