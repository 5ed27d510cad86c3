"""A run as a schedule document in nanoseconds, which `optsched.verify` checks and others draw."""

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


def measured(log: RunLog) -> Schedule:
    """Make the schedule of a run as it was; the clock starts with the first block or copy.

    Blocks keep the arcs of their plans, without lags and setups. Clocks of several hosts agree up
    to an uncertainty, so a block may seem to start before one that it waited for has ended. Such an
    arc has a negative lag; where it seems to start even before that one started, the arc is left
    out. The provenance counts both. Operation k is record k; copies of states follow, on one
    resource for every direction of every device.
    """
    run = log.executed
    start, end = _in_order(run)
    begins = np.append(start, np.array([c.start_ns for c in log.copies], np.int64))
    origin = int(begins.min()) if len(begins) else 0
    start, duration = start - origin, end - start
    early = np.minimum(start[run.head] - (start + duration)[run.tail], 0)
    lost = early < -duration[run.tail]
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
            key: sum(c.size for c in log.copies if c.direction == key) for key in COPIES
        }
        rows = _copies(log, resources, origin)
        owner = np.append(owner, rows.pop("owner"))
        columns = {key: np.append(column, rows[key]) for key, column in columns.items()}
    ends = columns["start"] + columns["duration"]
    none = np.zeros(int((~lost).sum()), np.int64)
    return Schedule(
        name=log.name,
        time_unit="ns",
        resources=tuple(map(Resource, resources)),
        op_resources=Rows(np.arange(len(owner) + 1), owner),
        arcs=Arcs(run.tail[~lost], run.head[~lost], early[~lost], none),
        sequences=grouped(owner, len(resources)),
        objective=Objective("makespan", int(ends.max(initial=0))),
        provenance={**log.provenance, **clock},
        **columns,
    )


def _in_order(run: Executed) -> tuple[IntArray, IntArray]:
    """Starts and ends without overlaps on a device; events may overlap by their resolution."""
    start, end = run.start_ns.copy(), run.end_ns.copy()
    for row in run.sequences.to_lists():
        ids = np.array(row, np.int64)
        if not len(ids):
            continue
        over = np.maximum.accumulate(np.maximum(start[ids], end[ids]))
        end[ids] = over
        start[ids[1:]] = np.maximum(start[ids[1:]], over[:-1])
    return start, end


def _copies(log: RunLog, resources: list[str], origin: int) -> dict[str, tuple[Any, ...]]:
    """Columns of the copies of states; their links are added to the resources."""
    devices, suffix = log.executed.devices, {"in": "from host", "out": "to host"}
    rows = []
    free: dict[str, int] = {}
    for c in sorted(log.copies, key=lambda c: (c.start_ns, c.end_ns)):
        link = f"{devices[c.device]} {suffix[c.direction]}"
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
