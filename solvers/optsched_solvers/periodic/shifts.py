"""Moves of an operation along the order of its device: what they change, and when they may."""

from __future__ import annotations

from numba import types

from optsched.kernels.compile import INT, helper
from optsched_solvers.periodic.state import (
    ACQUIRE,
    AFTER,
    BEFORE,
    CAPACITY,
    FREE,
    GRAPH,
    HEAD,
    HEAD_TOKENS,
    INTO,
    LEAST,
    LEVEL,
    NO_LIMIT,
    OUT,
    START,
    STATE,
    TAIL,
    TAIL_TOKENS,
    TOKENS,
    WORKSPACE,
)


@helper(types.void, GRAPH, STATE, INT, INT)
def shift_right(graph, state, u, v):  # type: ignore[no-untyped-def]
    """Put u right behind v, which follows it on the device."""
    before, after, tokens, level = state[BEFORE], state[AFTER], state[TOKENS], state[LEVEL]
    change = graph[ACQUIRE][u] - graph[FREE][u]
    if after[v] == u:  # the same order, a cycle later
        tokens[v] -= 1
        tokens[u] += 1
        x = u
        while True:
            level[x] -= change
            x = after[x]
            if x == u:
                return
    p, s, first = before[u], after[v], after[u]
    held = level[v] - change + graph[ACQUIRE][v] - graph[FREE][v]
    spanned = 0
    x = u
    while x != v:
        spanned += tokens[x]
        x = after[x]
        level[x] -= change
    level[u] = held
    tokens[p] += tokens[u]
    tokens[u] = tokens[v] + spanned
    tokens[v] = -spanned
    after[p], before[first] = first, p
    after[v], before[u] = u, v
    after[u], before[s] = s, u


@helper(types.void, GRAPH, STATE, INT, INT)
def shift_left(graph, state, u, v):  # type: ignore[no-untyped-def]
    """Put v right before u, which it follows on the device."""
    before, after, tokens, level = state[BEFORE], state[AFTER], state[TOKENS], state[LEVEL]
    change = graph[ACQUIRE][v] - graph[FREE][v]
    if after[v] == u:  # the same order, a cycle earlier
        tokens[before[v]] += 1
        tokens[v] -= 1
        x = u
        while True:
            level[x] += change
            x = after[x]
            if x == u:
                return
    p, s, last = before[u], after[v], before[v]
    level[v] = level[u]
    spanned = 0
    x = u
    while x != v:
        spanned += tokens[x]
        level[x] += change
        x = after[x]
    tokens[p] += spanned
    tokens[last] += tokens[v]
    tokens[v] = -spanned
    after[p], before[v] = v, p
    after[v], before[u] = u, v
    after[last], before[s] = s, last


@helper(counted=False, inline=True)
def fits(graph, state, u, v, step):  # type: ignore[no-untyped-def]
    """Whether the memory suffices after `shift_right` (step 1) or `shift_left` (-1)."""
    capacity = graph[CAPACITY][u]
    if capacity == NO_LIMIT:
        return True
    after, level = state[AFTER], state[LEVEL]
    acquire, free, workspace = graph[ACQUIRE], graph[FREE], graph[WORKSPACE]
    if step > 0:
        change = acquire[u] - free[u]
        x = u
        while x != v:
            x = after[x]
            if level[x] - change + acquire[x] + workspace[x] > capacity:
                return False
        held = level[v] - change + acquire[v] - free[v]
        return held + acquire[u] + workspace[u] <= capacity
    change = acquire[v] - free[v]
    if level[u] + acquire[v] + workspace[v] > capacity:
        return False
    x = u
    while x != v:
        if level[x] + change + acquire[x] + workspace[x] > capacity:
            return False
        x = after[x]
    return True


@helper(counted=False, inline=True)
def is_safe(graph, state, u, v, step, period):  # type: ignore[no-untyped-def]
    """Sufficient for a move not to make operations wait for each other for ever."""
    after, tokens, start, least = state[AFTER], state[TOKENS], state[START], graph[LEAST]
    spanned = 0
    x = u
    while x != v:
        spanned += tokens[x]
        x = after[x]
    if step > 0:
        for e in range(graph[OUT][u], graph[OUT][u + 1]):
            y = graph[HEAD][e]
            k = spanned - graph[HEAD_TOKENS][e]
            if start[v] + k * period >= start[y] + least[y]:
                return False
        return True
    for e in range(graph[INTO][v], graph[INTO][v + 1]):
        y = graph[TAIL][e]
        k = spanned - graph[TAIL_TOKENS][e]
        if start[y] + k * period >= start[u] + least[u]:
            return False
    return True
