"""Kernels of the searches over subsets of GPUs: compare spreads, and prune GPU by GPU."""

from __future__ import annotations

import numpy as np
from numba import types

from optsched.bandwidth.counts import joint_within, shared
from optsched.bandwidth.rates import NO_LIMIT
from optsched.bandwidth.tables import (
    BEST,
    BY_MASK,
    GPUS,
    HOSTS,
    INTRA,
    NETWORK,
    RECORD,
    RECORDS,
    STEP,
    WIDTH,
)
from optsched.kernels.compile import INT, INTS, READ, entry, helper
from optsched_solvers.gpus.value import (
    CROSS_ONLY,
    FILL_BEST,
    JUDGED,
    N_JOBS,
    TWO_SIDED,
    UNIT,
    divide,
    judge,
)


@helper(types.UniTuple(INT, 2), READ, READ, READ, READ, READ, INT, INT, INTS, counted=False)
def _prepare(words, rule, jobs, masks, hosts, at, m, plan):  # type: ignore[no-untyped-def]
    """What all spreads over one set of hosts share; number of jobs on the set, and their demand.

    plan: by host where its best bandwidths begin, where those of joint allocations do, and whether
    these are found by mask; then by job the states of S's side and of its own outside of the set,
    the least bandwidth within those hosts, and its GPUs on every host of the set.
    """
    n_hosts, found, demand, end = words[HOSTS], 0, 0, 3 * m
    for i in range(m):
        record = words[RECORDS] + hosts[at + i] * RECORD
        n = words[record + GPUS]
        plan[i] = words[record + BEST] + masks[hosts[at + i]] * (n + 1)
        plan[m + i], plan[2 * m + i] = words[record + INTRA], 0
        if words[record + BY_MASK] == 1:
            if rule[FILL_BEST] == 1:
                plan[m + i] = words[record + BEST] + ((1 << n) - 1) * (n + 1)
            else:
                plan[2 * m + i] = 1
    if m < 2 and rule[CROSS_ONLY] == 1:
        return 0, 0
    for j in range(rule[N_JOBS]):
        job = j * (n_hosts + 1)
        touched = False
        for i in range(m):
            held = jobs[job + 1 + hosts[at + i]]
            plan[end + 3 + i] = held
            touched = touched or held > 0
        if not touched:
            continue
        state, limit, i = 0, NO_LIMIT, at
        for h in range(n_hosts):
            if i < at + m and hosts[i] == h:
                i += 1
                continue
            held = jobs[job + 1 + h]
            if held > 0:
                state = words[words[STEP] + state * words[WIDTH] + held]
                record = words[RECORDS] + h * RECORD
                limit = min(limit, joint_within(words, record, held, rule[FILL_BEST]))
        plan[end] = 0 if rule[TWO_SIDED] == 1 else state
        plan[end + 1], plan[end + 2] = state, limit
        found += 1
        demand += jobs[job]
        end += 3 + m
    return found, demand


@entry(INT, READ, READ, READ, READ, READ, READ, INT, INTS)
def first_best(words, rule, jobs, masks, hosts, counts, m, out):  # type: ignore[no-untyped-def]
    """The first best row of counts, on every host the fastest free GPUs; -1 if none is measured.

    words, rule, jobs: as in `judge`. masks: `ClusterState.masks`. hosts, counts: m numbers a row,
    hosts ascending. out[0]: its value.
    """
    step, width, network = words[STEP], words[WIDTH], words[NETWORK]
    two, unit = rule[TWO_SIDED], rule[UNIT]
    plan = np.empty(3 * m + (rule[N_JOBS] + 1) * (3 + m), np.int64)
    n_jobs = demand = 0
    best, chosen = -1, -1
    for row in range(len(hosts) // m):
        at = row * m
        same = row > 0
        for i in range(m):
            same = same and hosts[at + i] == hosts[at - m + i]
        if not same:
            n_jobs, demand = _prepare(words, rule, jobs, masks, hosts, at, m, plan)
        state, limit = 0, NO_LIMIT
        for i in range(m):
            c = counts[at + i]
            limit = min(limit, words[plan[i] + c])
            state = words[step + state * width + c]
        d = min(limit, words[network + state])
        if d <= best:  # nor can what others leave of it be more; -1 is not measured
            continue
        if unit > 1:
            d -= d % unit
        capacity, known = NO_LIMIT, True
        for j in range(n_jobs):
            t = 3 * m + j * (3 + m)
            ours, theirs, joint = plan[t], plan[t + 1], plan[t + 2]
            for i in range(m):
                held = plan[t + 3 + i]
                both = held + counts[at + i]
                joint = min(
                    joint, words[plan[m + i] + ((1 << both) - 1 if plan[2 * m + i] else both)]
                )
                ours = words[step + ours * width + both]
                if two == 1 and held > 0:
                    theirs = words[step + theirs * width + both]
            reached = words[network + ours]
            if two == 1:
                reached = min(reached, words[network + theirs])
            known = known and reached >= 0
            joint = min(joint, reached)
            if unit > 1:
                joint -= joint % unit
            capacity = min(capacity, joint)
        if not known:
            continue
        value = shared(d, 1 if n_jobs > 0 else 0, capacity, d + demand)
        if value > best:
            best, chosen = value, row
    out[0] = best
    return chosen


@entry(INT, READ, READ, READ, READ, READ, INTS, INTS, INT, INTS)
def prune(words, rule, jobs, host, bit, left, now, target, out):  # type: ignore[no-untyped-def]
    """Remove GPU by GPU the one without which most bandwidth is left, down to `target` of them.

    words, rule, jobs: as in `judge`. host, bit: host of each candidate GPU and its bit in the mask
    (1 where GPUs are only counted), ascending ids. left: the candidates that are left, ascending,
    in the first out[0] places. now: their masks (or numbers) by host. These three are updated.
    out[1]: value of what is left, -1 if it is not measured. The answer: sets evaluated.
    """
    n_hosts, records = words[HOSTS], words[RECORDS]
    counts = np.zeros(n_hosts, np.int64)
    judged = np.zeros((n_hosts, JUDGED), np.int64)
    known, others = np.zeros(n_hosts, np.int64), np.zeros(n_hosts, np.int64)
    size, evaluated = out[0], 0
    for i in range(size):
        counts[host[left[i]]] += 1
    while size > target:
        least = second = NO_LIMIT  # of the bandwidths within hosts
        slowest = -1
        for h in range(n_hosts):
            if counts[h] > 0:
                limit = words[words[records + h * RECORD + INTRA] + now[h]]
                if limit < least:
                    least, second, slowest = limit, least, h
                else:
                    second = min(second, limit)
        for h in range(n_hosts):  # all but the bandwidth within h is the same for all GPUs of h
            if counts[h] > 0:
                counts[h] -= 1
                known[h] = judge(words, rule, jobs, counts, judged[h])
                counts[h] += 1
                others[h] = second if h == slowest else least
        best, worst = -2, 0
        for i in range(size):
            h = host[left[i]]
            value = -1
            if known[h] == 1:
                rest = words[words[records + h * RECORD + INTRA] + now[h] - bit[left[i]]]
                value = divide(rule, judged[h], min(rest, others[h]))
            if value > best:
                best, worst = value, i
        evaluated += size
        gpu = left[worst]
        now[host[gpu]] -= bit[gpu]
        counts[host[gpu]] -= 1
        size -= 1
        for i in range(worst, size):
            left[i] = left[i + 1]
        out[1] = best
    out[0] = size
    return evaluated
