"""What is wrong with a quota plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from optsched.errors import InputError
from optsched.io.strict_json import format_json, shortened
from optsched.problems.quota.job import QuotaJob, of_kind

if TYPE_CHECKING:
    from optsched.problems.quota.data import PlanData

_NEEDED: Final = {
    "sum": ("utility",), "max_min": (), "proportional": ("score",), "makespan": ("work", "rates"),
}  # fmt: skip

_NAMED: Final = 5
"""Jobs that a message lists."""


def check_jobs(plan: PlanData) -> None:
    """Refuse jobs that do not go with the objective, with each other, or with the nodes."""
    seen: set[str] = set()
    nodes = {node.name: node for node in plan.nodes}
    kinds, held = set(plan.kinds), dict.fromkeys(nodes, 0)
    needed = _NEEDED[plan.objective]
    optional = plan.objective == "sum"
    for i, job in enumerate(plan.jobs):
        if not isinstance(job, QuotaJob):
            raise InputError(f"jobs[{i}]: expected a QuotaJob, got {job!r:.60}")
        if job.name in seen:
            raise InputError(
                f"jobs[{i}].name: {format_json(job.name)} is also the name of another job"
            )
        seen.add(job.name)
        for key in needed:
            if getattr(job, key) is None:
                raise InputError(
                    f'job {job.name!r}.{key}: missing, objective "{plan.objective}" needs it'
                )
        if not (optional or job.must_run):
            raise InputError(
                f'job {job.name!r}.must_run: objective "{plan.objective}" needs every job to run; '
                "choose which by optsched_solvers.quota.admit first, and set must_run"
            )
        for kind in job.kinds or ():
            if kind not in kinds:
                known = shortened([repr(k) for k in plan.kinds])
                raise InputError(
                    f"job {job.name!r}: names the type {format_json(kind)}, the plan has {known}"
                )
        if not plan.nodes and (job.locality != "any" or job.current):
            what = "current" if job.current else "locality"
            raise InputError(f"job {job.name!r}.{what}: needs a plan with nodes, not a budget")
        for name, gpus in job.current.items():
            if name not in nodes:
                raise InputError(f"job {job.name!r}.current: there is no node {format_json(name)}")
            held[name] += gpus
            if held[name] > nodes[name].gpus:
                raise InputError(
                    f"job {job.name!r}.current: node {format_json(name)} has {nodes[name].gpus} "
                    "GPUs, "
                    f"the jobs hold {held[name]} there"
                )
        for key in ("work", "pass_work"):
            amount = getattr(job, key)
            if amount is not None and amount * plan.resolution >= 2**62:
                raise InputError(
                    f"job {job.name!r}.{key}: {amount} times the resolution is beyond 2^62; "
                    "use a larger time unit"
                )
        if job.rates is not None:
            _check_rates(plan, job)
    if plan.objective == "proportional":
        _check_proportional(plan)


def _check_rates(plan: PlanData, job: QuotaJob) -> None:
    for kind in plan.kinds:
        table = of_kind(job.rates, kind)
        if table is not None and round(min(table) * plan.resolution) < 1:
            raise InputError(
                f"job {job.name!r}.rates: {min(table)} is below half a part of the resolution"
            )
        if table is not None and max(table) * plan.resolution >= 2**62:
            raise InputError(f"job {job.name!r}.rates: {max(table)} is beyond 2^62 parts")


def _check_proportional(plan: PlanData) -> None:
    if len(plan.kinds) > 1:
        raise InputError('objective: "proportional" shares GPUs of one type; make a plan per type')
    for job in plan.jobs:
        allowed = job.allowed(plan.kinds[0])
        sizes = None if allowed is None else allowed[2]
        if sizes is not None and sizes[-1] - sizes[0] + 1 != len(sizes):
            raise InputError(
                f'job {job.name!r}.sizes: "proportional" needs all numbers between two bounds, '
                "give minimum and maximum"
            )


def infeasibility(plan: PlanData) -> str:
    """Why no answer exists, in one sentence, if counting GPUs shows it; else ``""``."""
    least = []
    for job, span in zip(plan.jobs, plan.spans, strict=True):
        if not job.must_run:
            continue
        if not span:
            return _too_small(plan, job)
        least.append((min(low for _, low, _, _ in span), job.name))
    needed = sum(low for low, _ in least)
    if needed <= plan.n_gpus:
        return ""
    names = [repr(name) for _, name in least[:_NAMED]]
    more = f" and {len(least) - _NAMED} more" if len(least) > _NAMED else ""
    return (
        f"jobs {', '.join(names)}{more} must run and need at least {needed} GPUs together, "
        f"there are {plan.n_gpus}"
    )


def _too_small(plan: PlanData, job: QuotaJob) -> str:
    parts = []
    for kind, gpus in zip(plan.kinds, plan.budgets, strict=True):
        allowed = job.allowed(kind)
        if allowed is not None:
            parts.append(f"at least {allowed[0]} of {gpus} GPUs" + (f" {kind}" if kind else ""))
    needs = shortened(parts).replace(", ", " or ") or "a type that is not there"
    return f"job {job.name!r} must run and needs {needs}"
