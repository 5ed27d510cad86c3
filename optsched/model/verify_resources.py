"""Rules on every resource: sequences, overlaps, setups and held memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optsched.io.strict_json import shortened
from optsched.model.violation import Kind, Names, Violation, count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.model.schedule import Csr, IntArray, Schedule


_SAFE = 1 << 61


class Plan(NamedTuple):
    """Input of every check; `period` is 0 in a one-shot schedule."""

    schedule: Schedule
    start: IntArray
    end: IntArray
    period: int
    names: Names


class Entries(NamedTuple):
    """Places in the sequences, one resource after the other."""

    resource: IntArray
    operation: IntArray


class Pairs(NamedTuple):
    """Immediate neighbours on a resource; `shift` is the period across a cycle's end, else 0."""

    before: IntArray
    after: IntArray
    resource: IntArray
    shift: IntArray


def entries_of(plan: Plan, sequences: Csr) -> tuple[Entries, list[Violation]]:
    """The first entry of every user in the sequences of its resources, and wrong entries."""
    needs, n = plan.schedule.op_resources, plan.schedule.n_operations
    needed = needs.ids * n + np.repeat(np.arange(n), np.diff(needs.indptr))
    row = np.repeat(np.arange(len(sequences)), np.diff(sequences.indptr))
    # one number per (resource, operation); later checks use its first entry only
    listed, first, times = np.unique(row * n + sequences.ids, return_index=True, return_counts=True)
    known = np.isin(listed, needed)
    keep = np.sort(first[known])
    return Entries(row[keep], sequences.ids[keep]), [
        *_wrong_entries(plan, needed[~np.isin(needed, listed)], "misses"),
        *_wrong_entries(plan, listed[~known], "holds", times[~known]),
        *_wrong_entries(plan, listed[known & (times > 1)], "repeats", times[known & (times > 1)]),
    ]


def _wrong_entries(
    plan: Plan, keys: IntArray, verb: str, times: IntArray | None = None
) -> Iterator[Violation]:
    names = plan.names
    for k, key in enumerate(np.sort(keys).tolist()):
        r, i = divmod(key, plan.schedule.n_operations)
        often = 1 if times is None else int(times[k])
        what = f"the sequence of {names.resource(r)} {verb} {names.operation(i)}"
        if verb == "misses":
            yield Violation("sequence", (i,), r, often, f"{what}, which uses that resource")
        elif verb == "holds":
            message = f"{what} ({count(often, 'time')}), which does not use that resource"
            yield Violation("sequence", (i,), r, often, message)
        else:
            yield Violation(
                "sequence", (i,), r, often - 1, f"{what}: {often} times instead of once"
            )


def neighbours(entries: Entries, period: int | None) -> Pairs:
    """Every operation and the next on its resource; with a period also the last and the first."""
    resource, operation = entries
    ends = np.flatnonzero(np.diff(resource, append=-1))  # the last place of every resource
    begins = np.concatenate((np.zeros(1, np.int64), ends + 1))[: len(ends)]
    follower = np.arange(1, len(resource) + 1)
    follower[ends] = begins
    shift = np.zeros(len(resource), np.int64)
    shift[ends] = period or 0
    kept = np.ones(len(resource), np.bool_)
    kept[ends] = period is not None
    return Pairs(operation[kept], operation[follower[kept]], resource[kept], shift[kept])


def neighbour_gaps(plan: Plan, pairs: Pairs) -> Iterator[Violation]:
    """Operations that start before their predecessor on a resource ends and the setup is done.

    Neighbours suffice: durations and setups are >= 0, so along a sequence without violation
    starts and ends never fall, and no operation can start before the end of any earlier one.
    """
    s, names = plan.schedule, plan.names
    before, after, resource, shift = pairs
    same_family = s.family[before] == s.family[after]
    setup = np.where(same_family, 0, s.setup_out[before] + s.setup_in[after])
    begins = plan.start[after] + shift
    missing = plan.end[before] + setup - begins
    for k in np.flatnonzero(missing > 0).tolist():
        i, j, r = int(before[k]), int(after[k]), int(resource[k])
        amount, due = int(missing[k]), int(setup[k])
        later = f"{names.operation(j)}{' of the next cycle' if shift[k] else ''}"
        gap = due - amount
        both = (
            f", and {names.time(due)} of setup follow: {names.time(amount)} missing" if due else ""
        )
        reverse_fits = plan.end[j] + shift[k] <= plan.start[i]
        kind: Kind
        if gap >= 0:
            kind = "setup"
            message = (
                f"{later} starts {names.time(gap)} after {names.operation(i)} ends on "
                f"{names.resource(r)}, but the setup between them takes {names.time(due)}: "
                f"{names.time(amount)} missing"
            )
        elif begins[k] < plan.start[i] or reverse_fits:
            kind = "order"
            message = (
                f"{names.operation(j)} comes after {names.operation(i)} in the sequence of "
                f"{names.resource(r)}, but starts {names.time(-gap)} before that ends "
                f"(starts {int(plan.start[j])} and {int(plan.start[i])}){both}"
            )
        else:
            kind = "overlap"
            message = (
                f"{later} starts {names.time(-gap)} before {names.operation(i)} ends on "
                f"{names.resource(r)}{both}"
            )
        yield Violation(kind, (i, j), r, amount, message)


