"""The job array, rolling: a quick schedule, beside the bounds of load, chain and copies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.analysis.occupancy import peak_memory
from optsched.arraypipe.advice.alternatives import option
from optsched.arraypipe.advice.costs import Seat, longest_first, rolling_array, window
from optsched.arraypipe.advice.options import Option
from optsched.io.text import bytes_text
from optsched.pipelines import one_f_one_b
from optsched.solving.solve import solve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.advice.costs import Situation
    from optsched.model.schedule import IntArray, Schedule
    from optsched.problems.jobarray.problem import JobArray
    from optsched.problems.jobarray.reports import ServerPrefetch


NAME = "job array"
_BLOCKS: Final = 2_000  # of a schedule that is made; beyond, blocks stand for several
_HALVINGS: Final = 6  # of micro-batches that do not fit
_RULES: Final = 60  # list schedules of the dispatch solver
_JOBS: Final = 24  # of a schedule that is made; of more a sample stands for all


class Rolling(NamedTuple):
    """One group's array: nanoseconds a round, bytes, and which bound says what."""

    time: float
    needed: int
    bounds: dict[str, float]
    recompute: bool
    swapped: bool = False
    waves: int = 1
    forced: bool = False  # some of its jobs are not set to recompute


class Misfit(NamedTuple):
    """Why an array does not run: the device, its bytes, how many jobs would fit."""

    device: int
    needed: int
    jobs: int


def job_array(situation: Situation) -> Option:
    """All jobs at once; several arrays side by side if there are more devices than stages.

    Jobs run as they are set; only if that does not fit they get smaller micro-batches.
    """
    first: Misfit | None = None
    for finer in range(_HALVINGS + 1):
        found = _side_by_side(situation, 1 << finer)
        if isinstance(found, Option):
            return found
        first = first or found
        if all(one.job.batch_size <= one.job.microbatches << finer for one in situation.jobs):
            break
    assert first is not None
    return _misfit(situation, first)


