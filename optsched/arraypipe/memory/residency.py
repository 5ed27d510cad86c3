"""Whether the states of a device stay there, or how many slots they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optsched.analysis.occupancy import jobs_that_fit
from optsched.arraypipe.memory.accesses import most_pinned
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.memory.accesses import Access, State


class Residency(NamedTuple):
    """Where the states of one device are; slots and their bytes per piece."""

    slots: tuple[int, int] = (0, 0)  # none: all states are resident
    sizes: tuple[int, int] = (0, 0)  # the most of any state

    @property
    def taken(self) -> int:
        """Bytes of all slots."""
        return sum(n * size for n, size in zip(self.slots, self.sizes, strict=True))


def residency(
    states: Sequence[State], accesses: Sequence[Access], limit: int, device: str = "the device"
) -> Residency:
    """Decide between residence and slots for so many bytes.

    Moments get one slot: they are copied once an iteration anyway, and weights up to three times.
    `accesses` are those of one cycle, `device` is for messages.

    Raises
    ------
    InputError
        Not even one state fits, or more states than slots are between a forward and its backward.
    """
    if sum(state.total for state in states) <= limit:
        return Residency()
    limit -= sum(state.resident for state in states)
    jobs, (weights, moments) = sorted({s.job for s in states}), slot_bytes(states)
    if weights + moments > limit:
        largest = max(states, key=lambda s: s.total)

        def fits(n: int) -> bool:
            some = [s for s in states if s.job in jobs[:n]]
            return sum(slot_bytes(some)) + sum(s.resident for s in some) <= limit

        raise InputError(
            f"memory: {device} has {limit} bytes for states, slots for the largest state (job "
            f"{largest.job}, stage {largest.stage}: {largest.total}) take {weights + moments}; "
            f"{jobs_that_fit(len(jobs), fits)} jobs would fit"
        )
    slots = min(len(states), (limit - moments) // weights) if weights else len(states)
    need, at = most_pinned(accesses)
    if need <= slots:
        more = min(len(states), (limit - slots * weights) // moments) if moments else 1
        return Residency((slots, more), (weights, moments))

    def pinned(n: int) -> int:
        return most_pinned([a for a in accesses if states[a.state].job in jobs[:n]])[0]

    block, state = accesses[at], states[accesses[at].state]
    fit = jobs_that_fit(len(jobs), lambda n: pinned(n) <= slots)
    raise InputError(
        f"memory: at {block.kind} of job {state.job}, stage {state.stage}, {need} states are "
        f"between a forward and its backward on {device} ({need * weights} bytes of weights), "
        f"which has {limit} bytes for states, {slots} slots; {fit} jobs would fit, or use "
        f"recompute=True"
    )


def slot_bytes(states: Sequence[State]) -> tuple[int, int]:
    """Bytes of a slot that takes any of the states, per piece."""
    weights, moments = (max((s.bytes[piece] for s in states), default=0) for piece in (0, 1))
    return weights, moments
