"""What the verifier asks of a schedule that repeats: the cycle's end and what it carries over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from optsched.io.strict_json import shortened
from optsched.model.violation import Violation, count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.model.schedule import IntArray, Schedule
    from optsched.model.violation import Words

_SAFE = 1 << 61


def wrap_pairs(resource: IntArray, operation: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Last and first operation of every sequence that is not empty, and the resource.

    Parameters
    ----------
    resource, operation
        The places in the sequences, one resource after the other.
    """
    is_first = np.ones(len(resource), np.bool_)
    is_first[1:] = resource[1:] != resource[:-1]
    return operation[np.roll(is_first, -1)], operation[is_first], resource[is_first]


def level_at_cycle_start(schedule: Schedule) -> npt.NDArray[Any]:
    """Bytes that every resource holds when a cycle begins in the steady state.

    An operation with offset k has run k times less often than one with offset 0, hence
    ``sum(offset * (free - acquire))``. All 0 in a one-shot schedule. Python integers where int64
    could overflow.

    Returns
    -------
    array, shape (n_resources,)
    """
    levels = [0] * schedule.n_resources
    resources = schedule.op_resources
    late = np.flatnonzero((schedule.offset > 0) & (schedule.free != schedule.acquire))
    for i in late.tolist():
        carried = int(schedule.offset[i]) * (int(schedule.free[i]) - int(schedule.acquire[i]))
        for r in resources[i].tolist():
            levels[r] += carried
    exact = any(abs(level) > _SAFE for level in levels)
    return np.array(levels, dtype=object if exact else np.int64)


def balance(schedule: Schedule, words: Words) -> Iterator[Violation]:
    """Resources that hold more or less bytes after every cycle.

    The operations named are those of every (job, stage, micro-batch, iteration) whose bytes do
    not cancel out.
    """
    s = schedule
    operation = np.repeat(np.arange(s.n_operations), np.diff(s.op_resources.indptr))
    change = (s.acquire - s.free)[operation]
    moves = np.flatnonzero(change)
    gain = np.zeros(s.n_resources, np.int64)
    np.add.at(gain, s.op_resources.ids[moves], change[moves])
    for r in np.flatnonzero(gain).tolist():
        here = operation[moves[s.op_resources.ids[moves] == r]]
        labels = np.stack((s.job[here], s.stage[here], s.microbatch[here], s.iteration[here]))
        _, group = np.unique(labels, axis=1, return_inverse=True)
        total = np.zeros(len(here), np.int64)
        np.add.at(total, group.ravel(), (s.acquire - s.free)[here])
        guilty = here[total[group.ravel()] != 0].tolist()
        amount = int(gain[r])
        verb = "gains" if amount > 0 else "loses"
        moved = [
            f"{words.operation(i)} acquires {int(s.acquire[i])} and frees {int(s.free[i])}"
            for i in guilty
        ]
        message = (
            f"{words.resource(r)} {verb} {count(abs(amount), 'byte')} a cycle: {shortened(moved)}"
        )
        yield Violation("balance", tuple(guilty), r, abs(amount), message)
