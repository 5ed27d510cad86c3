"""`makespan`: the running jobs together end as early as possible, at every event.

Smallest T with the fewest GPUs for each job that end it by T, the minimum-makespan policy of
Narayanan et al. (Gavel, OSDI 2020) in the homogeneous case, in whole GPUs. Jobs are admitted by
arrival with their smallest size, and none is preempted: of jobs that still wait it knows nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from optsched.cluster.policies.room import Room, fitted, flag, tables

if TYPE_CHECKING:
    from optsched.cluster.policy import ClusterView, Decision


class Makespan:
    """Smallest max R/f(g) over the jobs that run.

    Parameters
    ----------
    clairvoyant
        True remaining work instead of the estimate.
    """

    name: ClassVar[str] = "makespan"
    options: ClassVar[tuple[str, ...]] = ("clairvoyant",)

    def __init__(self, *, clairvoyant: bool = False) -> None:
        self.clairvoyant: bool = flag("clairvoyant", clairvoyant)

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        from optsched_solvers.quota import makespan

        room = Room.of(view)
        if len(room.movable) == 0:
            return room.decision(view, room.movable)

        def time(position: int, at: int) -> int:
            return -(-int(view.remaining[position]) // int(view.rate[at]))

        given, _ = makespan(*tables(view, room, time, -1), room.budget)
        return room.decision(view, fitted(view, room, given))
