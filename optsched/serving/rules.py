"""Compiled rules of routers and learned policies: width, group and server of the next block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.io.values import frozen
from optsched.kernels.compile import helper
from optsched.serving.core import BUSY, EMPTY, FREE, UNIT, UNLOADING, load_of, slowdown
from optsched.serving.tables import NEVER, SLOTS, fields

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

EXTERNAL, RANDOM, ROUND_ROBIN, JSED, POWER_OF_TWO, MARGINAL, POLICY = range(-1, 6)
"""Server rules: a router in Python, the rules of a server, and those that decide all three."""

STATIC, RANDOM_WIDTH, BACKLOG = range(3)

GROUPS: Final = (1, 2, 4, 8, 16, 32)  # values of a random group (0)

RULE = fields("server width group random turn inputs sampled", "target rate price epsilon")
"""Codes of the rules, their parameters, and the states of random numbers and round robin."""

N_GROUPS: Final = len(GROUPS)
HIDDEN: Final = 64  # units of each of the two layers of a learned policy

MODULUS: Final = 2**31 - 1
_PARTS: Final = 2**24  # resolution of the random numbers of a policy
_SPREAD = 1.3
_SAFETY: Final = 0.7  # share of the time until a deadline that an estimated end may take
_OVERLOAD_NS: Final = 100_000_000  # time after shedding during which work costs more
_OVERLOAD_PRICE: Final = 100.0
_LATE: Final = 1e15  # ns: more than any other cost
_EVICTION = 5


class Compiled(NamedTuple):
    """Rules as arrays, see `optsched.serving.world.World`."""

    rule: Any
    ladder: IntArray = frozen(np.zeros((0, 0), np.int64))
    weights: Any = np.zeros(0)


def rule_of(server: int, seed: int = 0, **others: Any) -> Any:
    """Return the record of a rule; random numbers are a stream separate from the arrivals."""
    drawn = np.random.SeedSequence([seed, 1]).generate_state(1)
    rule = np.zeros(1, RULE)
    rule["server"], rule["random"] = server, int(drawn[0]) % (MODULUS - 1) + 1
    for key, value in others.items():
        rule[key] = value
    return rule


@helper(counted=False, inline=True)
def decide(world):  # type: ignore[no-untyped-def]
    """Write server, width and group of the next block; False for a router in Python."""
    rule, trace = world.rule[0], world.trace[0]
    if rule.server == EXTERNAL:
        return False
    if rule.server == POLICY:
        _learned(world)
        return True
    k = trace.segment
    if rule.server == MARGINAL:
        _marginal(world, k)
        return True
    w = trace.width = _hosted(world, k, _width(world, k))
    group = rule.group if rule.group else GROUPS[draw(rule, N_GROUPS)]
    trace.group = min(group, world.core.state[0].max_batch)
    if rule.server in (RANDOM, ROUND_ROBIN):
        trace.server = _any(world, k, w)
    elif rule.server == POWER_OF_TWO:
        a, b = _any(world, k, w), _any(world, k, w)
        low, high = min(a, b), max(a, b)
        trace.server = low if delay(world, low) <= delay(world, high) else high
    else:
        least, trace.server = 1e300, -1
        for s in range(len(world.core.server)):
            if world.feasible[s, k, w]:
                value = delay(world, s)
                if value < least:
                    least, trace.server = value, s
    return True


@helper(counted=False, inline=True)
def draw(rule, n):  # type: ignore[no-untyped-def]
    """A random integer below n."""
    rule.random = rule.random * 48271 % MODULUS
    return rule.random * n // MODULUS


@helper(counted=False, inline=True)
def _width(world, k):  # type: ignore[no-untyped-def]
    """Width of segment k by the width rule."""
    rule = world.rule[0]
    if rule.width == RANDOM_WIDTH:
        return draw(rule, world.core.state[0].widths)
    if rule.width == STATIC:
        return world.ladder[0, k]
    waiting, queued = 32.0, world.core.server["queued_mmac"].sum()
    segments = world.core.vram.shape[0]
    for f in range(segments):
        waiting += world.fifo[f].images * (segments - f) / segments
    slack = world.deadline[world.fifo[k].head] - world.trace[0].now
    most = (min(rule.target, slack) * rule.rate / 1.6 - queued) / waiting
    j = len(world.ladder) - 1
    while j > 0 and world.weights[j] > most:
        j -= 1
    return world.ladder[j, k]


@helper(counted=False, inline=True)
def _hosted(world, k, w):  # type: ignore[no-untyped-def]
    """The widest width up to w that a server can ever run, or w."""
    for narrower in range(w, -1, -1):
        for s in range(len(world.core.server)):
            if world.feasible[s, k, narrower]:
                return narrower
    return w


@helper(counted=False, inline=True)
def _any(world, k, w):  # type: ignore[no-untyped-def]
    """A random server that can run (k, w), or the next in turn."""
    rule = world.rule[0]
    able = world.feasible[:, k, w]
    n = max(able.sum(), 1)
    i = rule.turn % n if rule.server == ROUND_ROBIN else draw(rule, n)
    rule.turn += 1
    for s in range(len(able)):
        i -= able[s]
        if i < 0:
            return s
    return 0


@helper(counted=False, inline=True)
def delay(world, s):  # type: ignore[no-untyped-def]
    """Estimated ns until server s has completed the head block."""
    trace = world.trace[0]
    core = world.core
    server = core.server[s]
    k, w = trace.segment, trace.width
    fifo = world.fifo[k]
    head = world.request[fifo.head]
    images = min(trace.group, fifo.images)
    work = server.queued + 0.5 * server.active + images * core.cost[s, k, head.width, w]
    found = server.launch + _SPREAD * work
    if k > 0 and head.server != s:
        found += world.transfer[k - 1, head.width]
    if _hosts(core, s, k, w, trace.now)[0] == 0:
        found += server.load_time
        if server.used + core.vram[k, w] > server.vram:
            found += _EVICTION * server.load_time
    return found


@helper(counted=False, inline=True)
def expected(world):  # type: ignore[no-untyped-def]
    """Estimate ns until the head is answered; later segments are narrow, on the fastest server.

    A load that it would be the first to wait for takes none: if that was shed, nothing would load.
    """
    trace, core = world.trace[0], world.core
    s, k, w = trace.server, trace.segment, trace.width
    head = world.request[world.fifo[k].head]
    hosts, start = _hosts(core, s, k, w, trace.now)
    fits = core.server[s].used + core.vram[k, w] <= core.server[s].vram
    if hosts == 0 and fits and core.queue[s, k * core.vram.shape[1] + w].head < 0:
        start = 0.0
    end, _, _ = _batch(core, s, k, w, min(trace.group, world.fifo[k].images), head.width)
    if k > 0 and head.server != s:
        end += world.transfer[k - 1, head.width]
    return start + end + _later(world, k, w)


@helper(counted=False, inline=True)
def _later(world, k, width):  # type: ignore[no-untyped-def]
    """Estimated ns of all loaded segments after k, given its width; see `expected`."""
    core = world.core
    found = 0.0
    for j in range(k + 1, core.vram.shape[0]):
        w = world.ladder[0, j] if len(world.ladder) else 0
        least, loaded = np.inf, 0
        for s in range(len(core.server)):
            if world.feasible[s, j, w]:
                hosts, start = _hosts(core, s, j, w, world.trace[0].now)
                end, _, _ = _batch(core, s, j, w, 1, width)
                least = min(least, start + end)
                loaded += hosts
        found += world.trace[0].router + (least if loaded else 0.0)
        width = w
    return found


@helper(counted=False, inline=True)
def _marginal(world, k):  # type: ignore[no-untyped-def]
    """Choose width and server of the least cost for all requests, of the block and others.

    Cost of a request of the block: time until its batch would end, plus the accuracy lost by the
    width if later segments are the best. Cost of the others: `price` times the work for all in the
    system; 0 while no instance can run the block, since then they wait for loading.
    ``world.weights`` holds the value of the best completion of every prefix, in ns.

    With deadlines, blocks are as large as the queue, but end with a batch; choices that end the
    request too late come last, narrow widths first; and for a while after a request was shed, the
    price of work is higher and accuracy has none.
    """
    rule = world.rule[0]
    trace = world.trace[0]
    core = world.core
    segments, widths = core.vram.shape
    fifo = world.fifo[k]
    head = world.request[fifo.head]
    trace.group = rule.group
    if trace.deadlines:
        trace.group = max(rule.group, min(fifo.images, core.state[0].max_batch))
    images = min(trace.group, fifo.images)
    before, prefixes = 0, 1
    for _ in range(k):
        before += prefixes
        prefixes *= widths
    worth = world.weights[before + head.tuple]
    price = rule.price * (trace.arrived - trace.completed)
    slack = world.deadline[fifo.head] - trace.now
    overload = trace.now - trace.shed_at < _OVERLOAD_NS
    price *= _OVERLOAD_PRICE if overload else 1.0
    least = np.inf
    trace.server, trace.width = 0, 0
    for w in range(widths):
        lost = worth - world.weights[before + prefixes + head.tuple * widths + w]
        later = _later(world, k, w) if trace.deadlines else 0.0
        for s in range(len(core.server)):
            if not world.feasible[s, k, w]:
                continue
            hosts, start = _hosts(core, s, k, w, trace.now)
            end, work, joules = _batch(core, s, k, w, images, head.width)
            value = start + end + (not overload) * lost + joules * rule.rate / images
            if hosts:
                if k + 1 < segments:  # input of the next segment
                    work += images * (core.cost[s, k + 1, w, -1] - core.cost[s, k + 1, 0, -1])
                value += price * work
            if k > 0 and head.server != s:
                value += world.transfer[k - 1, head.width]
            if trace.deadlines and start + end + later > _SAFETY * slack:
                value = _LATE * (1 + w) + start + end + later
            if value < least:
                least = value
                trace.server, trace.width = s, w
    if trace.deadlines:
        s, w, most = trace.server, trace.width, core.state[0].max_batch
        queued = core.queue[s, k * widths + w].work / max(core.cost[s, k, head.width, w], 1)
        trace.group = min(trace.group, most - round(queued) % most)


@helper(counted=False, inline=True)
def _hosts(core, s, k, w, now):  # type: ignore[no-untyped-def]
    """Number of instances that can run (k, w), and ns until the first could start."""
    server = core.server[s]
    hosts, soonest, ended = 0, NEVER, NEVER
    for i in range(SLOTS):
        slot = core.instance[s, i]
        if slot.state == BUSY:
            ended = min(ended, slot.until)
        resident = slot.state != EMPTY and slot.state != UNLOADING
        if resident and slot.segment == k and slot.width >= w:
            hosts += 1
            soonest = min(soonest, now if slot.state == FREE else slot.until)
    if hosts == 0:
        return 0, 1.0 * server.load_time
    widths, most = core.vram.shape[1], hosts
    first, last = k * widths, (k + 1) * widths
    if server.parallel < SLOTS:  # all queues share the limit
        first, last, most = 0, core.queue.shape[1], min(hosts, server.parallel)
        if server.running >= server.parallel:
            soonest = max(soonest, ended)
    others = 0.0
    for key in range(first, last):
        queue = core.queue[s, key]
        if key != k * widths + w and queue.head >= 0:
            others += _launches(core, s, key, queue.work, -1) + queue.work
    return hosts, max(0, soonest - now) + others / most


@helper(counted=False, inline=True)
def _batch(core, s, k, w, images, widest):  # type: ignore[no-untyped-def]
    """A block run with the queue of (k, w): ns of the batch, ns of work and J of the block."""
    server = core.server[s]
    work = images * core.cost[s, k, widest, w]
    key = k * core.vram.shape[1] + w
    total = work + core.queue[s, key].work
    load = load_of(server, images * core.mmac[k, widest, w])
    slowed = slowdown(server, server.load / UNIT + load)
    joules = (server.peak_w - server.idle_w) * load * (server.launch + work * slowed) * 1e-9
    return _launches(core, s, key, total, widest) + total * slowed, work, joules


@helper(counted=False, inline=True)
def _launches(core, s, key, work, widest):  # type: ignore[no-untyped-def]
    """Return ns of the launches of a queue with so many ns of work: batches are full."""
    k, w = key // core.vram.shape[1], key % core.vram.shape[1]
    full = core.state[0].max_batch * core.cost[s, k, widest, w]
    return core.server[s].launch * max(1.0, np.ceil(work / max(full, 1.0)))


# learned policies; ``world.weights`` has the parameters, then the buffers of a forward pass


def sizes(state: str, servers: int, segments: int, widths: int) -> tuple[int, int, int]:
    """Return the numbers of features, of weights, and of buffers of a forward pass."""
    n = 2 + 3 * servers if state == "paper" else 3 + 3 * segments + 8 * servers
    heads = servers + widths + N_GROUPS
    return n, (n + HIDDEN + 2) * HIDDEN + (HIDDEN + 1) * heads, n + 2 * HIDDEN + heads


@helper(counted=False, inline=True)
def _learned(world):  # type: ignore[no-untyped-def]
    """Decide by softmaxes of server, width, group; the first is mixed with a uniform epsilon."""
    x, rule = world.weights, world.rule[0]
    servers, _, widths = world.feasible.shape
    weight, at = _layer(x, 0, features(world), rule.inputs, HIDDEN, True)
    weight, at = _layer(x, weight, at, HIDDEN, HIDDEN, True)
    _, at = _layer(x, weight, at, HIDDEN, servers + widths + N_GROUPS, False)
    s = _choose(x, at, servers, rule, rule.epsilon)
    w = _choose(x, at + servers, widths, rule, 0.0)
    set_decision(world, s, w, _choose(x, at + servers + widths, N_GROUPS, rule, 0.0))


@helper(counted=False, inline=True)
def features(world):  # type: ignore[no-untyped-def]
    """Write the features of a decision; returns their position in ``world.weights``.

    Reconstructed from the paper: requests at the router, share completed, and per server MMACs that
    are queued, power and U. Extended: segment, last and earlier widths, requests at the router
    by segment, age of the head, and per server queued and running ms, free instances of the
    segment, free memory, whether the segment is resident at full width. Counts, times and U as
    log(1 + x), all others as fractions.
    """
    x = world.weights
    trace = world.trace[0]
    core = world.core
    servers, segments, widths = world.feasible.shape
    n = world.rule[0].inputs
    first = len(x) - (n + 2 * HIDDEN + servers + widths + N_GROUPS)
    x[first] = math.log1p(world.fifo["images"].sum())
    x[first + 1] = trace.completed / max(trace.arrived, 1)
    at = first + 2
    for s in range(servers):
        server = core.server[s]
        x[at] = math.log1p(max(0.0, server.queued_mmac) / 100.0)
        x[at + 1] = server.watts / max(server.peak_w, 1e-9)
        x[at + 2] = math.log1p(server.load / UNIT)
        at += 3
    if at == first + n:  # paper
        return first
    k = trace.segment
    head = world.request[world.fifo[k].head]
    prefix = head.tuple
    for f in range(segments):
        x[at + f] = 1.0 if f == k else 0.0
        x[at + segments + f] = 0.0
        x[at + 2 * segments + f] = math.log1p(world.fifo[f].images)
    x[at + segments] = (head.width + 1) / widths if k else 0.0
    for f in range(k, 0, -1):
        x[at + segments + f] = (prefix % widths + 1) / widths
        prefix //= widths
    at += 3 * segments
    x[at] = math.log1p((trace.now - world.arrival[world.fifo[k].head]) * 1e-6)
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
def set_decision(world, s, w, g):  # type: ignore[no-untyped-def]
    """Write the first feasible server from s on, the widest feasible width up to w, and 2**g."""
    trace = world.trace[0]
    servers = len(world.feasible)
    for _ in range(servers):
        if not world.feasible[s, trace.segment, 0]:
            s = (s + 1) % servers
    while w > 0 and not world.feasible[s, trace.segment, w]:
        w -= 1
    trace.server, trace.width = s, w
    trace.group = min(1 << g, world.core.state[0].max_batch)


@helper(counted=False)
def _layer(x, weight, given, n, m, squashed):  # type: ignore[no-untyped-def]
    """``x[given + n:][:m] = x[given:][:n] @ W + b``; positions of the next weights and of the m."""
    # unsigned: indices that may be negative are not vectorised, which takes twice as long
    made, bias, columns = np.uint64(given + n), np.uint64(weight + n * m), np.uint64(m)
    for j in range(columns):
        x[made + j] = x[bias + j]
    for i in range(n):
        factor, row = x[given + i], np.uint64(weight + i * m)
        for j in range(columns):
            x[made + j] += factor * x[row + j]
    if squashed:
        for j in range(given + n, given + n + m):  # three times as fast as math.tanh
            x[j] = 1.0 - 2.0 / (math.exp(2.0 * min(max(x[j], -20.0), 20.0)) + 1.0)
    return weight + (n + 1) * m, given + n


@helper(counted=False)
def _choose(x, at, n, rule, epsilon):  # type: ignore[no-untyped-def]
    """The most likely of n logits; or one drawn by (1 - epsilon) softmax + epsilon / n."""
    best, total = 0, 0.0
    for j in range(n):
        if x[at + j] > x[at + best]:
            best = j
    if not rule.sampled:
        return best
    most = x[at + best]
    for j in range(n):
        total += math.exp(x[at + j] - most)
    left = (draw(rule, _PARTS) + 0.5) / _PARTS
    for j in range(n):
        left -= (1.0 - epsilon) * math.exp(x[at + j] - most) / total + epsilon / n
        if left < 0.0:
            return j
    return best
