"""The ways to train jobs: one at a time (a GPU, a pipeline, FSDP), all at once, stacked."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.analysis.occupancy import peak_memory
from optsched.arraypipe.advice.costs import Cut, groupings, longest_first, rolling_array, window
from optsched.arraypipe.advice.options import Option
from optsched.arraypipe.memory.budget import standing
from optsched.io.text import bytes_text
from optsched.pipelines import interleaved, one_f_one_b, wrapped
from optsched.solving.solve import solve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from optsched.arraypipe.advice.costs import Asked, Costs, Situation


_CHUNKS: Final = 2  # stages a device of the interleaved pipeline
_PIPELINE_BLOCKS: Final = 1_000  # of a schedule; more micro-batches only lengthen its rhythm
_TRIES: Final = 3  # fitting schedules that are made, of all numbers of micro-batches
_ARRAY_BLOCKS: Final = 4_000  # of a schedule; more micro-batches are taken to be as fast
_RULES: Final = 60  # list schedules of the dispatch solver
_FINER: Final = (1, 2, 4, 8, 16)  # times the micro-batches, if those of an array do not fit


class Way(NamedTuple):
    """How to run one iteration of a job on a group of devices."""

    time: int  # nanoseconds
    busy: float  # of them a device computes, in the mean
    needed: int  # bytes of the fullest device
    microbatches: int
    recompute: bool
    costs: Costs


def one_at_a_time(situation: Situation) -> list[Option]:
    """One job at a time on a device, through a pipeline, or sharded over devices."""
    devices, stages = situation.devices, situation.n_stages
    found = [_in_turn(situation, "one job per GPU", [(devices, 1)], _alone)]
    for name, most, ways_of, need in (
        ("1F1B", stages, partial(_pipelined, 1), "two stages"),
        ("interleaved", stages // _CHUNKS, partial(_pipelined, _CHUNKS), "four stages"),
        ("FSDP", devices, _sharded, ""),
    ):
        if pairs := groupings(devices, most):
            found.append(_in_turn(situation, name, pairs, ways_of))
        else:
            found.append(Option(name, None, f"needs {need if devices > 1 else 'two devices'}"))
    return found


def _in_turn(
    situation: Situation,
    name: str,
    pairs: Sequence[tuple[int, int]],
    ways_of: Callable[[Situation, Asked, int], Iterable[Way]],
) -> Option:
    """One job at a time on each of some equal groups of devices; the best number of groups."""
    found: list[Option] = []
    misfits: list[Option] = []
    for groups, width in pairs:
        known: dict[tuple[object, ...], Way] = {}
        for asked in situation.jobs:
            if asked.alike not in known:
                known[asked.alike] = _best(situation, ways_of(situation, asked, width))
        ways = [known[asked.alike] for asked in situation.jobs]
        needed, job = max(
            (way.needed, asked.job.name) for way, asked in zip(ways, situation.jobs, strict=True)
        )
        if situation.fits(needed) is False:
            misfits.append(_misfit(situation, name, job, needed))
            continue
        rounds = [asked.iterations for asked in situation.jobs]
        times = [n * way.time for n, way in zip(rounds, ways, strict=True)]
        busy = sum(n * way.busy for n, way in zip(rounds, ways, strict=True))
        time, reason = _side_by_side(times, groups, width)
        if name == "FSDP":
            reason += ", if messages overlap with computing"
        if width > 1:
            reason += f", {1 - busy / sum(times):.0%} idle"
        reason = f"{reason}; {_settings(ways)}"
        spread = max(way.costs.spread for way in ways)
        found.append(_option(situation, name, time, reason, needed, spread))
    if found:
        return min(found, key=lambda option: option.seconds or 0.0)
    return min(misfits, key=lambda option: option.needed or 0)


def _side_by_side(times: Sequence[int], groups: int, width: int) -> tuple[int, str]:
    """Nanoseconds until all groups are done, and in words where jobs run.

    Longest first. If that leaves loads uneven, jobs move on the way: the mean load or the longest
    job is reached when at most ``groups - 1`` of them do, each once (McNaughton 1959).
    """
    text = "jobs in turn"
    if width > 1:
        text += (
            f" on {groups} groups of {width} devices" if groups > 1 else f" over {width} devices"
        )
    rows = longest_first(times, groups)
    still = max(sum(times[j] for j in row) for row in rows)
    even = max(*times, -(-sum(times) // groups))
    if still <= 1.01 * even:
        return still, text
    movers = "one job moves" if groups == 2 else f"up to {groups - 1} jobs move"
    return even, f"{text}; {movers} once, by checkpoint (else {still / 1e9:.4g})"


def _best(situation: Situation, ways: Iterable[Way]) -> Way:
    """The fastest way that fits; the one of least bytes if none does."""

    def key(way: Way) -> tuple[int, int, int]:
        if situation.fits(way.needed) is False:
            return 1, way.needed, way.time
        return 0, way.time, way.needed

    return min(ways, key=key)


def _settings(ways: Sequence[Way]) -> str:
    """Micro-batches and recomputation of some jobs, in words."""
    counts = sorted({way.microbatches for way in ways})
    said = f"M = {counts[0]}" + (f"..{counts[-1]}" if len(counts) > 1 else "")
    again = sum(way.recompute for way in ways)
    if again:
        said += ", with recomputation" + ("" if again == len(ways) else f" in {again} jobs")
    if any(way.costs.predicted for way in ways):
        said += ", block times partly predicted"
    return said


def _option(
    situation: Situation, name: str, time: float, reason: str, needed: int, spread: float
) -> Option:
    """An option that is possible, from nanoseconds and their relative error."""
    seconds = time / 1e9
    return Option(name, seconds, reason, situation.fits(needed), needed, spread * seconds)


def _misfit(situation: Situation, name: str, what: str, needed: int, helps: str = "") -> Option:
    """An option for which devices are too small."""
    assert situation.room is not None
    reason = (
        f"{what} needs {bytes_text(needed)} on a device, at best, and there are "
        f"{bytes_text(situation.room)}: {helps or 'cut it over more devices, or take larger ones'}"
    )
    return Option(name, None, reason, False, needed)


# one job at a time: ways to run an iteration on `width` devices


def _alone(situation: Situation, asked: Asked, width: int) -> Iterator[Way]:
    """On one device."""
    for m, again in product(asked.microbatches, (False, True)):
        costs = situation.costs(asked, asked.size(m))
        time = costs.one_device(m, again)
        yield Way(time, time, costs.one_device_bytes(again), m, again, costs)


def _sharded(situation: Situation, asked: Asked, width: int) -> Iterator[Way]:
    """Every device has a part of the batch and of the state; layers are gathered when needed.

    Per micro-batch and stage the weights are gathered for F and for B, and the gradients scattered:
    (n - 1)/n of the weights each, over a ring (Rajbhandari et al. 2020, ZeRO stage 3). All of it
    overlaps with computing but the first and the last message.
    """
    link, used = situation.link, min(width, asked.job.batch_size)  # the others have no samples
    for m, again in product(asked.microbatches, (False, True)):
        costs = situation.costs(asked, asked.size(m, used))
        ring = [
            (used - 1) / used * int(w) * 1e9 / link.bandwidth + (used - 1) * link.latency_ns
            for w in costs.weights
        ]
        computing, update = int(costs.passes(again).sum()), int(costs.update.sum()) / used
        time = m * max(computing, 3 * sum(ring)) + 2 * ring[0] + update
        part = int((costs.state + costs.gradients).sum()) // used
        ahead = 2 * int(costs.weights.max()) + int(costs.gradients.max())
        needed = part + ahead + costs.activations(again)
        busy = (m * computing + update) * used / width
        yield Way(round(time), busy, needed, m, again, costs)


def _pipelined(chunks: int, situation: Situation, asked: Asked, width: int) -> Iterator[Way]:
    """Iteration after iteration through a pipeline: the most promising ways, until some fit."""
    cuts = situation.cuts(width * chunks)
    device = np.arange(width * chunks) % width
    tried = []
    for m, again in product(asked.microbatches, (False, True)):
        if chunks > 1 and m % max(1, m // width):  # no groups of equal size
            continue
        costs = situation.costs(asked, asked.size(m)).merged(cuts)
        rhythm = int(np.bincount(device, costs.passes(again)).max())
        # with the published bubble, which is that of equal stages
        tried.append(((m + (width - 1) / chunks) * rhythm, m, again, rhythm, costs))
    fitting = 0
    for _, m, again, rhythm, costs in sorted(tried, key=lambda row: row[:3]):
        shown = min(m, max(_PIPELINE_BLOCKS // len(device), 2 * width) // width * width)
        array = rolling_array(
            situation,
            [Cut(asked._replace(iterations=1), costs, shown, again)],
            place=wrapped(width, chunks),
            update_mode="global" if asked.job.update == "global" else "block",
        )
        schedule = one_f_one_b(array) if chunks == 1 else interleaved(array)
        held = np.bincount(device, costs.state + costs.gradients + window([costs]))
        needed = max(int(held[d]) + peak_memory(schedule, d) for d in range(width))
        time = (schedule.period or 0) + (m - shown) * rhythm
        yield Way(time, costs.one_device(m, again) / width, needed, m, again, costs)
        fitting += situation.fits(needed) is not False
        if fitting == _TRIES:
            return


# all jobs at once


class Rolling(NamedTuple):
    """An array on a group of devices, or several sets of jobs there, one after the other."""

    time: float  # nanoseconds a round
    needed: int  # bytes of the fullest device
    bounds: dict[str, float]
    spread: float
    changed: str = ""  # what is not as the jobs are set, in words


def job_array(situation: Situation) -> Option:
    """All jobs at once; several arrays side by side if there are more devices than stages."""
    width = min(situation.n_stages, situation.devices)
    groups = min(situation.devices // width, len(situation.jobs))
    cuts = situation.cuts(width)
    found: list[Rolling] = []
    for row in longest_first([situation.work(one) for one in situation.jobs], groups):
        one = _group(situation, [situation.jobs[j] for j in row], cuts)
        if one is None:
            return _array_misfit(situation, cuts)
        found.append(one)
    slowest = max(found, key=lambda one: one.time)
    bounds = ", ".join(f"{key} {value / 1e9:.4g}" for key, value in slowest.bounds.items())
    side = f"{groups} arrays of {width} devices; " if groups > 1 else ""
    reason = f"{side}quick schedule, rolling; bounds: {bounds}{slowest.changed}"
    needed, spread = max(one.needed for one in found), max(one.spread for one in found)
    return _option(situation, "job array", slowest.time, reason, needed, spread)


def _group(situation: Situation, jobs: Sequence[Asked], cuts: Sequence[int]) -> Rolling | None:
    """The fastest way that fits; None if not even a job alone does.

    As the jobs are set. If that does not fit, with recomputation or smaller micro-batches, or in
    sets of jobs, one trained after the other; more sets are tried while that is faster.
    """
    best: Rolling | None = None
    for count in range(1, len(jobs) + 1):
        size = -(-len(jobs) // count)  # jobs are sorted: those of a set are alike
        sets = [jobs[k : k + size] for k in range(0, len(jobs), size)]
        found: list[Rolling] = []
        for finer, again in product(_FINER, (False, True)):
            if found and not again:
                break
            made = _sets(situation, sets, cuts, finer, again)
            found += [made] if made is not None else []
        fastest = min(found, key=lambda one: one.time, default=None)
        if best is not None and (fastest is None or fastest.time >= best.time):
            return best
        best = fastest
        if best is not None and not best.changed:
            return best
    return best


def _sets(
    situation: Situation,
    sets: Sequence[Sequence[Asked]],
    cuts: Sequence[int],
    finer: int,
    again: bool,
) -> Rolling | None:
    """Sets of jobs, one after the other; None if one does not fit."""
    known: dict[tuple[object, ...], Rolling] = {}
    parts: list[Rolling] = []
    for jobs in sets:
        key = tuple((asked.alike, asked.iterations) for asked in jobs)
        made = known.get(key) or _rolling(
            situation, [_cut(situation, asked, cuts, finer, again) for asked in jobs]
        )
        if made is None:
            return None
        known[key] = made
        parts.append(made)
    changed = f"; {len(sets)} sets of jobs, one trained after the other" if len(sets) > 1 else ""
    changed += "; all jobs recompute" if again else ""
    changed += f"; {finer}x as many micro-batches" if finer > 1 else ""
    return Rolling(
        sum(part.time for part in parts),
        max(part.needed for part in parts),
        {key: sum(part.bounds[key] for part in parts) for key in parts[0].bounds},
        max(part.spread for part in parts),
        changed,
    )


def _cut(situation: Situation, asked: Asked, cuts: Sequence[int], finer: int, again: bool) -> Cut:
    """A job in the array's stages."""
    count = min(finer * asked.job.microbatches, asked.job.batch_size)
    costs = situation.costs(asked, asked.size(count)).merged(cuts)
    return Cut(asked, costs, count, again or asked.job.recompute)


