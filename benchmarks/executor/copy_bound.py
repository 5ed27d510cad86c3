"""What no plan of slots goes below: copies of states per cycle, and the time that they take."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final

from optsched.arraypipe.memory.types import CHANGES, NEEDS, POOLS

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from optsched.arraypipe.memory.engines import HostLink
    from optsched.arraypipe.memory.types import State, Visit

_MOST_CYCLES: Final = 64  # until the slots repeat; all cases met so far need fewer than ten


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
    """Nanoseconds of copying per cycle that no plan with so many slots (per pool) goes below.

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
    return 1e9 * max(float(inward) / link.inward, float(outward) / link.outward)


def next_uses(states: Sequence[int]) -> list[int]:
    """How many steps later the state of a step comes again, round and round."""
    n = len(states)
    found, last = [0] * n, dict[int, int]()
    for i in range(2 * n - 1, -1, -1):
        state = states[i % n]
        if i < n:
            found[i] = last[state] - i
        last[state] = i
    return found
