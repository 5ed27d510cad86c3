"""The actor of a learned router: features of the state, network, choice; for kernels only.

``World.weights`` holds the parameters, and after them room for one forward pass (see `sizes`).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from optsched.compiled import helper
from optsched.serving.core import EMPTY, FREE, UNIT, UNLOADING

PAPER, EXTENDED = 1, 2
"""Which features: those of the paper's (1), or more."""

HIDDEN: Final = 64
"""Units of each of the two layers."""

GROUPS: Final = 6
"""A block has 1, 2, 4, ... 32 requests at most."""

PARTS: Final = 2**24
"""Random numbers are integers below this."""


@helper(counted=False)
def inputs(state, servers, segments):  # type: ignore[no-untyped-def]
    """Number of features: 2 + 3N, or 3 + 3K + 8N, which is 15 + 8N for four segments."""
    if state == PAPER:
        return 2 + 3 * servers
    return 3 + 3 * segments + 8 * servers


def sizes(state: int, servers: int, segments: int, widths: int) -> tuple[int, int]:
    """Numbers of parameters, and numbers that a forward pass writes: features, layers, heads.

    Parameters are W1 [inputs][64], b1, W2 [64][64], b2, W3 [64][heads], b3, in this order.
    """
    n, heads = int(inputs(state, servers, segments)), servers + widths + GROUPS
    return (n + HIDDEN + 2) * HIDDEN + (HIDDEN + 1) * heads, n + 2 * HIDDEN + heads


@helper(counted=False, inline=True)
def features(world):  # type: ignore[no-untyped-def]
    """Write what the actor sees at a decision; returns where it begins in ``world.weights``.

    Reconstructed: Q requests at the router, C completed of those that arrived, and per server
    MMACs that wait, power and U; then the head's segment, its last width and all before, requests
    at the router by segment, the head's age, and per server ms that wait and run, free instances of
    the head's segment, free memory, whether the segment is resident at full width. Counts, times
    and U as log(1 + x), the rest as fractions.
    """
    x = world.weights
    trace = world.trace[0]
    core = world.core
    servers, segments, widths = world.feasible.shape
    n = inputs(world.rule[0].state, servers, segments)
    first = len(x) - (n + 2 * HIDDEN + servers + widths + GROUPS)
    waiting = 0
    for f in range(segments):
        waiting += world.fifo[f].images
    x[first] = math.log1p(waiting)
    x[first + 1] = trace.completed / max(trace.arrived, 1)
    at = first + 2
    for s in range(servers):
        server = core.server[s]
        x[at] = math.log1p(max(0.0, server.queued_mmac) / 100.0)
        x[at + 1] = server.watts / max(server.peak_w, 1e-9)
        x[at + 2] = math.log1p(server.load / UNIT)
        at += 3
    if world.rule[0].state == PAPER:
        return first
    head = world.request[world.fifo[trace.queue].head]
    prefix, k = head.tuple, trace.segment
    for f in range(segments):
        x[at + f] = 1.0 if f == k else 0.0
        x[at + segments + f] = 0.0
        x[at + 2 * segments + f] = math.log1p(world.fifo[f].images)
    x[at + segments] = (head.width + 1) / widths if k else 0.0
    for f in range(k, 0, -1):
        x[at + segments + f] = (prefix % widths + 1) / widths
        prefix //= widths
    at += 3 * segments
    age = trace.now - world.arrival[world.fifo[trace.queue].head]
    x[at] = math.log1p(age * 1e-6)
    at += 1
    for s in range(servers):
        server = core.server[s]
        free, full = 0, 0.0
        for i in range(core.instance.shape[1]):
            slot = core.instance[s, i]
            if slot.segment == k and slot.state != EMPTY and slot.state != UNLOADING:
                free += slot.state == FREE
                if slot.width == widths - 1:
                    full = 1.0
        x[at] = math.log1p(max(0.0, server.queued) * 1e-6)
        x[at + 1] = math.log1p(max(0.0, server.active) * 1e-6)
        x[at + 2] = math.log1p(free)
        x[at + 3] = 1.0 - server.used / max(server.vram, 1)
        x[at + 4] = full
        at += 5
    return first


