"""When all devices of a process backend change to another plan, although none waits for another."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optsched.arraypipe.channels import AHEAD

if TYPE_CHECKING:
    from optsched.arraypipe.planning.segments import Segment


class Swap(NamedTuple):
    """The segment with this number begins where iterations of cycle `first_cycle` would have."""

    number: int
    first_cycle: int


def first_cycle(segment: Segment, cycle: int) -> int:
    """First cycle that a swap announced in this cycle may replace.

    A message that is sent in the next cycle tells of it. Its iteration passes all stages within
    the cycles ``cycle + 1 .. cycle + 1 + largest offset``, so after them every device knows; and
    none has by then posted a receive for more than `AHEAD` cycles later.
    """
    return cycle + 1 + max(segment.latest) + AHEAD + 1


def is_heard(segment: Segment, cycle: int) -> bool:
    """Whether an iteration begins in the next cycle that will tell all devices of a swap.

    True if some job with blocks on every device still has a whole iteration there.
    """
    plan = segment.plan
    devices = set(range(len(plan.devices)))
    for seat, (count, copies) in enumerate(zip(segment.count, plan.copies, strict=True)):
        if count > (cycle + 1) * copies and devices == {
            b.device for b in plan.blocks if b.job == seat and b.device >= 0
        }:
            return True
    return False


def shorten(segment: Segment, cycle: int) -> list[int]:
    """End the segment before the iterations of this cycle; iterations left over, per seat."""
    left = []
    for seat, copies in enumerate(segment.plan.copies):
        kept = min(segment.count[seat], cycle * copies)
        left.append(segment.count[seat] - kept)
        segment.count[seat] = kept
    return left
