"""A plan as text: predicted period, orders of the devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.arraypipe.memory.budget import budget
from optsched.io.text import bytes_text, duration, plain
from optsched.kernels.cycle_ratio import cycle_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.arraypipe.plan.plan import ExecutionPlan


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
