"""The answer to one request: which GPUs, what they get, who pays, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.ask import Choice, ask, gpus_of
from optsched.bandwidth.contention import Contention, Share, demands, share
from optsched.bandwidth.ends import End
from optsched.bandwidth.links import weight
from optsched.bandwidth.model import CountModel
from optsched.bandwidth.patterns import written_pattern
from optsched.bandwidth.ranks import hostfile, rank_order, visible_devices
from optsched.bandwidth.rates import shown
from optsched.bandwidth.state import ClusterState, Job
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.bandwidth.policy import Policy
    from optsched.model.schedule import Schedule
    from optsched.problems.gpus.problem import GpuPlacement


@dataclass(frozen=True, eq=False)
class DispatchChoice:
    """The GPUs of the only request of a `GpuPlacement`; bandwidths in kB/s.

    Parameters
    ----------
    problem
        What was asked.
    gpus
        Global numbers, ascending.
    share
        What they get, and which job limits them.
    """

    problem: GpuPlacement
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
        return _explained(self)


def best(
    problem: GpuPlacement,
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


def choice_of_problem(problem: GpuPlacement) -> DispatchChoice | None:
    """What `counts` answers; None if there is nothing, or no tables."""
    found = best(problem, problem.policy, ties=True)
    if found is None:
        return None
    gpus = gpus_of(problem.state, found.parts)
    return DispatchChoice(problem, gpus, problem.shares([gpus])[0])


def choice_of(problem: GpuPlacement, schedule: Schedule | None) -> DispatchChoice:
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
    problem: GpuPlacement,
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


def _explained(choice: DispatchChoice) -> str:
    """One fact a line."""
    problem = choice.problem
    lines = [
        f"{written_pattern(tuple(choice.counts.values()))} GPUs: "
        f"{problem.cluster.written(choice.gpus)}",
        f"bandwidth {shown(choice.bandwidth)}"
        + (f" of {shown(choice.standalone)} alone" if choice.share.jobs else ""),
        f"limited by {limit_of(choice)}",
    ]
    if choice.share.jobs:
        one = choice.share
        lines.append(
            f"shared with {', '.join(one.jobs)}: together {shown(one.capacity or 0)} (the least, "
            f"with {one.job}), asked {shown(one.standalone + one.demand)}"
        )
    if problem.model.mixed:
        lines.append("the model mixes measurements of several payloads or collectives")
    lines += [f"costs {name} {shown(lost)}" for name, lost in choice.victims.items()]
    if choice.regret:
        lines.append(f"not all of this is measured: up to {shown(choice.regret)} may be lost")
    if not problem.policy.is_free:
        lines.append(f"the policy costs {shown(choice.price_of_policy)}")
    return "\n".join([*lines, *_alternatives(choice)])


def limit_of(choice: DispatchChoice) -> str:
    """What holds the standalone bandwidth back: a host and its weakest link, or the network."""
    problem, cluster = choice.problem, choice.problem.cluster
    model = problem.model
    if len(choice.gpus) == 1:
        return "nothing: a single GPU does not communicate"
    for h, name in enumerate(host.name for host in cluster.hosts):
        first = int(cluster.first[h])
        local = [g - first for g in choice.gpus if int(cluster.host_of[g]) == h]
        if len(local) < 2:
            continue
        inside = problem.judged_by.of([first + i for i in local])
        if inside - inside % problem.contention.unit != choice.standalone:
            continue
        links = cluster.type(h).links
        what = f"the links within {name}: {shown(inside)}"
        if links is None:
            return what
        pairs = [(i, k) for i in local for k in local if i < k]
        i, k = min(pairs, key=lambda pair: weight(links[pair[0]][pair[1]]))
        return f"{what} (weakest link {links[i][k]}, GPUs {i} and {k})"
    pattern = written_pattern(tuple(choice.counts.values()))
    what = f"the network for {pattern}: {shown(choice.standalone)}"
    if isinstance(model, CountModel):
        counts = np.sort(np.array([list(choice.counts.values())], np.int64))[:, ::-1]
        low, high = (int(model.network(counts, end)[0]) for end in ("low", "high"))
        if low == high:
            return f"{what}, measured"
        return f"{what}, predicted ({shown(max(low, 0))} to {shown(high)})"
    return f"{what}, predicted"


def _alternatives(choice: DispatchChoice) -> list[str]:
    """The best of other kinds of choices, a line each."""
    problem = choice.problem
    if problem.tables is None:  # nothing to ask for others
        return []
    policy, k = problem.policy, problem.k
    fewest = next(
        (n for n in range(1, k + 1) if best(problem, replace(policy, min_hosts=1, max_hosts=n))),
        None,
    )
    others: list[tuple[str, Policy | None, int]] = [
        ("on one host", replace(policy, min_hosts=1, max_hosts=1), k),
        ("on the fewest hosts", replace(policy, min_hosts=1, max_hosts=fewest), k),
        ("balanced", replace(policy, balance="even"), k),
        ("one GPU less", policy, k - 1),
        ("one GPU more", policy, k + 1),
    ]
    if not policy.is_free:
        others.insert(3, ("without the policy", None, k))
    lines = []
    for what, rules, size in others:
        found = best(problem, rules, size)
        if found is None:
            lines.append(f"{what}: not possible")
            continue
        cluster = problem.cluster
        counts = [part.bit_count() if cluster.sizes[h] <= 16 else part for h, part in found.parts]
        relative = f" ({found.value / choice.bandwidth:.0%})" if choice.bandwidth else ""
        lines.append(f"{what}: {written_pattern(tuple(counts))}, {shown(found.value)}{relative}")
    return lines
