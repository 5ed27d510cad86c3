"""Longest paths through a critical operation, and what a move would make of them."""

from __future__ import annotations

from typing import Final

from numba import types

from optsched.kernels.compile import INT, INTS, helper
from optsched_solvers.periodic.state import (
    AFTER,
    BEFORE,
    GRAPH,
    HEAD,
    HEAD_TOKENS,
    HEAD_WEIGHT,
    INTO,
    ORDER,
    OUT,
    STATE,
    TAIL,
    TAIL_TOKENS,
    TAIL_WEIGHT,
    TOKENS,
    machine_weight,
)

HEADS, TAILS, NEW_HEAD, RANK, UNTIL, BEST_AFTER, BEST_TOKENS = range(7)
SCRATCH: Final = types.UniTuple(INTS, 7)
"""HEADS, TAILS: longest paths from and to one critical operation at the period. NEW_HEAD: those of
a move that is estimated. RANK: of an operation on its device. UNTIL: per operation and rank, until
which move the one may not come before the other again. BEST_AFTER, BEST_TOKENS: the best order."""

NO_PATH: Final = -(1 << 60)


@helper(types.void, GRAPH, STATE, INT, INT, INTS)
def heads_from(graph, state, period, r, head):  # type: ignore[no-untyped-def]
    """Longest paths from r at the period."""
    before, tokens, order = state[BEFORE], state[TOKENS], state[ORDER]
    into, tail, weight, spans = graph[INTO], graph[TAIL], graph[TAIL_WEIGHT], graph[TAIL_TOKENS]
    n = len(order)
    for i in range(n):
        head[i] = NO_PATH
    head[r] = 0
    first = 0
    while order[first] != r:
        first += 1
    for _ in range(n):
        moved = False
        for c in range(first + 1, first + n):
            j = order[c if c < n else c - n]
            latest = head[j]
            for e in range(into[j], into[j + 1]):
                reached = head[tail[e]] + weight[e] - spans[e] * period
                if reached > latest:
                    latest = reached
            i = before[j]
            if i >= 0:
                reached = head[i] + machine_weight(graph, i, j) - tokens[i] * period
                if reached > latest:
                    latest = reached
            if latest > head[j]:
                head[j] = latest
                moved = True
        if not moved:
            break


@helper(types.void, GRAPH, STATE, INT, INT, INTS)
def tails_to(graph, state, period, r, tails):  # type: ignore[no-untyped-def]
    """Longest paths to r at the period."""
    after, tokens, order = state[AFTER], state[TOKENS], state[ORDER]
    out, head, weight, spans = graph[OUT], graph[HEAD], graph[HEAD_WEIGHT], graph[HEAD_TOKENS]
    n = len(order)
    for i in range(n):
        tails[i] = NO_PATH
    tails[r] = 0
    first = 0
    while order[first] != r:
        first += 1
    for _ in range(n):
        moved = False
        for c in range(first + n - 1, first, -1):
            i = order[c if c < n else c - n]
            longest = tails[i]
            for e in range(out[i], out[i + 1]):
                reached = tails[head[e]] + weight[e] - spans[e] * period
                if reached > longest:
                    longest = reached
            j = after[i]
            if j >= 0:
                reached = tails[j] + machine_weight(graph, i, j) - tokens[i] * period
                if reached > longest:
                    longest = reached
            if longest > tails[i]:
                tails[i] = longest
                moved = True
        if not moved:
            break


@helper(counted=False, inline=True)
def head_of(graph, scratch, period, j, reached):  # type: ignore[no-untyped-def]
    """Longest path to j, given the one along its device."""
    head = scratch[HEADS]
    latest = reached
    for e in range(graph[INTO][j], graph[INTO][j + 1]):
        t = head[graph[TAIL][e]] + graph[TAIL_WEIGHT][e] - graph[TAIL_TOKENS][e] * period
        if t > latest:
            latest = t
    return latest


@helper(counted=False, inline=True)
def tail_of(graph, scratch, period, i, reached):  # type: ignore[no-untyped-def]
    """Longest path from i, given the one along its device."""
    tails = scratch[TAILS]
    longest = reached
    for e in range(graph[OUT][i], graph[OUT][i + 1]):
        t = tails[graph[HEAD][e]] + graph[HEAD_WEIGHT][e] - graph[HEAD_TOKENS][e] * period
        if t > longest:
            longest = t
    return longest


@helper(counted=False, inline=True)
def estimate(graph, state, scratch, period, r, u, v, step):  # type: ignore[no-untyped-def]
    """Longest closed walk through r and what moves, at the period (Balas & Vazacopoulos 1998)."""
    before, after, tokens = state[BEFORE], state[AFTER], state[TOKENS]
    head, tails, new = scratch[HEADS], scratch[TAILS], scratch[NEW_HEAD]
    p, s = before[u], after[v]
    spanned = 0
    x = u
    while x != v:
        spanned += tokens[x]
        x = after[x]
    longest = NO_PATH
    if step > 0:
        # p, first, ..., v, u, s
        i = p
        reached = head[p]
        lag = tokens[p] + tokens[u]
        x = after[u]
        while True:
            t = head_of(
                graph, scratch, period, x, reached + machine_weight(graph, i, x) - lag * period
            )
            if x == r:
                longest = max(longest, t)
                t = max(t, 0)
            new[x] = t
            reached = t
            i = x
            if x == v:
                break
            lag = tokens[x]
            x = after[x]
        t = head_of(
            graph, scratch, period, u, reached + machine_weight(graph, v, u) + spanned * period
        )
        if u == r:
            longest = max(longest, t)
            t = max(t, 0)
        q = tail_of(
            graph,
            scratch,
            period,
            u,
            tails[s] + machine_weight(graph, u, s) - (tokens[v] + spanned) * period,
        )
        if u == r:
            longest = max(longest, q)
            q = max(q, 0)
        else:
            longest = max(longest, t + q)
        j = u
        lag = -spanned
        x = v
        while x != u:
            q = tail_of(graph, scratch, period, x, q + machine_weight(graph, x, j) - lag * period)
            if x == r:
                longest = max(longest, q)
                q = max(q, 0)
            else:
                longest = max(longest, new[x] + q)
            j = x
            x = before[x]
            lag = tokens[x]
        return longest
    # p, v, u, ..., last, s
    t = head_of(
        graph,
        scratch,
        period,
        v,
        head[p] + machine_weight(graph, p, v) - (tokens[p] + spanned) * period,
    )
    if v == r:
        longest = max(longest, t)
        t = max(t, 0)
    new[v] = t
    i = v
    lag = -spanned
    x = u
    while x != v:
        t = head_of(graph, scratch, period, x, t + machine_weight(graph, i, x) - lag * period)
        if x == r:
            longest = max(longest, t)
            t = max(t, 0)
        new[x] = t
        i = x
        lag = tokens[x]
        x = after[x]
    last = before[v]
    q = tails[s]
    j = s
    lag = tokens[last] + tokens[v]
    x = last
    while True:
        q = tail_of(graph, scratch, period, x, q + machine_weight(graph, x, j) - lag * period)
        if x == r:
            longest = max(longest, q)
            q = max(q, 0)
        else:
            longest = max(longest, new[x] + q)
        j = x
        if x == u:
            break
        x = before[x]
        lag = tokens[x]
    q = tail_of(graph, scratch, period, v, q + machine_weight(graph, v, u) + spanned * period)
    if v == r:
        return max(longest, q)
    return max(longest, new[v] + q)
