"""A schedule as a Chrome trace (JSON), for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.analysis.occupancy import bars, check_cycles, holds_memory, memory_steps, setups
from optsched.analysis.unroll import instances, unroll
from optsched.model.schedule import NO_DEADLINE

if TYPE_CHECKING:
    import os

    from optsched.analysis.occupancy import Bars
    from optsched.model.schedule import IntArray, Schedule

Event = dict[str, Any]

PROCESS: Final = 1
"""Process id of all events; resource r is thread ``r + 1``."""


def write(schedule: Schedule, path: str | os.PathLike[str], *, cycles: int = 3) -> None:
    """Write the trace of a schedule as JSON (whole file or nothing); see `trace`."""
    from optsched.io.files import write_atomic

    write_atomic(path, json.dumps(trace(schedule, cycles=cycles), separators=(",", ":")) + "\n")


def trace(schedule: Schedule, *, cycles: int = 3) -> dict[str, Any]:
    """Return the trace-event object of a schedule ("Trace Event Format", Google, object form).

    One thread per resource, in document order. An operation is a complete event (``"X"``) on each
    of its resources, in the order of their sequences, or an instant (``"i"``) if it lasts no time;
    without resources it is an asynchronous pair (``"b"``, ``"e"``). Setups are slices of category
    ``setup``; arcs between resources are flows (``"s"``, ``"f"``; none to or from an instant, which
    has no slice to bind to); held memory is a counter (``"C"``) per resource. A periodic schedule
    is written as it runs from cold, cycle by cycle, each of which begins with a global instant of
    category ``cycle``; ``iteration`` then counts those of the job.

    Parameters
    ----------
    schedule
        A scheduled graph; it is not verified.
    cycles
        Cycles to write of a periodic schedule.

    Returns
    -------
    dict
        Ready for `json.dumps`. ``ts`` and ``dur`` are in microseconds: integers, or multiples of
        0.001 for a schedule in ns (the nearest double; exact to the nanosecond below 11 days).
        Without a unit of time one unit is one microsecond, and ``otherData.time_unit`` is "".

    Raises
    ------
    InputError
        The graph is not scheduled, or cycles are too many.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
    >>> from optsched.formats import perfetto
    >>> sorted(perfetto.trace(optsched.solve(shop).schedule))
    ['displayTimeUnit', 'otherData', 'traceEvents']
    """
    check_cycles(cycles)
    origin = Origin(np.zeros(schedule.n_operations, np.int64), np.arange(schedule.n_operations))
    run = schedule
    if schedule.period is not None and schedule.is_scheduled:
        run, origin = unroll(schedule, cycles), Origin(*instances(schedule, cycles))
    chart = bars(run)
    events = _names(run)
    if schedule.period is not None:
        events += _cycles(schedule, cycles)
    events += _operations(run, chart, None if schedule.period is None else origin)
    events += _setups(run, origin)
    if holds_memory(run):
        events += _memory(run)
    events += _flows(run, chart)
    document: dict[str, Any] = {
        "displayTimeUnit": "ns" if schedule.time_unit == "ns" else "ms",
        "traceEvents": events,
    }
    other = {"name": schedule.name, "time_unit": schedule.time_unit, "period": schedule.period}
    if schedule.objective is not None:
        other |= {f"objective_{k}": v for k, v in schedule.objective._asdict().items()}
    document["otherData"] = {key: value for key, value in other.items() if value is not None}
    return document


def microseconds(time: int, time_unit: str) -> int | float:
    """Convert a time to microseconds, an integer if it is whole."""
    if time_unit == "ns":
        whole, remainder = divmod(time, 1000)
        return time / 1000 if remainder else whole
    return time * {"": 1, "us": 1, "ms": 10**3, "s": 10**6}[time_unit]


class Origin(NamedTuple):
    """Cycle and document number of the operations of a run."""

    cycle: IntArray
    operation: IntArray


_FIELDS = (
    "job", "stage", "microbatch", "iteration", "family", "release",
    "setup_in", "setup_out", "acquire", "free", "workspace",
)  # fmt: skip


def _event(phase: str, name: str, thread: int, **fields: Any) -> Event:
    return {"name": name, "ph": phase, "pid": PROCESS, "tid": thread, **fields}


def _names(schedule: Schedule) -> list[Event]:
    names = [_event("M", "process_name", 0, args={"name": schedule.name or "schedule"})]
    for r, resource in enumerate(schedule.resources):
        names.append(_event("M", "thread_name", r + 1, args={"name": resource.name}))
        names.append(_event("M", "thread_sort_index", r + 1, args={"sort_index": r}))
    return names


def _cycles(schedule: Schedule, cycles: int) -> list[Event]:
    """Return a mark through all threads at the start of every cycle."""
    assert schedule.period is not None  # checked by `trace`
    times = [microseconds(c * schedule.period, schedule.time_unit) for c in range(cycles)]
    return [
        _event("i", f"cycle {c}", 0, cat="cycle", s="g", ts=time) for c, time in enumerate(times)
    ]


def _operations(run: Schedule, chart: Bars, origin: Origin | None) -> list[Event]:
    """Return the slices of operations; an origin for a periodic schedule."""
    unit = run.time_unit
    kept = [key for key in _FIELDS if key in ("job", "stage") or getattr(run, key).any()]
    columns = {key: getattr(run, key).tolist() for key in kept}
    kind, deadline = run.kind.tolist(), run.deadline.tolist()
    events: list[Event] = []
    for i, r, start, end in _rows(chart):
        args: dict[str, Any] = {"operation": i, "kind": kind[i]}
        if origin is not None:
            args |= {"operation": int(origin.operation[i]), "cycle": int(origin.cycle[i])}
        args |= {key: column[i] for key, column in columns.items()}
        if deadline[i] != NO_DEADLINE:
            args["deadline"] = deadline[i]
        name = f"{kind[i]} {run.job_name(columns['job'][i])}".strip()
        given = {"cat": kind[i] or "operation", "ts": microseconds(start, unit), "args": args}
        if end == start:
            events.append(_event("i", name, r + 1, s="t", **given))
        elif r < 0:
            # the pair overlaps others freely, unlike slices of a thread
            ends = given | {"ts": microseconds(end, unit)}
            events += [
                _event("b", name, r + 1, id=i, **given),
                _event("e", name, r + 1, id=i, **ends),
            ]
        else:
            events.append(_event("X", name, r + 1, dur=microseconds(end - start, unit), **given))
    return events


def _rows(chart: Bars) -> list[tuple[int, int, int, int]]:
    columns = (chart.operation, chart.resource, chart.start, chart.end)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _setups(run: Schedule, origin: Origin) -> list[Event]:
    found, unit = setups(run), run.time_unit
    return [
        _event(
            "X", "setup", r + 1, cat="setup", ts=microseconds(start, unit),
            dur=microseconds(end - start, unit), args={"before": i},
        )
        for r, i, start, end in zip(
            found.resource.tolist(), origin.operation[found.operation].tolist(),
            found.start.tolist(), found.end.tolist(), strict=True,
        )
        if start >= 0
    ]  # fmt: skip


def _memory(run: Schedule) -> list[Event]:
    events: list[Event] = []
    for r, resource in enumerate(run.resources):
        times, levels = memory_steps(run, r)
        if not levels.any():
            continue
        for time, level in zip(times.tolist(), levels.tolist(), strict=True):
            at = microseconds(time, run.time_unit)
            name = f"memory {resource.name}"
            events.append(_event("C", name, r + 1, ts=at, args={"bytes": level}))
    return events


def _flows(run: Schedule, chart: Bars) -> list[Event]:
    """Return arrows of arcs between different resources."""
    place: dict[int, tuple[int, int]] = {}  # first bar of every operation
    for i, r, start, end in _rows(chart):
        if r >= 0 and end > start:
            place.setdefault(i, (r, start))
    events: list[Event] = []
    for i, j in zip(run.arcs.tail.tolist(), run.arcs.head.tolist(), strict=True):
        tail, head = place.get(i), place.get(j)
        if tail is None or head is None or tail[0] == head[0]:
            continue
        # both ends bind to the slice that begins there; viewers draw from its end
        arrow = {"cat": "arc", "id": len(events) // 2 + 1}
        for phase, (r, start), bound in (("s", tail, {}), ("f", head, {"bp": "e"})):
            at = microseconds(start, run.time_unit)
            events.append(_event(phase, "arc", r + 1, **arrow, ts=at, **bound))
    return events
