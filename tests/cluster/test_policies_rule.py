"""The rule of the elastic policies against a simple version of it, and brute force."""

from __future__ import annotations

import elastic_workloads as cases
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optsched.cluster.policies.elastic_rule import (
    APPORTION,
    BY_GAIN,
    BY_ORDER,
    HOLDS,
    LAST,
    MARGINAL,
    NEVER,
    PINNED,
    ROUND,
    Gangs,
    share,
)


def plain_share(jobs, order, budget, preempt, surplus):
    """`share` in plain Python: jobs are dictionaries; returns their quotas."""
    smallest = {j: job["size"][0] for j, job in enumerate(jobs)}
    least = {j: job["held"] if job["fixed"] == LAST else smallest[j] for j, job in enumerate(jobs)}
    loose = [j for j in order if jobs[j]["fixed"] != PINNED]
    admitted = {j for j in order if jobs[j]["fixed"] == PINNED}
    stays = [
        j for j in loose if jobs[j]["held"] and (preempt != BY_ORDER or not jobs[j]["preemptible"])
    ]
    admitted |= set(stays)
    left = budget - sum(least[j] for j in stays)
    out: list[int] = []
    displacing = preempt == BY_GAIN
    for at, j in enumerate(order):
        job = jobs[j]
        if j in admitted or (job["held"] and preempt != BY_ORDER):
            continue
        if least[j] <= left:
            admitted.add(j)
            left -= least[j]
            continue
        if not displacing:
            continue
        victims, freed = [], left
        behind = [v for v in order[at + 1 :] if v in stays and v in admitted]
        for v in reversed([v for v in behind if jobs[v]["preemptible"]]):
            if freed >= smallest[j]:
                break
            victim = jobs[v]
            own = job["remaining"] / job["rate"][0]
            its = victim["remaining"] / victim["rate"][0]
            costs = victim["weight"] * (victim["cost"] + job["cost"])
            if job["weight"] * its * (1 - 1e-9) - victim["weight"] * own <= costs:
                break
            victims.append(v)
            freed += least[v]
        if freed >= smallest[j]:
            admitted -= set(victims)
            admitted.add(j)
            left = freed - smallest[j]
            for v in reversed(victims):
                if least[v] <= left:
                    admitted.add(v)
                    left -= least[v]
        else:
            displacing = False
    quota = dict.fromkeys(order, 0)
    left = budget
    for j in order:
        job = jobs[j]
        if j in admitted and job["held"]:
            quota[j] = job["held"] if job["fixed"] else smallest[j]
            left -= 0 if job["fixed"] == PINNED else quota[j]
    for j in order:
        job = jobs[j]
        if j in admitted and not job["held"] and smallest[j] <= left:
            quota[j] = smallest[j]
        elif j in admitted and not job["held"]:
            out.append(j)
            continue
        elif j not in admitted and job["held"]:
            ways = [job["held"]] if job["fixed"] else job["size"]
            quota[j] = max((g for g in ways if g <= min(left, job["held"])), default=0)
        else:
            continue
        left -= quota[j]
    spare = left - sum(smallest[j] for j in out)

    def step(j):
        job = jobs[j]
        if not quota[j] or job["fixed"] or quota[j] == job["size"][-1]:
            return None
        k = job["size"].index(quota[j])
        now, then = job["size"][k], job["size"][k + 1]
        return (k, now, then) if then - now <= spare else None

    if surplus == ROUND:
        moved = True
        while moved:
            moved = False
            for j in order:
                if step(j):
                    _, now, then = step(j)
                    quota[j], spare, moved = then, spare - (then - now), True
        return quota
    while True:
        best, most = None, 0.0
        for j in order:
            if not step(j):
                continue
            job, (k, now, then) = jobs[j], step(j)
            left_now, left_then = (job["remaining"] / job["rate"][i] for i in (k, k + 1))
            if surplus == MARGINAL:
                gain = job["weight"] * (left_now - left_then) / (then - now)
            elif job["remaining"] > 0:
                gain = job["remaining"] / (now + then)
            else:
                gain = -float(then)
            if best is None or gain > most:
                best, most = j, gain
        if best is None or (surplus == MARGINAL and most <= 0):
            return quota
        _, now, then = step(best)
        quota[best], spare = then, spare - (then - now)


@st.composite
def situations(draw):
    """Jobs, of which the running ones fit, an order, all GPUs."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    jobs, held, pinned = [], 0, 0
    for _ in range(draw(st.integers(1, 9))):
        size = cases.SIZES[int(random.integers(len(cases.SIZES)))]
        running = random.random() < 0.5
        fixed = int(random.choice([0, 1, 2, 3], p=[0.4, 0.3, 0.1, 0.2])) if running else 0
        gpus = int(random.choice(size)) if running else 0
        held += gpus if fixed != PINNED else 0
        pinned += gpus if fixed == PINNED else 0
        rate = np.cumsum(random.integers(1, 9, len(size))).tolist()
        jobs.append({
            "size": list(size), "rate": rate, "held": gpus, "fixed": fixed,
            "remaining": float(random.integers(0, 50)), "weight": float(random.integers(1, 4)),
            "cost": int(random.integers(0, 4)), "preemptible": int(random.random() < 0.8),
        })  # fmt: skip
    order = random.permutation(len(jobs)).tolist()
    return jobs, order, held + int(random.integers(0, 6))


@given(situations(), st.sampled_from([NEVER, BY_ORDER, BY_GAIN]),
       st.sampled_from([ROUND, MARGINAL, APPORTION]))  # fmt: skip
def test_kernel_equals_plain_code(situation, preempt, surplus):
    """Admission, displacement, realisation, surplus."""
    jobs, order, budget = situation
    quota = kernel_share(jobs, order, budget, preempt, surplus)
    assert quota == plain_share(jobs, order, budget, preempt, surplus)
    assert all(q == 0 or q in job["size"] for q, job in zip(quota.values(), jobs, strict=True))
    loose = [j for j in quota if jobs[j]["fixed"] != PINNED]
    assert sum(quota[j] for j in loose) <= budget
    for j, job in enumerate(jobs):
        if job["held"] and (preempt == NEVER or not job["preemptible"]):
            assert quota[j] > 0
        if job["fixed"] in (HOLDS, LAST):
            assert quota[j] in (0, job["held"])
        if job["held"] and not quota[j]:  # the start of another job has used its GPUs
            needs = job["held"] if job["fixed"] else job["size"][0]
            assert sum(quota[i] for i in loose) + needs > budget


def kernel_share(jobs, order, budget, preempt, surplus):
    """The same by the rule: GPUs by job, ascending."""
    n = len(jobs)
    column = {k: np.array([job[k] for job in jobs]) for k in jobs[0] if k not in ("size", "rate")}
    size, rate = (np.array([x for job in jobs for x in job[k]]) for k in ("size", "rate"))
    loose = int(column["held"][column["fixed"] != PINNED].sum())
    ptr = np.cumsum([0, *(len(job["size"]) for job in jobs)])
    about = Gangs(
        np.array(order), column["remaining"], column["weight"], np.zeros(n), column["cost"], rate,
        column["held"], ptr, size, column["preemptible"] > 0, column["fixed"],
        *np.zeros((4, n), np.int64),
    )  # fmt: skip
    share(about, budget - loose, preempt, surplus)
    return dict(enumerate(about.quota.tolist()))
