"""`goodput`: maximise the power mean of the jobs' speed-ups in goodput, at every event.

Qiao et al., *Pollux*, OSDI 2021, eq. 14-16: speedup_j(g) = goodput_j(g) / goodput_j(fair share),
fitness (mean of speedup^p)^(1/p), p = -1 by default. A job's speeds are its goodputs (throughput
times statistical efficiency at the best batch) if its speed-up is `optsched.cluster.Goodput`.
Pollux searches by a genetic algorithm; here it is a multiple choice, solved exactly. Jobs are
admitted by arrival with their smallest size (a job at 0 would make the mean 0), none is preempted;
its restart penalty is left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optsched.cluster.policies.room import Room, number, smallest

if TYPE_CHECKING:
    from optsched.cluster.policy import ClusterView, Decision
    from optsched.model.schedule import IntArray

PARTS: Final = 10**6
"""Speed-ups are compared in millionths."""
_MOST: Final = 2.0**40


class Goodput:
    """Power mean of speed-ups.

    Parameters
    ----------
    p
        Exponent, -10..1: 1 maximises the sum, 0 the product, lower ones are fairer.
    """

    name: ClassVar[str] = "goodput"
    options: ClassVar[tuple[str, ...]] = ("p",)
    clairvoyant: bool = False

    def __init__(self, *, p: float = -1.0) -> None:
        self.p = number("p", p, -10.0, 1.0)

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        from optsched_solvers.quota.multiple_choice import choice

        room = Room.of(view)
        if len(room.movable) == 0:
            return room.decision(view, room.movable)
        given, _ = choice(*self.table(view, room), room.budget)
        return room.decision(view, given)

    def table(self, view: ClusterView, room: Room) -> tuple[IntArray, IntArray, IntArray]:
        """Offsets, sizes and integer worths of the movable jobs' options."""
        cluster = int(view.capacity.sum())
        least = smallest(view)[room.movable]
        spare = room.budget - int(least.sum())
        ptr, sizes, values = [0], [], []
        for position, low in zip(room.movable.tolist(), least.tolist(), strict=True):
            at = slice(view.size_ptr[position], view.size_ptr[position + 1])
            row, rate = view.size[at].tolist(), view.rate[at].tolist()
            fair = max(sum(g <= cluster / len(view.job) for g in row) - 1, 0)
            for g, speed in zip(row, rate, strict=True):
                if g <= low + spare:
                    sizes.append(g)
                    values.append(round(PARTS * self._worth(speed / rate[fair])))
            ptr.append(len(sizes))
        return np.array(ptr, np.int64), np.array(sizes, np.int64), np.array(values, np.int64)

    def _worth(self, speedup: float) -> float:
        """To be maximised in sum: speedup^p, its logarithm, or its negative."""
        if self.p == 0:
            return math.log(speedup)
        worth = min(float(speedup**self.p), _MOST)
        return worth if self.p > 0 else -worth
