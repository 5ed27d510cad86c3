"""`sia`: one configuration or none for every job, by the rounded objective of Sia.

Jayaram Subramanya et al., *Sia*, SOSP 2023, homogeneous case: minimise the sum of A over the
chosen configurations plus 1.1 for every job left out, A = round((goodput * r / smallest goodput of
the job)^p, 2), p = -0.5. r discounts a change of size: 1 for the present one, for a job without
GPUs and for one younger than its restart cost, else max(age - restarts * cost, 0) / (age + cost).
Sizes are 1, 2, 4, .., one node, then whole nodes. The rounding to two decimals is part of the
peer's objective and is kept. Solved exactly as a multiple choice. Jobs compete anew at every event:
Sia itself decides in rounds (``round=60``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optsched.cluster.policies.room import decision, fixed_jobs, number

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView, Decision
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

LEFT_OUT: Final = 1.1
_CENTS: Final = 100
_MOST: Final = 10.0**8
_FREE, _HOLDS, _PINNED = 0, 1, 2


class Sia:
    """Sia's choice of configurations.

    Parameters
    ----------
    p
        Exponent, -10 up to below 0.
    """

    name: ClassVar[str] = "sia"
    options: ClassVar[tuple[str, ...]] = ("p",)
    clairvoyant: bool = False

    def __init__(self, *, p: float = -0.5) -> None:
        self.p = number("p", p, -10.0, -1e-6)

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        from optsched_solvers.quota.multiple_choice import choice

        fixed, slots = fixed_jobs(view), np.diff(view.size_ptr) > 0
        quota = np.where(slots, view.gpus, -1)
        movable = np.flatnonzero(slots & (fixed != _PINNED))
        if len(view.size) == int(slots.sum()):  # every job has one size
            from optsched.cluster.policies.sia_loop import one_size

            budget = int(view.free.sum() + view.gpus[movable].sum())
            gang = view.size[view.size_ptr[:-1][movable]]
            held, preemptible = view.gpus[movable], view.preemptible[movable]
            quota[movable] = one_size(held, preemptible, gang, budget)
            return decision(view, quota, None)
        positions, ptr, sizes, values, budget = self.table(view)
        if len(positions):
            # among equal sums the one with the fewest changes, or jobs could swap for ever
            keeps = sizes == np.repeat(view.gpus[positions], np.diff(ptr))
            ranked = values * (len(positions) + 1) + keeps
            quota[positions], _ = choice(ptr, sizes, ranked, budget)
        return decision(view, quota, None)

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code, of jobs of one size."""
        from optsched.cluster.policies.sia_loop import simulate_one_size

        return simulate_one_size(workload, nodes, settings, self.name)

    def table(self, view: ClusterView) -> tuple[IntArray, IntArray, IntArray, IntArray, int]:
        """Positions, offsets, sizes, worths (cents, negative costs) and budget of the choice."""
        fixed = fixed_jobs(view)
        slots = np.diff(view.size_ptr) > 0
        positions = np.flatnonzero(slots & (fixed != _PINNED))
        budget = int(view.free.sum() + view.gpus[positions].sum())
        node = int(view.capacity.max(initial=1))
        ptr, sizes, values = [0], [], []
        for i in positions.tolist():
            held = int(view.gpus[i])
            if not held or view.preemptible[i]:
                sizes.append(0)
                values.append(-round(_CENTS * LEFT_OUT))
            for g, cost in self.costs(view, i, node):
                if g <= budget and (g == held or fixed[i] == _FREE):
                    sizes.append(g)
                    values.append(-round(_CENTS * cost))
            ptr.append(len(sizes))
        return positions, *(np.array(x, np.int64) for x in (ptr, sizes, values)), budget  # type: ignore[return-value]

    def costs(self, view: ClusterView, i: int, node: int) -> list[tuple[int, float]]:
        """Sizes of a job and A, rounded to two decimals; sizes of discount 0 are not offered."""
        at = slice(view.size_ptr[i], view.size_ptr[i + 1])
        held = int(view.gpus[i])
        rows = list(zip(view.size[at].tolist(), view.rate[at].tolist(), strict=True))
        usual = [(g, f) for g, f in rows if (g & (g - 1) == 0 and g <= node) or g % node == 0]
        rows = [row for row in rows if row in usual or row[0] == held] if usual else rows
        slowest = min(f for _, f in rows)
        age = view.time - int(view.submit[i])
        cost = int(view.restart_cost[i])
        restarts = max(int(view.starts[i]) - 1, 0)
        discount = 1.0
        if held and age >= cost and age + cost > 0:
            discount = max(age - restarts * cost, 0) / (age + cost)
        found = []
        for g, f in rows:
            r = 1.0 if g == held else discount
            if r > 0:
                found.append((g, round(min((f * r / slowest) ** self.p, _MOST), 2)))
        return found
