"""One job at a time through a pipeline: 1F1B, interleaved 1F1B and ZB-H1 with the best M."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.analysis.occupancy import peak_memory
from optsched.arraypipe.advising.groups import groupings, longest_first
from optsched.arraypipe.advising.option import Option
from optsched.arraypipe.advising.situation import Seat, ladder, rolling_array, window
from optsched.arraypipe.advising.whole import Way, option, settings
from optsched.errors import InputError
from optsched.io.text import bytes_text
from optsched.pipelines import bubble, interleaved, one_f_one_b, wrapped, zb_h1

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.arraypipe.advising.situation import Asked, Costs, Situation
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray

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
