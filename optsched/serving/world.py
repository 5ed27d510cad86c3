"""Event loop of the simulation: arrivals, the serial router, servers, and the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.io.values import frozen
from optsched.kernels.compile import INT, READ, entry, helper, records
from optsched.serving.core import (
    CORE,
    DONE,
    ENQUEUE,
    LOAD,
    NONE,
    RUN,
    TICK,
    UNIT,
    UNLOAD,
    Core,
    handle,
    new_block,
    settle,
)
from optsched.serving.log import BATCH, ENTRY, INSTANCE
from optsched.serving.rules import RULE, decide, delay, expected
from optsched.serving.tables import NEVER, SLOTS, fields

if TYPE_CHECKING:
    from optsched.serving.plan import Plan
    from optsched.serving.scenario import Scenario

RUNNING, DRAINED, UNDECIDED, ENDED, FULL, STUCK, INFEASIBLE = range(-1, 6)
"""Reasons to return: all completed; a Python router decides; horizon; log is full; errors."""

ARRIVE, REQUEUE, ROUTE = range(TICK + 1, TICK + 4)
"""Additional events: a request arrives; one is queued again; the router decides."""

TRACE = fields(
    "now router router_at horizon arrived completed decisions pending order "
    "decision segment server width group logs batches entries instances "
    "deadlines sheds shed shed_at alone load squares since area counted",
    "variance variance_squared",
)
"""Clocks, counters, the current decision, rows written, and integrals over time.

