"""The compiled rules of routers: a width rule, a group, a server rule; each written once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.kernels.compile import helper
from optsched.serving.core import EMPTY, FREE, NEVER, UNIT, UNLOADING, load_of, slowdown
from optsched.serving.fields import frozen
from optsched.serving.plan import SLOTS

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

EXTERNAL: Final = -1
"""Server rule of a router that somebody else computes."""

RANDOM, ROUND_ROBIN, JSED, POWER_OF_TWO, MARGINAL = range(5)
POLICY: Final = 16
"""Server rule of a learned policy, which decides about all three (`optsched.serving.policy`)."""

STATIC, RANDOM_WIDTH, BACKLOG, FLUID = range(4)

GROUPS: Final = (1, 2, 4, 8, 16, 32)
"""What a random group (0) is drawn from."""

RULE = np.dtype(
    [(name, "i8") for name in ("server", "width", "group", "random", "turn", "inputs", "sampled")]
    + [(name, "f8") for name in ("target", "rate", "price", "epsilon")]
)
"""Which rules, their numbers, and the states of random numbers and of round robin.

`inputs`, `sampled` and `epsilon` are a learned policy's, see `optsched.serving.policy`.
"""

MODULUS: Final = 2**31 - 1
_SPREAD = 1.3
_EVICTION = 5


class Compiled(NamedTuple):
    """Rules as arrays, see `optsched.serving.world.World`."""

    rule: Any
    ladder: IntArray
    ladder_mmac: Any
    share: Any
    weights: Any = np.zeros(0)

    @classmethod
    def of(cls, rule: Any, weights: Any = ()) -> Compiled:
        """A rule that needs no tuples to choose from."""
        ladder = np.zeros((0, 0), np.int64)
        own = np.array(weights, np.float64)  # writable: a policy's has room for its layers
        return cls(rule, frozen(ladder), frozen(np.zeros(0)), np.zeros((0, 2)), own)

    @classmethod
    def external(cls) -> Compiled:
        """No rules: decisions come from somewhere else."""
        rule = np.zeros(1, RULE)
        rule["server"] = EXTERNAL
        return cls.of(rule)


def first_random(seed: int) -> int:
    """The state that a simulation's router begins with; the arrivals have another stream."""
    drawn = np.random.SeedSequence([seed, 1]).generate_state(1)
    return int(drawn[0]) % (MODULUS - 1) + 1


@helper(counted=False, inline=True)
def decide(world):  # type: ignore[no-untyped-def]
    """Write server, width and group for the head of ``trace.queue``; False if that is not ours."""
    rule = world.rule[0]
    if rule.server == EXTERNAL:
        return False
    trace = world.trace[0]
    k = trace.segment
    if rule.server == MARGINAL:
        _marginal(world, k)
        return True
    trace.width = _hosted(world, k, _width(world, k))
    group = rule.group if rule.group else GROUPS[draw(rule, len(GROUPS))]
    trace.group = min(group, world.core.state[0].max_batch)
    if rule.server == ROUND_ROBIN:
        trace.server = _next(world, k, trace.width)
    elif rule.server == RANDOM:
        trace.server = _any(world, k, trace.width)
    elif rule.server == POWER_OF_TWO:
        a, b = _any(world, k, trace.width), _any(world, k, trace.width)
        low, high = min(a, b), max(a, b)
        trace.server = low if delay(world, low) <= delay(world, high) else high
    else:
        least, trace.server = 1e300, -1
        for s in range(len(world.core.server)):
            if world.feasible[s, k, trace.width]:
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
    """What the width rule says for segment k."""
    rule = world.rule[0]
    if rule.width == FLUID:
        return world.ladder[world.request[world.fifo[world.trace[0].queue].head].plan, k]
    if rule.width == RANDOM_WIDTH:
        return draw(rule, world.core.state[0].widths)
    if rule.width == STATIC:
        return world.ladder[0, k]
    waiting, queued = 32.0, 0.0
    segments = world.core.vram.shape[0]
    for f in range(segments):
        waiting += world.fifo[f].images * (segments - f) / segments
    for s in range(len(world.core.server)):
        queued += world.core.server[s].queued_mmac
    most = (rule.target * rule.rate / 1.6 - queued) / waiting
    j = len(world.ladder_mmac) - 1
    while j > 0 and world.ladder_mmac[j] > most:
        j -= 1
    return world.ladder[j, k]


@helper(counted=False, inline=True)
def _hosted(world, k, w):  # type: ignore[no-untyped-def]
    """The width, or the widest below it, or else the narrowest, that some server can ever run."""
    for narrower in range(w, -1, -1):
        for s in range(len(world.core.server)):
            if world.feasible[s, k, narrower]:
                return narrower
    return w


