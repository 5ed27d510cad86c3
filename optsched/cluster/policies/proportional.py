"""`proportional`: GPUs in proportion to scores, within every job's sizes, at every event.

Bounded apportionment: eq. (31) of Sun & Huh, *Entropy* (Appl. Sci. 2026, 16, 3725), made exact;
Balinski & Young, *Fair Representation*, for the rules of rounding. Jobs are admitted by arrival
with their smallest size, and none is preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, cast

from optsched.cluster.policies.room import Room, choice_of, fitted, smallest

if TYPE_CHECKING:
    from optsched.cluster.policy import ClusterView, Decision


class Proportional:
    """Shares by weight, or by remaining work.

    Parameters
    ----------
    score
        ``"weight"`` or ``"remaining"`` (estimated work left: long jobs get more).
    method
        ``"webster"`` (never takes a GPU from a job because there are more) or
        ``"largest_remainder"``.
    """

    name: ClassVar[str] = "proportional"
    options: ClassVar[tuple[str, ...]] = ("score", "method")
    clairvoyant: bool = False

    def __init__(self, *, score: str = "weight", method: str = "webster") -> None:
        self.score = choice_of("score", score, ("weight", "remaining"))
        known = ("webster", "largest_remainder")
        self.method = cast(
            "Literal['webster', 'largest_remainder']", choice_of("method", method, known)
        )

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        from optsched_solvers.quota import proportional

        room = Room.of(view)
        if len(room.movable) == 0:
            return room.decision(view, room.movable)
        scores = (view.weight if self.score == "weight" else view.remaining)[room.movable]
        most = view.size[view.size_ptr[1:][room.movable] - 1]
        least = smallest(view)[room.movable]
        given, _ = proportional(scores, room.budget, least, most, method=self.method)
        return room.decision(view, fitted(view, room, given))