`completed` counts requests that were shed, too. `decision` is 1 while a Python router decides.
`deadlines`, `sheds`: whether there are any, are shed. `shed` is the last one or -1, its `next` the
one before; `shed_at` its time, if its deadline was not below `alone`, ns without others. `area` is
the integral of the requests in the system, up to `counted`; `load` and `squares` are sums over
servers of min(U, 1) and its square.
"""

REQUEST = fields("next width tuple server finish shed")
"""`width` is that of the last segment, `tuple` the index of all so far; `finish` and `shed` are
times or -1."""

FIFO = fields("head tail images")
EVENT = fields("at order kind server which")


class World(NamedTuple):
    """State of a simulation: all arrays that `advance` reads and writes."""

    core: Core
    trace: Any
    request: Any
    arrival: Any
    deadline: Any
    """Times at which answers are due, `NEVER` without a deadline."""
    fifo: Any
    """Queues of the router, [segment]."""
    heap: Any
    transfer: Any
    feasible: Any
    """Whether a server can ever run (segment, width)."""
    rule: Any
    ladder: Any
    """Candidate tuples of the width rule, narrowest first."""
    weights: Any
    """MMACs of the candidates, values of prefixes, or parameters of a policy and its buffers."""
    batch_row: Any
    request_row: Any
    instance_row: Any


_TABLE = types.Array(INT, 2, "C", readonly=True)
WORLD: Final = types.NamedTuple(
    (
        CORE, records(TRACE), records(REQUEST), READ, READ, records(FIFO), records(EVENT), _TABLE,
        types.Array(types.boolean, 3, "C", readonly=True), records(RULE), _TABLE,
        types.Array(types.float64, 1, "C"),
        records(BATCH), records(ENTRY), records(INSTANCE),
    ),
    World,
)  # fmt: skip


def feasible(scenario: Scenario, plan: Plan | None) -> Any:
    """Return whether a server can ever run (segment, width), [server][segment][width]."""
    k, n = scenario.vram.shape
    found = np.zeros((len(scenario.servers), k, n), np.bool_)
    for s, one in enumerate(scenario.servers):
        pinned = [] if plan is None else [row[1:] for row in plan.instances if row[0] == s]
        free = round(one.vram_mb * 1000) - sum(int(scenario.vram[row]) for row in pinned)
        if len(pinned) < SLOTS:
            found[s] = scenario.vram <= free
        for segment, width in pinned:
            found[s, segment, : width + 1] = True
    return frozen(found)


@helper(NONE, WORLD, INT, INT, INT, INT, counted=False, inline=True)
def _push(world, at, kind, s, which):  # type: ignore[no-untyped-def]
    """Insert a future event; equal times keep the order of insertion."""
    trace = world.trace[0]
    heap = world.heap
    i = trace.pending
    trace.pending += 1
    trace.order += 1
    while i > 0 and heap[(i - 1) // 2].at > at:
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    row = heap[i]
    row.at, row.order, row.kind, row.server, row.which = at, trace.order, kind, s, which


@helper(NONE, WORLD, counted=False, inline=True)
def _pop(world):  # type: ignore[no-untyped-def]
    """Remove the first event."""
    trace = world.trace[0]
    heap = world.heap
    trace.pending -= 1
    n = trace.pending
    i, child = 0, 1
    while child < n:
        if child + 1 < n and _before(heap[child + 1], heap[child]):
            child += 1
        if not _before(heap[child], heap[n]):
            break
        heap[i] = heap[child]
        i = child
        child = 2 * i + 1
    heap[i] = heap[n]


@helper(counted=False, inline=True)
def _before(a, b):  # type: ignore[no-untyped-def]
    return a.at < b.at or (a.at == b.at and a.order < b.order)


@helper(NONE, WORLD, INT, INT, INT, INT, counted=False, inline=True)
def _serve(world, s, event, which, now):  # type: ignore[no-untyped-def]
    """Pass an event to the core of a server, and schedule and log its commands."""
    trace = world.trace[0]
    core = world.core
    before = min(core.server[s].load, UNIT)
    handle(core, s, event, which, now)
    after = min(core.server[s].load, UNIT)
    if after != before:
        _spread(world, now)
        trace.load += after - before
        trace.squares += after * after - before * before
    for c in range(core.state[0].commands):
        command = core.command[c]
        i, kind = command.instance, command.kind
        end = now if kind == UNLOAD else command.until
        _push(world, end, kind + 1, s, i)  # a run ends with `DONE`, and so on
        if not trace.logs:
            continue
        slot = core.instance[s, i]
        if kind == RUN:
            _log_batch(world, s, i, now, end)
        elif kind == LOAD:
            slot.row = trace.instances
            row = world.instance_row[trace.instances]
            trace.instances += 1
            row.server, row.id, row.segment, row.width = s, slot.id, slot.segment, slot.width
            row.load, row.ready, row.unload = now, end, -1
        elif kind == UNLOAD:
            world.instance_row[slot.row].unload = now


@helper(types.float64, WORLD, counted=False, inline=True)
def variance_of(world):  # type: ignore[no-untyped-def]
    """Return the present variance of min(U, 1) over servers."""
    trace = world.trace[0]
    n = len(world.core.server)
    mean = trace.load / n / UNIT
    return max(0.0, trace.squares / n / (1.0 * UNIT * UNIT) - mean * mean)


@helper(NONE, WORLD, INT, counted=False, inline=True)
def _spread(world, now):  # type: ignore[no-untyped-def]
    """Integrate the variance up to now."""
    trace = world.trace[0]
    variance = variance_of(world)
    trace.variance += variance * (now - trace.since)
    trace.variance_squared += variance * variance * (now - trace.since)
    trace.since = now


@helper(NONE, WORLD, INT, INT, INT, INT, counted=False, inline=True)
def _log_batch(world, s, i, now, end):  # type: ignore[no-untyped-def]
    trace = world.trace[0]
    core = world.core
    slot = core.instance[s, i]
    row = world.batch_row[trace.batches]
    trace.batches += 1
    row.server, row.instance, row.segment = s, slot.id, slot.segment
    row.width = core.block[slot.first].width
    row.start, row.end, row.images, row.first = now, end, slot.images, trace.entries
    b = slot.first
    while b >= 0:
        block = core.block[b]
        r = block.first
        for _ in range(block.images):
            written = world.request_row[trace.entries]
            written.request, written.queued = r, block.queued
            trace.entries += 1
            r = world.request[r].next
        b = block.next


@helper(types.boolean, WORLD, INT, INT, counted=False, inline=True)
def _sooner(world, a, b):  # type: ignore[no-untyped-def]
    """Whether request a is due before b; at equal deadlines, whether it arrived before b."""
    first, second = world.deadline[a], world.deadline[b]
    if first == second:
        first, second = world.arrival[a], world.arrival[b]
    return first < second or (first == second and a < b)


@helper(NONE, WORLD, INT, INT, counted=False, inline=True)
def _queue(world, r, k):  # type: ignore[no-untyped-def]
    """Insert a request into the router's queue of segment k, before those with later deadlines."""
    fifo = world.fifo[k]
    before, after = fifo.tail if fifo.images else -1, -1
    due = world.deadline[r]
    if world.trace[0].deadlines and fifo.images and due < world.deadline[before]:
        before, after = -1, fifo.head
        while world.deadline[after] <= due:
            before, after = after, world.request[after].next
    world.request[r].next = after
    if before < 0:
        fifo.head = r
    else:
        world.request[before].next = r
    if after < 0:
        fifo.tail = r
    fifo.images += 1


