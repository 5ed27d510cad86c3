"""What was run, as a schedule document; and replayed, as parallel devices would have run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.arraypipe.plan.types import COPIES
from optsched.arraypipe.report.executed import grouped
from optsched.model.schedule import Arcs, Objective, Resource, Rows, Schedule

if TYPE_CHECKING:
    from optsched.arraypipe.report.executed import Executed, RunLog
    from optsched.model.schedule import IntArray


SERIAL: Final = "monotonic, blocks of all devices one after the other"
VIRTUAL: Final = "virtual: measured durations, devices in parallel, lags and setups of the plan"


def measured(log: RunLog) -> Schedule:
    """The run as it was, in nanoseconds; the clock starts with the first block or copy.

    Blocks keep the arcs that they had in their plans, without lags and setups: what a wait was for
    is the report's question. Clocks of several hosts agree up to an uncertainty, so a block may
    seem to start before one that it waited for has ended. Such an arc has a negative lag; where it
    seems to start even before that one started, the arc is left out. The provenance counts both.

    Operation k is record k. Copies of states come after them, on resources of their own, one for
    every direction of every device.
    """
    run = log.executed
    tail, head = run.waits.tail, run.waits.head
    start, end = _in_order(run)
    begins = np.append(start, np.array([c.start_ns for c in log.copies], np.int64))
    origin = int(begins.min()) if len(begins) else 0
    start, duration = start - origin, end - start
    early = np.minimum(start[head] - (start + duration)[tail], 0)
    lost = early < -duration[tail]
    clock: dict[str, Any] = {"clock": SERIAL}
    if log.parallel or not run.serial:
        clock = {
            "clock": "monotonic clocks of the devices, shifted to one",
            "clock_uncertainty_ns": log.uncertainty_ns,
            "arcs_of_negative_lag": int(((early < 0) & ~lost).sum()),
            "arcs_left_out": int(lost.sum()),
            "most_negative_lag_ns": int(early.min(initial=0)),
        }
    columns = {**run.labels, "start": start, "duration": duration}
    resources, owner = list(run.devices), run.device
    if log.copies:
        clock["copied_bytes"] = {
            way: sum(c.size for c in log.copies if c.direction == way) for way in COPIES
        }
        rows = _copies(log, resources, origin)
        owner = np.append(owner, rows.pop("owner"))
        columns = {key: np.append(column, rows[key]) for key, column in columns.items()}
    arcs = Arcs(tail[~lost], head[~lost], early[~lost], np.zeros(int((~lost).sum()), np.int64))
    return _document(log, clock, resources, owner, arcs, columns)


def replayed(log: RunLog) -> Schedule:
    """The run as parallel devices would have done it: measured durations on a virtual clock.

    Lags and setups are those of the plans, orders those of the run; every block starts as early as
    it can. Every device goes on to the next segment when it is done with its own part of the one
    before, as in the run.
    """
    run = log.executed
    tail, head, lag_ns = run.waits
    columns = {**run.labels, "start": run.replayed_ns, "duration": run.duration_ns}
    if run.setups["setup_in"].any() or run.setups["setup_out"].any():
        columns |= run.setups
    arcs = Arcs(
        tail, head, np.maximum(lag_ns, -run.duration_ns[tail]), np.zeros(len(tail), np.int64)
    )
    return _document(log, {"clock": VIRTUAL}, list(run.devices), run.device, arcs, columns)


def _document(
    log: RunLog,
    clock: dict[str, Any],
    resources: list[str],
    owner: IntArray,
    arcs: Arcs,
    columns: dict[str, Any],
) -> Schedule:
    """A schedule whose sequences are the orders of the run."""
    ends = columns["start"] + columns["duration"]
    return Schedule(
        name=log.name,
        time_unit="ns",
        resources=tuple(map(Resource, resources)),
        op_resources=Rows(np.arange(len(owner) + 1), owner),
        arcs=arcs,
        sequences=grouped(owner, len(resources)),
        objective=Objective("makespan", int(ends.max(initial=0))),
        provenance={**log.provenance, **clock},
        **columns,
    )


def _in_order(run: Executed) -> tuple[IntArray, IntArray]:
    """Starts and ends in which no device does two things at once.

    Times that events of a device are said to have may overlap by their resolution.
    """
    start, end = run.start_ns.copy(), run.end_ns.copy()
    for row in run.sequences.to_lists():
        own = np.array(row, np.int64)
        if not len(own):
            continue
        over = np.maximum.accumulate(np.maximum(start[own], end[own]))
        end[own] = over
        start[own[1:]] = np.maximum(start[own[1:]], over[:-1])
    return start, end


def _copies(log: RunLog, resources: list[str], origin: int) -> dict[str, tuple[Any, ...]]:
    """Columns of the copies of states; their links join the resources, and carry one at a time."""
    devices, words = log.executed.devices, {"in": "from host", "out": "to host"}
    rows = []
    free: dict[str, int] = {}
    for c in sorted(log.copies, key=lambda c: (c.start_ns, c.end_ns)):
        link = f"{devices[c.device]} {words[c.direction]}"
        if link in devices:  # a device may have any name
            link += " (link)"
        if link not in free:
            resources.append(link)
        start = max(c.start_ns, free.get(link, c.start_ns))
        free[link] = max(start, c.end_ns)
        labels = (COPIES[c.direction], c.job, c.stage, 0, 0)
        rows.append((*labels, start - origin, free[link] - start, resources.index(link)))
    names = (*log.executed.labels, "start", "duration", "owner")
    return dict(zip(names, zip(*rows, strict=True), strict=True))
