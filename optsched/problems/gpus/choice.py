"""The answer to one request: which GPUs, what they get, who pays, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from optsched.bandwidth.ask import Choice, ask, gpus_of
from optsched.bandwidth.contention import Contention, Share, demands, share
from optsched.bandwidth.ends import End
from optsched.bandwidth.ranks import hostfile, rank_order, visible_devices
from optsched.bandwidth.state import ClusterState, Job
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.bandwidth.policy import Policy
    from optsched.model.schedule import Schedule
    from optsched.problems.gpus.problem import SubsetChoice


@dataclass(frozen=True, eq=False)
class DispatchChoice:
    """The GPUs of the only request of a `SubsetChoice`; bandwidths in kB/s.

    Parameters
    ----------
    problem
        What was asked.
    gpus
        Global numbers, ascending.
    share
        What they get, and which job limits them.
    """

    problem: SubsetChoice
    gpus: tuple[int, ...]
    share: Share

    @property
    def bandwidth(self) -> int:
        """B(S, traffic)."""
        return self.share.value

    @property
    def standalone(self) -> int:
        """B(S), were nobody else there."""
        return self.share.standalone

    @property
    def counts(self) -> dict[str, int]:
        """Host to number of GPUs."""
        cluster = self.problem.cluster
        found: dict[str, int] = {}
        for gpu in self.gpus:
            host = cluster.hosts[int(cluster.host_of[gpu])].name
            found[host] = found.get(host, 0) + 1
        return found

    @property
    def rank_order(self) -> tuple[int, ...]:
        """The GPUs by rank: hosts contiguous, domains grouped, rings within hosts."""
        return rank_order(self.problem.cluster, self.gpus)

    def hostfile(self) -> str:
        """``host slots=n`` a line, in rank order."""
        return hostfile(self.problem.cluster, self.gpus)

    def visible_devices(self) -> dict[str, str]:
        """Host to its ``CUDA_VISIBLE_DEVICES``, in rank order."""
        return visible_devices(self.problem.cluster, self.gpus)

    @cached_property
    def victims(self) -> dict[str, int]:
        """What running jobs lose, for those that lose anything: their share before less after."""
        problem = self.problem
        state, model, wanted = problem.state, problem.judged_by, problem.demands
        newcomer = "the new job"
        found = {}
        for j, job in enumerate(state.jobs):
            others = state.jobs[:j] + state.jobs[j + 1 :]
            asked = wanted[:j] + wanted[j + 1 :]
            before = _as_tenant(problem, state, others, asked, job, wanted[j])
            after = _as_tenant(
                problem, state, (*others, Job(newcomer, self.gpus)),
                (*asked, model.of(self.gpus)), job, wanted[j],
            )  # fmt: skip
            if after < before:
                found[job.name] = before - after
        return found

    @cached_property
    def regret(self) -> int | None:
        """What may be lost at most by not knowing better; 0 if all is measured, None if unknown.

        The best that any choice may have, were the model's intervals true at their upper ends,
        less what this choice has at least.
        """
        problem = self.problem
        model, state = problem.model, problem.state
        high, low = End(model, "high"), End(model, "low")
        tables = high.tables()
        if tables is None:
            return None
        kind, seed, unit = problem.traffic, problem.seed, problem.contention.unit
        best = ask(
            tables, state.masks, state.held, demands(low, state, kind, seed, unit), len(self.gpus),
            problem.policy, problem.contention,
        )  # fmt: skip
        if best is None or not best.exact:
            return None
        sure = share(
            low, state, self.gpus, demands(high, state, kind, seed, unit), problem.contention
        )
        return max(0, best.value - sure.value)

    @cached_property
    def price_of_policy(self) -> int:
        """Bandwidth that the policy costs: the best without it less the best with it."""
        problem = self.problem
        if problem.policy.is_free:
            return 0
        free, ruled = best(problem, None), best(problem, problem.policy)
        return 0 if free is None or ruled is None else free.value - ruled.value

    def explain(self) -> str:
        """What limits this choice, its best alternatives, victims, and the price of the policy."""
        from optsched.problems.gpus.explain import explain

        return explain(self)


def best(
    problem: SubsetChoice,
    policy: Policy | None,
    k: int | None = None,
    *,
    ties: bool = False,
) -> Choice | None:
    """The best choice by counts under another policy or for another k; None without tables."""
    size = problem.k if k is None else k
    if problem.tables is None or not 1 <= size <= len(problem.state.free):
        return None
    state = problem.state
    return ask(
        problem.tables, state.masks, state.held, problem.demands, size, policy,
        problem.contention, ties=ties, tolerance=problem.tolerance if ties else 0.0,
    )  # fmt: skip


def choice_of_problem(problem: SubsetChoice) -> DispatchChoice | None:
    """What `counts` answers; None if there is nothing, or no tables."""
    found = best(problem, problem.policy, ties=True)
    if found is None:
        return None
    gpus = gpus_of(problem.state, found.parts)
    return DispatchChoice(problem, gpus, problem.shares([gpus])[0])


def choice_of(problem: SubsetChoice, schedule: Schedule | None) -> DispatchChoice:
    """The only request's answer in a schedule; without one, what `counts` answers."""
    problem.single("choice")
    if schedule is None:
        found = choice_of_problem(problem)
        if found is None:
            reason = problem.infeasibility() or "the model has no tables; solve it first"
            raise InputError(f"choice: there is none: {reason}")
        return found
    problem.check_sizes(problem.chosen(schedule))
    gpus = tuple(problem.chosen(schedule)[0])
    return DispatchChoice(problem, gpus, problem.shares([gpus])[0])


def _as_tenant(
    problem: SubsetChoice,
    state: ClusterState,
    others: tuple[Job, ...],
    asked: tuple[int, ...],
    job: Job,
    demand: int,
) -> int:
    """What a running job gets beside others, of its demand or B of its GPUs if that is less."""
    around = state.with_jobs(others)
    rule: Contention = problem.contention
    one = share(problem.judged_by, around, job.gpus, asked, rule)
    if not one.jobs or one.capacity is None:
        return min(demand, one.standalone)
    wanted = min(demand, one.standalone)
    total = wanted + one.demand
    return wanted if total <= one.capacity else wanted * one.capacity // total
