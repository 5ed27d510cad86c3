"""Use of resources over time: bars, setups and held memory, ready to be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.analysis.links import links
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from optsched.model.schedule import IntArray, Schedule


@dataclass(frozen=True)
class Bars:
    """Executions of operations in time order of their cycles; arrays of one value per bar.

    ``cycle`` is 0 throughout for a one-shot schedule. In a periodic one it counts turns of the
    steady state from the drawing's time 0; -1 marks bars that began before it.
    """

    operation: IntArray
    resource: IntArray
    start: IntArray
    end: IntArray
    cycle: IntArray


@dataclass(frozen=True)
class Setups:
    """Setups right before their operation: resource, operation, start and end of each."""

    resource: IntArray
    operation: IntArray
    start: IntArray
    end: IntArray


def horizon(schedule: Schedule, cycles: int = 1) -> int:
    """Time that a drawing spans: the makespan, or so many periods."""
    if schedule.period is None:
        return schedule.makespan
    check_cycles(cycles)
    return schedule.period * cycles


def check_cycles(cycles: int) -> None:
    """Refuse a number of cycles that is too large for a picture."""
    if not 1 <= cycles <= MOST_CYCLES:
        raise InputError(f"cycles: expected 1..{MOST_CYCLES}, got {cycles}")


MOST_CYCLES: Final = 100
"""Cycles of a periodic schedule that pictures, pages and traces show at most."""


def turns(schedule: Schedule, cycles: int) -> range:
    """Cycles to draw: one for a one-shot schedule; else one more, for what runs across time 0."""
    if schedule.period is None:
        return range(1)
    check_cycles(cycles)
    return range(-1, cycles)


def bars(schedule: Schedule, cycles: int = 1) -> Bars:
    """One bar per operation, resource it holds and cycle; resource -1 for none.

    Bars of a resource follow each other in the order of its sequence. Times may lie outside
    0..horizon in a periodic schedule (the drawing clips them); bars wholly outside are left out.
    """
    start = _starts(schedule)
    counts = np.diff(schedule.op_resources.indptr)
    free = np.flatnonzero(counts == 0)
    rows = [_in_order(schedule, r) for r in range(schedule.n_resources)]
    operation = np.concatenate([*rows, free]).astype(np.int64)
    resource = np.repeat(
        np.arange(schedule.n_resources + 1), [*(len(row) for row in rows), len(free)]
    )
    resource[len(resource) - len(free) :] = -1
    turn = schedule.period or 0
    found = [
        (operation, resource, start[operation] + c * turn, np.full(len(operation), c))
        for c in turns(schedule, cycles)
    ]
    operation, resource, begin, cycle = (
        np.concatenate([part[k] for part in found]) for k in range(4)
    )
    end = begin + schedule.duration[operation]
    seen = (cycle >= 0) | (end > 0)
    return Bars(operation[seen], resource[seen], begin[seen], end[seen], cycle[seen])


def left_out(schedule: Schedule, chart: Bars) -> npt.NDArray[np.bool_]:
    """Bars of iterations before the first one, which a cold start does not have."""
    found: npt.NDArray[np.bool_] = chart.cycle < schedule.offset[chart.operation]
    return found


def setups(schedule: Schedule, cycles: int = 1) -> Setups:
    """Positive setup times between neighbours of every sequence, drawn as late as possible."""
    start, found = _starts(schedule), links(schedule)
    found = found.where((found.resource >= 0) & (found.wait > 0))
    found = found.where(np.lexsort((start[found.head], found.resource)))
    later = [c * (schedule.period or 0) for c in turns(schedule, cycles)]
    end = np.concatenate([start[found.head] + shift for shift in later])
    resource, operation, wait = (
        np.tile(column, len(later)) for column in (found.resource, found.head, found.wait)
    )
    seen = end > 0
    return Setups(resource[seen], operation[seen], (end - wait)[seen], end[seen])


def setup_times(schedule: Schedule) -> IntArray:
    """Sum of the setups on every resource: of the whole schedule, or of one period."""
    found, total = links(schedule), np.zeros(schedule.n_resources, np.int64)
    found = found.where(found.resource >= 0)
    np.add.at(total, found.resource, found.wait)
    return total


def held_bytes(
    schedule: Schedule,
    row: Sequence[int] | IntArray,
    change: tuple[IntArray, IntArray] | None = None,
) -> IntArray:
    """Bytes held while each of these operations runs, in this order, without workspaces.

    `change` is the bytes each acquires and frees (default: `acquire` and `free`). In the steady
    state an operation with offset k is k cycles late, and has k times its bytes still to free.
    """
    which = np.array(row, np.int64)
    take, give = (schedule.acquire[which], schedule.free[which]) if change is None else change
    level: IntArray = _level(schedule, which, give - take) + np.cumsum(take - give) + give
    return level


def jobs_that_fit(jobs: int, fits: Callable[[int], bool]) -> int:
    """Number of first jobs that fit together, if all jobs do not."""
    return next((n for n in range(jobs - 1, 0, -1) if fits(n)), 0)


def peak_memory(schedule: Schedule, resource: int) -> int:
    """Most bytes held at once: the prefix sum along the sequence, workspaces included."""
    row = _sequence(schedule, resource)
    return int((held_bytes(schedule, row) + schedule.workspace[row]).max(initial=0))


def memory_steps(schedule: Schedule, resource: int, cycles: int = 1) -> tuple[IntArray, IntArray]:
    """Bytes held on a resource over time, as a step function: times and levels.

    The level is ``levels[k]`` from ``times[k]`` to ``times[k + 1]``; times strictly ascend and lie
    in 0..horizon. Peaks that last no time (zero durations) do not show.
    """
    start = _starts(schedule)
    row = _sequence(schedule, resource)
    turn, limit = schedule.period or 0, horizon(schedule, cycles)
    up, down = (
        schedule.acquire[row] + schedule.workspace[row],
        -schedule.free[row] - schedule.workspace[row],
    )
    begin, finish = start[row], start[row] + schedule.duration[row]
    # interleaved: at equal times an operation frees before the next one acquires
    shape = [np.stack(pair, axis=1).ravel() for pair in ((begin, finish), (up, down))]
    rounds = turns(schedule, cycles)
    times = np.concatenate([shape[0] + c * turn for c in rounds])
    change = np.concatenate([shape[1]] * len(rounds))
    order = np.argsort(times, kind="stable")
    times, levels = times[order], _steady_level(schedule, resource) + np.cumsum(change[order])
    keep = np.append(times[1:] != times[:-1], True)[: len(times)]
    times, levels = times[keep], levels[keep]
    inside = (times > 0) & (times <= limit)
    before = levels[times <= 0]
    first = int(before[-1]) if len(before) else _steady_level(schedule, resource)
    return (
        np.concatenate([np.zeros(1, np.int64), times[inside]]),
        np.concatenate([np.array([first]), levels[inside]]),
    )


def holds_memory(schedule: Schedule) -> bool:
    """Whether any operation acquires, frees or needs bytes."""
    return bool(schedule.acquire.any() or schedule.free.any() or schedule.workspace.any())


def _starts(schedule: Schedule) -> IntArray:
    if schedule.start is None:
        raise InputError("this graph is not scheduled: there is nothing to draw; solve it first")
    return schedule.start


def _sequence(schedule: Schedule, resource: int) -> IntArray:
    assert schedule.sequences is not None  # checked by `_starts`
    return schedule.sequences[resource]


def _in_order(schedule: Schedule, resource: int) -> IntArray:
    """Users of a resource in sequence order; by start time if the sequence is not a permutation."""
    row = _sequence(schedule, resource)
    users = schedule.users[resource]
    if np.array_equal(np.sort(row), users):
        return row
    return users[np.argsort(_starts(schedule)[users], kind="stable")]


def _steady_level(schedule: Schedule, resource: int) -> int:
    row = _sequence(schedule, resource)
    return _level(schedule, row, schedule.free[row] - schedule.acquire[row])


def _level(schedule: Schedule, row: IntArray, change: IntArray) -> int:
    """Bytes held when a cycle begins, from executions that began in earlier cycles."""
    if schedule.period is None:
        return 0
    offset = schedule.offset[row].tolist()
    level = sum(o * c for o, c in zip(offset, change.tolist(), strict=True))
    if abs(level) > MAX_INTEGER:
        raise InputError(f"resources: one holds {level} bytes when a cycle begins, not 0..2^53")
    return int(level)
