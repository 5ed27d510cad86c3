"""Times of a plan and of a run: predicted, measured, waited; a plan as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.arraypipe.memory.budget import budget
from optsched.io.text import aligned, bytes_text, duration, plain
from optsched.kernels.cycle_ratio import cycle_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.report.trace import Executed, RunLog


class Prediction(NamedTuple):
    """Times of one cycle."""

    period_ns: int  # least one of the plan's orders: what a long run needs by these durations
    load_ns: tuple[int, ...]  # durations of the blocks of every device
    chain_ns: int  # the job with the longest iterations, if no device delays it
    chain_job: int  # that job; -1 if no job takes any time

    @property
    def bound_ns(self) -> int:
        """No order of these blocks has a shorter period."""
        return max(*self.load_ns, self.chain_ns)


def predict(plan: ExecutionPlan) -> Prediction:
    """Period and bounds of a plan when it is repeated for ever.

    The period is the maximum cycle ratio of the plan's arcs, those between iterations included, and
    device orders (`optsched.kernels.cycle_ratio`).
    """
    free = cycle_time(plan.graph, None, plan.schedule.offset)
    unit_ns, duration = plan.unit_ns, plan.schedule.duration.tolist()
    jobs = [plan.blocks[i].job for i in free.critical]
    return Prediction(
        period_ns=unit_ns * plan.least_period,
        load_ns=tuple(unit_ns * sum(duration[i] for i in row) for row in plan.sequences),
        chain_ns=unit_ns * free.period if jobs else 0,
        chain_job=jobs[0] if jobs else -1,
    )


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


_LISTED: Final = 24  # blocks of a device


def headline(plan: ExecutionPlan) -> str:
    """Size and kind of a plan."""
    parts = ", ".join(map(str, plan.microbatches[:8])) + ", ..." * (plan.n_jobs > 8)
    how = "rolling"
    if plan.schedule.period is None:
        how = "one iteration, repeated rolling"
    return (
        f"{_many(plan.n_jobs, 'job')} in {_many(plan.n_stages, 'stage')} on "
        f"{_many(len(plan.devices), 'device')}, micro-batches {parts}; {how}"
    )


def explain(plan: ExecutionPlan) -> str:
    """Describe a plan: predicted period, bounds, devices with their blocks."""
    prediction = predict(plan)
    lines = [headline(plan), "", *_period(plan, prediction), ""]
    lines += [line for d in range(len(plan.devices)) for line in _device(plan, prediction, d)]
    return "\n".join(lines)


def _period(plan: ExecutionPlan, prediction: Prediction) -> Iterator[str]:
    busiest = max(range(len(plan.devices)), key=prediction.load_ns.__getitem__)
    gap = prediction.period_ns / prediction.bound_ns - 1 if prediction.bound_ns else 0.0
    yield f"predicted period  {duration(prediction.period_ns)}, {gap:.1%} above the bound"
    yield f"bound             {duration(prediction.bound_ns)}, the larger of"
    yield f"  load            {duration(prediction.load_ns[busiest])} on {_name(plan, busiest)}"
    if prediction.chain_job >= 0:
        yield f"  longest chain   {duration(prediction.chain_ns)} of job {prediction.chain_job}"
    claimed_ns = plan.unit_ns * (plan.schedule.period or 0)
    if claimed_ns > prediction.period_ns:
        yield f"the document claims {duration(claimed_ns)}; its orders allow the shorter period"


def _device(plan: ExecutionPlan, prediction: Prediction, device: int) -> Iterator[str]:
    row = plan.sequences[device]
    share = prediction.load_ns[device] / prediction.period_ns if prediction.period_ns else 0.0
    stages = sorted({plan.blocks[i].stage for i in row})
    on = f"stage{'s' * (len(stages) != 1)} {', '.join(map(str, stages))}" if stages else "nothing"
    yield (
        f"{_name(plan, device)}: {on}, {_many(len(row), 'block')} a cycle, load "
        f"{duration(prediction.load_ns[device])} ({share:.0%})"
    )
    kept = budget(plan, device, {})
    if held := kept.activations + kept.workspace:
        limit = plan.schedule.resources[device].memory
        most = f" of {bytes_text(limit)}" if limit else ""
        yield f"  up to {bytes_text(held)} of activations{most}"
    labels = [_label(plan, i) for i in row[:_LISTED]]
    if len(row) > _LISTED:
        labels.append(f"... and {len(row) - _LISTED} more")
    if labels:
        yield "  " + " ".join(labels)


def _label(plan: ExecutionPlan, operation: int) -> str:
    """``F3.1'`` is the forward of job 3, micro-batch 1; a stroke for every cycle of offset."""
    b = plan.blocks[operation]
    text = f"{b.kind}{b.job}"
    if b.kind != "U" and plan.microbatches[b.job] > 1:
        text += f".{b.microbatch}"
    if plan.copies[b.job] > 1:
        text += f"#{b.copy}"
    crowded = len({plan.blocks[i].stage for i in plan.sequences[b.device]}) > 1
    text += f"@{b.stage}" if crowded else ""
    return text + ("'" * b.offset if b.offset <= 3 else f"'{b.offset}")


def _name(plan: ExecutionPlan, device: int) -> str:
    return plain(plan.devices[device], 24)


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
