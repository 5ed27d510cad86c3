"""What was run as a schedule document, its replay on parallel devices, and the report."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from optsched.schedule import Arcs, Objective, Resource, Rows, Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.inline import Record
    from optsched.arraypipe.plan import ExecutionPlan

_NANOSECONDS: Final = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}


@dataclass(frozen=True)
class BlockError:
    """A block with its predicted and its median measured duration in nanoseconds."""

    block: str
    predicted: int
    measured: int


@dataclass(frozen=True)
class Report:
    """Predicted against measured; all times in nanoseconds.

    On a CPU the devices are logical and run one after the other. So the time that parallel devices
    would need is replayed on a *virtual clock*: first with the durations of the plan
    (`predicted`), then with the measured ones (`replayed`). The gap between the two is the error
    of the durations; `wall` is what the serial run took, `host` its part outside of blocks.
    """

    devices: tuple[str, ...]
    predicted: int
    replayed: int
    wall: int
    host: int
    busy_predicted: tuple[int, ...]
    busy_measured: tuple[int, ...]
    largest_errors: tuple[BlockError, ...]

    def __str__(self) -> str:
        lines = [
            f"virtual clock: predicted {_shown(self.predicted)}, "
            f"with measured durations {_shown(self.replayed)}",
            f"serial run:    {_shown(self.wall)}, of which {_shown(self.host)} outside of blocks",
        ]
        for name, plan, real in zip(
            self.devices, self.busy_predicted, self.busy_measured, strict=True
        ):
            share = real / self.replayed if self.replayed else 0.0
            lines.append(
                f"{name}: busy {_shown(real)} (predicted {_shown(plan)}), "
                f"{share:.0%} of the virtual time"
            )
        for error in self.largest_errors:
            lines.append(
                f"{error.block}: predicted {_shown(error.predicted)}, "
                f"median {_shown(error.measured)}"
            )
        return "\n".join(lines)


def measured(
    plan: ExecutionPlan, records: Sequence[Record], provenance: Mapping[str, Any]
) -> Schedule:
    """The run as it was: one operation per executed block, serial, in nanoseconds."""
    first = records[0].start if records else 0
    duration = [record.end - record.start for record in records]
    start = [record.start - first for record in records]
    clock = "monotonic, blocks of all devices one after the other"
    return _document(
        plan, records, duration, start, provenance={**provenance, "clock": clock}, waits=False
    )


def replayed(
    plan: ExecutionPlan, records: Sequence[Record], provenance: Mapping[str, Any]
) -> Schedule:
    """The run as parallel devices would have done it: measured durations on a virtual clock.

    Lags and setups are those of the plan.
    """
    duration = [record.end - record.start for record in records]
    start = _virtual_starts(plan, records, duration)
    clock = "virtual: measured durations, devices in parallel, lags and setups of the plan"
    return _document(
        plan, records, duration, start, provenance={**provenance, "clock": clock}, waits=True
    )


def compare(plan: ExecutionPlan, records: Sequence[Record]) -> Report:
    """Compare a run with its prediction."""
    unit = _NANOSECONDS[plan.schedule.time_unit]
    planned = [d * unit for d in plan.schedule.duration.tolist()]
    predicted = [planned[record.operation] for record in records]
    real = [record.end - record.start for record in records]
    busy = [[0] * len(plan.devices) for _ in range(2)]
    samples: dict[int, list[int]] = {}
    for record, p, r in zip(records, predicted, real, strict=True):
        device = plan.blocks[record.operation].device
        busy[0][device] += p
        busy[1][device] += r
        samples.setdefault(record.operation, []).append(r)
    errors = [
        BlockError(str(plan.blocks[i]), planned[i], round(statistics.median(values)))
        for i, values in samples.items()
    ]
    errors.sort(key=lambda e: -abs(e.measured - e.predicted))
    wall = records[-1].end - records[0].start if records else 0
    return Report(
        devices=plan.devices,
        predicted=_makespan(_virtual_starts(plan, records, predicted), predicted),
        replayed=_makespan(_virtual_starts(plan, records, real), real),
        wall=wall,
        host=wall - sum(real),
        busy_predicted=tuple(busy[0]),
        busy_measured=tuple(busy[1]),
        largest_errors=tuple(errors[:5]),
    )


def _makespan(start: Sequence[int], duration: Sequence[int]) -> int:
    return max((s + d for s, d in zip(start, duration, strict=True)), default=0)


def _executed_arcs(
    plan: ExecutionPlan, records: Sequence[Record], duration: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Arcs (tail, head, lag in nanoseconds) between the records."""
    unit = _NANOSECONDS[plan.schedule.time_unit]
    at = {(record.operation, record.cycle): k for k, record in enumerate(records)}
    arcs = []
    for k, record in enumerate(records):
        for arc in plan.waits[record.operation]:
            tail = at.get((arc.tail, record.cycle - arc.tokens))
            if tail is not None:
                arcs.append((tail, k, max(arc.lag * unit, -duration[tail])))
    return arcs


