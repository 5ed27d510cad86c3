"""Greedy core of a server: forms batches for instances, loads and unloads instances.

A pure state machine from events to commands, without clock, randomness or I/O. The simulator calls
it with a virtual clock, the executor calls the same compiled function with real events.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import from_dtype, types

from optsched.errors import InputError
from optsched.kernels.compile import INT, helper, records
from optsched.serving.tables import NEVER, SLOTS, Contention, fields

if TYPE_CHECKING:
    from optsched.serving.scenario import Scenario, Settings

KEYS: Final = 63  # maximum number of queues, one per (segment, width): bits of an integer

ENQUEUE, DONE, LOADED, UNLOADED, TICK = range(5)
"""Events: a block arrives; a batch, a load, an unload ends; a timer expires."""

RUN, LOAD, UNLOAD, WAKE = range(4)
"""Commands; the end of each is the event with the next higher number."""

EMPTY, LOADING, FREE, BUSY, UNLOADING = range(5)
"""States of a slot for an instance."""

UNIT: Final = 2**28  # units of a load of 1: sums of integers are exact

STATE = fields("cap idle starve strict util_block max_batch widths commands free_block order")
"""Settings of all servers (times in ns), the number of commands, and the order of blocks."""

SERVER = fields(
    "vram launch load_time used reserved waiting load running parallel instances since wake",
    "saturation knee below above idle_w peak_w queued active queued_mmac watts energy",
)
"""`vram` and `used` are kB, `launch` and `load_time` ns, `load` is U in 1/`UNIT`.