@helper(NONE, WORLD, INT, counted=False, inline=True)
def _count(world, now):  # type: ignore[no-untyped-def]
    """Integrate the number of requests in the system up to now."""
    trace = world.trace[0]
    trace.area += (trace.arrived - trace.completed) * (now - trace.counted)
    trace.counted = now


@helper(NONE, WORLD, INT, INT, counted=False, inline=True)
def _arrive(world, r, now):  # type: ignore[no-untyped-def]
    request = world.request[r]
    request.width, request.tuple = 0, 0
    request.server = request.finish = request.shed = -1
    _count(world, now)
    world.trace[0].arrived += 1
    _queue(world, r, 0)


@helper(NONE, WORLD, INT, INT, INT, counted=False, inline=True)
def _complete(world, s, i, now):  # type: ignore[no-untyped-def]
    """Return the requests of a batch to the router, or complete them."""
    trace = world.trace[0]
    core = world.core
    widths = core.state[0].widths
    slot = core.instance[s, i]
    k = slot.segment + 1
    last = k * widths == core.queue.shape[1]
    b = slot.first
    if last:
        _count(world, now)
    while b >= 0:
        block = core.block[b]
        r = block.first
        for _ in range(block.images):
            request = world.request[r]
            following = request.next
            request.width = block.width
            request.tuple = request.tuple * widths + block.width
            request.server = s
            if last:
                request.finish = now
                trace.completed += 1
            else:
                _queue(world, r, k)
            r = following
        b = block.next


@helper(INT, WORLD, counted=False, inline=True)
def _oldest(world):  # type: ignore[no-untyped-def]
    """Segment of the most urgent request at the router, or -1."""
    best = -1
    for f in range(len(world.fifo)):
        fifo = world.fifo[f]
        if fifo.images and (best < 0 or _sooner(world, fifo.head, world.fifo[best].head)):
            best = f
    return best


@helper(NONE, WORLD, INT, counted=False, inline=True)
def _shed(world, now):  # type: ignore[no-untyped-def]
    """Remove the head of the decision's queue from the system."""
    trace = world.trace[0]
    fifo = world.fifo[trace.segment]
    r = fifo.head
    request = world.request[r]
    fifo.head = request.next
    fifo.images -= 1
    _count(world, now)
    trace.completed += 1
    request.shed = now
    trace.shed_at = trace.shed_at if world.deadline[r] - world.arrival[r] < trace.alone else now
    request.next = trace.shed
    trace.shed = r


@helper(types.UniTuple(INT, 2), WORLD, counted=False, inline=True)
def _form(world):  # type: ignore[no-untyped-def]
    """Form the block of the decision. Second result: transfer time, ns."""
    trace = world.trace[0]
    s, k, w = trace.server, trace.segment, trace.width
    fifo = world.fifo[k]
    images = min(trace.group, fifo.images)
    first = r = fifo.head
    widest, moved = 0, 0
    for _ in range(images):
        request = world.request[r]
        widest = max(widest, request.width)
        if k > 0 and request.server != s:
            moved = max(moved, world.transfer[k - 1, request.width])
        r = request.next
    fifo.head = r
    fifo.images -= images
    trace.decisions += 1
    return new_block(world.core, s, k, w, first, images, widest), moved


@helper(types.UniTuple(INT, 4), WORLD, counted=False, inline=True)
def next_event(world):  # type: ignore[no-untyped-def]
    """Time, kind, server and slot or block of the next event; at equal times the heap's first."""
    trace = world.trace[0]
    first = world.heap[0]
    now, event = trace.router_at, ROUTE
    if trace.arrived < len(world.arrival) and world.arrival[trace.arrived] <= now:
        now, event = world.arrival[trace.arrived], ARRIVE
    if trace.pending and first.at <= now:
        return first.at, first.kind, first.server, first.which
    return now, event, 0, trace.arrived


