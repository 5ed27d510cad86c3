"""`finish_time_fairness`: the largest rho = JCT / T_iso is as small as possible, at every event.

The *objective* of Mahajan et al., *Themis*, NSDI 2020: rho compares a job's completion time with
what it would be on its own share of the cluster. Their auction between applications is not
reproduced. T_iso = work / f(s) * max(1, n s / G) with n jobs active now and s the largest allowed
size of at most G/n GPUs, else the smallest. Jobs are admitted by arrival, and none is preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from optsched.cluster.policies.room import Room, fitted, tables

if TYPE_CHECKING:
    from optsched.cluster.policy import ClusterView, Decision

PARTS: Final = 10**6
"""Rho is compared in millionths."""
_MOST: Final = 2**60


class FinishTimeFairness:
    """Smallest max (elapsed + R/f(g)) / T_iso: bisection, with the fewest GPUs for each rho."""

    name: ClassVar[str] = "finish_time_fairness"
    options: ClassVar[tuple[str, ...]] = ()
    clairvoyant: bool = False

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        from optsched_solvers.quota import makespan

        room = Room.of(view)
        if len(room.movable) == 0:
            return room.decision(view, room.movable)
        alone = {position: isolated(view, position) for position in room.movable.tolist()}

        def rho(position: int, at: int) -> int:
            left = int(view.remaining[position]) / int(view.rate[at])
            whole = view.time - int(view.submit[position]) + left
            return min(round(PARTS * whole / alone[position]), _MOST)

        given, _ = makespan(*tables(view, room, rho, -1), room.budget)
        return room.decision(view, fitted(view, room, given))


def isolated(view: ClusterView, position: int) -> float:
    """T_iso of an active job, by its estimated work (done and left)."""
    first, end = view.size_ptr[position], view.size_ptr[position + 1]
    cluster = max(int(view.capacity.sum()), 1)
    fair = cluster / len(view.job)
    at = int(first)
    while at + 1 < end and view.size[at + 1] <= fair:
        at += 1
    work = int(view.done[position]) + int(view.remaining[position])
    crowd = max(1.0, len(view.job) * int(view.size[at]) / cluster)
    return work / int(view.rate[at]) * crowd