def _side_by_side(situation: Situation, finer: int) -> Option | Misfit:
    """The option with `finer` times the micro-batches of every job."""
    width = min(situation.n_stages, situation.devices)
    groups = min(situation.devices // width, len(situation.jobs))
    members = longest_first([situation.work(one) for one in situation.jobs], groups)
    found: list[Rolling] = []
    spread = 0.0
    for group in range(groups):
        seats = _seats(situation, members.jobs_on(group), width, finer)
        one = _fastest(situation, seats)
        if situation.room is not None and (isinstance(one, Misfit) or one.swapped or one.forced):
            one = _waves(situation, seats, one)
        if isinstance(one, Misfit):
            return one
        found.append(one)
        spread = max(spread, *(seat.costs.spread for seat in seats))
    slowest = max(found, key=lambda one: one.time)
    needed = max(one.needed for one in found)
    bounds = ", ".join(f"{key} {value / 1e9:.4g}" for key, value in slowest.bounds.items())
    side = f"{groups} arrays of {width} devices; " if groups > 1 else ""
    copies = "states come from the host" if slowest.swapped else "states stay on the devices"
    if slowest.waves > 1:
        copies = f"{slowest.waves} sets of jobs, one trained after the other"
    again = ", all jobs recompute" if slowest.recompute else ""
    small = f", {finer}x as many micro-batches" if finer > 1 else ""
    reason = f"{side}quick schedule, rolling; bounds: {bounds}; {copies}{again}{small}"
    return option(NAME, slowest.time, reason, situation.fits(needed), needed, spread)


def prefetch(situation: Situation) -> tuple[ServerPrefetch, ...]:
    """`JobArray.prefetch_ok`, with a host link for every device."""
    width = min(situation.n_stages, situation.devices)
    names = [f"device {d}" for d in range(width)]
    seats = _seats(situation, range(len(situation.jobs)), width)
    array = rolling_array(situation, _lumped(seats), servers=names)
    return array.prefetch_ok(situation.host.bandwidth)


def _seats(situation: Situation, jobs: Sequence[int], width: int, finer: int = 1) -> list[Seat]:
    cuts = situation.cuts(width)
    seats = []
    for one in (situation.jobs[j] for j in jobs):
        count = min(finer * one.job.microbatches, one.job.batch_size)
        costs = situation.costs(one, one.size(count)).merged(cuts)
        seats.append(Seat(one, costs, count, one.job.recompute))
    return seats


def _fastest(situation: Situation, seats: list[Seat]) -> Rolling | Misfit:
    """All states on the devices; else they come from the host and go back."""
    own = _stays(situation, seats)
    if isinstance(own, Rolling):
        return own
    again = [seat._replace(recompute=True) for seat in seats]
    tries = [_swapped(situation, again, True)]
    if not any(seat.recompute for seat in seats):
        tries.append(_swapped(situation, seats, False))
    found = [one for one in tries if isinstance(one, Rolling)]
    return min(found, key=lambda one: one.time) if found else own


def _waves(situation: Situation, seats: list[Seat], other: Rolling | Misfit) -> Rolling | Misfit:
    """The best of some numbers of sets of jobs, one set after the other, and of `other`.

    More sets are tried until jobs need not recompute but where they are set to.
    """
    order = sorted(seats, key=lambda seat: -situation.work(seat.asked))
    best, known = other, dict[tuple[object, ...], "Rolling | Misfit"]()
    steps = {w for k in range(len(seats).bit_length()) for w in (1 << k, 3 << k)}
    for waves in sorted(w for w in steps if 2 <= w <= len(seats) // 2):
        size = -(-len(seats) // waves)
        found: list[Rolling] = []
        for part in (order[k : k + size] for k in range(0, len(order), size)):
            key = tuple((*seat.asked.alike, seat.asked.iterations) for seat in part)
            if key not in known:
                known[key] = _stays(situation, part)
            one = known[key]
            if isinstance(one, Misfit):
                break
            found.append(one)
        else:
            made = _in_turn(found)
            if isinstance(best, Misfit) or made.time < best.time:
                best = made
            if not made.forced:
                break
    return best


def _in_turn(parts: Sequence[Rolling]) -> Rolling:
    """Sets of jobs, one after the other."""
    return Rolling(
        sum(part.time for part in parts),
        max(part.needed for part in parts),
        {key: sum(part.bounds[key] for part in parts) for key in ("load", "chain")},
        any(part.recompute for part in parts),
        waves=len(parts),
        forced=any(part.forced for part in parts),
    )


def _stays(situation: Situation, seats: list[Seat]) -> Rolling | Misfit:
    """As the jobs are set; if memory is short also with recomputation."""
    again = [seat._replace(recompute=True) for seat in seats]
    own = _resident(situation, seats, all(seat.recompute for seat in seats))
    late = isinstance(own, Misfit) or own.time > 1.02 * max(own.bounds.values())
    if late and situation.room is not None and not all(seat.recompute for seat in seats):
        other = _resident(situation, again, True)
        if isinstance(other, Rolling) and (isinstance(own, Misfit) or other.time < own.time):
            return other._replace(forced=True)
    return own


def _resident(situation: Situation, seats: list[Seat], recompute: bool) -> Rolling | Misfit:
    """All states stay on the devices."""
    held = _standing(seats)
    left = None if situation.room is None else situation.room - held
    if left is not None and left.min() <= 0:
        return _short(situation, seats, held)
    found = _rolled(situation, seats, held, left, recompute)
    return found or _short(situation, seats, held)


def _swapped(situation: Situation, seats: list[Seat], recompute: bool) -> Rolling | Misfit:
    """States come from the host for a visit; without recomputation they stay from F to B.

    One buffer of a state is kept free to load the next one ahead.
    """
    assert situation.room is not None
    windows = window([seat.costs for seat in seats])
    whole = np.array([seat.costs.state + seat.costs.gradients for seat in seats])
    largest = whole.max(axis=0)
    base = windows + largest * (2 if recompute else 1)
    left = situation.room - base
    short = _short(situation, seats, windows + 2 * largest)
    if left.min() <= 0:
        return short
    held = seats
    if not recompute:  # whoever holds activations holds its state
        held = [
            _changed(seat, kept=seat.costs.kept + -(-row // seat.microbatches))
            for seat, row in zip(seats, whole, strict=True)
        ]
    found = _rolled(situation, held, base, left, recompute)
    if found is None:
        return short
    slots = 2 if recompute else int(((situation.room - windows) // np.maximum(largest, 1)).min())
    copies = _copies(situation, seats, slots, recompute)
    bounds = found.bounds | {"copies": copies}
    return found._replace(time=max(found.time, copies), bounds=bounds, swapped=True)


def _copies(situation: Situation, seats: list[Seat], slots: int, recompute: bool) -> float:
    """Nanoseconds of loading states, on the busiest device; writing back goes the other way.

    Jobs in a circle over n slots are loaded K - n + 1 times a round when the one that is used
    farthest in the future is evicted (Belady 1966).
    """
    count = len(seats)
    share = 1.0 if recompute else min(1.0, max(0, count - slots + 1) / count)
    visits = np.array([seat.asked.iterations for seat in seats])[:, None]
    loads = np.array([seat.costs.state for seat in seats])
    if recompute:  # weights for F, everything for B
        loads = loads + np.array([seat.costs.weights for seat in seats])
    busiest = float((visits * loads).sum(axis=0).max())
    latency = situation.host.latency_ns * float(visits.sum()) * (1 + recompute)
    return share * (busiest * 1e9 / situation.host.bandwidth + latency)


def _rolled(
    situation: Situation, seats: list[Seat], held: IntArray, left: IntArray | None, recompute: bool
) -> Rolling | None:
    """The better of a dispatch schedule and 1F1B through all jobs; None if none fits."""
    sample = _sample(situation, seats)
    array = rolling_array(situation, _lumped(sample))
    if left is not None:
        array = array.replace(memory=left.tolist())
        if array.infeasibility():
            return None
    found = [s for s in (_dispatched(array), one_f_one_b(array)) if s is not None]
    room = np.full(array.n_devices, 1 << 62) if left is None else left
    ways = [
        (schedule.period, peak)
        for schedule in found
        if schedule.period is not None and ((peak := _peaks(schedule)) <= room).all()
    ]
    if not ways:
        return None
    time, peak = min(ways, key=lambda way: way[0])
    known = array.replace(memory=None).bounds()
    bounds = {"load": float(known["load"]), "chain": float(max(known["chain"], known["lap"]))}
    scale = 1.0
    if len(sample) < len(seats):
        scale = max(1.0, float(_load(seats)) / max(1, _load(sample)))
        bounds["load"] *= scale
    return Rolling(time * scale, int((held + peak).max()), bounds, recompute)


def _sample(situation: Situation, seats: list[Seat]) -> list[Seat]:
    """Some of very many jobs, evenly by their work: the rhythm of all is theirs."""
    if len(seats) <= _JOBS:
        return seats
    order = sorted(seats, key=lambda seat: situation.work(seat.asked))
    return [order[(2 * k + 1) * len(order) // (2 * _JOBS)] for k in range(_JOBS)]


def _load(seats: Sequence[Seat]) -> int:
    """Nanoseconds of a round on the busiest device."""
    work = [
        seat.asked.iterations
        * (seat.microbatches * seat.costs.passes(seat.recompute) + seat.costs.update)
        for seat in seats
    ]
    return int(np.sum(work, axis=0).max())


def _dispatched(array: JobArray) -> Schedule | None:
    """The best of the dispatching rules."""
    return solve(array, "dispatch", iterations=_RULES).schedule


def _peaks(schedule: Schedule) -> IntArray:
    """Bytes of activations on every device, at most; shape (devices,)."""
    return np.array([peak_memory(schedule, d) for d in range(schedule.n_resources)], np.int64)


def _lumped(seats: Sequence[Seat]) -> list[Seat]:
    """The seats, but where there are too many micro-batches one block stands for several."""
    cycle = sum(seat.asked.iterations for seat in seats) * len(seats[0].costs.forward)
    most = max(4, _BLOCKS // (2 * cycle))
    found = []
    for seat in seats:
        lump = -(-seat.microbatches // most)
        count = -(-seat.microbatches // lump)
        times = {
            key: getattr(seat.costs, key) * seat.microbatches // count
            for key in ("forward", "backward", "recompute")
        }
        found.append(_changed(seat, **times)._replace(microbatches=count))
    return found


def _standing(seats: Sequence[Seat]) -> IntArray:
    """Bytes of every device that do not come and go; shape (S,)."""
    costs = [seat.costs for seat in seats]
    gradients = np.array([one.gradients for one in costs])
    # with one micro-batch and a fused update a gradient lives in its own block only
    alone = all(s.microbatches == 1 and s.asked.job.update == "fused" for s in seats)
    states = np.array([one.state for one in costs]).sum(axis=0)
    once: IntArray = gradients.max(axis=0) if alone else gradients.sum(axis=0)
    total: IntArray = states + once + window(costs)
    return total


def _blocks(seats: Sequence[Seat]) -> IntArray:
    """Bytes of the largest micro-batch alone, on every device; shape (S,)."""
    most: IntArray = np.max(
        [
            s.costs.checkpoint + s.costs.workspace if s.recompute else s.costs.kept
            for s in seats
        ],
        axis=0,
    )  # fmt: skip
    return most


def _short(situation: Situation, seats: Sequence[Seat], held: IntArray) -> Misfit:
    """The fullest device, and how many of the jobs would stay on it."""
    assert situation.room is not None
    needed = held + _blocks(seats)
    d = int(needed.argmax())
    costs = [seat.costs for seat in seats]
    each = max(int(one.state[d] + one.gradients[d]) for one in costs)
    spare = situation.room - int(window(costs)[d] + _blocks(seats)[d])
    return Misfit(d, int(needed[d]), max(0, spare // max(each, 1)))


def _misfit(situation: Situation, found: Misfit) -> Option:
    assert situation.room is not None
    fit = f"{found.jobs} job{'s' * (found.jobs != 1)} would stay" if found.jobs else "no job fits"
    reason = (
        f"device {found.device} needs {bytes_text(found.needed)} at least and has "
        f"{bytes_text(situation.room)} ({fit} there): fewer jobs, smaller micro-batches, more "
        "stages, or a larger device"
    )
    return Option(NAME, None, reason, False, found.needed)


def _changed(seat: Seat, **costs: Any) -> Seat:
    return seat._replace(costs=replace(seat.costs, **costs))
