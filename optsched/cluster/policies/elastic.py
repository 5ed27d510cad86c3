"""`elastic` and `entropy`: one gang each in an order, idle GPUs by a rule.

`elastic` looks at no learning signal: its orders are the controls that learned rules are compared
with. What they gain over their rigid namesakes is the gain of elasticity (and of ordering), not of
uncertainty. The walk over all GPUs with ``preempt="order"`` is that of Gu et al., *Tiresias*, NSDI
2019 (its SRTF baseline), with elastic gangs. ``surplus="marginal"`` is the rule of Peng et al.,
*Optimus*, EuroSys 2018, section 4.1 (all workers; parameter servers do not exist here).

`entropy` is the macro scheduler of *Entropy* (Sun & Huh, Appl. Sci. 2026, 16, 3725), (28)-(31).
Score S = lam U + (1 - lam) ReLU(dU) with U the uncertainty after the last pass (a job that never
ran: `initial`) and dU its fall in that pass, 0 while fewer than two are known; per pass, so that
preemptions and quota changes do not matter. Jobs are admitted one smallest gang each by falling
score, and GPUs that are left are apportioned to the scores (31). What the paper leaves open is
resolved thus: g_min for every job may not fit, so admission goes first; "round, clip, correct" is
bounded apportionment by divisors, which never takes a GPU from a job because another was freed.
``score="as_printed"`` orders by S; jobs that never ran all have the same S, so that without
preemption it is elastic FIFO, and with preemption lam U favors the job that was trained least:
processor sharing, the opposite of shortest-first. ``score="resolved"`` is S / estimated remaining
GPU time. The curve of a simulated job is its U of (26), whose flaws are in
`optsched.elastic.MicroController`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from optsched.cluster.policies.elastic_rule import (
    APPORTION,
    BY_ORDER,
    MARGINAL,
    NEVER,
    ROUND,
    floats,
    gangs,
    in_order,
    integers,
    placed,
    positions,
    share,
    sizing,
    total,
)
from optsched.cluster.world.compiled import Choice, RulePolicy
from optsched.io.values import boolean, number, one_of
from optsched.kernels.compile import helper

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.settings import Settings

ORDERS: Final = ("fifo", "sjf", "srtf")
PREEMPT: Final = {"never": NEVER, "order": BY_ORDER}
SURPLUS: Final = {"round": ROUND, "marginal": MARGINAL}


class Elastic(RulePolicy):
    """One smallest gang each in an order; a job whose gang does not fit is passed by the next.

    Parameters
    ----------
    order
        ``"fifo"``: by arrival; ``"sjf"``: by total work (1-GPU time); ``"srtf"``: by remaining work
        (of equal jobs the running one goes on).
    clairvoyant
        True work instead of the estimate.
    preempt
        When a running job loses its GPUs: ``"never"``, or by ``"order"``, to a job before it.
    surplus
        GPUs that would idle go ``"round"``, one step up for each in order, or one step after the
        other to the largest ``"marginal"`` saving R/f(g) - R/f(g+1), per GPU where steps are larger
        (weights do not count).
    """

    name = "elastic"
    options: ClassVar[tuple[str, ...]] = ("order", "clairvoyant", "preempt", "surplus")

    def __init__(
        self,
        *,
        order: str = "fifo",
        clairvoyant: bool = False,
        preempt: str = "never",
        surplus: str = "round",
    ) -> None:
        self.order = one_of("options.order", order, ORDERS)
        self.clairvoyant = boolean("options.clairvoyant", clairvoyant)
        self.preempt = one_of("options.preempt", preempt, [*PREEMPT])
        self.surplus = one_of("options.surplus", surplus, [*SURPLUS])

    def arguments(self, workload: Workload, nodes: Nodes, settings: Settings) -> tuple[Any, ...]:
        """When sizes may change, work of every job, and the options as numbers."""
        return (
            sizing(workload, nodes, settings, self.clairvoyant),
            workload.work if self.clairvoyant else workload.estimate,
            ORDERS.index(self.order), PREEMPT[self.preempt], SURPLUS[self.surplus],
        )  # fmt: skip

    @staticmethod
    def rule(view, sizing, work, by, preempt, surplus):  # type: ignore[no-untyped-def]
        """GPUs and order now."""
        n = len(view.gpus)
        key, left, one = integers(n), floats(n), floats(n)
        for i in range(n):
            left[i], one[i] = view.remaining[i], 1.0
            if by > 0:
                key[i] = work[view.job[i]] if by == 1 else view.remaining[i]
        order = in_order(view, key) if by > 0 else positions(n)
        jobs = gangs(view, sizing, order, left, one, one, one, view.rate)
        share(jobs, total(view.free), preempt, surplus)
        return Choice(jobs.quota, jobs.some[: placed(jobs)], 0)


@helper(counted=False)
def score(reports, first, end, initial, lam):  # type: ignore[no-untyped-def]
    """Score lam * U + (1 - lam) * max(0, fall of U) (29) of a job with these values of U."""
    level, fall = initial, 0.0
    if end > first:
        level = reports[end - 1]
    if end > first + 1:
        fall = max(reports[end - 2] - level, 0.0)
    return lam * level + (1.0 - lam) * fall


class Entropy(RulePolicy):
    """By uncertainty and its fall.

    Parameters
    ----------
    score
        ``"as_printed"``: S; ``"resolved"``: S per estimated remaining GPU time.
    lam
        The paper's lambda, 0..1; it is never given there.
    preemptive
        Whether running jobs compete with pending ones at every event.
    initial
        U of a job that never ran, 0..1.
    """

    name = "entropy"
    options: ClassVar[tuple[str, ...]] = ("score", "lam", "preemptive", "initial")
    clairvoyant: bool = False

    def __init__(
        self,
        *,
        score: str = "as_printed",
        lam: float = 0.5,
        preemptive: bool = False,
        initial: float = 1.0,
    ) -> None:
        self.score = one_of("options.score", score, ("as_printed", "resolved"))
        self.lam = number("options.lam", lam, 0.0, 1.0)
        self.preemptive = boolean("options.preemptive", preemptive)
        self.initial = number("options.initial", initial, 0.0, 1.0)

    def arguments(self, workload: Workload, nodes: Nodes, settings: Settings) -> tuple[Any, ...]:
        """When sizes may change, and the options as numbers."""
        return (
            sizing(workload, nodes, settings, False), self.lam, self.initial,
            self.score == "resolved", BY_ORDER if self.preemptive else NEVER,
        )  # fmt: skip

    @staticmethod
    def rule(view, sizing, lam, initial, resolved, preempt):  # type: ignore[no-untyped-def]
        """GPUs and order now."""
        n = len(view.gpus)
        scores, key = floats(n), floats(n)
        for i in range(n):
            scores[i] = score(
                view.observed, view.observed_ptr[i], view.observed_ptr[i + 1], initial, lam
            )
            if resolved:
                scores[i] /= view.remaining[i]
            key[i] = -scores[i]
        jobs = gangs(view, sizing, in_order(view, key), scores, key, key, key, view.rate)
        share(jobs, total(view.free), preempt, APPORTION)
        return Choice(jobs.quota, jobs.some[: placed(jobs)], 0)
