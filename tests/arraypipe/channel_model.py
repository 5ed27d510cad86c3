"""Random rolling plans, and a model of devices and rendezvous channels that runs them.

A transfer happens when its sender has issued it and its receiver has posted it, both in their own
order. Of all that may happen next, what happens is drawn at random; some actors are very slow.
"""

from __future__ import annotations

import copy
import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from optsched.arraypipe import compile
from optsched.arraypipe.distributed.protocol import (
    SIZE,
    DevicePort,
    Header,
    Slot,
    Swap,
    check,
    first_cycle,
    is_heard,
    shorten,
    slot_of,
    unpack,
)
from optsched.arraypipe.plan.plan import routes
from optsched.arraypipe.plan.segments import Segment, device_stream
from optsched.model.schedule import Resource, Rows, Schedule

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from optsched.arraypipe.plan.types import Instance

PERIOD = 10**6
SLOWNESS = (1.0, 1.0, 1.0, 10.0, 1000.0)
Key = tuple[int, int, str]
"""A channel of the run: source, target, kind."""


def packed(header: Header) -> bytes:
    """The header as it goes to another device."""
    data = bytearray(SIZE)
    header.pack_into(data)
    return bytes(data)


class Shape(NamedTuple):
    """What stays the same when the plan of a run changes."""

    n_stages: int
    n_devices: int
    microbatches: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]  # device of every stage, per job
    recomputed: tuple[bool, ...]
    updated: tuple[bool, ...]
    together: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]


class Hang(AssertionError):
    """Nothing can happen any more, and not everything has happened."""


def random_shape(draw: random.Random, *, everywhere: bool = False) -> Shape:
    """2 to 8 devices and a few jobs; with `everywhere` all jobs have a stage on every device."""
    n_devices = draw.choice([2, 2, 3, 3, 4, 4, 5, 6, 7, 8])
    n_stages = n_devices + draw.choice([0, 0, 1, 2])
    n_jobs = draw.randint(1, max(2, 7 - n_devices))
    places = []
    for _ in range(n_jobs):
        place = [draw.randrange(n_devices) for _ in range(n_stages)]
        if everywhere or draw.random() < 0.5:
            place[:n_devices] = range(n_devices)
        if draw.random() < 0.5:
            draw.shuffle(place)
        places.append(tuple(place))
    updated = tuple(draw.random() < 0.4 for _ in range(n_jobs))
    pairs = [sorted(draw.sample(range(n_stages), 2)) for _ in range(draw.choice([0, 0, 1, 2]))]
    return Shape(
        n_stages=n_stages,
        n_devices=n_devices,
        microbatches=tuple(draw.choice([1, 1, 1, 2]) for _ in range(n_jobs)),
        places=tuple(places),
        recomputed=tuple(draw.random() < 0.3 for _ in range(n_jobs)),
        updated=updated,
        together=tuple(j for j in range(n_jobs) if updated[j] and draw.random() < 0.6),
        ties=tuple(sorted({(a, b) for a, b in pairs})),
    )


