"""Bandwidth under contention of one vector of counts, from tables: what searches evaluate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.counts import joint_within, popcount, shared
from optsched.bandwidth.rates import NO_LIMIT
from optsched.bandwidth.tables import (
    BY_MASK,
    HOSTS,
    INTRA,
    NETWORK,
    RECORD,
    RECORDS,
    STEP,
    WIDTH,
)
from optsched.kernels.compile import INT, INTS, READ, entry, helper

if TYPE_CHECKING:
    from optsched.bandwidth.contention import Contention
    from optsched.model.schedule import IntArray

__all__ = ["best_mask", "divide", "judge", "rule_of", "value_of"]

# the rule, one array
N_JOBS: Final = 0
FILL_BEST: Final = 1
TWO_SIDED: Final = 2
CROSS_ONLY: Final = 3
UNIT: Final = 4

# what `judge` says of a vector of counts
LIMIT: Final = 0
"""Of the network, for S itself."""
ANY: Final = 1
"""1 if a job interferes."""
CAPACITY: Final = 2
DEMAND: Final = 3
JUDGED: Final = 4


def rule_of(contention: Contention, n_jobs: int) -> IntArray:
    """How so many jobs of `jobs_of` share, as the kernels read it; not for exact joint GPUs."""
    assert contention.fill != "exact"
    return np.array(
        [
            n_jobs, contention.fill == "best", contention.sides == "two", contention.cross_only,
            contention.unit,
        ],
        np.int64,
    )  # fmt: skip


@helper(INT, READ, READ, READ, READ, INTS, counted=False)
def judge(words, rule, jobs, counts, out):  # type: ignore[no-untyped-def]
    """What the counts of a choice decide: limit of the network, and what others leave; 1, or 0.

    words: `CountTables.words`. rule: of `rule_of`. jobs: of `ask.jobs_of`. counts: by host, shape
    (hosts,). out: filled as named above, length JUDGED. 0 if a pattern is not measured.
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
def divide(rule, judged, limit):  # type: ignore[no-untyped-def]
    """Value of a choice with this bandwidth within its hosts, from what `judge` said."""
    d = min(limit, judged[LIMIT])
    if rule[UNIT] > 1:
        d -= d % rule[UNIT]
    return shared(d, judged[ANY], judged[CAPACITY], d + judged[DEMAND])


@entry(INT, READ, READ, READ, READ)
def value_of(words, rule, jobs, chosen):  # type: ignore[no-untyped-def]
    """B(S) beside the jobs of a choice, masks (or numbers) by host; -1 if it is not known."""
    n_hosts = words[HOSTS]
    counts, out = np.zeros(n_hosts, np.int64), np.empty(JUDGED, np.int64)
    limit = NO_LIMIT
    for h in range(n_hosts):
        record = words[RECORDS] + h * RECORD
        counts[h] = popcount(chosen[h]) if words[record + BY_MASK] == 1 else chosen[h]
        if chosen[h] > 0:
            limit = min(limit, words[words[record + INTRA] + chosen[h]])
    if judge(words, rule, jobs, counts, out) == 0:
        return -1
    return divide(rule, out, limit)


@entry(INT, READ, INT, INT, INT, counted=False)
def best_mask(words, host, free, count):  # type: ignore[no-untyped-def]
    """The fastest `count` of a host's free GPUs, of equals the lowest ids; or just the number."""
    record = words[RECORDS] + host * RECORD
    if words[record + BY_MASK] == 0:
        return count
    intra = words[record + INTRA]
    chosen, most = 0, -1
    sub = free
    while sub > 0:
        if popcount(sub) == count:
            limit = words[intra + sub]
            differ = sub ^ chosen
            if limit > most or (limit == most and (differ & -differ & sub) != 0):
                chosen, most = sub, limit
        sub = (sub - 1) & free
    return chosen