def _rolling(situation: Situation, jobs: Sequence[Cut]) -> Rolling | None:
    """The best of the dispatching rules, all states on the devices; None if none fits."""
    costs, load = [one.costs for one in jobs], _load(jobs)
    # with one micro-batch and a fused update a gradient lives in its own block only
    alone = all(one.microbatches == 1 and one.asked.job.update == "fused" for one in jobs)
    states, gradients = (
        np.array([getattr(one, key) for one in costs]) for key in ("state", "gradients")
    )
    held = standing(states, gradients, alone) + window(costs)
    if situation.room is not None and held.max() >= situation.room:
        return None
    most = max(4, _ARRAY_BLOCKS // (2 * len(jobs) * len(held)))
    shown = [one._replace(microbatches=min(one.microbatches, most)) for one in jobs]
    array = rolling_array(situation, shown)
    known = array.bounds()
    if situation.room is not None:
        array = array.replace(memory=(situation.room - held).tolist())
    schedule = solve(array, "dispatch", iterations=_RULES).schedule
    if schedule is None or schedule.period is None:
        return None
    scale = load / _load(shown)
    needed = max(int(held[d]) + peak_memory(schedule, d) for d in range(len(held)))
    bounds = {"load": known["load"] * scale, "chain": max(known["chain"], known["lap"]) * scale}
    return Rolling(schedule.period * scale, needed, bounds, max(one.spread for one in costs))


def _load(jobs: Sequence[Cut]) -> int:
    """Nanoseconds of a round on the busiest device."""
    work = [
        one.asked.iterations
        * (one.microbatches * one.costs.passes(one.recompute) + one.costs.update)
        for one in jobs
    ]
    return int(np.sum(work, axis=0).max())


def _array_misfit(situation: Situation, cuts: Sequence[int]) -> Option:
    """The job that needs most even alone, recomputed, in its smallest micro-batches."""
    tight = []
    for asked in situation.jobs:
        one = _cut(situation, asked, cuts, _FINER[-1], True).costs
        held = one.state + one.gradients + one.checkpoint + one.workspace + window([one])
        tight.append((int(held.max()), asked.job.name))
    needed, job = max(tight)
    return _misfit(situation, "job array", job, needed)


# jobs stacked on a device


def stacked(situation: Situation, fused: Mapping[int, float] | None) -> Option:
    """Jobs of equal shapes as one job of stacked tensors; only from measured times."""
    name, jobs = "fused", situation.jobs
    if len({(one.job.batch_size, one.job.microbatches) for one in jobs}) > 1:
        return Option(name, None, "impossible: the jobs' batch shapes differ (vmap, HFTA)", False)
    if len(jobs) < 2:
        return Option(name, None, "needs two jobs or more")
    if not fused:
        reason = "never guessed: time a stack of n jobs on one device, give fused={n: seconds}"
        return Option(name, None, reason)
    each = sorted(situation.own(one).one_device_bytes(one.job.recompute) for one in jobs)
    found, misfits = [], []
    for n, seconds in sorted(fused.items()):
        needed = sum(each[-n:])
        if situation.fits(needed) is False:
            helps = "measure smaller stacks"
            misfits.append(_misfit(situation, name, f"a stack of {n}", needed, helps))
            continue
        stacks = -(-len(jobs) // n)
        rounds = -(-stacks // situation.devices) * max(one.iterations for one in jobs)
        reason = f"measured stacks of {n}, one on each device; gradients are not bit-equal"
        spread = max(situation.own(one).spread for one in jobs)
        found.append(_option(situation, name, rounds * seconds * 1e9, reason, needed, spread))
    return min(found, key=lambda one: one.seconds or 0.0) if found else misfits[0]
