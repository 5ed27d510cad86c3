"""Bandwidth under contention of counts by tables: compare spreads, and prune GPU by GPU."""

from __future__ import annotations

from typing import Final

import numpy as np

from optsched.bandwidth.models.tables import (
    BEST,
    GPUS,
    HOSTS,
    INTRA,
    NETWORK,
    RECORD,
    RECORDS,
    STEP,
    WIDTH,
)
from optsched.bandwidth.search.counts import joint_within, shared
from optsched.bandwidth.topology.rates import NO_LIMIT
from optsched.kernels.compile import INT, INTS, READ, entry, helper

# the rule of contention, one array
N_JOBS: Final = 0
FILL_BEST: Final = 1
TWO_SIDED: Final = 2
CROSS_ONLY: Final = 3
UNIT: Final = 4

# what `_judge` says of counts
LIMIT: Final = 0
"""Of the network, for S itself."""
ANY: Final = 1
"""1 if a job interferes."""
CAPACITY: Final = 2
DEMAND: Final = 3
JUDGED: Final = 4


@helper(INT, READ, READ, READ, READ, INTS, counted=False)
def _judge(words, rule, jobs, counts, out):  # type: ignore[no-untyped-def]
    """What the counts of a choice decide: limit of the network, and what others leave; 1, or 0.

    words: `CountTables.words`. jobs: of `ask.jobs_of`. counts: by host, shape (hosts,). out: filled
    as named above, length JUDGED. 0 if a pattern is not measured.
    """
    n_hosts, step, width = words[HOSTS], words[STEP], words[WIDTH]
    network, records = words[NETWORK], words[RECORDS]
    state = used = 0
    for h in range(n_hosts):
        if counts[h] > 0:
            state = words[step + state * width + counts[h]]
            used += 1
    out[LIMIT], out[ANY], out[CAPACITY], out[DEMAND] = words[network + state], 0, NO_LIMIT, 0
    if out[LIMIT] < 0:
        return 0
    if used < 2 and rule[CROSS_ONLY] == 1:
        return 1
    best, two = rule[FILL_BEST], rule[TWO_SIDED]
    for j in range(rule[N_JOBS]):
        at = j * (n_hosts + 1)
        touched = 0
        for h in range(n_hosts):
            if counts[h] > 0 and jobs[at + 1 + h] > 0:
                touched = 1
                break
        if touched == 0:
            continue
        ours = theirs = 0
        joint = NO_LIMIT
        for h in range(n_hosts):
            held = jobs[at + 1 + h]
            both = held + counts[h]
            if both == 0:
                continue
            limit = joint_within(words, records + h * RECORD, both, best)
            joint = min(joint, limit)  # hosts of either are on one of the two sides
            if two == 0 or counts[h] > 0:
                ours = words[step + ours * width + both]
            if held > 0:
                theirs = words[step + theirs * width + both]
        reached = words[network + ours]
        if two == 1:
            reached = min(reached, words[network + theirs])
        if reached < 0:
            return 0
        joint = min(joint, reached)
        if rule[UNIT] > 1:
            joint -= joint % rule[UNIT]
        out[ANY] = 1
        out[CAPACITY] = min(out[CAPACITY], joint)
        out[DEMAND] += jobs[at]
    return 1


@helper(INT, READ, READ, INT, counted=False)
def _divide(rule, judged, limit):  # type: ignore[no-untyped-def]
    """Value of a choice with this bandwidth within its hosts, from what `_judge` said."""
    d = min(limit, judged[LIMIT])
    if rule[UNIT] > 1:
        d -= d % rule[UNIT]
    return shared(d, judged[ANY], judged[CAPACITY], d + judged[DEMAND])


@entry(INT, READ, READ, READ, READ, READ, READ, INT, INTS)
def first_best(words, rule, jobs, masks, hosts, counts, m, out):  # type: ignore[no-untyped-def]
    """The first best row of counts, on every host the fastest free GPUs; -1 if none is measured.

    words, rule, jobs: as in `_judge`. masks: `ClusterState.masks`. hosts, counts: m numbers a
    row. out[0]: its value.
    """
    by_host = np.zeros(words[HOSTS], np.int64)
    judged = np.zeros(JUDGED, np.int64)
    best, chosen = -1, -1
    for row in range(len(hosts) // m):
        limit = NO_LIMIT
        for i in range(row * m, (row + 1) * m):
            h = hosts[i]
            by_host[h] = counts[i]
            record = words[RECORDS] + h * RECORD
            place = words[record + BEST] + masks[h] * (words[record + GPUS] + 1)
            limit = min(limit, words[place + counts[i]])
        if limit > best and _judge(words, rule, jobs, by_host, judged) == 1:
            value = _divide(rule, judged, limit)
            if value > best:
                best, chosen = value, row
        for i in range(row * m, (row + 1) * m):
            by_host[hosts[i]] = 0
    out[0] = best
    return chosen


@entry(INT, READ, READ, READ, READ, READ, INTS, INTS, INT, INTS)
def prune(words, rule, jobs, host, bit, left, now, target, out):  # type: ignore[no-untyped-def]
    """Remove GPU by GPU the one without which most bandwidth is left, down to `target` of them.

    words, rule, jobs: as in `_judge`. host, bit: host of each candidate GPU and its bit in the mask
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
                known[h] = _judge(words, rule, jobs, counts, judged[h])
                counts[h] += 1
                others[h] = second if h == slowest else least
        best, worst = -2, 0
        for i in range(size):
            h = host[left[i]]
            value = -1
            if known[h] == 1:
                rest = words[words[records + h * RECORD + INTRA] + now[h] - bit[left[i]]]
                value = _divide(rule, judged[h], min(rest, others[h]))
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
