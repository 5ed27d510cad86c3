"""One job per device: does it fit, how long does it take, which job runs where."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optsched.arraypipe.advising.groups import longest_first, moved
from optsched.arraypipe.advising.option import Option
from optsched.arraypipe.advising.situation import ladder
from optsched.io.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.arraypipe.advising.situation import Asked, Situation

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
