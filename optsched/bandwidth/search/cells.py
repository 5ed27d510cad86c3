"""Kernels of the search on large clusters: the best alone, and sets of jobs that a choice meets.

With thresholds x on the bandwidth of S and y on those of its joint allocations (a cell), every
host has a largest count that keeps both. What is left is to meet the cheapest set of jobs so that
their hosts, with those of no job, have k GPUs. A job can be met only if the hosts on which it is
thin (has too few GPUs for y) are taken too, so sets of jobs are closed under this relation.
"""

# numba compiles the kernels: they are typed by signatures
# mypy: disable-error-code="no-untyped-call,assignment"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.bandwidth.search.counts import line
from optsched.bandwidth.search.request import FLOATS, REQUEST, TABLE, worth
from optsched.kernels.compile import BOOL, INT, INTS, entry, helper, record, records

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

CELL: Final = record("x x_high y y_high bound known")
"""Lowest and highest bandwidths of S and of joint allocations; `known`: `bound` is that of jobs."""


class Part(NamedTuple):
    """What counts bring at most in one domain of the network, in kB/s."""

    good: IntArray  # [host, count]: for S; -1: not possible
    joint: IntArray  # [host, count]: for joint allocations with the host's jobs, or any without
    single: IntArray  # [kind, count]: for joint allocations with jobs elsewhere
    thin_at: IntArray  # by edge: for joint allocations in which S leaves out the host


BOOLS: Final = types.Array(types.boolean, 1, "C")
PART: Final[Any] = types.NamedTuple([TABLE, TABLE, TABLE, INTS], Part)


@helper()
def fewest(q, p, free, forced, x, y, counts):  # type: ignore[no-untyped-def]
    """Fill in counts with sum k on the fewest hosts, each at least x and y; their number or 0.

    fewest[s]: hosts so far that give s GPUs.
    """
    most = len(free) + 1
    hosts, taken, left = np.full(q.k + 1, most), np.zeros((most, q.k + 1), np.int64), q.k
    hosts[0] = 0
    for h in range(len(free)):
        for s in range(q.k if free[h] > 0 else -1, -1, -1):
            best = most if forced[h] else hosts[s]
            for c in range(max(1, q.least[h]), min(free[h], s) + 1):
                if hosts[s - c] + 1 < best and p.good[h, c] >= x and p.joint[h, c] >= y:
                    best, taken[h, s] = hosts[s - c] + 1, c
            hosts[s] = best
    if hosts[q.k] >= most:
        return 0
    for h in range(most - 2, -1, -1):
        counts[h] = taken[h, left]
        left -= counts[h]
    return hosts[q.k]


