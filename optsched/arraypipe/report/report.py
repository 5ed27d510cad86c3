"""Where the time of a run went: predicted, measured, waited."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.arraypipe.report.explain import predict
from optsched.io.text import aligned, duration, plain

if TYPE_CHECKING:
    from optsched.arraypipe.report.executed import Executed, RunLog


@dataclass(frozen=True)
class DeviceTime:
    """What a device did: time in blocks, and time that blocks waited for messages and copies.

    `idle` is the share of the run in which the device computed nothing (its *bubble*).
    """

    name: str
    blocks: int
    compute_ns: int
    waited_ns: int
    idle: float


@dataclass(frozen=True)
class Report:
    """Predicted against measured.

    Parameters
    ----------
    serial
        All devices of the plan shared one device, so that blocks took turns.
    predicted_ns
        Time of a cycle by the durations of the plan: the period of its orders; if serial, the sum
        of all blocks. None if the plan has no times.
    measured_ns
        The same as it was, from the ends of whole cycles; None with fewer than two.
    waited_ns, exposed_ns
        Time that blocks waited for messages and copies of states, of all devices; and its part for
        copies.
    wall_ns
        From the first block to the end of the last.
    devices
        What each device did.
    cycles, left_out
        Cycles in the log, and earlier blocks that a long run no longer has in it.
    """

    serial: bool
    predicted_ns: float | None
    measured_ns: float | None
    waited_ns: int
    exposed_ns: int
    wall_ns: int
    devices: tuple[DeviceTime, ...]
    cycles: int = 0
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return asdict(self)

    @property
    def line(self) -> str:
        """Predicted, measured, waited: one line."""
        measured = "-" if self.measured_ns is None else duration(self.measured_ns)
        predicted = "-" if self.predicted_ns is None else duration(self.predicted_ns)
        change = ""
        if self.measured_ns and self.predicted_ns:
            ratio = self.measured_ns / self.predicted_ns
            change = f" ({ratio - 1:+.1%})" if 0.1 < ratio < 10 else f" ({ratio:.3g}x)"
        total_ns = self.wall_ns * max(1, 1 if self.serial else len(self.devices))
        share = self.waited_ns / total_ns if total_ns else 0.0
        return (
            f"a cycle: predicted {predicted}, measured {measured}{change}; waited "
            f"{duration(self.waited_ns)} ({share:.1%}) for messages and copies"
        )

    def __str__(self) -> str:
        rows = [["device", "blocks", "compute", "waited", "idle"]]
        for d in self.devices:
            times = (duration(d.compute_ns), duration(d.waited_ns))
            rows.append([plain(d.name), str(d.blocks), *times, f"{d.idle:.1%}"])
        lines = [self.line, *aligned(rows)]
        if self.serial:
            lines.append("(one device runs the blocks of all in turn)")
        if self.left_out:
            lines.append(f"(the last {self.cycles} cycles; {self.left_out} blocks before them)")
        return "\n".join(lines)


def compare(log: RunLog) -> Report:
    """Compare a run with the prediction of its plan."""
    run = log.executed
    serial = run.serial and not log.parallel and len(run.devices) > 1
    wall_ns = int(run.end_ns.max() - run.start_ns.min()) if len(run.start_ns) else 0
    waited_ns = run.waited_ns + run.exposed_ns
    devices = []
    for name, row in zip(run.devices, run.sequences.to_lists(), strict=True):
        compute_ns = int(run.duration_ns[row].sum())
        idle = max(0.0, 1 - compute_ns / wall_ns) if wall_ns else 0.0
        devices.append(DeviceTime(name, len(row), compute_ns, int(waited_ns[row].sum()), idle))
    longest = max((_cycles(log, k) for k in range(len(log.segments))), key=lambda one: one.whole)
    return Report(
        serial=serial,
        predicted_ns=_predicted_ns(log, longest.segment, serial),
        measured_ns=longest.time_ns,
        waited_ns=int(waited_ns.sum()),
        exposed_ns=int(run.exposed_ns.sum()),
        wall_ns=wall_ns,
        devices=tuple(devices),
        cycles=len({*zip(run.segment.tolist(), run.cycle.tolist(), strict=True)}),
        left_out=log.left_out,
    )


class _Cycles(NamedTuple):
    """Whole cycles of a segment, and the time of one."""

    whole: int
    segment: int
    time_ns: float | None


def _cycles(log: RunLog, segment: int) -> _Cycles:
    """Whole cycles, in which all blocks of the plan ran.

    The time of one is the slope of their ends, without the first quarter, which fills the pipeline.
    """
    run: Executed = log.executed
    here = np.flatnonzero(run.segment == segment)
    cycle, end_ns = run.cycle[here], run.end_ns[here]
    needed = sum(block.device >= 0 for block in log.segments[segment].plan.blocks)
    whole = sorted(c for c, n in Counter(cycle.tolist()).items() if n == needed)
    if len(whole) < 2:
        return _Cycles(len(whole), segment, None)
    first, last = whole[len(whole) // 4], whole[-1]
    ends = [int(end_ns[cycle == c].max()) for c in (first, last)]
    return _Cycles(len(whole), segment, (ends[1] - ends[0]) / (last - first))


def _predicted_ns(log: RunLog, segment: int, serial: bool) -> float | None:
    """Time of a cycle by the durations of the plan."""
    plan = log.segments[segment].plan
    if not plan.schedule.duration.any():
        return None
    predicted = predict(plan)
    return float(sum(predicted.load_ns) if serial else predicted.period_ns)
