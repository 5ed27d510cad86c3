"""`ResidencyPlan`: which states of a device are where, and when they are copied."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.analysis.occupancy import jobs_that_fit
from optsched.arraypipe.memory.copies import OutOfSlots, Replacement, Rule, Simulated, Transfers
from optsched.arraypipe.memory.engines import IN, OUT, SimulatedEngine
from optsched.arraypipe.memory.types import CHANGES, NEEDS, POOLS, most_pinned, next_uses
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from optsched.arraypipe.memory.copies import Move
    from optsched.arraypipe.memory.engines import HostLink
    from optsched.arraypipe.memory.types import State, Visit


_CHUNKS, _LATENCIES = 6, 32  # of the largest piece, for the fill; a chunk takes so many latencies
_DIVISIONS: Final = 3  # how many ways to divide the room are tried
_TRIAL_CYCLES: Final = 6  # from empty slots; the later half counts
_CYCLES: Final = 24  # from empty slots; the last ones that have been repeated count
_MOST_CYCLES: Final = 64  # until the slots repeat; all cases met so far need fewer than ten


@dataclass(frozen=True, eq=False)
class ResidencyPlan:
    """Where the states of one device are, and what one cycle costs; made by `compile`.

    Times are in the unit of the visits' durations.
    """

    states: tuple[State, ...]
    visits: tuple[Visit, ...]  # of one cycle
    compute: float  # time of blocks, and of gaps that the schedule has anyway
    rules: tuple[Rule, ...] = ()  # of weights and of moments (`POOLS`); none: nothing is copied
    chunk: int = 0  # largest copy in bytes
    inward: float = 0.0  # bytes per cycle, in the mean
    outward: float = 0.0
    period: float = 0.0  # predicted time per cycle, with the copies that blocks wait for
    bound: float = 0.0  # no plan with these slots copies in less time per cycle

    @property
    def exposed(self) -> float:
        """Predicted time per cycle that blocks wait for copies."""
        return self.period - self.compute

    @property
    def capacity(self) -> tuple[int, ...]:
        """Most bytes of every piece."""
        return tuple(max(sizes) for sizes in zip(*(s.bytes for s in self.states), strict=True))

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of a slot of every pool."""
        return slot_bytes(self.states)

    @classmethod
    def compile(
        cls,
        states: Sequence[State],
        visits: Sequence[Visit],
        room: int | None,
        link: HostLink,
        *,
        device: str = "the device",
        chunk: int | None = None,
        slots: tuple[int, int] | None = None,
    ) -> ResidencyPlan:
        """Decide between residence and slots, how many of which, and how they are replaced.

        The most promising ways to divide the room between weights and moments are tried with a few
        rules each on the simulated engine; the fastest is taken, of equal ones that which copies
        least.

        Parameters
        ----------
        states, visits
            What the device works on, and one cycle of its blocks (`cycle_of`).
        room
            Bytes for states; None: all fit.
        link
            For the prediction.
        device
            Its name, for messages.
        chunk
            Largest copy in bytes, 0: pieces are copied whole; None: a sixth of the largest, or
            more, so that latencies are at most three per cent of the time.
        slots
            Slots for weights and for moments, instead of any division of the room.

        Raises
        ------
        InputError
            Not even one state fits, or more states than slots are between a forward and its
            backward without recompute.
        """
        states, visits = tuple(states), tuple(visits)
        compute = sum(v.duration + v.gap for v in visits)
        if slots is None and (room is None or sum(s.total for s in states) <= room):
            return cls(states, visits, compute, period=compute)
        largest = max(max(s.bytes) for s in states)
        if chunk is None:
            least = math.ceil(_LATENCIES * link.latency * max(link.inward, link.outward))
            chunk = max(least, -(-largest // _CHUNKS))
        divisions = [slots] if slots else divide(states, visits, room or 0, device)
        bounds = {d: copy_bound(states, visits, d, link) for d in divisions}
        ranked = sorted(divisions, key=lambda d: (bounds[d], d[0]))[:_DIVISIONS]
        trial = max(chunk, -(-largest // _CHUNKS)) if chunk else 0
        search = _Search(states, visits, trial, link)
        _, rules = min((search.best(d) for d in ranked), key=lambda row: row[0])
        period, inward, outward = _steady(simulate(states, visits, rules, chunk, link, _CYCLES))
        bound = bounds[rules[0].slots, rules[1].slots]
        return cls(states, visits, compute, rules, chunk, inward, outward, period, bound)

    def __str__(self) -> str:
        if not self.rules:
            return f"{len(self.states)} states, all resident: nothing is copied"
        pools = ", ".join(
            f"{rule.slots} slots of {size} bytes for {name} (lead {rule.lead}, "
            f"{len(rule.fixed)} fixed)"
            for rule, size, name in zip(
                self.rules, self.slot_bytes, ("weights", "moments"), strict=True
            )
        )
        return (
            f"{len(self.states)} states in {pools}: {self.inward:.0f} bytes in and "
            f"{self.outward:.0f} out per cycle, at least {self.bound:.6g} of copies beside "
            f"{self.compute:.6g} of blocks, predicted {self.period:.6g} ({self.exposed:.6g} "
            f"exposed)"
        )


def slot_bytes(states: Sequence[State]) -> tuple[int, ...]:
    """Bytes of a slot that takes any of the states, per pool."""
    return tuple(
        sum(max((s.bytes[piece] for s in states), default=0) for piece in pool) for pool in POOLS
    )


def divide(
    states: Sequence[State], visits: Sequence[Visit], room: int, device: str
) -> list[tuple[int, int]]:
    """Ways to divide the room into slots for weights and for moments; none fits: a sentence."""
    weights, moments = slot_bytes(states)
    jobs = sorted({s.job for s in states})

    def first(n: int) -> list[State]:
        return [s for s in states if s.job in jobs[:n]]

    if weights + moments > room:
        # only an update needs all of a state
        block = max(visits, key=lambda v: (states[v.state].total, v.kind == "U"))
        largest = states[block.state]
        fit = jobs_that_fit(len(jobs), lambda n: sum(slot_bytes(first(n))) <= room)
        raise InputError(
            f"memory: {device} has {room} bytes for states, slots for the largest state (at "
            f"{block.kind} of job {largest.job}, stage {largest.stage}: {largest.total}) take "
            f"{weights + moments}; {fit} jobs would fit"
        )
    n = len(states)
    most_moments = min(n, (room - weights) // moments) if moments else 1
    found: dict[int, int] = {}  # weights -> the most moments beside them
    for b in range(1, most_moments + 1):
        found[min(n, (room - b * moments) // weights) if weights else 1] = b
    need, at = most_pinned(visits)
    if enough := [(a, b) for a, b in found.items() if a >= need]:
        return enough

    def pinned(n: int) -> int:
        return most_pinned([v for v in visits if states[v.state].job in jobs[:n]])[0]

    block, slots = visits[at], max(found)
    state, fit = states[block.state], jobs_that_fit(len(jobs), lambda n: pinned(n) <= slots)
    raise InputError(
        f"memory: at {block.kind} of job {state.job}, stage {state.stage}, {need} states are "
        f"between a forward and its backward on {device} ({need * weights} bytes of weights), "
        f"which has {room} bytes for states, {slots} slots; {fit} jobs would fit, or use "
        f"recompute=True"
    )


def fewest_copies(states: Sequence[int], slots: int) -> Fraction:
    """Copies per cycle that no order of replacement goes below, for states of equal size.

    Belady's rule on the sequence repeated for ever.
    """
    where = {state: k for k, state in enumerate(dict.fromkeys(states))}
    if len(where) <= slots:
        return Fraction(0)
    n = len(states)
    following = next_uses(states)
    held: dict[int, int] = {}  # state -> its next use
    seen: dict[Hashable, tuple[int, int]] = {}
    count = 0
    for number in range(_MOST_CYCLES * len(where)):
        key = frozenset(held)
        if key in seen:
            before, then = seen[key]
            return Fraction(count - then, number - before)
        seen[key] = number, count
        for i, state in enumerate(states):
            if state not in held:
                count += 1
                if len(held) == slots:
                    del held[max(held, key=held.__getitem__)]
            held[state] = number * n + i + following[i]
    raise AssertionError("the slots do not repeat")


def copy_bound(
    states: Sequence[State], visits: Sequence[Visit], slots: Sequence[int], link: HostLink
) -> float:
    """Copy time per cycle that no plan with so many slots (per pool) goes below.

    Every piece by itself: in, as many copies as Belady's rule needs, the smallest that are asked
    for; out, at the end of every cycle all states but those in the slots have been written since
    their last change.
    """
    inward = outward = Fraction(0)
    for pool, count in zip(POOLS, slots, strict=True):
        fewest: dict[tuple[int, ...], Fraction] = {}
        for piece in pool:
            asked = [v.state for v in visits if piece in NEEDS[v.kind]]
            turns = tuple(s for i, s in enumerate(asked) if s != asked[i - 1] or len(asked) == 1)
            if turns not in fewest:
                fewest[turns] = fewest_copies(turns, count)
            sizes = sorted(states[s].bytes[piece] for s in turns)
            whole, part = divmod(fewest[turns], 1)
            inward += sum(sizes[:whole]) + (part * sizes[whole] if part else 0)
            changed = {v.state for v in visits if piece in CHANGES[v.kind]}
            least = sorted(states[s].bytes[piece] for s in changed)
            outward += sum(least[: max(0, len(changed) - count)])
    return link.time(float(inward), float(outward))


class Cycle(NamedTuple):
    """A simulated cycle: when it ends, bytes copied until then, and who took whose slots."""

    end: float
    inward: int
    outward: int
    moves: list[Move]


def simulate(
    states: Sequence[State],
    visits: Sequence[Visit],
    rules: Sequence[Rule],
    chunk: int,
    link: HostLink,
    cycles: int,
) -> list[Cycle]:
    """So many cycles on the virtual clock, from empty slots."""
    engine = SimulatedEngine(link)
    horizon = 2 * len(visits) + 1
    future = islice(cycle(visits), cycles * len(visits) + horizon)
    transfers = Transfers(Replacement(future, rules, horizon), engine, Simulated(states), chunk)
    found = []
    for _ in range(cycles):
        moves: list[Move] = []
        for visit in visits:
            engine.block(visit.gap)
            decision = transfers.enter()
            assert decision is not None
            moves += (m._replace(slot=-1, writes=(), after=-1) for m in decision.moves)
            engine.block(visit.duration)
            transfers.leave()
        found.append(Cycle(engine.now, engine.copied[IN], engine.copied[OUT], moves))
    return found


def _steady(cycles: Sequence[Cycle]) -> tuple[float, float, float]:
    """Means per cycle of time and bytes, over the last that repeat those before, or a half."""
    rows, half = [c.moves for c in cycles], len(cycles) // 2
    last = next((n for n in range(1, half) if rows[-n:] == rows[-2 * n : -n]), half)
    a, b = cycles[-1 - last], cycles[-1]
    return (b.end - a.end) / last, (b.inward - a.inward) / last, (b.outward - a.outward) / last


class _Tried(NamedTuple):
    """About the time of a cycle, rounded so that equal rules are equal, and bytes copied."""

    time: float
    copied: int


@dataclass
class _Search:
    """Tries a few rules on one cycle of visits, by the clock of the simulated engine."""

    states: Sequence[State]
    visits: Sequence[Visit]
    chunk: int
    link: HostLink

    def best(self, slots: tuple[int, int]) -> tuple[_Tried, tuple[Rule, ...]]:
        """Good rules for so many slots: one pool after the other, the other as it is."""
        choices = [self._choices(pool, count) for pool, count in enumerate(slots)]
        best = tuple(rows[0] for rows in choices)
        for pool in (1, 0):
            tries = [(*best[:pool], rule, *best[pool + 1 :]) for rule in choices[pool]]
            best = min(tries, key=self._tried)
        return self._tried(best), best

    def _tried(self, rules: tuple[Rule, ...]) -> _Tried:
        try:
            row = simulate(self.states, self.visits, rules, self.chunk, self.link, _TRIAL_CYCLES)
        except OutOfSlots:
            return _Tried(math.inf, 0)
        half = _TRIAL_CYCLES // 2
        time = (row[-1].end - row[-1 - half].end) / half
        return _Tried(float(f"{time:.6g}"), row[-1].inward + row[-1].outward)

    def _choices(self, pool: int, slots: int) -> list[Rule]:
        """What is worth a try: a lead of one first, fixed states that leave one to three slots."""
        found = []
        for lead, left in ((1, slots), (0, slots), (2, slots), (1, 2), (2, 3), (0, 1)):
            if not lead < left <= slots:
                continue
            fixed = self._spread(pool, slots - left)
            if pool or most_pinned(self.visits, fixed)[0] <= left:
                found.append(Rule(slots, lead, fixed))
        return found or [Rule(slots)]

    def _spread(self, pool: int, count: int) -> tuple[int, ...]:
        """So many states, evenly spread over the cycle, the largest first where they differ."""
        if not count:
            return ()
        order = list(dict.fromkeys(v.state for v in self.visits))
        size = {s: sum(self.states[s].bytes[piece] for piece in POOLS[pool]) for s in order}
        least = sorted(size.values())[-count]
        sure = [s for s in order if size[s] > least]
        rest = [s for s in order if size[s] == least]
        left = count - len(sure)
        return tuple(sorted(sure + [rest[k * len(rest) // left] for k in range(left)]))