def random_rolling(shape: Shape, draw: random.Random) -> Schedule:
    """A feasible periodic schedule with offsets and copies, otherwise arbitrary.

    All blocks of one cycle of a job get random times within one period, in an order that its
    dependencies allow; the job starts anywhere in the first cycles. So every block comes after all
    that it waits for, and the last update before the next cycle's first forward.
    """
    labels: list[tuple[str, int, int, int, int]] = []
    times: list[int] = []
    for job in range(len(shape.microbatches)):
        begin = draw.randrange(3 * PERIOD) if draw.random() < 0.5 else draw.randrange(PERIOD)
        row = list(_random_chain(shape, job, draw.choice([1, 1, 1, 2]), draw))
        labels += row
        times += [begin + t for t in sorted(draw.sample(range(PERIOD), len(row)))]
    kind, job_of, stage, microbatch, iteration = zip(*labels, strict=True)
    place = [shape.places[j][s] for j, s in zip(job_of, stage, strict=True)]
    sequences: list[list[int]] = [[] for _ in range(shape.n_devices)]
    for i in sorted(range(len(labels)), key=lambda i: times[i] % PERIOD):
        sequences[place[i]].append(i)
    return Schedule(
        resources=tuple(Resource(f"device{d}") for d in range(shape.n_devices)),
        duration=[1] * len(labels),  # type: ignore[arg-type]
        op_resources=Rows.of([[d] for d in place]),
        kind=kind, job=job_of, stage=stage, microbatch=microbatch, iteration=iteration,  # type: ignore[arg-type]
        offset=[t // PERIOD for t in times],  # type: ignore[arg-type]
        start=[t % PERIOD for t in times],  # type: ignore[arg-type]
        period=PERIOD,
        sequences=Rows.of(sequences),
    )  # fmt: skip


def _random_chain(
    shape: Shape, job: int, copies: int, draw: random.Random
) -> Iterator[tuple[str, int, int, int, int]]:
    """Labels of all blocks of one job in a random order that is allowed."""
    micro, last = shape.microbatches[job], shape.n_stages - 1
    waits: dict[tuple[str, int, int, int, int], list[tuple[str, int, int, int, int]]] = {}
    for a in range(copies):
        for s in range(shape.n_stages):
            ends = ("U", job, s, 0, a) if shape.updated[job] else ("B", job, s, micro - 1, a)
            for m in range(micro):
                f, b, r = (("F", job, s, m, a), ("B", job, s, m, a), ("R", job, s, m, a))
                before = [("F", job, s - 1, m, a)] * (s > 0) + [("F", job, s, m - 1, a)] * (m > 0)
                if m == 0 and a > 0:
                    before.append((*ends[:4], a - 1))
                waits[f] = before
                waits[b] = [f] + [("B", job, s + 1, m, a)] * (s < last)
                waits[b] += [("B", job, s, m - 1, a)] * (m > 0)
                if shape.recomputed[job]:
                    waits[r] = [f]
                    waits[b].append(r)
            if shape.updated[job]:
                waits[ends] = [("B", job, s, micro - 1, a)]
                if job in shape.together:
                    waits[ends].append(("B", job, 0, micro - 1, a))
    left = {label: len(before) for label, before in waits.items()}
    after = defaultdict(list)
    for label, before in waits.items():
        for other in before:
            after[other].append(label)
    ready = [label for label, n in left.items() if not n]
    while ready:
        label = ready.pop(draw.randrange(len(ready)))
        yield label
        for other in after[label]:
            left[other] -= 1
            if not left[other]:
                ready.append(other)


def segment_of(shape: Shape, draw: random.Random, first: Sequence[int], most: int) -> Segment:
    """A random plan of this shape, with up to `most` cycles of every job."""
    plan = compile(random_rolling(shape, draw))
    return Segment(
        plan=plan,
        routes=routes(plan, shape.ties, shape.together),
        seats=tuple(range(plan.n_jobs)),
        first=list(first),
        count=[draw.randint(0, most * r) for r in plan.copies],
    )


@dataclass
class Device:
    """One process of the model: where it is, what has arrived, what it knows of a swap."""

    index: int
    segments: list[Segment]
    windows: Callable[[], int]
    number: int = 0
    swap: Swap | None = None
    instance: Instance | None = None
    cycle: int = 0
    arrived: dict[Slot, Header] = field(default_factory=dict)
    needs: list[tuple[Key, Slot]] = field(default_factory=list)
    missing: set[Slot] = field(default_factory=set)
    ran: list[tuple[int, Instance]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open()

    @property
    def segment(self) -> Segment:
        """The one it is in."""
        return self.segments[self.number]

    def open(self) -> None:
        """Begin the segment `number`."""
        drawn = [self.windows() for _ in self.segment.routes.channels]
        self.widest = max(drawn, default=0)
        self.port = DevicePort(self.segment, self.index, drawn)
        self.stream = device_stream(self.segment, self.index)

    def hear(self, swap: Swap) -> None:
        """End the segment early; the next one takes what it leaves over."""
        self.swap = swap
        left = shorten(self.segment, swap.first_cycle)
        for receiver in self.port.receivers.values():
            for transfer in receiver.posted:
                consumer = self.segment.routes.messages[transfer.message].consumer
                assert self.segment.runs(consumer, transfer.cycle) >= 0, "posted too early"
        following = self.segments[swap.number]
        for seat, more in enumerate(left):
            following.first[seat] -= more
            following.count[seat] += more


Actor = Device | Key


class Model:
    """Devices and channels; `run` lets happen what may happen, in random order, to the end."""

    def __init__(
        self,
        segments: Sequence[Segment],
        window: int | Sequence[int],
        draw: random.Random,
        announce: float = 0.0,
    ) -> None:
        n = len(segments[0].plan.devices)
        # counts are private to a device: it hears of a swap at a time of its own
        choices = [window] if isinstance(window, int) else window
        windows = partial(draw.choice, choices)  # of every channel, as those of small messages
        self.devices = [Device(d, [_own(s) for s in segments], windows) for d in range(n)]
        self.draw, self.announce = draw, announce
        self.sent: dict[Key, deque[tuple[Slot, bytes]]] = defaultdict(deque)
        self.posted: dict[Key, deque[Slot]] = defaultdict(deque)
        self.order: dict[Key, list[Slot]] = defaultdict(list)  # as consumed
        self.wire: dict[Key, list[Slot]] = defaultdict(list)  # as transferred
        self.held: dict[Key, dict[Slot, int]] = defaultdict(dict)  # buffers by consuming instance
        self.unfinished: dict[tuple[int, str, int, int], set[Slot]] = defaultdict(set)
        self.maker: dict[Slot, tuple[int, str, int, int]] = {}
        self.announced_in = -1

    def run(self) -> None:
        """Until every device has done all of its segments; `Hang` if that never comes."""
        random, slowness = self.draw.random, defaultdict(lambda: self.draw.choice(SLOWNESS))
        agenda: list[tuple[float, int, Actor]] = []
        entries = count()

        def wake(actors: Sequence[Actor]) -> None:
            for actor in actors:
                delay = random() * slowness[actor if isinstance(actor, tuple) else actor.index]
                heapq.heappush(agenda, (now + delay, next(entries), actor))

        now = 0.0
        wake(self.devices)
        while agenda:
            now, _, actor = heapq.heappop(agenda)
            wake(self._transfer(actor) if isinstance(actor, tuple) else self._advance(actor))
        for device in self.devices:
            if device.instance is not None:
                block = device.segment.plan.blocks[device.instance.operation]
                raise Hang(f"device {device.index} waits in cycle {device.instance.cycle}: {block}")
            assert device.number == len(device.segments) - 1
        assert not any(self.sent.values())
        assert not any(self.posted.values())
        for key, row in self.order.items():
            assert self.wire[key] == row

    def _advance(self, device: Device) -> list[Actor]:
        """Run the block the device is at, if it has all it needs, and go on to the next."""
        woken: list[Actor] = []
        if device.instance is not None:
            if device.missing:
                return []  # comes back when the last of them arrives
            self._execute(device, device.instance)
            woken += self._post(device)  # as `Post.ended`
            woken += self._issue(device)
        woken += self._next(device)
        if device.instance is not None and not device.missing:
            woken.append(device)
        return woken

    def _next(self, device: Device) -> list[Actor]:
        while (instance := next(device.stream, None)) is None:
            device.port.close()
            device.instance = None
            if device.number + 1 == len(device.segments):
                return []
            device.number += 1
            device.swap = None
            device.open()
        device.instance, device.cycle = instance, instance.cycle
        self._maybe_announce(device)
        woken = self._post(device)
        channels = device.segment.routes.channels
        device.needs = [
            (channels[channel][:3], slot_of(device.segment, device.number, transfer))
            for channel, transfer in device.port.needs(instance)
        ]
        device.missing = {slot for _, slot in device.needs if slot not in device.arrived}
        return woken

    def _post(self, device: Device) -> list[Actor]:
        """Begin the receives that the port wants."""
        woken: list[Actor] = []
        for channel, transfer in device.port.post(device.cycle):
            key = device.segment.routes.channels[channel][:3]
            slot = slot_of(device.segment, device.number, transfer)
            consumer = device.segment.routes.messages[transfer.message].consumer
            self.posted[key].append(slot)
            self.held[key][slot] = consumer * 10**6 + transfer.cycle
            assert len(set(self.held[key].values())) <= device.widest, (
                "more buffers than the window"
            )
            woken.append(key)
        return woken

    def _maybe_announce(self, device: Device) -> None:
        if device.index or device.number or len(device.segments) == 1 or self.announced_in >= 0:
            return
        if self.draw.random() < self.announce and is_heard(device.segment, device.cycle):
            self.announced_in = device.cycle
            device.hear(Swap(1, first_cycle(device.segment, device.cycle)))

    def _execute(self, device: Device, instance: Instance) -> None:
        segment = device.segment
        block = segment.plan.blocks[instance.operation]
        for key, slot in device.needs:
            header = device.arrived.pop(slot)
            self.order[key].append(slot)
            del self.held[key][slot]
            if header.swap > device.number and device.swap is None:
                device.hear(Swap(header.swap, header.first_cycle))
        # what F sent is over before B, what B sent before the next F of the same micro-batch
        # (factors: before the next B), so that waiting for them never blocks
        other = {"F": "B", "B": "F"}.get(block.kind)
        if other is not None:
            rest = self.unfinished[segment.seats[block.job], other, block.stage, block.microbatch]
            assert not [slot for slot in rest if slot.kind != "factor"]
            own = self.unfinished[segment.seats[block.job], block.kind, *block[3:5]]
            assert not own
        device.ran.append((device.number, instance))
        device.port.ended(instance)

    def _issue(self, device: Device) -> list[Actor]:
        """Issue what the port lets go; headers tell what is known at this moment."""
        woken: list[Actor] = []
        segment = device.segment
        swap = device.swap or Swap(-1, -1)
        for channel, transfer in device.port.send():
            key = segment.routes.channels[channel][:3]
            slot = slot_of(segment, device.number, transfer)
            made = segment.plan.blocks[segment.routes.messages[transfer.message].producer]
            maker = (slot.job, made.kind, made.stage, made.microbatch)
            self.maker[slot] = maker
            self.unfinished[maker].add(slot)
            header = Header(slot, payload=1, swap=swap.number, first_cycle=swap.first_cycle)
            self.sent[key].append((slot, packed(header)))
            woken.append(key)
        return woken

    def _transfer(self, key: Key) -> list[Actor]:
        if not self.sent[key] or not self.posted[key]:
            return []
        slot, data = self.sent[key].popleft()
        expected = self.posted[key].popleft()
        header = unpack(data)
        check(expected, header, len(data) + 1, f"device {key[0]}")
        self.wire[key].append(expected)
        self.unfinished[self.maker.pop(slot)].discard(slot)
        receiver = self.devices[key[1]]
        receiver.arrived[expected] = header
        if expected in receiver.missing:
            receiver.missing.remove(expected)
            if not receiver.missing:
                return [key, receiver]
        return [key]


def _own(segment: Segment) -> Segment:
    own = copy.copy(segment)
    own.first, own.count = list(segment.first), list(segment.count)
    return own