@helper(counted=False, inline=True)
def _any(world, k, w):  # type: ignore[no-untyped-def]
    """A random server that can run (k, w)."""
    n = 0
    for s in range(len(world.core.server)):
        n += world.feasible[s, k, w]
    i = draw(world.rule[0], max(n, 1))
    for s in range(len(world.core.server)):
        if world.feasible[s, k, w]:
            if i == 0:
                return s
            i -= 1
    return 0


@helper(counted=False, inline=True)
def _next(world, k, w):  # type: ignore[no-untyped-def]
    """The next server in turn that can run (k, w)."""
    rule = world.rule[0]
    for _ in range(len(world.core.server)):
        s = rule.turn % len(world.core.server)
        rule.turn += 1
        if world.feasible[s, k, w]:
            return s
    return 0


@helper(counted=False, inline=True)
def delay(world, s):  # type: ignore[no-untyped-def]
    """When server s would have done the head block, in ns from now, roughly."""
    trace = world.trace[0]
    core = world.core
    server = core.server[s]
    k, w = trace.segment, trace.width
    fifo = world.fifo[trace.queue]
    head = world.request[fifo.head]
    images = min(trace.group, fifo.images)
    work = server.queued + 0.5 * server.active + images * core.cost[s, k, head.width, w]
    found = server.launch + _SPREAD * work
    if k > 0 and head.server != s:
        found += world.transfer[k - 1, head.width]
    hosts, _ = _hosts(core, s, k, w, trace.now)
    if hosts == 0:
        found += server.load_time
        if server.used + core.vram[k, w] > server.vram:
            found += _EVICTION * server.load_time
    return found


@helper(counted=False, inline=True)
def _marginal(world, k):  # type: ignore[no-untyped-def]
    """Width and server that cost all requests together least, the head block's and the others'.

    A request of the block pays until its batch would end, and for the accuracy that the width
    loses if all later segments are the best. The others pay `price` times the work for every
    request in the system; not while nothing can run it: then loading, not work, is what they wait
    for. The weights are what the best completion of every prefix is worth, in ns.
    """
    rule = world.rule[0]
    trace = world.trace[0]
    core = world.core
    segments, widths = core.vram.shape
    fifo = world.fifo[trace.queue]
    head = world.request[fifo.head]
    trace.group = rule.group
    images = min(rule.group, fifo.images)
    before, prefixes = 0, 1
    for _ in range(k):
        before += prefixes
        prefixes *= widths
    worth = world.weights[before + head.tuple]
    price = rule.price * (trace.arrived - trace.completed)
    least = np.inf
    trace.server, trace.width = 0, 0
    for w in range(widths):
        lost = worth - world.weights[before + prefixes + head.tuple * widths + w]
        for s in range(len(core.server)):
            if not world.feasible[s, k, w]:
                continue
            hosts, start = _hosts(core, s, k, w, trace.now)
            end, work, joules = _alone(core, s, k, w, images, head.width)
            value = start + end + lost + joules * rule.rate / images
            if hosts:
                if k + 1 < segments:  # what the next segment has to read
                    work += images * (core.cost[s, k + 1, w, -1] - core.cost[s, k + 1, 0, -1])
                value += price * work
            if k > 0 and head.server != s:
                value += world.transfer[k - 1, head.width]
            if value < least:
                least = value
                trace.server, trace.width = s, w


@helper(counted=False, inline=True)
def _hosts(core, s, k, w, now):  # type: ignore[no-untyped-def]
    """Instances that can run (k, w), and in how many ns one of them could begin."""
    server = core.server[s]
    hosts, soonest = 0, NEVER
    for i in range(SLOTS):
        slot = core.instance[s, i]
        there = slot.state != EMPTY and slot.state != UNLOADING
        if there and slot.segment == k and slot.width >= w:
            hosts += 1
            soonest = min(soonest, now if slot.state == FREE else slot.until)
    if hosts == 0:
        return 0, 1.0 * server.load_time
    others = 0.0
    for v in range(core.vram.shape[1]):
        queue = core.queue[s, k * core.vram.shape[1] + v]
        if v != w and queue.head >= 0:
            others += server.launch + queue.work
    return hosts, max(0, soonest - now) + others / hosts


@helper(counted=False, inline=True)
def _alone(core, s, k, w, images, widest):  # type: ignore[no-untyped-def]
    """A block with all that waits for (k, w): ns that they run, ns of work and J of the block."""
    server = core.server[s]
    work = images * core.cost[s, k, widest, w]
    total = work + core.queue[s, k * core.vram.shape[1] + w].work
    load = load_of(server, images * core.mmac[k, widest, w])
    slowed = slowdown(server, server.load / UNIT + load)
    joules = (server.peak_w - server.idle_w) * load * (server.launch + work * slowed) * 1e-9
    return server.launch + total * slowed, work, joules
