"""Operations of links in a schedule document: a trace has them, a plan does without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.arraypipe.planning.messages import KINDS
from optsched.model.schedule import Arcs, Rows, Schedule

if TYPE_CHECKING:
    import numpy.typing as npt

COPIES: Final = {"in": "copy in", "out": "copy out"}
"""Kinds of copies of states, by direction."""
CARRIED: Final = frozenset((*KINDS, *COPIES.values()))
"""Kinds of operations of links."""
_COLUMNS: Final = (
    "duration", "kind", "job", "stage", "microbatch", "iteration", "offset", "family", "release",
    "deadline", "setup_in", "setup_out", "acquire", "free", "workspace", "start",
)  # fmt: skip


def blocks_only(schedule: Schedule) -> Schedule:
    """A scheduled document without messages and copies, and without their links.

    What a message joined is joined by an arc of its own. Documents without links are given back as
    they are.
    """
    if CARRIED.isdisjoint(schedule.kind.tolist()):
        return schedule
    assert schedule.sequences is not None
    stays = ~np.isin(schedule.kind, sorted(CARRIED))
    users = schedule.users
    kept = [r for r in range(len(users)) if not len(users[r]) or stays[users[r]].any()]
    at = np.full(schedule.n_resources, -1)
    at[kept] = np.arange(len(kept))
    number = np.cumsum(stays) - 1
    tail, head, lag, distance = schedule.arcs
    inner = stays[tail] & stays[head]
    columns: dict[str, Any] = {key: getattr(schedule, key)[stays] for key in _COLUMNS}
    return Schedule(
        name=schedule.name,
        time_unit=schedule.time_unit,
        resources=tuple(schedule.resources[r] for r in kept),
        op_resources=Rows.of(at[schedule.op_resources[i]] for i in np.flatnonzero(stays).tolist()),
        arcs=Arcs(number[tail[inner]], number[head[inner]], lag[inner], distance[inner]),
        period=schedule.period,
        sequences=Rows.of(number[_of(schedule.sequences[r], stays)] for r in kept),
        provenance=schedule.provenance,
        **columns,
    )


def _of(row: npt.NDArray[np.int64], stays: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return row[stays[row]]
