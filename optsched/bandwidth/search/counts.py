"""Exact choice of k GPUs by the numbers of GPUs on every host, with ties broken: the kernel.

For fixed counts the hosts used, their lowest common level, the jobs that interfere and their joint
bandwidths are fixed, and the value never falls when the bandwidth within a host rises; so some
optimum takes the best subset of every host, and only counts are searched. A first pass finds the
best value, a second one compares all choices that have it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from optsched.bandwidth.models.tables import HOST, SIZE, TableArrays
from optsched.bandwidth.topology.levels import WHOLE
from optsched.bandwidth.topology.rates import MOST, NO_LIMIT
from optsched.kernels.compile import INT, INTS, READ, entry, helper, record, records

REQUEST: Final = record(
    "k n_jobs nodes leaves domains "
    "balance min_hosts max_hosts same_type ties top preferred used_host"
)
"""A request. `balance`: most difference of counts on used hosts. `ties`: 0 if any best choice will
do. `leaves`: most count vectors to evaluate in a pass. `nodes`: most levels to enter in both
passes. `top`: highest lowest common level allowed, -1: one host. `domains`: most of the level
`preferred`. `used_host`: what a used host adds to the spread; one that was whole adds 1 more."""

PLACE: Final = record("host least most gap level whole")
"""A host in the order of domains: bounds on its count; what the domains that it
does not share with the host before it add to the spread, the lowest level that both share, and
whether it was whole before rails left some of its GPUs."""

NODE: Final = record(
    "state left within hosts least most type count next spread gap level far domains"
)
"""A level of the search: the counts of the hosts before it are chosen. `left`: GPUs still to be
chosen. `count`: of the host before this level; `next`: to be tried on its host. `level`: lowest
common level of the hosts used; `gap`, `far`: added spread, and level, since the last used host."""

TENANT: Final = record("state within touched ahead level far hosts")
"""Joint allocation with a job at a level of the search. `ahead`: GPUs of the job on the hosts from
here on; `far`: highest level since its last host."""

ANSWER: Final = record("value alone visited complete")
"""`complete`: 2 if the search was complete; 1 if the value is the optimum, but not all choices
that have it were compared."""

TABLES: Final[Any] = types.NamedTuple(
    [READ, READ, READ, records(HOST, True), READ, records(SIZE, True), READ, READ], TableArrays
)
_NODES, _TENANTS = records(NODE), records(TENANT)
_REQUEST, _PLACES = records(REQUEST, True), records(PLACE, True)


@helper(INT, INT, counted=False)
def popcount(mask):  # type: ignore[no-untyped-def]
    """Return the number of bits of a mask below 2^32."""
    mask = mask - (mask >> 1 & 0x55555555)
    mask = (mask & 0x33333333) + (mask >> 2 & 0x33333333)
    return ((mask + (mask >> 4) & 0x0F0F0F0F) * 0x01010101 & 0xFFFFFFFF) >> 24


@helper(INT, INT, INT, INT, counted=False)
def shared(d, capacity, total):  # type: ignore[no-untyped-def]
    """Return the share of a bandwidth d alone in a joint capacity; `total` includes d."""
    return d if total <= capacity else d * capacity // total


@helper()
def line(rate, n, m):  # type: ignore[no-untyped-def]
    """Limit of the network for n GPUs on m hosts of which each brings `rate` or more."""
    return np.int64(min(np.rint(rate * ((n - 1) / n) * (m / (m - 1))), MOST - 1.0))


@helper(INT, TABLES, INT, INT, INT, INT, counted=False, inline=True)
def limited(t, value, level, gpus, hosts):  # type: ignore[no-untyped-def]
    """Apply the uplinks and the factor of a level to a set of several hosts; see `Levels`."""
    uplink = t.uplink[level]
    if uplink < MOST:
        value = min(value, line(uplink, gpus, hosts))
    return scaled(t, value, level)


@helper(INT, TABLES, INT, INT, counted=False, inline=True)
def scaled(t, value, level):  # type: ignore[no-untyped-def]
    """Apply the factor of a level; a division only where it limits."""
    factor = t.factor[level]
    return value if factor == WHOLE else value * factor // WHOLE


@helper(types.UniTuple(INT, 5), TABLES, INT, INT, INT, INT, counted=False, inline=True)
def _pick(t, host, free, count, least):  # type: ignore[no-untyped-def]
    """Pick `count` free GPUs with bandwidth >= least, so that the leftovers are worth most.

    Of equal masks the lowest ids. Returns whether there are any, the mask (or count), both weights
    of the leftovers, and the bandwidth.
    """
    h = t.host[host]
    if count == 0 or h.by_mask == 0:
        left = free if h.by_mask == 1 else free - count
        limit = NO_LIMIT
        if count > 1:
            limit = t.values[h.within + count]
        enough = 1 if limit >= least else 0
        return enough, count, t.values[h.whole + left], t.values[h.left + left], limit
    found, mask, whole, others, best = 0, 0, 0, 0, 0
    sub = free
    while sub > 0:
        if popcount(sub) == count:
            limit = t.values[h.within + sub]
            if limit >= least:
                w, s = t.values[h.whole + free - sub], t.values[h.left + free - sub]
                better = found == 0 or w > whole
                if not better and w == whole:
                    better = s > others
                    if not better and s == others:
                        differ = sub ^ mask
                        better = (differ & -differ & sub) != 0
                if better:
                    found, mask, whole, others, best = 1, sub, w, s, limit
        sub = (sub - 1) & free
    return found, mask, whole, others, best


@helper(
    types.UniTuple(INT, 5),
    TABLES,
    _REQUEST,
    READ,
    _NODES,
    _TENANTS,
    INT,
    counted=False,
    inline=True,
)
def _worth(t, request, jobs, nodes, tenants, at):  # type: ignore[no-untyped-def]
    """Evaluate the count vector at a leaf: value (-1: not measured), alone, and why.

    The others: joint capacity (`NO_LIMIT` without jobs), demands, and the network's limit.
    """
    node, r = nodes[at], request[0]
    network = t.network[node.state]
    if network < 0:
        return -1, 0, 0, 0, 0
    d = min(network, node.within)
    if node.hosts < 2:
        return d, d, NO_LIMIT, 0, network
    d = limited(t, d, node.level, r.k, node.hosts)
    capacity, demand = NO_LIMIT, 0
    stride = t.size[0].hosts + 1
    for j in range(r.n_jobs):
        joint = tenants[at * r.n_jobs + j]
        if joint.touched == 0:
            continue
        limit = t.network[joint.state]
        if limit < 0:
            return -1, 0, 0, 0, 0
        limit = min(limit, joint.within)
        if t.uplink[joint.level] < MOST:
            gpus = r.k
            for h in range(1, stride):
                gpus += jobs[j * stride + h]
            limit = limited(t, limit, joint.level, gpus, joint.hosts)
        else:
            limit = scaled(t, limit, joint.level)
        capacity = min(capacity, limit)
        demand += jobs[j * stride]
    return shared(d, capacity, d + demand), d, capacity, demand, network


@helper(INT, TABLES, INT, INT, INT, INT, INT, INT, counted=False)
def _needed(t, aim, alone, capacity, demand, level, hosts):  # type: ignore[no-untyped-def]
    """Return the least bandwidth within hosts with which the share is still `aim`."""
    low, high = aim, alone
    while low < high:
        middle = (low + high) // 2
        if shared(middle, capacity, middle + demand) >= aim:
            high = middle
        else:
            low = middle + 1
    if hosts < 2:
        return low
    factor = t.factor[level]
    return (low * WHOLE + factor - 1) // factor


@helper(INT, TABLES, _PLACES, READ, _NODES, INT, INTS, counted=False, inline=True)
def _pick_all(t, places, masks, nodes, least, picked):  # type: ignore[no-untyped-def]
    """Pick on every used host, each independently; return the lowest bandwidth within them.

    Fills `picked` with the masks (or counts) and, behind them, the two sums of weights.
    """
    n = len(places)
    lowest = NO_LIMIT
    picked[n] = picked[n + 1] = 0
    for u in range(n):
        host = places[u].host
        _, mask, whole, left, limit = _pick(t, host, masks[host], nodes[u + 1].count, least)
        picked[u] = mask
        picked[n] += whole
        picked[n + 1] += left
        lowest = min(lowest, limit)
    return lowest


@helper(INT, TABLES, _PLACES, INTS, INTS, counted=False)
def _lower_ids(t, places, picked, best):  # type: ignore[no-untyped-def]
    """Return whether `picked` has the lowest GPU in which the two differ."""
    first, lower = NO_LIMIT, 0
    for u in range(len(places)):
        a, b, host = picked[u], best[u], places[u].host
        if a != b and host < first:
            first = host
            differ = a ^ b
            lower = 1 if (differ & -differ & a) != 0 else 0
            if t.host[host].by_mask == 0:
                lower = 1 if a > b else 0
    return lower


@helper(INT, TABLES, _REQUEST, READ, _NODES, _TENANTS, counted=False, inline=True)
def _begin(t, request, jobs, nodes, tenants):  # type: ignore[no-untyped-def]
    """Fill level 0: nothing is chosen."""
    node, stride = nodes[0], t.size[0].hosts + 1
    node.state, node.left, node.within, node.hosts = 0, request[0].k, NO_LIMIT, 0
    node.least, node.most, node.type, node.count, node.next = NO_LIMIT, 0, -1, 0, 0
    node.spread, node.gap, node.level, node.far, node.domains = 0, 0, -1, -1, 0
    for j in range(request[0].n_jobs):
        joint = tenants[j]
        joint.state, joint.within, joint.touched, joint.ahead = 0, NO_LIMIT, 0, 0
        joint.level, joint.far, joint.hosts = -1, -1, 0
        for h in range(1, stride):
            joint.ahead += jobs[j * stride + h]
    return 0


@helper(
    INT,
    TABLES,
    _REQUEST,
    _PLACES,
    READ,
    READ,
    _NODES,
    _TENANTS,
    INT,
    INT,
    counted=False,
    inline=True,
)
def _descend(t, request, places, masks, jobs, nodes, tenants, at, count):  # type: ignore[no-untyped-def]
    """Fill the next level with `count` GPUs on the host of this one; 0 if a rule forbids it."""
    r, place, node, to = request[0], places[at], nodes[at], nodes[at + 1]
    if count < place.least or count > place.most:
        return 0
    h, free, width = t.host[place.host], masks[place.host], t.size[0].width
    gap, far = max(node.gap, place.gap), max(node.far, place.level)
    if count > 0:
        hosts = node.hosts + 1
        if hosts > r.max_hosts:
            return 0
        level, domains = node.level, 1
        if hosts > 1:
            level, domains = max(level, far), node.domains + (1 if far > r.preferred else 0)
            if level > r.top or (r.same_type == 1 and h.kind != node.type):
                return 0
        least, most = min(node.least, count), max(node.most, count)
        if most - least > r.balance or domains > r.domains:
            return 0
        best = t.values[h.best + free * (h.gpus + 1) + count]
        to.state, to.left = t.step[node.state * width + count], node.left - count
        to.within, to.hosts, to.least, to.most = min(node.within, best), hosts, least, most
        to.type, to.level, to.domains = h.kind, level, domains
        every = (1 << h.gpus) - 1 if h.by_mask == 1 else h.gpus
        to.spread = node.spread + gap + r.used_host + (1 if free == every else place.whole)
        to.gap, to.far = 0, -1
    else:
        to.state, to.left, to.within, to.hosts = node.state, node.left, node.within, node.hosts
        to.least, to.most, to.type, to.level = node.least, node.most, node.type, node.level
        to.domains, to.spread, to.gap, to.far = node.domains, node.spread, gap, far
    to.count = count
    for j in range(r.n_jobs):
        a, b = tenants[at * r.n_jobs + j], tenants[(at + 1) * r.n_jobs + j]
        held = jobs[j * (t.size[0].hosts + 1) + 1 + place.host]
        both, apart = held + count, max(a.far, place.level)
        b.ahead = a.ahead - held
        b.touched = 1 if held > 0 and count > 0 else a.touched
        if both == 0:
            b.state, b.within, b.level, b.far, b.hosts = a.state, a.within, a.level, apart, a.hosts
            continue
        b.state = t.step[a.state * width + both]
        b.within = min(a.within, t.values[h.joint + both])
        b.level = max(a.level, apart) if a.hosts > 0 else -1
        b.far, b.hosts = -1, a.hosts + 1
    return 1


@helper(INT, TABLES, INT, INT, counted=False, inline=True)
def _most(t, state, left):  # type: ignore[no-untyped-def]
    """Return the most that the network allows any completion of a state by `left` GPUs."""
    size = t.size[0]
    if size.columns > 1:
        return t.bound[state * size.columns + left]
    return t.bound[t.bound[state] + left * size.stride]


@helper(INT, TABLES, _REQUEST, READ, _NODES, _TENANTS, INT, counted=False, inline=True)
def _bound(t, request, jobs, nodes, tenants, at):  # type: ignore[no-untyped-def]
    """Return an upper bound of the value of every count vector below a level.

    A level only rises on the way down, and factors do not rise with it.
    """
    node, n_jobs = nodes[at], request[0].n_jobs
    d = min(node.within, _most(t, node.state, node.left))
    if node.hosts > 1:
        d = scaled(t, d, node.level)
    if n_jobs == 0 or d <= 0 or (node.hosts < 2 and node.left == 0):
        return d
    capacity, demand = NO_LIMIT, 0
    for j in range(n_jobs):
        a = tenants[at * n_jobs + j]
        if a.touched == 1:
            demand += jobs[j * (t.size[0].hosts + 1)]
            joint = min(a.within, _most(t, a.state, node.left + a.ahead))
            if a.level >= 0 and joint < MOST:
                joint = scaled(t, joint, a.level)
            capacity = min(capacity, joint)
    return shared(d, capacity, d + demand)


@entry(
    INT, TABLES, _REQUEST, _PLACES, READ, READ, _NODES, _TENANTS, records(ANSWER), INTS
)  # fmt: skip
def choose(t, request, places, masks, jobs, nodes, tenants, answer, chosen):  # type: ignore[no-untyped-def]
    """Choose k free GPUs by value, spread and leftovers; return 0 if no choice is allowed.

    Parameters: `CountTables.arrays`; one `REQUEST`; a `PLACE` for every host, domain by domain;
    free GPUs a host (mask or number); demand, then GPUs by host, of every job that may interfere,
    flat; work space: hosts + 1 `NODE`, and n_jobs times as many `TENANT`. Filled: `answer`, and the
    masks (or counts) `chosen` by place.
    """
    r, out, n = request[0], answer[0], len(places)
    free_from = np.zeros(n + 1, np.int64)  # free GPUs of the hosts from here on
    picked, best_picked = np.empty(n + 2, np.int64), np.empty(n + 2, np.int64)
    kept = np.zeros(n, np.int64)  # counts of the best of the first pass
    for u in range(n - 1, -1, -1):
        host = places[u].host
        free = popcount(masks[host]) if t.host[host].by_mask == 1 else masks[host]
        free_from[u] = free_from[u + 1] + free
    out.visited, out.complete = 0, 0
    budget = r.nodes
    best, answered, spread = -1, 0, NO_LIMIT  # of the best choice so far
    level_kept, hosts_kept, leaf = -1, 0, (0, 0, 0, 0, 0)
    kept_leaf = leaf
    if free_from[0] < r.k:
        out.complete = 2
        return 0
    _begin(t, request, jobs, nodes, tenants)
    for turn in range(1 + r.ties):
        if turn == 1 and best < 0:
            break
        visited = at = 0
        nodes[0].next = max(0, r.k - free_from[1])
        while at >= 0:
            node = nodes[at]
            budget -= 1
            if budget < 0:
                break
            if at < n:
                count = node.next
                if count > min(node.left, free_from[at] - free_from[at + 1]):
                    at -= 1
                    continue
                node.next += 1
                if _descend(t, request, places, masks, jobs, nodes, tenants, at, count) == 1:
                    if turn == 1 and nodes[at + 1].spread > spread:
                        continue
                    bound = _bound(t, request, jobs, nodes, tenants, at + 1)
                    if (turn == 0 and bound > best) or (turn == 1 and bound >= best):
                        at += 1
                        if at < n:
                            nodes[at].next = max(0, nodes[at].left - free_from[at + 1])
                continue
            at -= 1
            visited += 1
            if visited > r.leaves:
                break
            if node.hosts < r.min_hosts:
                continue
            leaf = _worth(t, request, jobs, nodes, tenants, n)
            if turn == 0:
                if leaf[0] <= best:
                    continue
                best = leaf[0]
                for u in range(n):
                    kept[u] = nodes[u + 1].count
                kept_leaf, level_kept, hosts_kept = leaf, node.level, node.hosts
                continue
            if leaf[0] < best:
                continue
            least = _needed(t, best, leaf[1], leaf[2], leaf[3], node.level, node.hosts)
            d = min(_pick_all(t, places, masks, nodes, least, picked), leaf[4])
            if node.hosts > 1:
                d = limited(t, d, node.level, r.k, node.hosts)
            if answered == 1 and node.spread == spread:
                better = picked[n] - best_picked[n]
                if better == 0:
                    better = picked[n + 1] - best_picked[n + 1]
                if better == 0:
                    better = _lower_ids(t, places, picked, best_picked)
                if better <= 0:
                    continue
            answered, spread = 1, node.spread
            best_picked, picked = picked, best_picked
            out.alone = d
        out.visited += visited
        if at >= 0:
            break
        out.complete = 2 if turn == r.ties or best < 0 else 1
    out.value = best
    if answered == 0 and best >= 0:  # without ties, or stopped before any choice was compared
        for u in range(n):
            nodes[u + 1].count = kept[u]
        least = _needed(t, best, kept_leaf[1], kept_leaf[2], kept_leaf[3], level_kept, hosts_kept)
        d = min(_pick_all(t, places, masks, nodes, least, best_picked), kept_leaf[4])
        if hosts_kept > 1:
            d = limited(t, d, level_kept, r.k, hosts_kept)
        answered, out.alone = 1, d
    if answered == 1:
        for u in range(n):
            chosen[u] = best_picked[u]
    return answered