def _virtual_starts(
    plan: ExecutionPlan, records: Sequence[Record], duration: Sequence[int]
) -> list[int]:
    """Earliest starts for the executed orders (the records are in a topological order)."""
    unit = _NANOSECONDS[plan.schedule.time_unit]
    earliest = [0] * len(records)
    last = [-1] * len(plan.devices)
    arcs = iter(_executed_arcs(plan, records, duration))
    arc = next(arcs, None)
    for k, record in enumerate(records):
        while arc is not None and arc[1] == k:
            tail, _, lag = arc
            earliest[k] = max(earliest[k], earliest[tail] + duration[tail] + lag)
            arc = next(arcs, None)
        device = plan.blocks[record.operation].device
        before = last[device]
        if before >= 0:
            setup = plan.schedule.setup(records[before].operation, record.operation) * unit
            earliest[k] = max(earliest[k], earliest[before] + duration[before] + setup)
        last[device] = k
    return earliest


def _document(
    plan: ExecutionPlan,
    records: Sequence[Record],
    duration: Sequence[int],
    start: Sequence[int],
    *,
    provenance: Mapping[str, Any],
    waits: bool,
) -> Schedule:
    """A schedule of the records; with `waits` the lags and setups of the plan are in it."""
    unit = _NANOSECONDS[plan.schedule.time_unit]
    blocks = [plan.blocks[record.operation] for record in records]
    sequences: list[list[int]] = [[] for _ in plan.devices]
    for k, block in enumerate(blocks):
        sequences[block.device].append(k)
    arcs = _executed_arcs(plan, records, duration)
    setups: dict[str, Any] = {}
    if waits:
        for key, factor in (("family", 1), ("setup_in", unit), ("setup_out", unit)):
            column = getattr(plan.schedule, key)
            setups[key] = [int(column[block.operation]) * factor for block in blocks]
    return Schedule(
        name=plan.schedule.name,
        time_unit="ns",
        resources=tuple(Resource(name) for name in plan.devices),
        duration=list(duration),  # type: ignore[arg-type]
        op_resources=Rows.of([[block.device] for block in blocks]),
        arcs=Arcs.of([(i, j, lag if waits else 0) for i, j, lag in arcs]),
        kind=[block.kind for block in blocks],  # type: ignore[arg-type]
        job=[block.job for block in blocks],  # type: ignore[arg-type]
        stage=[block.stage for block in blocks],  # type: ignore[arg-type]
        microbatch=[block.microbatch for block in blocks],  # type: ignore[arg-type]
        iteration=[record.iteration for record in records],  # type: ignore[arg-type]
        sequences=Rows.of(sequences),
        start=list(start),  # type: ignore[arg-type]
        objective=Objective("makespan", _makespan(start, duration)),
        provenance=dict(provenance),
        **setups,
    )


def _shown(nanoseconds: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds} ns"
