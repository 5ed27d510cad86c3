"""`ResidencyPlan`: which states of a device are where, and when they are copied."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.analysis.occupancy import jobs_that_fit
from optsched.arraypipe.memory.copies import Carrier, Rule, Transfers
from optsched.arraypipe.memory.engines import IN, OUT, SimulatedEngine
from optsched.arraypipe.memory.types import POOLS, most_pinned
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.memory.engines import HostLink
    from optsched.arraypipe.memory.types import State, Visit


_CHUNKS, _LATENCIES = 6, 32  # of the largest piece, for the fill; a chunk takes so many latencies
_DIVISIONS: Final = 3  # how many ways to divide the room are tried
_TRIAL_CYCLES: Final = 6  # from empty slots; the later half counts


class Cycle(NamedTuple):
    """A simulated cycle: how long it takes, and bytes copied."""

    time_ns: float
    inward: float
    outward: float


@dataclass(frozen=True, eq=False)
class ResidencyPlan:
    """Where the states of one device are; made by `compile`."""

    states: tuple[State, ...]
    visits: tuple[Visit, ...]  # of one cycle
    rules: tuple[Rule, ...] = ()  # of weights and of moments (`POOLS`); none: nothing is copied
    chunk: int = 0  # largest copy in bytes

    @property
    def capacity(self) -> tuple[int, ...]:
        """Most bytes of every piece."""
        return tuple(max(sizes) for sizes in zip(*(s.bytes for s in self.states), strict=True))

    @property
    def slots(self) -> int:
        """For weights; 0: all states are resident."""
        return self.rules[0].slots if self.rules else 0

    @property
    def taken(self) -> int:
        """Bytes of all slots."""
        sizes = slot_bytes(self.states)
        return sum(rule.slots * size for rule, size in zip(self.rules, sizes, strict=False))

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

        The most promising ways to divide the `room`, bytes for states, between weights and moments
        are tried with a few rules each on the simulated engine; the fastest is taken, of equal ones
        that which copies least. `device` is for messages. A copy is at most a sixth of the largest
        piece, or more, so that latencies are at most three per cent of the time; `chunk` and
        `slots` are given instead to compare. `InputError`: not even one state fits, or more states
        than slots are between a forward and its backward without recompute.
        """
        states, visits = tuple(states), tuple(visits)
        if slots is None and (room is None or sum(s.total for s in states) <= room):
            return cls(states, visits)
        if chunk is None:
            least = math.ceil(_LATENCIES * link.latency_ns * max(link.inward, link.outward) / 1e9)
            chunk = max(least, -(-max(max(s.bytes) for s in states) // _CHUNKS))
        divisions = [slots] if slots else divide(states, visits, room or 0, device)
        rules = _Search(states, visits, chunk, link).best(divisions)
        return cls(states, visits, rules, chunk)

    def simulate(self, link: HostLink, cycles: int = 24) -> Cycle:
        """The mean of the later half of so many cycles on a virtual clock, from empty slots."""
        engine, visits = SimulatedEngine(link), self.visits
        horizon = 2 * len(visits) + 1
        transfers = Transfers(self.rules, horizon, engine, Carrier(self.states), self.chunk)
        transfers.renew(islice(cycle(visits), cycles * len(visits) + horizon))
        ends = []
        for _ in range(cycles):
            for visit in visits:
                engine.block(visit.gap_ns)
                transfers.enter(visit)
                engine.block(visit.duration_ns)
                transfers.leave()
            ends.append((engine.now_ns, engine.copied[IN], engine.copied[OUT]))
        half = cycles // 2
        late, early = ends[-1], ends[-1 - half]
        return Cycle(*((b - a) / half for a, b in zip(early, late, strict=True)))


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


@dataclass
class _Search:
    """Tries a few rules on one cycle of visits, by the clock of the simulated engine."""

    states: tuple[State, ...]
    visits: tuple[Visit, ...]
    chunk: int
    link: HostLink

    def best(self, divisions: Sequence[tuple[int, int]]) -> tuple[Rule, ...]:
        """Good rules for the most promising divisions of the room."""
        plain = [tuple(self._choices(pool, n)[0] for pool, n in enumerate(d)) for d in divisions]
        found = []
        for rules in sorted(plain, key=self._tried)[:_DIVISIONS]:
            for pool in (1, 0):  # one after the other, the other as it is
                choices = self._choices(pool, rules[pool].slots)
                tries = [(*rules[:pool], rule, *rules[pool + 1 :]) for rule in choices]
                rules = min(tries, key=self._tried)
            found.append(rules)
        return min(found, key=self._tried)

    def _tried(self, rules: tuple[Rule, ...]) -> tuple[float, float]:
        """About the time of a cycle, rounded so that equal rules are equal, and bytes copied."""
        plan = ResidencyPlan(self.states, self.visits, rules, self.chunk)
        mean = plan.simulate(self.link, _TRIAL_CYCLES)
        return float(f"{mean.time_ns:.6g}"), mean.inward + mean.outward

    def _choices(self, pool: int, slots: int) -> list[Rule]:
        """What is worth a try: a lead of one first, fixed states that leave one to three slots."""
        found = []
        for lead, left in ((1, slots), (0, slots), (2, slots), (1, 2), (2, 3), (0, 1)):
            if lead < left <= slots:
                found.append(Rule(slots, lead, self._spread(pool, slots - left)))
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
