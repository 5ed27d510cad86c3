"""What is wrong with a quota plan, or with an answer to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import format_json, shortened
from optsched.model.schedule import Rows
from optsched.problems.quota.job import QuotaJob, of_kind
from optsched.problems.quota.schedule import counts

if TYPE_CHECKING:
    from optsched.problems.quota.problem import QuotaPlan

_NEEDED: Final = {
    "sum": ("utility",), "max_min": (), "proportional": ("score",), "makespan": ("work", "rates"),
}  # fmt: skip

_NAMED: Final = 5
"""Jobs that a message lists."""


def check_jobs(plan: QuotaPlan) -> None:
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


def _check_rates(plan: QuotaPlan, job: QuotaJob) -> None:
    for kind in plan.kinds:
        table = of_kind(job.rates, kind)
        if table is not None and round(min(table) * plan.resolution) < 1:
            raise InputError(
                f"job {job.name!r}.rates: {min(table)} is below half a part of the resolution"
            )
        if table is not None and max(table) * plan.resolution >= 2**62:
            raise InputError(f"job {job.name!r}.rates: {max(table)} is beyond 2^62 parts")


def _check_proportional(plan: QuotaPlan) -> None:
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


def infeasibility(plan: QuotaPlan) -> str:
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


def _too_small(plan: QuotaPlan, job: QuotaJob) -> str:
    parts = []
    for kind, gpus in zip(plan.kinds, plan.budgets, strict=True):
        allowed = job.allowed(kind)
        if allowed is not None:
            parts.append(f"at least {allowed[0]} of {gpus} GPUs" + (f" {kind}" if kind else ""))
    needs = shortened(parts).replace(", ", " or ") or "a type that is not there"
    return f"job {job.name!r} must run and needs {needs}"


def faults(plan: QuotaPlan, answer: Rows) -> list[str]:
    """What is wrong with an answer (row j: GPUs of job j), a sentence each."""
    if not isinstance(answer, Rows):
        raise InputError(f"answer: expected Rows, got {answer!r:.60}")
    if len(answer) != len(plan.jobs):
        return [f"expected a row for each of {len(plan.jobs)} jobs, got {len(answer)}"]
    ids = answer.ids
    outside = (ids < 0) | (ids >= plan.n_gpus)
    if outside.any():
        gpu = int(ids[int(np.argmax(outside))])
        return [f"there is no GPU {gpu}, the plan has 0..{plan.n_gpus - 1}"]
    found = _twice(plan, answer)
    sizes, kinds = plan.sizes(answer)
    for j in np.flatnonzero(~plan.allowed(sizes, kinds)).tolist():
        kind = plan.kinds[int(kinds[j])] if sizes[j] else ""
        of = f" of type {kind}" if kind else ""
        found.append(f"job {plan.jobs[j].name!r} gets {sizes[j]} GPUs{of}, which is not allowed")
    if plan.hands_out_all and int(sizes.sum()) != plan.total:
        found.append(f"{int(sizes.sum())} GPUs are handed out, all {plan.total} must be")
    if len(plan.kinds) > 1:
        found += _mixed(plan, answer)
    return found + _astray(plan, answer)


def _twice(plan: QuotaPlan, answer: Rows) -> list[str]:
    many = np.flatnonzero(np.bincount(answer.ids, minlength=1) > 1)
    row = np.repeat(np.arange(len(plan.jobs)), np.diff(answer.indptr))
    found = []
    for gpu in many.tolist():
        owners = [plan.jobs[j].name for j in row[answer.ids == gpu].tolist()]
        found.append(f"GPU {plan.resources[gpu].name} goes to {owners[0]!r} and to {owners[1]!r}")
    return found


def _mixed(plan: QuotaPlan, answer: Rows) -> list[str]:
    kind, _, first = plan.pools
    of_gpu = kind[np.searchsorted(first, answer.ids, side="right") - 1]
    _, kinds = plan.sizes(answer)
    row = np.repeat(np.arange(len(plan.jobs)), np.diff(answer.indptr))
    mixed = np.unique(row[of_gpu != kinds[row]]).tolist()
    return [f"job {plan.jobs[j].name!r} gets GPUs of several types" for j in mixed]


def _astray(plan: QuotaPlan, answer: Rows) -> list[str]:
    """Jobs whose locality is broken."""
    if all(job.locality == "any" for job in plan.jobs):
        return []
    ptr, pool, count = counts(plan, answer)
    kind, gpus, _ = plan.pools
    largest = [int(gpus[kind == k].max(initial=0)) for k in range(len(plan.kinds))]
    found = []
    for j, job in enumerate(plan.jobs):
        held = list(zip(pool[ptr[j] : ptr[j + 1]].tolist(), count[ptr[j] : ptr[j + 1]].tolist(),
                        strict=True))  # fmt: skip
        if len(held) < 2 or job.locality == "any":
            continue
        total = sum(c for _, c in held)
        if job.locality == "single" and total <= largest[int(kind[held[0][0]])]:
            found.append(f"job {job.name!r} must be within one node, it is on {len(held)}")
        part = [n for n, c in held if c < gpus[n]]
        if job.locality == "whole" and len(part) > 1:
            names = " and ".join(plan.nodes[n].name for n in part[:2])
            found.append(f"job {job.name!r} must hold its nodes wholly, {names} are shared")
    return found


__all__ = ["check_jobs", "faults", "infeasibility"]
