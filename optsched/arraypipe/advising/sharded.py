"""Each job in turn on all devices: sharded data parallel (FSDP), sharded tensors, stacked jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from optsched.arraypipe.advising.groups import groupings, longest_first
from optsched.arraypipe.advising.option import Option
from optsched.arraypipe.advising.situation import ladder
from optsched.arraypipe.advising.whole import Way, option, settings
from optsched.io.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.arraypipe.advising.situation import Asked, Costs, Situation

FSDP = "FSDP"
TENSORS = "tensor sharding"
FUSED = "fused"


def sharded_data(situation: Situation) -> Option:
    """Every device has a part of the batch and of the state; layers are gathered when needed.

    Per micro-batch and stage the weights are gathered for F and for B, and the gradients scattered:
    (n - 1)/n of the weights each, over a ring (Rajbhandari et al. 2020, ZeRO stage 3). All of it
    overlaps with computing but the first and the last message.
    """
    return _sharded(situation, FSDP, _data_way, "if messages overlap with computing")


def sharded_tensors(situation: Situation) -> Option:
    """Every device has a part of every layer: a lower bound, as if layers split without loss.

    At least one all-reduce of every stage's output and one of its gradient per micro-batch, each
    2 (n - 1)/n of the bytes over a ring; a transformer layer needs twice as many (Shoeybi et al.
    2019), and a stage has several layers.
    """
    made = _sharded(situation, TENSORS, _tensor_way, "as if every layer split without loss")
    return made if made.seconds is None else replace(made, unsure=">=")


def stacked(situation: Situation, fused: Mapping[int, float] | None) -> Option:
    """Jobs of equal shapes as one job of stacked tensors; only from measured times."""
    shapes = {(one.job.batch_size, one.job.microbatches) for one in situation.jobs}
    if len(shapes) > 1:
        return Option(FUSED, None, "impossible: the jobs' batch shapes differ (vmap, HFTA)", False)
    if len(situation.jobs) < 2:
        return Option(FUSED, None, "needs two jobs or more", None)
    if not fused:
        reason = "never guessed: time a stack of n jobs on one device, give fused={n: seconds}"
        return Option(FUSED, None, reason, None)
    count = len(situation.jobs)
    found: list[tuple[float, int, int]] = []
    least: tuple[int, int] | None = None
    for n, seconds in sorted(fused.items()):
        stacks = -(-count // n)
        each = [situation.own(one).one_device_bytes(one.job.recompute) for one in situation.jobs]
        needed = sum(sorted(each)[-min(n, count) :])
        if situation.fits(needed) is False:
            least = min(least or (needed, n), (needed, n))
            continue
        rounds = -(-stacks // situation.devices) * max(one.iterations for one in situation.jobs)
        found.append((rounds * seconds, n, needed))
    if not found:
        assert least is not None
        assert situation.room is not None
        reason = (
            f"a stack of {least[1]} needs {bytes_text(least[0])}, and there are "
            f"{bytes_text(situation.room)}: measure smaller stacks"
        )
        return Option(FUSED, None, reason, False, least[0])
    time, n, needed = min(found)
    spread = max(situation.own(one).spread for one in situation.jobs)
    reason = f"measured stacks of {n}, one on each device; gradients are not bit-equal"
    return option(FUSED, time * 1e9, reason, situation.fits(needed), needed, spread)


def _sharded(
    situation: Situation,
    name: str,
    way_of: Callable[[Situation, Asked, int, int, bool], Way],
    condition: str,
) -> Option:
    """The best grouping of devices; jobs go to the groups longest first."""
    pairs = groupings(situation.devices, situation.devices)
    if not pairs:
        return Option(name, None, "needs two devices", None)
    found: list[Option] = []
    tight: tuple[int, str] | None = None
    for groups, width in pairs:
        known: dict[tuple[object, ...], Way] = {}
        for asked in situation.jobs:
            if asked.alike not in known:
                known[asked.alike] = _best(situation, asked, width, way_of)
        ways = [known[asked.alike] for asked in situation.jobs]
        worst, job = max(zip(ways, situation.jobs, strict=True), key=lambda pair: pair[0].needed)
        if situation.fits(worst.needed) is False:
            tight = min(tight or (worst.needed, job.job.name), (worst.needed, job.job.name))
            continue
        times = [a.iterations * w.time for a, w in zip(situation.jobs, ways, strict=True)]
        makespan = longest_first(times, groups).makespan
        where = f"on {groups} groups of {width} devices" if groups > 1 else f"over {width} devices"
        reason = f"jobs in turn {where}, {condition}; {settings(ways)}"
        spread = max(way.spread for way in ways)
        fits = situation.fits(worst.needed)
        found.append(option(name, makespan, reason, fits, worst.needed, spread))
    if found:
        return min(found, key=lambda one: one.seconds or 0.0)
    assert tight is not None
    assert situation.room is not None
    reason = (
        f"{tight[1]} needs {bytes_text(tight[0])} on every device, at best, and there are "
        f"{bytes_text(situation.room)}: more devices, or larger ones"
    )
    return Option(name, None, reason, False, tight[0])


def _best(
    situation: Situation,
    asked: Asked,
    width: int,
    way_of: Callable[[Situation, Asked, int, int, bool], Way],
) -> Way:
    """The fastest way that fits; the one of least bytes if none does."""
    ways = [
        way_of(situation, asked, width, m, again)
        for m in ladder(asked.job)
        for again in (False, True)
    ]
    fitting = [way for way in ways if situation.fits(way.needed) is not False]
    if fitting:
        return min(fitting, key=lambda way: (way.time, way.needed))
    return min(ways, key=lambda way: (way.needed, way.time))


def _data_way(situation: Situation, asked: Asked, width: int, m: int, again: bool) -> Way:
    used = min(width, asked.job.batch_size)  # a device without samples does nothing
    costs, link = situation.costs(asked, asked.size(m, used)), situation.link
    ring = [
        ((used - 1) / used * int(w)) * 1e9 / link.bandwidth + (used - 1) * link.latency_ns
        for w in costs.weights
    ]
    micro = max(float(costs.passes(again).sum()), 3 * sum(ring))
    time = m * micro + ring[0] + ring[0] + float(costs.update.sum()) / used
    part = int((costs.state + costs.gradients).sum()) // used
    ahead = 2 * int(costs.weights.max()) + int(costs.gradients.max())
    needed = part + ahead + _held(costs, again)
    return Way(round(time), needed, m, again, costs.spread, costs.predicted)


def _tensor_way(situation: Situation, asked: Asked, width: int, m: int, again: bool) -> Way:
    costs, link = situation.costs(asked, asked.size(m)), situation.link
    sent = int(costs.output.sum() + costs.gradient.sum())
    messages = 2 * len(costs.output) * 2 * (width - 1)
    ring = 2 * (width - 1) / width * sent * 1e9 / link.bandwidth + messages * link.latency_ns
    time = m * (float(costs.passes(again).sum()) / width + ring) + float(costs.update.sum()) / width
    part = int((costs.state + costs.gradients).sum()) // width
    return Way(
        round(time), part + _held(costs, again) // width, m, again, costs.spread, costs.predicted
    )


def _held(costs: Costs, again: bool) -> int:
    """Bytes of one micro-batch through the whole model."""
    if again:
        return int(costs.checkpoint.sum()) + int(costs.workspace.max())
    return int(costs.kept.sum())