@helper()
def large_counts(q, inside, v, rate, least, most):  # type: ignore[no-untyped-def]
    """Fill in by host the largest count with v within and `rate`; the fewest hosts with k, or 0."""
    number, left, m = np.zeros(len(q.rates), np.int64), q.k, 0
    for h in range(len(inside)):
        c = q.free[h] if inside[h] else 0
        while c > 0 and (c < least or q.rows[h, c] < v or q.rates[c] < rate):
            c -= 1
        most[h] = c
        if q.least[h] > c:
            return 0
        if q.least[h] > 0:
            left, m = left - c, m + 1
        else:
            number[c] += 1
    for c in range(len(number) - 1, 0, -1):
        some = min(number[c], max(0, (left + c - 1) // c))
        m, left = m + some, left - c * some
    m = max(m, min(q.min_hosts, (most > 0).sum()))
    return m if left <= 0 and q.min_hosts <= m <= q.max_hosts and m * least <= q.k else 0


@helper()
def part_at(q, rate):  # type: ignore[no-untyped-def]
    """What counts with a rate bring, without regard for jobs."""
    good, nothing = np.where(q.rates >= rate, q.rows, -1), np.zeros(0, np.int64)
    return Part(good, good, good, nothing)


@helper()
def rate_for(q, level, inside, v, exact, counts, most):  # type: ignore[no-untyped-def]
    """A rate with which k GPUs may have v before the factor (exact: have, with `counts`), or -1."""
    for step in range(1, len(q.rates)):
        rate, least = min(q.rates[step], q.cap[level]), 1
        while q.rates[least] < rate:
            least += 1
        if line(rate, q.k, 2) < v or (step > 1 and rate == min(q.rates[step - 1], q.cap[level])):
            continue
        m = large_counts(q, inside, v, rate, least, most)
        if exact and m > 0:
            m = fewest(q, part_at(q, rate), most, q.least > 0, v, v, counts)
        if 0 < m <= q.max_hosts and line(rate, q.k, max(m, 2)) >= v:
            return rate
    return -1.0


@entry(INT, REQUEST, INT, BOOLS, INT, INT, BOOL, INTS)
def alone(q, level, inside, low, high, exact, counts):  # type: ignore[no-untyped-def]
    """Bound up to `high` on what k GPUs have alone on some hosts, before the factor of the level.

    `low`: none has more. Counts that reach it are filled in if they are found (exact: always).
    """
    v, most = low + 1, np.zeros(len(inside), np.int64)
    counts[:] = 0
    while low < high:
        if rate_for(q, level, inside, v, exact, counts, most) >= 0:
            low = v
        else:
            high = v - 1
        v = (low + high + 1) // 2
    counts[:] = 0
    rate = rate_for(q, level, inside, low, exact, counts, most)
    if rate >= 0 and not exact:
        p = part_at(q, rate)
        if not take(q, p, most, q.least > 0, low, low, True, counts):
            counts[:] = 0
    return low


@helper()
def take(q, p, free, forced, x, y, fit, counts):  # type: ignore[no-untyped-def]
    """Fill in counts with sum k, at most `free`, on few hosts; False: they are not found.

    What is too much is given back where `p` stays best, at least x and y. `forced`: hosts to use.
    `fit`: exchange whole hosts for used hosts, and hosts for hosts with fewer free GPUs.
    """
    found = fill(q, p, free, forced, x, y, fit, counts)
    if not found and fewest(q, p, free, forced, x, y, counts) == 0:  # counts have gaps
        return False
    hosts = (counts > 0).sum()
    return q.min_hosts <= hosts <= q.max_hosts and (counts >= q.least).all()


@helper()
def fill(q, p, free, forced, x, y, fit, counts):  # type: ignore[no-untyped-def]
    """`take` without regard for gaps of counts and for numbers of hosts."""
    counts[:] = free * forced
    need, total, hosts = q.k, counts.sum(), (counts > 0).sum()
    for h in np.argsort(q.rank - 4 * len(q.rates) * free, kind="mergesort"):
        few = total < need or hosts < q.min_hosts
        if few and counts[h] == 0 and free[h] > 0:
            counts[h], total, hosts = free[h], total + free[h], hosts + 1
    if fit:
        total = exchange(q, free, forced, total - need, counts) + need
    while total > need:
        best, to, key = -1, 0, (0, 0, 0, 0)
        for h in np.flatnonzero(counts):
            c, low = counts[h] - 1, max(1, q.least[h])
            while c >= low and (p.good[h, c] < x or p.joint[h, c] < y):
                c -= 1
            now = (
                min(p.good[h, c], p.joint[h, c]),
                p.good[h, c] + p.joint[h, c],
                counts[h],
                -q.rank[h],
            )
            if c >= low and total - counts[h] + c >= need and (best < 0 or now > key):
                best, to, key = h, c, now
        if best < 0:
            return False
        total += to - counts[best]
        counts[best] = to
    return total == need


@helper()
def exchange(q, free, forced, spare, counts):  # type: ignore[no-untyped-def]
    """Use partly used hosts for whole hosts, then fewer free GPUs; what is left of `spare`."""
    for whole in range(1, -1, -1):
        for h in np.argsort(-q.rank):
            if counts[h] == 0 or forced[h] or q.rank[h] < len(q.rates) * whole:
                continue
            best, less = -1, len(q.rates) if whole else q.rank[h]
            for g in np.flatnonzero((counts == 0) & (free >= max(1, counts[h] - spare))):
                better = free[g] > free[best] if whole else q.rank[g] < q.rank[best]
                if q.rank[g] < less and (best < 0 or better):
                    best = g
            if best >= 0:
                spare += free[best] - counts[h]
                counts[h], counts[best] = 0, free[best]
    return spare


@helper()
def allowed(q, p, x, y):  # type: ignore[no-untyped-def]
    """Largest counts that keep the thresholds, and edges on which a job is thin.

    Jobs that cannot be met close their hosts, and hosts that are closed the jobs thin on them.
    """
    most, thin, again = np.zeros(len(q.free), np.int64), p.thin_at < y, True
    closed = np.zeros(len(q.demand), np.bool_)
    for h in range(len(most)):
        for c in range(1, q.free[h] + 1):
            if p.good[h, c] >= x and p.joint[h, c] >= y:
                most[h] = c
    while again:
        again = False
        for e in range(len(thin)):
            h, j = q.edge_host[e], q.edge_job[e]
            if closed[j] and most[h] > 0:
                most[h], again = 0, True
            if thin[e] and most[h] == 0 and not closed[j]:
                closed[j] = again = True
    return most, thin


@helper()
def bound_of(q, most, x_high, y_high):  # type: ignore[no-untyped-def]
    """Bound on choices of a cell that meet a job, 0 if there are none.

    Least demand: hosts divide a job's demand by their counts, the cheapest GPUs are taken. That is
    a feasible dual of the linear program that meets jobs in part.
    """
    least, demand, need, price = np.inf, 0.0, q.k, np.zeros(len(most))
    for j in range(len(q.demand)):
        hosts = q.edge_host[q.of_job[j] : q.of_job[j + 1]]
        gpus = most[hosts].sum()
        if gpus > 0:
            least = min(least, q.demand[j])
            for h in hosts:
                price[h] += q.demand[j] / gpus
    if most.sum() < need or least == np.inf:
        return 0
    for h in np.argsort(price):
        some = min(need, most[h])
        demand, need = demand + some * price[h], need - some
    return min(x_high, np.int64(x_high * (y_high / (x_high + max(least, demand)))) + 1)


@helper()
def enqueue(q, h, met, queue, top):  # type: ignore[no-untyped-def]
    """Append the jobs of a host that are not met, and mark them; the length of the queue."""
    for i in range(q.of_host[h], q.of_host[h + 1]):
        j = q.edge_job[q.edges[i]]
        if not met[j]:
            met[j], queue[top], top = True, j, top + 1
    return top


@helper()
def entail(q, thin, met, queue, top):  # type: ignore[no-untyped-def]
    """Close the jobs in a queue under thin hosts; its length."""
    at = 0
    while at < top:
        for e in range(q.of_job[queue[at]], q.of_job[queue[at] + 1]):
            if thin[e]:
                top = enqueue(q, q.edge_host[e], met, queue, top)
        at += 1
    return top


@helper()
def count_met(q, most, missing, jobs, sign):  # type: ignore[no-untyped-def]
    """Meet jobs (sign 1), or no more (-1): GPUs gained on hosts of which no job is missing."""
    gain = 0
    for j in jobs:
        for e in range(q.of_job[j], q.of_job[j + 1]):
            h = q.edge_host[e]
            gain -= most[h] * (missing[h] == 0)
            missing[h] -= sign
            gain += most[h] * (missing[h] == 0)
    return gain


@helper()
def meet(q, p, x, y, weight, budget, counts):  # type: ignore[no-untyped-def]
    """Fill in counts for thresholds that meet jobs of little demand; False: none are found.

    missing: jobs of a host that are not met. The demand may exceed `budget` twice while jobs are
    added, since some are dropped again.
    """
    (most, thin), forced, jobs = allowed(q, p, x, y), q.least > 0, len(weight)
    missing, spent, met = np.diff(q.of_host), 0, np.zeros(jobs, np.bool_)
    queue, best_queue, top = np.empty(jobs, np.int64), np.empty(jobs, np.int64), 0
    if (most < q.least).any():
        return False
    for h in np.flatnonzero(forced):
        top = enqueue(q, h, met, queue, top)
    total = (most * (missing == 0)).sum()
    total += count_met(q, most, missing, queue[: entail(q, thin, met, queue, top)], 1)
    while total < q.k:  # the jobs of a host, and those that these entail, with least demand per GPU
        best, best_top = np.inf, 0
        for h in np.flatnonzero(most * missing):
            top, cost = entail(q, thin, met, queue, enqueue(q, h, met, queue, 0)), 0.0
            gain = min(count_met(q, most, missing, queue[:top], 1), q.k - total)
            count_met(q, most, missing, queue[:top], -1)
            for j in queue[:top]:
                met[j], cost = False, cost + weight[j]
            if cost < best * gain:
                best, best_top = cost / gain, top
                best_queue[:top] = queue[:top]
        total += count_met(q, most, missing, best_queue[:best_top], 1)
        for j in best_queue[:best_top]:
            met[j], spent = True, spent + q.demand[j]
        if best_top == 0 or spent > 2 * budget:
            return False
    drop(q, thin, most, missing, met, weight, total)
    most = most * (missing == 0)
    for e in np.flatnonzero(thin):
        forced[q.edge_host[e]] |= met[q.edge_job[e]]
    strict, some = stricter(q, p, met, most, x, y)
    if some.sum() >= q.k and take(q, strict, some, forced, x, y, False, counts):
        return True
    return take(q, p, most, forced, x, y, False, counts)


@helper()
def drop(q, thin, most, missing, met, weight, total):  # type: ignore[no-untyped-def]
    """Drop jobs that are not needed, the heaviest first."""
    for j in np.argsort(-weight * met)[: met.sum()]:
        lost = 0
        for h in q.edge_host[q.of_job[j] : q.of_job[j + 1]]:
            lost += most[h] * (missing[h] == 0) + total * (q.least[h] > 0)
            for e in q.edges[q.of_host[h] : q.of_host[h + 1]]:
                lost += total * (thin[e] and met[q.edge_job[e]] and q.edge_job[e] != j)
        if total - lost >= q.k:
            met[j] = False
            total += count_met(q, most, missing, np.array([j]), -1)


@helper()
def stricter(q, p, met, most, x, y):  # type: ignore[no-untyped-def]
    """`p` and `most` in which met jobs elsewhere limit hosts with jobs too."""
    joint, some, number = p.joint.copy(), most.copy(), met.sum()
    for h in np.flatnonzero(most):
        jobs = 0
        for e in q.edges[q.of_host[h] : q.of_host[h + 1]]:
            jobs += met[q.edge_job[e]]
        if 0 < jobs < number:
            joint[h] = np.minimum(joint[h], p.single[q.kind[h]])
        while some[h] > 0 and (p.good[h, some[h]] < x or joint[h, some[h]] < y):
            some[h] -= 1
    return Part(p.good, joint, p.single, p.thin_at), some


@entry(INT, REQUEST, PART, records(CELL), INT, INT, FLOATS, INT, TABLE, TABLE)
def explore(q, p, cells, begin, end, weight, best, made, found):  # type: ignore[no-untyped-def]
    """Bound cells from `begin` up to `end`, and look for choices above `best` (-1: all) in them.

    Fill in count vectors, and their bandwidth next to the jobs and alone; their number is returned.
    """
    n = 0
    for i in range(begin, end):
        cell = cells[i]
        if cell.known == 0:
            most, _ = allowed(q, p, cell.x, cell.y)
            cell.bound = min(cell.bound, bound_of(q, most, cell.x_high, cell.y_high))
            cell.known = 1
        budget = cell.x_high * (cell.y_high / max(best, 1) - 1)
        if cell.bound > best and meet(q, p, cell.x, cell.y, weight, budget, made[n]):
            found[n, 0], found[n, 1] = worth(q, made[n])
            best = max(best, found[n, 0]) if best >= 0 else best
            n += 1
    return n
