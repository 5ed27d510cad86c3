"""The ways to train jobs: one at a time (a GPU, a pipeline, FSDP), all at once, stacked."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.analysis.occupancy import peak_memory
from optsched.arraypipe.advice.options import Option
from optsched.arraypipe.advice.situation import (
    Cut,
    groupings,
    load_ns,
    longest_first,
    rolling_array,
    window,
)
from optsched.arraypipe.memory.budget import standing
from optsched.io.text import bytes_text
from optsched.pipelines import interleaved, one_f_one_b, wrapped
from optsched.solving.solve import solve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from optsched.arraypipe.advice.situation import Asked, Situation


_CHUNKS: Final = 2  # stages a device of the interleaved pipeline
_PIPELINE_BLOCKS: Final = 1_000  # of a schedule; more micro-batches only lengthen its rhythm
_TRIES: Final = 3  # fitting schedules that are made, of all numbers of micro-batches
_ARRAY_BLOCKS: Final = 4_000  # of a schedule; more micro-batches are taken to be as fast
_RULES: Final = 60  # list schedules of the dispatch solver
_FINER: Final = (1, 2, 4, 8, 16)  # times the micro-batches, if those of an array do not fit


class Way(NamedTuple):
    """How to run one iteration of a job on a group of devices."""

    time_ns: int
    needed: int  # bytes of the fullest device
    busy_ns: float  # in which a device computes, in the mean
    microbatches: int
    recompute: bool
    size: int  # of the largest micro-batch


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
    jobs = situation.jobs

    def slowness(way: Way) -> tuple[float, ...]:
        return (0, *way) if way.needed <= situation.room else (1, way.needed)

    for groups, width in pairs:
        best = {one: min(ways_of(situation, one, width), key=slowness) for one in set(jobs)}
        ways = [best[asked] for asked in jobs]
        needed, job = max(zip([way.needed for way in ways], situation.names, strict=True))
        if needed > situation.room:
            found.append(_misfit(situation, name, job, needed))
            continue
        times_ns = [asked.iterations * way.time_ns for asked, way in zip(jobs, ways, strict=True)]
        time_ns, reason = _side_by_side(times_ns, groups, width)
        if name == "FSDP":
            reason += ", if messages overlap with computing"
        if width > 1:
            busy_ns = sum(
                asked.iterations * way.busy_ns for asked, way in zip(jobs, ways, strict=True)
            )
            reason += f", {1 - busy_ns / sum(times_ns):.0%} idle"
        spread = max(situation.spread(asked, w.size) for asked, w in zip(jobs, ways, strict=True))
        reason = f"{reason}; {_settings(situation, ways)}"
        found.append(_option(situation, name, time_ns, reason, needed, spread))
    return _fastest(found)


def _side_by_side(times_ns: Sequence[int], groups: int, width: int) -> tuple[int, str]:
    """Time until all groups are done, and in words where jobs run.

    Longest first. If that leaves loads uneven, jobs move on the way: the mean load or the longest
    job is reached when at most ``groups - 1`` of them do, each once (McNaughton 1959).
    """
    text = "jobs in turn"
    if width > 1:
        text += (
            f" on {groups} groups of {width} devices" if groups > 1 else f" over {width} devices"
        )
    still_ns = max(sum(times_ns[j] for j in row) for row in longest_first(times_ns, groups))
    even_ns = max(*times_ns, -(-sum(times_ns) // groups))
    if still_ns <= 1.01 * even_ns:
        return still_ns, text
    movers = "one job moves" if groups == 2 else f"up to {groups - 1} jobs move"
    return even_ns, f"{text}; {movers} once, by checkpoint (else {still_ns / 1e9:.4g})"


def _settings(situation: Situation, ways: Sequence[Way]) -> str:
    """Micro-batches and recomputation of the jobs, in words."""
    counts = sorted({way.microbatches for way in ways})
    said = f"M = {counts[0]}" + (f"..{counts[-1]}" if len(counts) > 1 else "")
    again = sum(way.recompute for way in ways)
    if again:
        said += ", with recomputation" + ("" if again == len(ways) else f" in {again} jobs")
    sizes = map(situation.profile.sizes, [one.job.precision for one in situation.jobs])
    if any(way.size not in known for way, known in zip(ways, sizes, strict=True)):
        said += ", block times partly predicted"
    return said


def _option(
    situation: Situation, name: str, time_ns: float, reason: str, needed: int, spread: float
) -> Option:
    """An option that is possible, from its time and the relative error of that."""
    seconds, fits = time_ns / 1e9, True if situation.memory else None
    return Option(name, seconds, reason, fits, needed, spread * seconds)


def _misfit(situation: Situation, name: str, what: str, needed: int, helps: str = "") -> Option:
    """An option for which devices are too small."""
    there, helps = int(situation.room), helps or "cut it over more devices, or take larger ones"
    reason = (
        f"{what} needs {bytes_text(needed)} on a device, at best, and there are "
        f"{bytes_text(there)}: {helps}"
    )
    return Option(name, None, reason, False, needed)


# one job at a time: ways to run an iteration on `width` devices


def _alone(situation: Situation, asked: Asked, width: int) -> Iterator[Way]:
    """On one device."""
    for m, again in product(asked.microbatches, (False, True)):
        costs = situation.costs(asked, size := asked.size(m))
        time_ns = costs.one_device_ns(m, again)
        yield Way(time_ns, costs.one_device_bytes(again), time_ns, m, again, size)


def _sharded(situation: Situation, asked: Asked, width: int) -> Iterator[Way]:
    """Every device has a part of the batch and of the state; layers are gathered when needed.

    Per micro-batch and stage the weights are gathered for F and for B, and the gradients scattered:
    (n - 1)/n of the weights each, over a ring (Rajbhandari et al. 2020, ZeRO stage 3). All of it
    overlaps with computing but the first and the last message.
    """
    link, used = situation.link, min(width, asked.job.batch_size)  # the others have no samples
    for m, again in product(asked.microbatches, (False, True)):
        costs = situation.costs(asked, size := asked.size(m, used))
        ring_ns = [
            (used - 1) / used * int(w) * 1e9 / link.bandwidth + (used - 1) * link.latency_ns
            for w in costs.weights
        ]
        computing_ns, update_ns = (
            int(costs.passes_ns(again).sum()),
            int(costs.update_ns.sum()) / used,
        )
        time_ns = m * max(computing_ns, 3 * sum(ring_ns)) + 2 * ring_ns[0] + update_ns
        part = int((costs.state + costs.gradients).sum()) // used
        ahead = 2 * int(costs.weights.max()) + int(costs.gradients.max())
        busy_ns = (m * computing_ns + update_ns) * used / width
        yield Way(round(time_ns), part + ahead + costs.activations(again), busy_ns, m, again, size)


def _pipelined(chunks: int, situation: Situation, asked: Asked, width: int) -> Iterator[Way]:
    """Iteration after iteration through a pipeline: the most promising ways, until some fit."""
    cuts = situation.cuts(width * chunks)
    device = np.arange(width * chunks) % width
    tried = []
    for m, again in product(asked.microbatches, (False, True)):
        if chunks > 1 and m % max(1, m // width):  # no groups of equal size
            continue
        one = Cut(asked._replace(iterations=1), situation.costs(asked, asked.size(m)), m, again)
        one = situation.merged(one, cuts)
        rhythm_ns = int(np.bincount(device, one.costs.passes_ns(again)).max())
        # with the published bubble, which is that of equal stages
        tried.append(((m + (width - 1) / chunks) * rhythm_ns, m, again, rhythm_ns, one))
    fitting = 0
    for _, m, again, rhythm_ns, one in sorted(tried, key=lambda row: row[:3]):
        shown = min(m, max(_PIPELINE_BLOCKS // len(device), 2 * width) // width * width)
        array = rolling_array(
            situation,
            [one._replace(microbatches=shown)],
            place=wrapped(width, chunks),
            update_mode="global" if asked.job.update == "global" else "block",
        )
        schedule = one_f_one_b(array) if chunks == 1 else interleaved(array)
        costs = one.costs
        held = np.bincount(device, costs.state + costs.gradients + window([costs]))
        needed = max(int(held[d]) + peak_memory(schedule, d) for d in range(width))
        time_ns = (schedule.period or 0) + (m - shown) * rhythm_ns
        yield Way(time_ns, needed, costs.one_device_ns(m, again) / width, m, again, asked.size(m))
        fitting += needed <= situation.room
        if fitting == _TRIES:
            return


# all jobs at once


class Rolling(NamedTuple):
    """An array on a group of devices, or several sets of jobs there, one after the other."""

    time_ns: float  # a round
    needed: int  # bytes of the fullest device
    load_ns: float  # bounds
    chain_ns: float
    changed: str = ""  # what is not as the jobs are set, in words


def job_array(situation: Situation) -> Option:
    """All jobs at once; several arrays side by side if there are more devices than stages."""
    width = min(situation.n_stages, situation.devices)
    groups = min(situation.devices // width, len(situation.jobs))
    cuts = situation.cuts(width)
    found: list[Rolling] = []
    own = [situation.own(one) for one in situation.jobs]
    for row in longest_first([int(load_ns([one]).sum()) for one in own], groups):
        one = _group(situation, [situation.jobs[j] for j in row], cuts)
        if one is None:
            return _array_misfit(situation, cuts)
        found.append(one)
    slowest = max(found, key=lambda one: one.time_ns)
    side = f"{groups} arrays of {width} devices; " if groups > 1 else ""
    reason = (
        f"{side}quick schedule, rolling; bounds: load {slowest.load_ns / 1e9:.4g}, "
        f"chain {slowest.chain_ns / 1e9:.4g}{slowest.changed}"
    )
    spread = max(situation.spread(one, one.job.batch) for one in situation.jobs)
    needed = max(one.needed for one in found)
    return _option(situation, "job array", slowest.time_ns, reason, needed, spread)


def _group(situation: Situation, jobs: Sequence[Asked], cuts: Sequence[int]) -> Rolling | None:
    """The fastest way that fits; None if not even a job alone does.

    As the jobs are set. If that does not fit, with recomputation or smaller micro-batches, or in
    sets of jobs, one trained after the other; more sets are tried while that is faster.
    """

    @cache
    def rolling(jobs: tuple[Asked, ...], finer: int, again: bool) -> Rolling | None:
        return _rolling(situation, [_cut(situation, one, cuts, finer, again) for one in jobs])

    best: Rolling | None = None
    for count in range(1, len(jobs) + 1):
        size = -(-len(jobs) // count)  # jobs are sorted: those of a set are alike
        sets = [tuple(jobs[k : k + size]) for k in range(0, len(jobs), size)]
        found: list[Rolling] = []
        for finer, again in product(_FINER, (False, True)):
            if found and not again:
                break
            parts = [part for one in sets if (part := rolling(one, finer, again)) is not None]
            if len(parts) < len(sets):
                continue
            changed = f"; {len(sets)} sets of jobs, one trained after the other" * (len(sets) > 1)
            changed += "; all jobs recompute" * again
            changed += f"; {finer}x as many micro-batches" * (finer > 1)
            times_ns, needed, loads_ns, chains_ns, _ = zip(*parts, strict=True)
            found.append(
                Rolling(sum(times_ns), max(needed), sum(loads_ns), sum(chains_ns), changed)
            )
        fastest = min(found, key=lambda one: one.time_ns, default=None)
        if best is not None and (fastest is None or fastest.time_ns >= best.time_ns):
            return best
        best = fastest
        if best is not None and not best.changed:
            return best
    return best


def _cut(situation: Situation, asked: Asked, cuts: Sequence[int], finer: int, again: bool) -> Cut:
    """A job in the array's stages."""
    count = min(finer * asked.job.microbatches, asked.job.batch_size)
    costs = situation.costs(asked, asked.size(count))
    return situation.merged(Cut(asked, costs, count, again or asked.job.recompute), cuts)


