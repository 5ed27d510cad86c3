"""What was run, as a schedule document; and replayed, as parallel devices would have run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.arraypipe.plan.edits import COPIES
from optsched.arraypipe.report.executed import executed, grouped
from optsched.errors import InternalError
from optsched.model.schedule import Arcs, Objective, Resource, Rows, Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.plan.segments import Course
    from optsched.arraypipe.plan.types import Copied, Moved, Record
    from optsched.arraypipe.report.executed import Executed
    from optsched.model.schedule import IntArray


SERIAL = "monotonic, blocks of all devices one after the other"


def measured(
    course: Course,
    records: Sequence[Record],
    provenance: Mapping[str, Any],
    *,
    messages: Sequence[Moved] = (),
    copies: Sequence[Copied] = (),
    parallel: bool = False,
    uncertainty: int = 0,
) -> Schedule:
    """The run as it was.

    Blocks keep the arcs that they had in their plans, without lags and setups: what a wait was for
    is the report's question. Clocks of several hosts agree up to an uncertainty, so a block may
    seem to start before one that it waited for has ended. Such an arc has a negative lag; where it
    seems to start even before that one started, the arc is left out. The provenance counts both.

    Parameters
    ----------
    course, records
        What was run; the records of one device in its own order. Blocks of several devices may
        overlap in time, if times are of one clock.
    provenance
        Put into the document.
    messages, copies
        Become operations on resources of their own, one for every channel, and for every direction
        of every device. A link takes what it carries one after the other: an operation begins when
        its message is there and the link is free.
    parallel
        Devices ran by themselves; taken for granted if blocks overlap.
    uncertainty
        How far the clocks of two devices may be apart, in nanoseconds.

    Returns
    -------
    Schedule
        Which `optsched.verify` accepts; operation k is record k, those of links come after, as do
        their resources. The clock starts with the first block, or with a copy before it.
    """
    run = executed(course, records)
    start, end = _in_order(run)
    begins = [int(start.min())] if len(start) else []
    origin = min([*begins, *(c.start for c in copies)], default=0)
    links = _Links(course, run, end, origin)
    for m in sorted(messages, key=lambda m: (m.end, m.start)):
        links.take_message(m)
    for c in sorted(copies, key=lambda c: (c.start, c.end)):
        links.take_copy(c)
    start, end = _joined(start, links.start) - origin, _joined(end, links.end) - origin
    duration = end - start
    tail, head = _joined(run.waits.tail, links.tail), _joined(run.waits.head, links.head)
    early = np.minimum(start[head] - end[tail], 0)
    lost = early < -duration[tail]
    clock: dict[str, Any] = {"clock": SERIAL}
    if parallel or not run.serial:
        clock = {
            "clock": "monotonic clocks of the devices, shifted to one",
            "clock_uncertainty_ns": uncertainty,
            "arcs_of_negative_lag": int(((early < 0) & ~lost).sum()),
            "arcs_left_out": int(lost.sum()),
            "most_negative_lag_ns": int(early.min(initial=0)),
        }
    if copies:
        clock["copied_bytes"] = {
            way: sum(c.size for c in copies if c.direction == way) for way in ("in", "out")
        }
    return document(
        run,
        course.name,
        start,
        duration,
        early[~lost],
        {**provenance, **clock},
        {},
        (tail[~lost], head[~lost]),
        links,
    )


def document(
    run: Executed,
    name: str,
    start: IntArray,
    duration: IntArray,
    lag: IntArray,
    provenance: Mapping[str, Any],
    setups: Mapping[str, Any],
    ends: tuple[IntArray, IntArray] | None = None,
    links: _Links | None = None,
) -> Schedule:
    """A schedule of the records with these times; its sequences are the orders of the run."""
    tail, head = ends or (run.waits.tail, run.waits.head)
    resources = list(run.devices)
    owner, rows = run.device, run.sequences
    labels: dict[str, Any] = {
        key: getattr(run, key) for key in ("kind", "job", "stage", "microbatch", "iteration")
    }
    if links is not None and links.names:
        labels = {key: np.append(labels[key], links.labels[key]) for key in labels}
        owner = np.append(owner, len(resources) + np.array(links.owner, np.int64))
        resources += links.names
        rows = grouped(owner, len(resources))
    return Schedule(
        name=name,
        time_unit="ns",
        resources=tuple(map(Resource, resources)),
        duration=duration,
        op_resources=Rows(np.arange(len(owner) + 1), owner),
        arcs=Arcs(tail, head, lag, np.zeros(len(tail), np.int64)),
        sequences=rows,
        start=start,
        objective=Objective("makespan", int((start + duration).max(initial=0))),
        provenance=dict(provenance),
        **labels,
        **setups,
    )


def _in_order(run: Executed) -> tuple[IntArray, IntArray]:
    """Starts and ends in which no device does two things at once.

    Times that events of a device are said to have may overlap by their resolution.
    """
    start, end = run.start.copy(), run.end.copy()
    for row in run.sequences.to_lists():
        own = np.array(row, np.int64)
        if not len(own):
            continue
        over = np.maximum.accumulate(np.maximum(start[own], end[own]))
        end[own] = over
        start[own[1:]] = np.maximum(start[own[1:]], over[:-1])
    return start, end


def _joined(column: IntArray, more: Sequence[int]) -> IntArray:
    return np.concatenate((column, np.array(more, np.int64)))


class _Links:
    """Operations of links, numbered after the records."""

    def __init__(self, course: Course, run: Executed, end: IntArray, origin: int) -> None:
        self.course, self.run, self.ended, self.origin = course, run, end, origin
        self.at: dict[tuple[int, int, int], int] = {}
        self.names: list[str] = []
        self.place: dict[str, int] = {}
        self.free: list[int] = []  # when the last operation of every link ends
        self.owner: list[int] = []
        self.start: list[int] = []
        self.end: list[int] = []
        self.tail: list[int] = []
        self.head: list[int] = []
        self.labels: dict[str, list[Any]] = {
            key: [] for key in ("kind", "job", "stage", "microbatch", "iteration")
        }

    def take_message(self, m: Moved) -> None:
        """One message; those of a channel come in their order."""
        if not self.at:
            run = self.run
            keys = (run.segment.tolist(), run.operation.tolist(), run.cycle.tolist())
            self.at = {key: k for k, key in enumerate(zip(*keys, strict=True))}
        part = self.course.segments[m.segment]
        plan, message = part.plan, part.routes.messages[m.message]
        tail, head = plan.blocks[message.producer], plan.blocks[message.consumer]
        sent = self.at.get((m.segment, tail.operation, m.cycle - head.offset + tail.offset))
        taken = self.at.get((m.segment, head.operation, m.cycle))
        known = [k for k in (sent, taken) if k is not None]
        if not known:
            return
        start = m.start if sent is None else max(m.start, int(self.ended[sent]))
        link = f"{plan.devices[tail.device]} to {plan.devices[head.device]}, {message.kind}"
        k = self._take(
            link, start, m.end, message.kind, part.seats[tail.job], tail.stage, tail.microbatch,
            int(self.run.iteration[known[0]]),
        )  # fmt: skip
        for i, j in ((sent, k), (k, taken)):
            if i is not None and j is not None:
                self.tail.append(i)
                self.head.append(j)

    def take_copy(self, c: Copied) -> None:
        """One copy."""
        words = {"in": "from host", "out": "to host"}
        link = f"{self.run.devices[c.device]} {words[c.direction]}"
        self._take(link, c.start, c.end, COPIES[c.direction], c.job, c.stage, 0, 0)

    def _take(self, link: str, start: int, end: int, *labels: Any) -> int:
        if link not in self.place:
            self.place[link] = len(self.names)
            # a device may have any name
            self.names.append(f"{link} (link)" if link in self.run.devices else link)
            self.free.append(start)
        own = self.place[link]
        start = max(start, self.free[own], self.origin)
        self.free[own] = end = max(start, end)
        self.owner.append(own)
        self.start.append(start)
        self.end.append(end)
        for key, value in zip(self.labels, labels, strict=True):
            self.labels[key].append(value)
        return len(self.run) + len(self.start) - 1


CLOCK = "virtual: measured durations, devices in parallel, lags and setups of the plan"


def replayed(course: Course, records: Sequence[Record], provenance: Mapping[str, Any]) -> Schedule:
    """The run as parallel devices would have done it: measured durations on a virtual clock.

    Lags and setups are those of the plans, orders those of the run. Every device goes on to the
    next segment when it is done with its own part of the one before, as in the run.

    Parameters
    ----------
    course, records
        What was run; the records of one device in its own order.
    provenance
        Put into the document.

    Returns
    -------
    Schedule
        In nanoseconds; every block starts as early as it can.
    """
    run = executed(course, records)
    duration = run.duration
    columns = {"setup_in": run.setup_in, "setup_out": run.setup_out, "family": run.family}
    return document(
        run,
        course.name,
        virtual_starts(run, duration),
        duration,
        np.maximum(run.waits.lag, -duration[run.waits.tail]),
        {**provenance, "clock": CLOCK},
        columns if run.setup_in.any() or run.setup_out.any() else {},
    )


def virtual_starts(run: Executed, duration: IntArray) -> IntArray:
    """Earliest starts of all records if their blocks take so long, in nanoseconds.

    Longest paths over the arcs of the plans, with their lags, and over the orders of the devices,
    with their setups.
    """
    before, after = run.neighbours
    tail = np.concatenate((run.waits.tail, before))
    head = np.concatenate((run.waits.head, after))
    lag = np.maximum(run.waits.lag, -duration[run.waits.tail])
    weight = np.concatenate((lag, run.setup(before, after))) + duration[tail]
    by_tail = np.argsort(tail, kind="stable")
    heads, weights = head[by_tail].tolist(), weight[by_tail].tolist()
    bounds = np.searchsorted(tail[by_tail], np.arange(len(run) + 1)).tolist()
    waiting = np.bincount(head, minlength=len(run)).tolist()
    start = [0] * len(run)
    order = [k for k, n in enumerate(waiting) if not n]
    for k in order:  # grows while it is walked: Kahn's algorithm
        here = start[k]
        for e in range(bounds[k], bounds[k + 1]):
            j = heads[e]
            if here + weights[e] > start[j]:
                start[j] = here + weights[e]
            waiting[j] -= 1
            if not waiting[j]:
                order.append(j)
    if len(order) < len(start):
        raise InternalError("blocks that were run are said to wait for each other")
    return np.array(start, np.int64)


def makespan(start: IntArray, duration: IntArray) -> int:
    """When the last block ends; 0 without blocks."""
    return int((start + duration).max(initial=0))
