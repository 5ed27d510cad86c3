"""Which rules make a cycle of visits short: a few kinds are tried, then marks are flipped."""

from __future__ import annotations

import random
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.arraypipe.states import cycle_clock
from optsched.arraypipe.states.replacement import Replacement, Rule, mark
from optsched.arraypipe.states.visits import CHANGES, NEEDS, POOLS, most_pinned, next_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.states.engines import SimulatedEngine
    from optsched.arraypipe.states.visits import State, Visit

_TRIAL_CYCLES, _TRIAL_SETTLED, _CYCLES, _SETTLED = 6, 3, 9, 3
_FLIPS, _AT_ONCE = 400, (1, 1, 2, 2, 3)

Rules = tuple[Rule, ...]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Reals = np.ndarray[Any, np.dtype[np.float64]]
Arguments = tuple[Ints, Reals, Ints, Ints, Ints, Ints, Ints, int, Reals]


class Tried(NamedTuple):
    """About the time of a cycle, rounded so that equal rules are equal, and bytes copied."""

    time: float
    copied: int


class RuleSearch:
    """Tries rules on one cycle of visits, on the clock of the simulated engine.

    Parameters
    ----------
    states, visits
        What the device works on, and one cycle of its blocks.
    engine
        A fresh one, for its links.
    """

    def __init__(
        self, states: Sequence[State], visits: Sequence[Visit], engine: SimulatedEngine
    ) -> None:
        self.states, self.visits = states, visits
        inward, outward = engine.links.values()
        shared = float(inward is outward)
        self.link = np.array([inward.bandwidth, outward.bandwidth, inward.latency, shared])
        self.sizes = np.array([s.bytes for s in states], np.int64)
        marks = [mark(v) for v in visits]
        self.names = [marks.index(m) for m in marks]
        self.table = np.array(
            [
                (v.state, _bits(NEEDS[v.kind]), _bits(CHANGES[v.kind]), v.graph, v.first, name)
                for v, name in zip(visits, self.names, strict=True)
            ],
            np.int64,
        )
        self.times = np.array([(v.duration, v.gap) for v in visits], np.float64)
        self.following = np.zeros((len(POOLS), len(visits)), np.int64)
        for pool, pieces in enumerate(POOLS):
            asked = [i for i, v in enumerate(visits) if set(pieces) & set(NEEDS[v.kind])]
            later = next_uses([visits[i].state for i in asked])
            for k, i in enumerate(asked):
                laps, j = divmod(k + later[k], len(asked))
                self.following[pool, i] = asked[j] + laps * len(visits) - i

    def plain(self, slots: tuple[int, int], chunk: int) -> tuple[Tried, Rules]:
        """Good rules without marks: one pool after the other, the other as it is."""
        choices = [self._choices(pool, count) for pool, count in enumerate(slots)]
        best = tuple(rows[0] for rows in choices)
        for pool in (1, 0):
            tries = [(*best[:pool], rule, *best[pool + 1 :]) for rule in choices[pool]]
            best = min(tries, key=lambda rules: self.tried(rules, chunk))
        return self.tried(best, chunk), best

    def marked(self, rules: Rules, chunk: int, enough: float) -> Rules:
        """Start with what the rules keep, and flip marks as long as that saves time or bytes.

        `enough` is a time with which it ends early.
        """
        n, spots = len(self.visits), self._spots(rules)
        if not spots:
            return rules
        draw = random.Random(0)
        flips = np.full((_FLIPS, max(_AT_ONCE)), -1, np.int64)
        for row in flips:
            count = min(len(spots), draw.choice(_AT_ONCE))
            row[:count] = draw.sample(spots, count)
        leaving = self._left(rules)
        plain = tuple(Rule(rule.slots, min(1, rule.slots - 1)) for rule in rules)
        cycle_clock.improve(
            *self._arguments(plain, leaving, chunk), _CYCLES, _SETTLED, np.zeros(1, np.int64),
            flips, enough,
        )  # fmt: skip
        return tuple(
            rule._replace(leaving=frozenset(mark(self.visits[k]) for k in range(n) if row[k]))
            for rule, row in zip(plain, leaving, strict=True)
        )

    def tried(self, rules: Rules, chunk: int) -> Tried:
        """A few cycles from empty slots."""
        leaving = np.zeros((len(rules), len(self.visits)), np.int64)
        for row, rule in zip(leaving, rules, strict=True):
            row[:] = [mark(v) in rule.leaving for v in self.visits]
        copied = np.zeros(1, np.int64)
        time = cycle_clock.cycle_time(
            *self._arguments(rules, leaving, chunk), _TRIAL_CYCLES, _TRIAL_SETTLED, copied
        )
        return Tried(float(f"{time:.6g}") if time >= 0 else float("inf"), int(copied[0]))

    def _arguments(self, rules: Rules, leaving: np.ndarray, chunk: int) -> Arguments:
        numbers = np.array([(rule.slots, rule.lead) for rule in rules], np.int64)
        fixed = np.zeros((len(rules), len(self.states)), np.int64)
        for row, rule in zip(fixed, rules, strict=True):
            row[list(rule.fixed)] = 1
        return (
            self.table, self.times, self.following, self.sizes, numbers, fixed, leaving, chunk,
            self.link,
        )  # fmt: skip

    def _spots(self, rules: Rules) -> list[int]:
        """Marks that may matter, as pool * visits + visit."""
        return [
            pool * len(self.visits) + i
            for pool, rule in enumerate(rules)
            if rule.slots < len(self.states) and self.sizes[:, list(POOLS[pool])].any()
            for i, visit in enumerate(self.visits)
            if self.names[i] == i and set(POOLS[pool]) & set(NEEDS[visit.kind])
        ]

    def _left(self, rules: Rules) -> np.ndarray:
        """Visits after which states have left under these rules, in the last of a few cycles."""
        n = len(self.visits)
        decisions = Replacement(cycle(self.visits), rules, 2 * n + 1)
        left = np.zeros((len(rules), n), np.int64)
        last: dict[tuple[int, int], int] = {}
        for decision in islice(iter(decisions.decide, None), _TRIAL_CYCLES * n):
            for move in decision.moves:
                place = move.pool, decision.visit.state
                if place in last:
                    left[move.pool, self.names[last[place]]] = move.after >= 0 and bool(move.fetch)
                last[place] = decision.position % n
        return left

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


def _bits(pieces: Sequence[int]) -> int:
    return sum(1 << piece for piece in pieces)
