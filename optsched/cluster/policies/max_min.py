"""`max_min`: the worst-off job is as well off as possible, then the next, at every event.

Lexicographic weighted max-min of g/w or of f(g)/w, the homogeneous case of Narayanan et al.,
*Heterogeneity-Aware Cluster Scheduling Policies* (Gavel), OSDI 2020, in whole GPUs and without
time slices: jobs are admitted by arrival with their smallest size, and none is preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from optsched.cluster.policies.room import Room, choice_of, fitted, smallest, tables

if TYPE_CHECKING:
    from optsched.cluster.policy import ClusterView, Decision


class MaxMin:
    """Weighted max-min fairness.

    Parameters
    ----------
    of
        ``"gpus"``: levels g/w; ``"speed"``: levels f(g)/w.
    """

    name: ClassVar[str] = "max_min"
    options: ClassVar[tuple[str, ...]] = ("of",)
    clairvoyant: bool = False

    def __init__(self, *, of: str = "gpus") -> None:
        self.of = choice_of("of", of, ("gpus", "speed"))

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        from optsched_solvers.quota import max_min, max_min_table

        room = Room.of(view)
        if len(room.movable) == 0:
            return room.decision(view, room.movable)
        if self.of == "gpus":
            most = view.size[view.size_ptr[1:][room.movable] - 1]
            weight = view.weight[room.movable]
            given, _ = max_min(weight, room.budget, smallest(view)[room.movable], most)
        else:
            scale = float(np.min(view.weight[room.movable]))

            def level(position: int, at: int) -> int:
                return round(int(view.rate[at]) * (scale / float(view.weight[position])))

            given, _ = max_min_table(*tables(view, room, level), room.budget)
        return room.decision(view, fitted(view, room, given))