def double_bookings(plan: Plan, reported: list[Violation]) -> Iterator[Violation]:
    """Operations that start while another holds their resource, also if they are no neighbours.

    Each operation is reported once per resource, with the one that holds the resource longest;
    overlaps in `reported` are skipped.
    """
    needs, n = plan.schedule.op_resources, plan.schedule.n_operations
    operation, resource = np.repeat(np.arange(n), np.diff(needs.indptr)), needs.ids
    current = np.ones(len(operation), np.bool_)
    start, end = plan.start[operation], plan.end[operation]
    if plan.period:  # the cycle before may still run
        operation, resource = np.tile((operation, resource), 2)
        current = np.concatenate((current, ~current))
        start = np.concatenate((start, start - plan.period))
        end = np.concatenate((end, end - plan.period))
    # shorter first: an empty operation may touch another, not lie inside it
    by_time = np.lexsort((end, start, resource))
    by_end = np.lexsort((end, resource))
    rank = np.empty(len(by_end), np.int64)
    rank[by_end] = np.arange(len(by_end))
    # ranks rise with the resource, so the running maximum starts anew on each
    holder = by_end[np.maximum.accumulate(rank[by_time])][:-1]
    late = by_time[1:]
    clash = (resource[holder] == resource[late]) & (end[holder] > start[late]) & current[late]
    known = {(v.resource, *v.operations) for v in reported if v.kind == "overlap"}
    for k in np.flatnonzero(clash).tolist():
        i, j, r = int(operation[holder[k]]), int(operation[late[k]]), int(resource[late[k]])
        together = start[holder[k]] == start[late[k]]
        if (r, i, j) in known or (together and (r, j, i) in known):
            continue
        amount = int(end[holder[k]] - start[late[k]])
        later = "" if current[holder[k]] else " of the next cycle"
        message = (
            f"{plan.names.operation(j)}{later} starts {plan.names.time(amount)} before "
            f"{plan.names.operation(i)} ends on {plan.names.resource(r)}"
        )
        yield Violation("overlap", (i, j), r, amount, message)


def memory(plan: Plan, entries: Entries) -> Iterator[Violation]:
    """Held bytes as a prefix sum along every sequence: it depends on the orders alone."""
    s, names = plan.schedule, plan.names
    resource, operation = entries
    if not (s.acquire.any() or s.free.any() or s.workspace.any()):
        return
    acquire, free, workspace = s.acquire[operation], s.free[operation], s.workspace[operation]
    # the sum over all sequences may wrap round, the differences within one cannot
    before = np.cumsum(acquire - free) - (acquire - free)
    first = np.searchsorted(resource, resource)
    level = before - before[first] + level_at_cycle_start(s)[resource]
    needed = level + acquire + workspace
    limit = s.memory[resource]
    for k in np.flatnonzero((limit > 0) & (needed > limit)).tolist():
        i, r, amount = int(operation[k]), int(resource[k]), int(needed[k]) - int(limit[k])
        message = (
            f"{names.operation(i)} needs {count(int(needed[k]), 'byte')} on {names.resource(r)} "
            f"({int(level[k])} held, {int(acquire[k])} acquired, {int(workspace[k])} workspace), "
            f"{count(amount, 'byte')} more than its memory of {int(limit[k])}"
        )
        yield Violation("memory", (i,), r, amount, message)
    left = level + acquire - free
    for k in np.flatnonzero((left < 0) & (free > 0)).tolist():
        i, r = int(operation[k]), int(resource[k])
        held = int(level[k]) + int(acquire[k])
        message = (
            f"{names.operation(i)} frees {count(int(free[k]), 'byte')} on {names.resource(r)}, "
            f"where only {held} are held: {count(-int(left[k]), 'byte')} too many"
        )
        yield Violation("free", (i,), r, -int(left[k]), message)


def level_at_cycle_start(schedule: Schedule) -> npt.NDArray[Any]:
    """Bytes that every resource holds when a cycle begins in the steady state.

    An operation with offset k has run k times less often than one with offset 0, hence
    ``sum(offset * (free - acquire))``. All 0 in a one-shot schedule. Python integers where int64
    could overflow.
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


def balance(plan: Plan) -> Iterator[Violation]:
    """Resources that hold more or less bytes after every cycle.

    The operations named are those of every (job, stage, micro-batch, iteration) whose bytes do
    not cancel out.
    """
    s, names = plan.schedule, plan.names
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
            f"{names.operation(i)} acquires {int(s.acquire[i])} and frees {int(s.free[i])}"
            for i in guilty
        ]
        message = (
            f"{names.resource(r)} {verb} {count(abs(amount), 'byte')} a cycle: {shortened(moved)}"
        )
        yield Violation("balance", tuple(guilty), r, abs(amount), message)