@helper(counted=False, inline=True)
def forward(world, first):  # type: ignore[no-untyped-def]
    """Logits of the three heads from the features at `first`; returns where they begin."""
    x = world.weights
    servers, segments, widths = world.feasible.shape
    n, heads = inputs(world.rule[0].state, servers, segments), servers + widths + GROUPS
    at = _layer(x, 0, first, n, HIDDEN)
    _tanh(x, first + n, HIDDEN)
    at = _layer(x, at, first + n, HIDDEN, HIDDEN)
    _tanh(x, first + n + HIDDEN, HIDDEN)
    _layer(x, at, first + n + HIDDEN, HIDDEN, heads)
    return first + n + 2 * HIDDEN


@helper(counted=False)
def _layer(x, weight, given, n, m):  # type: ignore[no-untyped-def]
    """``x[given + n:][:m] = x[given:][:n] @ W + b``; returns where the next weights begin."""
    # unsigned: indices that may be negative are not vectorised, which takes twice as long
    made, bias, columns = np.uint64(given + n), np.uint64(weight + n * m), np.uint64(m)
    for j in range(columns):
        x[made + j] = x[bias + j]
    for i in range(n):
        factor, row = x[given + i], np.uint64(weight + i * m)
        for j in range(columns):
            x[made + j] += factor * x[row + j]
    return weight + (n + 1) * m


@helper(counted=False)
def _tanh(x, first, n):  # type: ignore[no-untyped-def]
    for j in range(first, first + n):  # three times as fast as math.tanh
        x[j] = 1.0 - 2.0 / (math.exp(2.0 * min(max(x[j], -20.0), 20.0)) + 1.0)


@helper(counted=False, inline=True)
def act(world, r0, r1, r2):  # type: ignore[no-untyped-def]
    """Write the decision of ``world.weights``; the numbers are random, below `PARTS`.

    pi(s, w, g) = pi_server pi_width pi_group, a softmax each over those that are feasible, the
    server's mixed with the uniform distribution: (1 - epsilon) pi + epsilon / N. Reconstructed.
    """
    rule = world.rule[0]
    x = world.weights
    servers, _, widths = world.feasible.shape
    at = forward(world, features(world))
    allowed = 0
    for s in range(servers):
        if world.feasible[s, world.trace[0].segment, 0]:
            allowed += 1
        else:
            x[at + s] = -1e30
    _softmax(x, at, servers)
    for s in range(servers):
        if world.feasible[s, world.trace[0].segment, 0]:
            x[at + s] = (1.0 - rule.epsilon) * x[at + s] + rule.epsilon / allowed
    _softmax(x, at + servers, widths)
    _softmax(x, at + servers + widths, GROUPS)
    s = _pick(x, at, servers, r0 if rule.sampled else -1)
    w = _pick(x, at + servers, widths, r1 if rule.sampled else -1)
    set_decision(world, s, w, _pick(x, at + servers + widths, GROUPS, r2 if rule.sampled else -1))


@helper(counted=False, inline=True)
def set_decision(world, s, w, g):  # type: ignore[no-untyped-def]
    """Write server, the widest width up to `w` that it can ever run, and 2 to the g."""
    trace = world.trace[0]
    while w > 0 and not world.feasible[s, trace.segment, w]:
        w -= 1
    trace.server, trace.width = s, w
    trace.group = min(1 << g, world.core.state[0].max_batch)


@helper(counted=False)
def _softmax(x, at, n):  # type: ignore[no-untyped-def]
    most, total = x[at], 0.0
    for j in range(at + 1, at + n):
        most = max(most, x[j])
    for j in range(at, at + n):
        x[j] = math.exp(max(x[j] - most, -700.0))
        total += x[j]
    for j in range(at, at + n):
        x[j] /= total


@helper(counted=False)
def _pick(x, at, n, random):  # type: ignore[no-untyped-def]
    """By these probabilities; the most likely one if `random` is negative."""
    best, left = 0, (random + 0.5) / PARTS
    for j in range(n):
        if random < 0:
            if x[at + j] > x[at + best]:
                best = j
            continue
        if x[at + j] > 1e-300:
            best = j
            left -= x[at + j]
            if left < 0.0:
                break
    return best
