"""What an array competes with: a job a device, pipelines of one job, sharded and stacked jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.analysis.occupancy import peak_memory
from optsched.arraypipe.advice.costs import (
    Seat,
    groupings,
    ladder,
    longest_first,
    moved,
    rolling_array,
    window,
)
from optsched.arraypipe.advice.options import Option
from optsched.errors import InputError
from optsched.io.text import bytes_text
from optsched.pipelines import bubble, interleaved, one_f_one_b, wrapped, zb_h1

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from optsched.arraypipe.advice.costs import Asked, Costs, Situation
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


NAME = "one job per GPU"


class Way(NamedTuple):
    """How to run one iteration of a job: nanoseconds, bytes of the fullest device, settings."""

    time: int
    needed: int
    microbatches: int
    recompute: bool
    spread: float
    predicted: bool


def one_per_device(situation: Situation) -> list[Option]:
    """Every job on a device of its own, the next one when a device is free."""
    ways = [best_alone(situation, asked) for asked in situation.jobs]
    tight = max(zip(ways, situation.jobs, strict=True), key=lambda pair: pair[0].needed)
    needed = tight[0].needed
    if situation.fits(needed) is False:
        assert situation.room is not None
        reason = (
            f"{tight[1].job.name} needs {bytes_text(needed)} on one device, at best, and there are "
            f"{bytes_text(situation.room)}: cut it over {-(-needed // max(1, situation.room))} "
            "devices or more"
        )
        return [Option(NAME, None, reason, False, needed)]
    times = [one.iterations * w.time for one, w in zip(situation.jobs, ways, strict=True)]
    found = longest_first(times, situation.devices)
    spread = max(way.spread for way in ways)
    fits = situation.fits(needed)
    split = settings(ways)
    text = f"no bubbles, no messages; LPT of {len(times)} jobs, bound {found.bound / 1e9:.4g}"
    options = [option(NAME, found.makespan, f"{text}; {split}", fits, needed, spread)]
    best = moved(times, situation.devices)
    if found.makespan > 1.01 * best:
        most = situation.devices - 1
        movers = "one job changes" if most == 1 else f"up to {most} jobs change"
        text = f"as above, but {movers} devices once, by checkpoint"
        options.append(option(f"{NAME}, moved", best, text, fits, needed, spread))
    return options


def best_alone(situation: Situation, asked: Asked) -> Way:
    """The fastest way that fits one device; the one of least bytes if none does."""
    ways = [
        Way(
            costs.one_device(m, recompute),
            costs.one_device_bytes(recompute),
            m,
            recompute,
            costs.spread,
            costs.predicted,
        )
        for m in ladder(asked.job)
        if (costs := situation.costs(asked, asked.size(m)))
        for recompute in (False, True)
    ]
    fitting = [way for way in ways if situation.fits(way.needed) is not False]
    if not fitting:
        return min(ways, key=lambda way: (way.needed, way.time))
    own = asked.job.microbatches
    return min(fitting, key=lambda way: (way.time, way.microbatches != own, way.needed))


def settings(ways: Sequence[Way]) -> str:
    """Micro-batches and recomputation of some jobs, in words."""
    said = f"M = {_range(way.microbatches for way in ways)}"
    count = sum(way.recompute for way in ways)
    if count:
        said += ", with recomputation" + ("" if count == len(ways) else f" in {count} jobs")
    if any(way.predicted for way in ways):
        said += ", block times partly predicted"
    return said


def option(
    name: str, time: float, reason: str, fits: bool | None, needed: int, spread: float
) -> Option:
    """An option from nanoseconds and a relative error."""
    return Option(name, time / 1e9, reason, fits, needed, spread * time / 1e9)


def _range(values: Iterable[int]) -> str:
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]}..{found[-1]}"


CHUNKS: Final = 2
"""Stages a device of the interleaved pipeline."""

_BLOCKS: Final = 1024  # of a schedule that is made; more micro-batches only lengthen its rhythm
_TRIES: Final = 3  # fitting schedules that are made, of all numbers of micro-batches


class Kind(NamedTuple):
    """A hand-made pipeline: its name in tables and in `optsched.pipelines`, and who makes it."""

    title: str
    name: str
    make: Callable[[JobArray], Schedule]
    chunks: int
    halves: bool


KINDS: Final = (
    Kind("1F1B", "one_f_one_b", one_f_one_b, 1, False),
    Kind("interleaved", "interleaved", interleaved, CHUNKS, False),
    Kind("ZB-H1", "zb_h1", zb_h1, 1, True),
)


def one_at_a_time(situation: Situation) -> list[Option]:
    """Every hand-made pipeline, each with as many equal groups of devices as is best."""
    return [_option(situation, kind) for kind in KINDS]


def _option(situation: Situation, kind: Kind) -> Option:
    most = situation.n_stages // kind.chunks
    pairs = groupings(situation.devices, most)
    if not pairs:
        need = "two devices" if situation.devices < 2 else f"{2 * kind.chunks} stages or more"
        return Option(kind.title, None, f"needs {need}", None)
    found: list[Option] = []
    tight: tuple[Way, Asked, int] | None = None
    for groups, width in pairs:
        known: dict[tuple[object, ...], Way] = {}
        for asked in situation.jobs:
            if asked.alike not in known:
                known[asked.alike] = best_way(situation, asked, kind, width)
        ways = [known[asked.alike] for asked in situation.jobs]
        worst, job = max(zip(ways, situation.jobs, strict=True), key=lambda pair: pair[0].needed)
        if situation.fits(worst.needed) is False:
            if tight is None or worst.needed < tight[0].needed:
                tight = worst, job, width
            continue
        times = [a.iterations * w.time for a, w in zip(situation.jobs, ways, strict=True)]
        makespan = longest_first(times, groups).makespan
        fits, spread = situation.fits(worst.needed), max(way.spread for way in ways)
        reason = f"{_layout(situation, kind, groups, width, ways)}; {settings(ways)}"
        made = option(kind.title, makespan, reason, fits, worst.needed, spread)
        if kind.halves:
            reason += (
                "; if the backward pass split in equal halves (our executor does not split it)"
            )
            made = replace(made, reason=reason, unsure="~")
        found.append(made)
    if found:
        return min(found, key=lambda one: one.seconds or 0.0)
    assert tight is not None
    return _misfit(situation, kind, *tight)


def best_way(situation: Situation, asked: Asked, kind: Kind, width: int) -> Way:
    """The fastest way of one job that fits; the one of least bytes if none does.

    The published formulas say in which order numbers of micro-batches are tried.
    """
    cuts = situation.cuts(width * kind.chunks)
    tried: list[tuple[float, int, int, bool, Costs]] = []
    for m in ladder(asked.job, width):
        costs = situation.costs(asked, asked.size(m)).merged(cuts)
        for again in (False,) if kind.halves else (False, True):
            tried.append((_formula(kind, costs, width, m, again), len(tried), m, again, costs))
    fitting: list[Way] = []
    least: Way | None = None
    refusal: InputError | None = None
    for _, _, m, again, costs in sorted(tried):
        try:
            way = _measured(situation, Seat(asked, costs, m, again), kind, width)
        except InputError as error:  # interleaved: they do not fall into equal groups
            refusal = error
            continue
        if situation.fits(way.needed) is not False:
            fitting.append(way)
        elif least is None or way.needed < least.needed:
            least = way
        if len(fitting) == _TRIES:
            break
    if fitting:
        return min(fitting, key=lambda way: (way.time, way.needed))
    if least is None:  # M = 1, at least, is legal everywhere: the times are too long to add
        assert refusal is not None
        raise refusal
    return least


def _formula(kind: Kind, costs: Costs, width: int, m: int, again: bool) -> float:
    """Nanoseconds of an iteration by the published bubble, for stages as long as the longest."""
    device = np.arange(len(costs.forward)) % width
    both = [costs.forward, costs.backward + costs.recompute if again else costs.backward]
    forward, backward = (int(np.bincount(device, time).max()) for time in both)
    weight = backward // 2 if kind.halves else None
    times = {"forward": forward, "backward": backward - (weight or 0), "weight": weight}
    try:
        idle = bubble(kind.name, stages=width, micro_batches=m, chunks=kind.chunks, **times)  # type: ignore[arg-type]
    except InputError:  # not published for this number
        idle = bubble("one_f_one_b", stages=width, micro_batches=m)
    return float(m * (forward + backward) / (1 - idle))


def _measured(situation: Situation, seat: Seat, kind: Kind, width: int) -> Way:
    """The period and the bytes of the schedule of one job, iteration after iteration."""
    costs, stages = seat.costs, width * kind.chunks
    most = max(_BLOCKS // stages, 2 * width) // width * width
    shown = min(seat.microbatches, most)
    one = [seat._replace(asked=seat.asked._replace(iterations=1), microbatches=shown)]
    # a fused update holds up the gradient behind it on every stage, a block of its own on none
    modes = ("global",) if seat.asked.job.update == "global" else ("fused", "block")
    schedules = [
        kind.make(
            rolling_array(
                situation, one, halves=kind.halves, place=wrapped(width, kind.chunks),
                update_mode=mode,
            )
        )
        for mode in modes
    ]  # fmt: skip
    schedule = min(schedules, key=lambda made: made.period or 0)
    assert schedule.period is not None
    device = np.arange(stages) % width
    rhythm = int(np.bincount(device, costs.passes(seat.recompute)).max())
    held = np.bincount(device, costs.state + costs.gradients + window([costs]))
    needed = max(int(held[d]) + peak_memory(schedule, d) for d in range(width))
    time = schedule.period + (seat.microbatches - shown) * rhythm
    return Way(time, needed, seat.microbatches, seat.recompute, costs.spread, costs.predicted)


def _layout(situation: Situation, kind: Kind, groups: int, width: int, ways: list[Way]) -> str:
    """How many pipelines, and how idle they are."""
    where = f"{groups} pipelines of {width} devices, jobs in turn" if groups > 1 else "jobs in turn"
    busy = total = 0.0
    cuts = situation.cuts(width * kind.chunks)
    for asked, way in zip(situation.jobs, ways, strict=True):
        costs = situation.costs(asked, asked.size(way.microbatches)).merged(cuts)
        busy += asked.iterations * costs.one_device(way.microbatches, way.recompute)
        total += asked.iterations * width * way.time
    return f"{where}, {1 - busy / total:.0%} idle"


def _misfit(situation: Situation, kind: Kind, way: Way, asked: Asked, width: int) -> Option:
    assert situation.room is not None
    reason = (
        f"{asked.job.name} on {width} devices needs {bytes_text(way.needed)} on the fullest one, "
        f"at best, and there are {bytes_text(situation.room)}: more devices and stages, or a "
        "larger device"
    )
    return Option(kind.title, None, reason, False, way.needed)


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