def _rolling(situation: Situation, jobs: Sequence[Cut]) -> Rolling | None:
    """The best of the dispatching rules, all states on the devices; None if none fits."""
    costs, busiest_ns = [one.costs for one in jobs], load_ns(jobs).max()
    # with one micro-batch and a fused update a gradient lives in its own block only
    alone = all(one.microbatches == 1 and one.asked.job.update == "fused" for one in jobs)
    states, gradients = (
        np.array([getattr(one, key) for one in costs]) for key in ("state", "gradients")
    )
    held = standing(states, gradients, alone) + window(costs)
    if held.max() >= situation.room:
        return None
    most = max(4, _ARRAY_BLOCKS // (2 * len(jobs) * len(held)))
    shown = [one._replace(microbatches=min(one.microbatches, most)) for one in jobs]
    array = rolling_array(situation, shown)
    known = array.bounds()
    if situation.memory:
        array = array.replace(memory=(int(situation.room) - held).tolist())
    schedule = solve(array, "dispatch", iterations=_RULES).schedule
    if schedule is None or schedule.period is None:
        return None
    scale = busiest_ns / load_ns(shown).max()
    needed = max(int(held[d]) + peak_memory(schedule, d) for d in range(len(held)))
    chain_ns = max(known["chain"], known["lap"])
    return Rolling(schedule.period * scale, needed, known["load"] * scale, chain_ns * scale)


def _array_misfit(situation: Situation, cuts: Sequence[int]) -> Option:
    """The job that needs most even alone, recomputed, in its smallest micro-batches."""
    tight = []
    for asked, name in zip(situation.jobs, situation.names, strict=True):
        one = _cut(situation, asked, cuts, _FINER[-1], True).costs
        held = one.state + one.gradients + one.input + one.workspace + window([one])
        tight.append((int(held.max()), name))
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
    own = [situation.own(one) for one in jobs]
    each = sorted(one.costs.one_device_bytes(one.recompute) for one in own)
    spread = max(situation.spread(one, one.job.batch) for one in jobs)
    found = []
    for n, seconds in sorted(fused.items()):
        needed = sum(each[-n:])
        if needed > situation.room:
            found.append(
                _misfit(situation, name, f"a stack of {n}", needed, "measure smaller stacks")
            )
            continue
        stacks = -(-len(jobs) // n)
        rounds = -(-stacks // situation.devices) * max(one.iterations for one in jobs)
        reason = f"measured stacks of {n}, one on each device; gradients are not bit-equal"
        found.append(_option(situation, name, rounds * seconds * 1e9, reason, needed, spread))
    return _fastest(found)


def _fastest(found: Sequence[Option]) -> Option:
    """The fastest; the one of least bytes if none fits."""
    return min(found, key=lambda one: (one.seconds is None, one.seconds or one.needed or 0))