`reserved` is 1 + the key for which memory is being freed, `waiting` has a bit per key (segment,
width) with queued blocks. `running` counts batches, at most `parallel`; `queued` and `active` are
ns of queued and running work. `energy` is J up to `since`.
"""

INSTANCE = fields("state id segment width pinned idle_since until first images load row", "work")
"""`first` is the first block of the running batch; `row` is a field of the caller."""

BLOCK = fields("next first images segment width widest queued order", "work mmac")
"""Requests routed together; `first` is a field of the caller, `widest` the widest input."""

QUEUE = fields("head tail", "work")

COMMAND = fields("kind server instance until")
"""`until` is the end of a batch or load by the model, or the time of a timer."""


class Core(NamedTuple):
    """States of all servers and their parameters."""

    state: Any
    server: Any
    instance: Any
    """[server][slot]"""
    queue: Any
    """[server][segment * widths + width]"""
    block: Any
    command: Any
    cost: Any
    """ns of an image, [server][segment][input width][width]."""
    mmac: Any
    """[segment][input width][width]"""
    vram: Any
    """kB of an instance, [segment][width]."""


_READ = {n: types.Array(types.float64, n, "C", readonly=True) for n in (3, 4)}
CORE = types.NamedTuple(
    (
        records(STATE), records(SERVER), types.Array(from_dtype(INSTANCE), 2, "C"),
        types.Array(from_dtype(QUEUE), 2, "C"), records(BLOCK), records(COMMAND),
        _READ[4], _READ[3], types.Array(INT, 2, "C", readonly=True),
    ),
    Core,
)  # fmt: skip
REAL = types.float64
NONE = types.none


def new_core(scenario: Scenario, blocks: int, settings: Settings) -> Core:
    """Create empty servers with capacity for a number of blocks."""
    if scenario.vram.size > KEYS:
        raise InputError(
            f"vram_mb: {scenario.vram.size} pairs of segment and width, a server keeps queues for "
            f"at most {KEYS}"
        )
    state = np.zeros(1, STATE)
    state["cap"], state["strict"] = settings.cap, settings.strict
    state["idle"], state["starve"] = round(settings.idle_ms * 1e6), round(settings.starve_ms * 1e6)
    state["util_block"] = min(round(settings.util_block * UNIT), NEVER)
    state["max_batch"], state["widths"] = scenario.max_batch, scenario.n_widths
    server = np.zeros(len(scenario.servers), SERVER)
    for row, one, launch in zip(server, scenario.servers, scenario.launch.tolist(), strict=True):
        row["vram"], row["launch"] = round(one.vram_mb * 1000), launch
        row["load_time"] = round((one.load_ms or 0) * 1e6)
        row["saturation"] = one.sat_mmac or 0.0
        rule = one.contention or Contention(math.inf, 0.0, 0.0)
        row["knee"], row["below"], row["above"] = rule.knee, rule.below, rule.above
        row["idle_w"] = row["watts"] = one.idle_w
        row["peak_w"], row["wake"] = one.peak_w, NEVER
        row["parallel"] = one.parallel or SLOTS
    block = np.zeros(blocks, BLOCK)
    block["next"] = np.arange(1, blocks + 1)
    block["next"][-1:] = -1
    queue = np.zeros((len(server), scenario.vram.size), QUEUE)
    queue["head"] = queue["tail"] = -1
    instance, command = np.zeros((len(server), SLOTS), INSTANCE), np.zeros(4 * SLOTS, COMMAND)
    costs = scenario.cost, scenario.mmac, scenario.vram
    return Core(state, server, instance, queue, block, command, *costs)


def pin(core: Core, server: int, segment: int, width: int) -> int:
    """Make an instance resident from the beginning, never unloaded; returns its number."""
    row = core.server[server]
    number = int(row["instances"])
    slot = core.instance[server, number]
    slot["state"], slot["id"], slot["pinned"] = FREE, number, 1
    slot["segment"], slot["width"] = segment, width
    row["used"] += core.vram[segment, width]
    row["instances"] += 1
    return number


@helper(INT, CORE, INT, INT, INT, INT, INT, INT, counted=False, inline=True)
def new_block(core, s, k, w, first, images, widest):  # type: ignore[no-untyped-def]
    """Create a block of requests for (segment, width), for `ENQUEUE`."""
    state = core.state[0]
    b = state.free_block
    block = core.block[b]
    state.free_block = block.next
    block.first, block.images = first, images
    block.segment, block.width, block.widest = k, w, widest
    block.work = images * core.cost[s, k, widest, w]
    block.mmac = images * core.mmac[k, widest, w]
    return b


@helper(NONE, CORE, INT, INT, INT, INT, counted=False, inline=True)
def handle(core, s, event, which, now):  # type: ignore[no-untyped-def]
    """Process an event of server `s`; the commands are in ``core.command``.

    `which` is the block that arrives, or the slot of the batch, load or unload that has ended. At
    `DONE` the blocks of the batch are recycled: read them before.
    """
    state = core.state[0]
    server = core.server[s]
    state.commands = 0
    if event == ENQUEUE:
        _enqueue(core, s, which, now)
    elif event in (DONE, LOADED):
        slot = core.instance[s, which]
        if event == DONE:
            _recycle(core, slot.first)
            server.running -= 1
            server.active = server.active - slot.work if server.running else 0.0
            _change_load(server, -slot.load, now)
        slot.state = FREE
        slot.idle_since = now
        if not slot.pinned:
            _wake(core, s, now + state.idle)
    elif event == UNLOADED:
        slot = core.instance[s, which]
        slot.state = EMPTY
        server.used -= core.vram[slot.segment, slot.width]
        if server.reserved:  # first: the memory was freed for this key
            k, w = (server.reserved - 1) // state.widths, (server.reserved - 1) % state.widths
            if server.used + core.vram[k, w] <= server.vram:
                server.reserved = 0
                _load(core, s, k, w, now)
    elif event == TICK:
        _unload_idle(core, s, now)
    blocked = 0
    while server.waiting & ~blocked and server.running < server.parallel:
        key = _oldest(core, s, server.waiting & ~blocked)
        k, w = key // state.widths, key % state.widths
        i = _free_host(core, s, k, w)
        if i >= 0:
            _run(core, s, key, i, now)
            continue
        _maybe_load(core, s, k, w, now)
        blocked |= 1 << key
        if state.strict or now - core.block[core.queue[s, key].head].queued > state.starve:
            break


@helper(NONE, CORE, INT, INT, INT, counted=False, inline=True)
def _enqueue(core, s, b, now):  # type: ignore[no-untyped-def]
    state = core.state[0]
    server = core.server[s]
    block = core.block[b]
    block.next = -1
    block.queued = now
    block.order = state.order
    state.order += 1
    key = block.segment * state.widths + block.width
    queue = core.queue[s, key]
    if queue.head < 0:
        queue.head = b
        server.waiting |= 1 << key
    else:
        core.block[queue.tail].next = b
    queue.tail = b
    queue.work += block.work
    server.queued += block.work
    server.queued_mmac += block.mmac


@helper(INT, CORE, INT, INT, counted=False, inline=True)
def _oldest(core, s, keys):  # type: ignore[no-untyped-def]
    """Key, of a bit set, with the oldest head."""
    best, first = -1, NEVER
    key = 0
    while keys:
        if keys & 1:
            order = core.block[core.queue[s, key].head].order
            if order < first:
                best, first = key, order
        keys >>= 1
        key += 1
    return best


@helper(INT, CORE, INT, INT, INT, counted=False, inline=True)
def _free_host(core, s, k, w):  # type: ignore[no-untyped-def]
    """Narrowest free instance that can run (k, w); at ties the oldest."""
    best, narrowest, oldest = -1, NEVER, NEVER
    for i in range(SLOTS):
        slot = core.instance[s, i]
        fits = slot.state == FREE and slot.segment == k and w <= slot.width <= narrowest
        if fits and (slot.width < narrowest or slot.id < oldest):
            best, narrowest, oldest = i, slot.width, slot.id
    return best


@helper(NONE, CORE, INT, INT, INT, INT, counted=False, inline=True)
def _run(core, s, key, i, now):  # type: ignore[no-untyped-def]
    """Run a batch of the first blocks of a queue, up to `max_batch` images."""
    state = core.state[0]
    server = core.server[s]
    slot = core.instance[s, i]
    queue = core.queue[s, key]
    b = queue.head
    slot.first = b
    images, widest, last = 0, 0, b
    while b >= 0 and images + core.block[b].images <= state.max_batch:
        block = core.block[b]
        images += block.images
        widest = max(widest, block.widest)
        queue.work -= block.work
        server.queued -= block.work
        server.queued_mmac -= block.mmac
        last, b = b, block.next
    core.block[last].next = -1
    queue.head = b
    if b < 0:
        server.waiting &= ~(1 << key)
        queue.work = 0.0  # sums of floats drift
        if server.waiting == 0:
            server.queued = 0.0
            server.queued_mmac = 0.0
    k, w = key // state.widths, key % state.widths
    slot.state = BUSY
    slot.images = images
    slot.work = images * core.cost[s, k, widest, w]
    slot.load = round(load_of(server, images * core.mmac[k, widest, w]) * UNIT)
    server.running += 1
    server.active += slot.work
    _change_load(server, slot.load, now)
    slowed = slot.work * slowdown(server, server.load / UNIT)
    slot.until = now + math.ceil(server.launch + slowed)
    _command(core, RUN, s, i, slot.until)


@helper(NONE, CORE, INT, counted=False, inline=True)
def _recycle(core, b):  # type: ignore[no-untyped-def]
    """Free a chain of blocks."""
    state = core.state[0]
    while b >= 0:
        following = core.block[b].next
        core.block[b].next = state.free_block
        state.free_block = b
        b = following


@helper(NONE, CORE, INT, INT, counted=False, inline=True)
def _wake(core, s, at):  # type: ignore[no-untyped-def]
    if at < core.server[s].wake:
        core.server[s].wake = at
        _command(core, WAKE, s, 0, at)


@helper(NONE, CORE, INT, INT, counted=False, inline=True)
def _unload_idle(core, s, now):  # type: ignore[no-untyped-def]
    core.server[s].wake = following = NEVER
    for i in range(SLOTS):
        slot = core.instance[s, i]
        if slot.state == FREE and not slot.pinned:
            if slot.idle_since + core.state[0].idle <= now:
                _unload(core, s, i)
            else:
                following = min(following, slot.idle_since + core.state[0].idle)
    _wake(core, s, following)


@helper(NONE, CORE, INT, INT, counted=False, inline=True)
def _unload(core, s, i):  # type: ignore[no-untyped-def]
    slot = core.instance[s, i]
    slot.state = UNLOADING
    _command(core, UNLOAD, s, i, 0)


@helper(NONE, CORE, INT, INT, INT, INT, counted=False, inline=True)
def _maybe_load(core, s, k, w, now):  # type: ignore[no-untyped-def]
    """Load an instance for (k, w) if memory is free; evict only if no instance serves it."""
    state = core.state[0]
    server = core.server[s]
    if server.reserved:  # a load would take memory freed for another key
        return
    hosts, has_slot = 0, False
    for i in range(SLOTS):
        slot = core.instance[s, i]
        if slot.state == EMPTY:
            has_slot = True
        elif slot.segment == k and slot.width >= w and slot.state != UNLOADING:
            if slot.state == LOADING:
                return
            hosts += 1
    full = server.saturation > 0.0 and server.load > state.util_block
    if hosts >= state.cap or (server.running and full):
        return
    if has_slot and server.used + core.vram[k, w] <= server.vram:
        _load(core, s, k, w, now)
    elif hosts == 0:
        _evict(core, s, k, w, has_slot)


@helper(NONE, CORE, INT, INT, INT, INT, counted=False, inline=True)
def _load(core, s, k, w, now):  # type: ignore[no-untyped-def]
    """Load an instance into the first empty slot."""
    server = core.server[s]
    i = 0
    while core.instance[s, i].state != EMPTY:
        i += 1
    slot = core.instance[s, i]
    slot.state, slot.segment, slot.width = LOADING, k, w
    slot.id, slot.pinned = server.instances, 0
    server.instances += 1
    server.used += core.vram[k, w]
    slot.until = now + server.load_time
    _command(core, LOAD, s, i, slot.until)


@helper(NONE, CORE, INT, INT, INT, types.boolean, counted=False, inline=True)
def _evict(core, s, k, w, has_slot):  # type: ignore[no-untyped-def]
    """Unload the longest idle instances until (k, w) fits; none if that does not suffice."""
    server = core.server[s]
    need = core.vram[k, w]
    free = most = server.vram - server.used
    can_slot = has_slot
    for i in range(SLOTS):
        slot = core.instance[s, i]
        if slot.state == FREE and not slot.pinned:
            most += core.vram[slot.segment, slot.width]
            can_slot = True
    if most < need or not can_slot:
        return
    server.reserved = k * core.state[0].widths + w + 1
    while free < need or not has_slot:
        longest, since = -1, NEVER
        for i in range(SLOTS):
            slot = core.instance[s, i]
            if slot.state == FREE and not slot.pinned and slot.idle_since < since:
                longest, since = i, slot.idle_since
        slot = core.instance[s, longest]
        free += core.vram[slot.segment, slot.width]
        has_slot = True
        _unload(core, s, longest)


@helper(NONE, CORE, INT, INT, INT, INT, counted=False, inline=True)
def _command(core, kind, s, i, until):  # type: ignore[no-untyped-def]
    state = core.state[0]
    row = core.command[state.commands]
    row.kind, row.server, row.instance, row.until = kind, s, i, until
    state.commands += 1


_SERVER = from_dtype(SERVER)


@helper(REAL, _SERVER, REAL, counted=False, inline=True)
def load_of(server, mmac):  # type: ignore[no-untyped-def]
    """u: load of a batch; 1 without `sat_mmac`."""
    if server.saturation <= 0.0:
        return 1.0
    x = mmac / server.saturation
    return x / (1.0 + x) + 0.02


@helper(REAL, _SERVER, REAL, counted=False, inline=True)
def slowdown(server, u):  # type: ignore[no-untyped-def]
    """phi(U): factor of the duration of a batch that starts at load U."""
    if server.saturation <= 0.0:
        return 1.0
    return 1.0 + server.below * min(u, server.knee) + server.above * max(0.0, u - server.knee)


@helper(NONE, _SERVER, INT, INT, counted=False, inline=True)
def _change_load(server, by, now):  # type: ignore[no-untyped-def]
    """Integrate the energy up to now and change the load."""
    settle(server, now)
    server.load += by
    u = server.load / UNIT
    if server.saturation <= 0.0:
        u = min(u, 1.0)
    watts = server.idle_w + (server.peak_w - server.idle_w) * min(u, 1.0)
    if u > server.knee:
        watts *= 1.0 + 0.5 * min(1.0, (u - server.knee) / 0.16)
    server.watts = watts


@helper(NONE, _SERVER, INT, counted=False, inline=True)
def settle(server, now):  # type: ignore[no-untyped-def]
    """Integrate the energy up to now."""
    server.energy += server.watts * (now - server.since) * 1e-9
    server.since = now