@helper(INT, WORLD, INT, counted=False, inline=True)
def _stop_reason(world, now):  # type: ignore[no-untyped-def]
    """Why the simulation stops before an event at `now`, or `RUNNING`."""
    trace = world.trace[0]
    if trace.completed == len(world.arrival):
        return DRAINED
    if now == NEVER:
        return STUCK
    if now > trace.horizon:
        trace.now = trace.horizon
        return ENDED
    if trace.logs and trace.instances + SLOTS > len(world.instance_row):
        return FULL
    return RUNNING


@helper(INT, WORLD, INT, INT, INT, INT, counted=False, inline=True)
def _process(world, event, s, which, now):  # type: ignore[no-untyped-def]
    """Process an event; `RUNNING`, or `UNDECIDED` or `INFEASIBLE` for a decision."""
    trace = world.trace[0]
    if event == ROUTE:
        trace.router_at = NEVER
        choosing = True
        while choosing:
            if trace.decision != 1:
                trace.segment = _oldest(world)
                if not decide(world):
                    trace.decision = 1
                    return UNDECIDED
            trace.decision = -1
            choosing = False
            if not world.feasible[trace.server, trace.segment, trace.width]:
                return INFEASIBLE
            slack = world.deadline[world.fifo[trace.segment].head] - now
            if trace.deadlines and trace.sheds and expected(world) > slack:
                _shed(world, now)
                choosing = _oldest(world) >= 0
                if not choosing:
                    return RUNNING
        s = trace.server
        which, moved = _form(world)
        event = ENQUEUE
        if moved:
            _push(world, now + moved, event, s, which)
            event = ROUTE
    elif event == ARRIVE:
        _arrive(world, which, now)
    elif event == REQUEUE:
        _queue(world, which, s)
    elif event == DONE:
        _complete(world, s, which, now)
    if event <= TICK:  # a single call: the core is inlined here
        _serve(world, s, event, which, now)
    if trace.router_at == NEVER and _oldest(world) >= 0:
        trace.router_at = now + trace.router
    return RUNNING


@helper(NONE, WORLD, counted=False, inline=True)
def _settle(world):  # type: ignore[no-untyped-def]
    """Integrate energy, variance and requests in the system up to now."""
    trace = world.trace[0]
    for s in range(len(world.core.server)):
        settle(world.core.server[s], trace.now)
    _spread(world, trace.now)
    _count(world, trace.now)


@entry(INT, WORLD)
def advance(world):  # type: ignore[no-untyped-def]
    """Simulate until all requests are completed or a decision of a Python router is required.

    In the latter case the caller writes server, width and group to the trace, and calls again.
    Returns `DRAINED`, `UNDECIDED`, `ENDED`, `FULL`, `STUCK` or `INFEASIBLE`.
    """
    trace = world.trace[0]
    status = RUNNING
    while status == RUNNING:
        now, event, s, which = trace.now, ROUTE, 0, 0
        if trace.decision != 1:
            now, event, s, which = next_event(world)
            status = _stop_reason(world, now)
            if status != RUNNING:
                break
            if event <= TICK:
                _pop(world)
            trace.now = now
        status = _process(world, event, s, which, now)
    _settle(world)
    return status


@entry(INT, WORLD, INT, INT, INT, INT)
def feed(world, event, s, which, now):  # type: ignore[no-untyped-def]
    """Process one event of an external clock; the commands are in ``core.command``.

    `s` and `which` are a server and a slot, or for `REQUEUE` a segment and a request. No event is
    scheduled: the ends of batches and loads come by further calls. Returns `DRAINED`: no request
    is at the router; `ENDED`: some are, `ROUTE` is possible; `UNDECIDED`: the caller writes the
    decision to the trace, and feeds `ROUTE` again; `INFEASIBLE`.
    """
    trace = world.trace[0]
    trace.now = now
    trace.router_at = NEVER
    trace.pending = 0
    world.core.state[0].commands = 0
    status = _process(world, event, s, which, now)
    _settle(world)
    if status == RUNNING:
        status = DRAINED if trace.router_at == NEVER else ENDED
    return status


@entry(NONE, WORLD, INT, INT, types.Array(types.float64, 1, "C"))
def expected_delays(world, width, group, found):  # type: ignore[no-untyped-def]
    """Write the value that `JSED` minimises, ns per server; inf where it can never run."""
    trace = world.trace[0]
    trace.width, trace.group = width, group
    for s in range(len(found)):
        fits = world.feasible[s, trace.segment, width]
        found[s] = delay(world, s) if fits else np.inf
