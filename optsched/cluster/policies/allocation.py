"""GPUs shared out exactly among the jobs that run, at every event.

Jobs are admitted by arrival with their smallest size, and none is preempted: of jobs that still
wait these policies know nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final, Literal, cast

import numpy as np

from optsched.cluster.policies.room import Room, choice_of, fitted, flag, number, smallest, tables

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView, Decision
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

PARTS: Final = 10**6
"""Speed-ups and rho are compared in millionths."""
_MOST: Final = 2**60
_MOST_WORTH: Final = 2.0**40


class Allocation:
    """What the policies below share: who is admitted, and what that means for rigid jobs."""

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    clairvoyant: bool = False

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        room = Room.of(view)
        if len(room.movable) == 0:
            return room.decision(view, room.movable)
        return room.decision(view, self.quotas(view, room))

    def quotas(self, view: ClusterView, room: Room) -> IntArray:
        """GPUs of the movable jobs."""
        raise NotImplementedError

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code, of jobs of one size: first fit by arrival."""
        from optsched.cluster.policies.rigid import Fifo

        if len(workload.size) != len(workload):
            return None
        return Fifo(backfill="first_fit").compiled(workload, nodes, settings)


class MaxMin(Allocation):
    """Weighted max-min fairness.

    Lexicographic weighted max-min of g/w or of f(g)/w: the worst-off job is as well off as
    possible, then the next; the homogeneous case of Narayanan et al., *Heterogeneity-Aware Cluster
    Scheduling Policies* (Gavel), OSDI 2020, in whole GPUs and without time slices.

    Parameters
    ----------
    of
        ``"gpus"``: levels g/w; ``"speed"``: levels f(g)/w.
    """

    name: ClassVar[str] = "max_min"
    options: ClassVar[tuple[str, ...]] = ("of",)

    def __init__(self, *, of: str = "gpus") -> None:
        self.of = choice_of("of", of, ("gpus", "speed"))

    def quotas(self, view: ClusterView, room: Room) -> IntArray:
        """GPUs of the movable jobs."""
        from optsched_solvers.quota import max_min, max_min_table

        if self.of == "gpus":
            most = view.size[view.size_ptr[1:][room.movable] - 1]
            weight = view.weight[room.movable]
            given, _ = max_min(weight, room.budget, smallest(view)[room.movable], most)
        else:
            scale = float(np.min(view.weight[room.movable]))

            def level(position: int, at: int) -> int:
                return round(int(view.rate[at]) * (scale / float(view.weight[position])))

            given, _ = max_min_table(*tables(view, room, level), room.budget)
        return fitted(view, room, given)


class Proportional(Allocation):
    """Shares by weight, or by remaining work.

    Bounded apportionment: eq. (31) of Sun & Huh, *Entropy* (Appl. Sci. 2026, 16, 3725), made exact;
    Balinski & Young, *Fair Representation*, for the rules of rounding.

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

    def __init__(self, *, score: str = "weight", method: str = "webster") -> None:
        self.score = choice_of("score", score, ("weight", "remaining"))
        known = ("webster", "largest_remainder")
        self.method = cast(
            "Literal['webster', 'largest_remainder']", choice_of("method", method, known)
        )

    def quotas(self, view: ClusterView, room: Room) -> IntArray:
        """GPUs of the movable jobs."""
        from optsched_solvers.quota import proportional

        scores = (view.weight if self.score == "weight" else view.remaining)[room.movable]
        most = view.size[view.size_ptr[1:][room.movable] - 1]
        least = smallest(view)[room.movable]
        given, _ = proportional(scores, room.budget, least, most, method=self.method)
        return fitted(view, room, given)


class Makespan(Allocation):
    """Smallest max R/f(g) over the jobs that run.

    Smallest T with the fewest GPUs for each job that end it by T, the minimum-makespan policy of
    Narayanan et al. (Gavel, OSDI 2020) in the homogeneous case, in whole GPUs.

    Parameters
    ----------
    clairvoyant
        True remaining work instead of the estimate.
    """

    name: ClassVar[str] = "makespan"
    options: ClassVar[tuple[str, ...]] = ("clairvoyant",)

    def __init__(self, *, clairvoyant: bool = False) -> None:
        self.clairvoyant: bool = flag("clairvoyant", clairvoyant)

    def quotas(self, view: ClusterView, room: Room) -> IntArray:
        """GPUs of the movable jobs."""
        from optsched_solvers.quota import makespan

        def time(position: int, at: int) -> int:
            return -(-int(view.remaining[position]) // int(view.rate[at]))

        given, _ = makespan(*tables(view, room, time, -1), room.budget)
        return fitted(view, room, given)


class FinishTimeFairness(Allocation):
    """Smallest max (elapsed + R/f(g)) / T_iso: bisection, with the fewest GPUs for each rho.

    The *objective* of Mahajan et al., *Themis*, NSDI 2020: rho = JCT / T_iso compares a job's
    completion time with what it would be on its own share of the cluster. Their auction between
    applications is not reproduced. T_iso = work / f(s) * max(1, n s / G) with n jobs active now and
    s the largest allowed size of at most G/n GPUs, else the smallest.
    """

    name: ClassVar[str] = "finish_time_fairness"

    def quotas(self, view: ClusterView, room: Room) -> IntArray:
        """GPUs of the movable jobs."""
        from optsched_solvers.quota import makespan

        alone = {position: isolated(view, position) for position in room.movable.tolist()}

        def rho(position: int, at: int) -> int:
            left = int(view.remaining[position]) / int(view.rate[at])
            whole = view.time - int(view.submit[position]) + left
            return min(round(PARTS * whole / alone[position]), _MOST)

        given, _ = makespan(*tables(view, room, rho, -1), room.budget)
        return fitted(view, room, given)


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


class Goodput(Allocation):
    """Power mean of speed-ups.

    Qiao et al., *Pollux*, OSDI 2021, eq. 14-16: speedup_j(g) = goodput_j(g) / goodput_j(fair
    share), fitness (mean of speedup^p)^(1/p), p = -1 by default. A job's speeds are its goodputs
    (throughput times statistical efficiency at the best batch) if its speed-up is
    `optsched.cluster.Goodput`. Pollux searches by a genetic algorithm; here it is a multiple
    choice, solved exactly. Its restart penalty is left out.

    Parameters
    ----------
    p
        Exponent, -10..1: 1 maximises the sum, 0 the product, lower ones are fairer.
    """

    name: ClassVar[str] = "goodput"
    options: ClassVar[tuple[str, ...]] = ("p",)

    def __init__(self, *, p: float = -1.0) -> None:
        self.p = number("p", p, -10.0, 1.0)

    def quotas(self, view: ClusterView, room: Room) -> IntArray:
        """GPUs of the movable jobs."""
        from optsched_solvers.quota.multiple_choice import choice

        given, _ = choice(*self.table(view, room), room.budget)
        return given

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
        worth = min(float(speedup**self.p), _MOST_WORTH)
        return worth if self.p > 0 else -worth
