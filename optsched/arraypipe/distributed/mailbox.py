"""What crosses the border of a device: parcels in and out of messages, in the receiver's order."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from optsched.arraypipe.distributed import protocol
from optsched.arraypipe.distributed.protocol import SIZE, DevicePort, Header, Slot, Swap, slot_of
from optsched.arraypipe.distributed.transport import LANES
from optsched.arraypipe.distributed.wire import Inbox, Outbox, capacity, words
from optsched.arraypipe.plan.types import MESSAGES, TOMBSTONE, Transfer
from optsched.arraypipe.runtime.types import Parcel
from optsched.arraypipe.runtime.worker import rehearse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

    from optsched.arraypipe.distributed.transport import GlooLinks
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Channel, Instance
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.arraypipe.runtime.worker import Worker


_NORM: Final = torch.float64
_MANY, _LITTLE = 16, 1 << 18  # blocks, and bytes of their messages, that are posted together
_FACTOR: Final = capacity([torch.empty((), dtype=_NORM)])


class Capacity:
    """Bytes of the longest message of every slot, from a first forward of every job.

    A message that turns out longer (a later batch of another shape) goes in two parts; only sender
    and receiver must not differ about what is longer.
    """

    def __init__(self, window: int = 2) -> None:
        self.window = window  # blocks whose messages are posted ahead, per channel
        self._boundary: dict[tuple[int, int], int] = {}  # (job, stage) -> bytes of its output
        self._weights: dict[tuple[int, int, int], int] = {}  # (job, owner, user)
        self._known: set[int] = set()  # jobs of which all are known

    def of(self, slot: Slot) -> int:
        """Bytes to be ready for, the header included."""
        low, high = sorted((slot.origin, slot.stage))
        if slot.kind in ("tied", "weight"):
            return self._weights[slot.job, low, high]
        if slot.kind == "factor":
            return _FACTOR
        return self._boundary[slot.job, low]

    def held(self, segment: Segment, device: int, seats: Collection[int]) -> tuple[int, int]:
        """Most bytes of a device's receive windows, and of its outboxes, for some seats.

        A window has the messages of so many blocks, however large they are; an outbox has one
        message of every block that sends any.
        """
        windows, outboxes = 0, 0
        for channel in segment.routes.channels:
            if device not in (channel.source, channel.target):
                continue
            blocks = self._blocks(segment, channel, seats)
            if channel.source == device:
                outboxes += sum(blocks)
            else:
                windows += self.window * max(blocks, default=0)
        return windows, outboxes

    def windows(self, segment: Segment, device: int) -> list[int]:
        """Blocks whose messages to post at a time, by channel: the window, more of small messages.

        For devices with room to spare: every receive that is posted wakes the process that sends,
        which costs about as much as a small message.
        """
        seats, found = range(len(segment.seats)), []
        for channel in segment.routes.channels:
            mine = channel.target == device
            most = max(self._blocks(segment, channel, seats), default=0) if mine else 0
            found.append(max(self.window, min(_MANY, _LITTLE // most)) if most else self.window)
        return found

    def _blocks(self, segment: Segment, channel: Channel, seats: Collection[int]) -> list[int]:
        """Bytes that every block takes from a channel, for some seats.

        None for a job that sends nothing: it is complete, or its first forward has failed.
        """
        blocks: dict[int, int] = defaultdict(int)
        for k in channel.messages:
            consumer = segment.routes.messages[k].consumer
            seat = segment.plan.blocks[consumer].job
            if seat in seats and segment.seats[seat] in self._known:
                blocks[consumer] += self.of(slot_of(segment, 0, Transfer(k, 0, 0)))
        return [*blocks.values()]

    def measure(self, run: JobRun, worker: Worker) -> None:
        """Look at the first forward of a job; the first micro-batch is the largest."""
        norms = torch.empty(len(run.unsplit_order) if run.job.needs_norm else 0, dtype=_NORM)
        for stage, output in enumerate(rehearse(run, worker)):
            self._boundary[run.index, stage] = capacity([*output, norms])
        if run.feed is not None:
            self._known.add(run.index)
        for (owner, user), names in run.lent.items():
            weights = [run.stages[owner].weight(name) for name in names]
            self._weights[run.index, owner, user] = capacity(weights)

    def rows(self, jobs: Collection[int]) -> list[list[list[int]]]:
        """The sizes of some jobs: rows (job, stage, bytes), and rows (job, owner, user, bytes)."""
        return [
            [[*key, size] for key, size in sorted(sizes.items()) if key[0] in jobs]
            for sizes in (self._boundary, self._weights)
        ]

    def take(self, rows: Sequence[Sequence[Sequence[int]]]) -> None:
        """Use the sizes that another rank has measured."""
        for job, stage, size in rows[0]:
            self._boundary[job, stage] = size
        for job, owner, user, size in rows[1]:
            self._weights[job, owner, user] = size


_QUIET: Final = Swap(-1, -1)

_Key = tuple[str, int, int, int, int]
"""Kind, seat, micro-batch, from which stage, to which: what has an outbox of its own."""


class _Line(NamedTuple):
    """What is the same of a message in every cycle of a segment."""

    peer: int  # the device at the other end
    lane: int
    key: _Key


class Post:
    """The post office of one device; lives as long as the run.

    `capacity` are the bytes to be ready for, of a message (both ends must know the same); `hear` is
    called with every announced swap that a message tells of.
    """

    def __init__(
        self,
        links: GlooLinks,
        capacity: Callable[[Slot], int],
        hear: Callable[[Swap], None],
    ) -> None:
        self.links, self.capacity, self.hear = links, capacity, hear
        self.swap = _QUIET
        self.inbox = Inbox()
        self.coming: dict[tuple[int, int], tuple[Slot, Any]] = {}  # what is posted
        # by seat, so that jobs that come later take no more
        self.outboxes: dict[_Key, Outbox] = {}
        self.leaving: dict[_Key, list[tuple[Any, int, Tensor]]] = {}
        self.waiting_for: Slot | None = None
        self.waited_ns = 0  # at receives, since somebody has set it to 0

    def open(self, segment: Segment, number: int, window: int | Sequence[int]) -> None:
        """Begin a segment; `window` as for `DevicePort`."""
        self.segment, self.number, self.swap = segment, number, _QUIET
        self.port = DevicePort(segment, self.links.rank, window)
        self.coming = {}
        self.finished: dict[tuple[int, int], Header] = {}  # waits for its turn, in its outbox
        self.lines: dict[int, _Line] = {}
        blocks, here = segment.plan.blocks, self.links.rank
        for source, target, kind, messages in segment.routes.channels:
            for k in messages if here in (source, target) else ():
                _, producer, consumer = segment.routes.messages[k]
                taker, origin = blocks[consumer], blocks[producer].stage
                key = kind, taker.job, taker.microbatch, origin, taker.stage
                peer = source if target == here else target
                self.lines[k] = _Line(peer, MESSAGES.index(kind), key)

    def post(self, cycle: int) -> None:
        """Be ready for the messages of the blocks to come."""
        for _, transfer in self.port.post(cycle):
            slot = slot_of(self.segment, self.number, transfer)
            peer, lane, _ = self.lines[transfer.message]
            incoming = self.links.post(peer, lane, self.capacity(slot))
            self.coming[transfer.message, transfer.iteration] = slot, incoming

    def receive(self, message: int, iteration: int) -> Parcel:
        """The parcel of a message that was posted; waits for it."""
        slot, incoming = self.coming.pop((message, iteration))
        peer, lane, _ = self.lines[message]
        self.waiting_for = slot
        asked_ns = time.perf_counter_ns()
        head, buffer = self.links.receive(incoming, peer)
        self.waited_ns += time.perf_counter_ns() - asked_ns
        raw = words(head)
        found = protocol.unpack(raw)
        protocol.check(slot, found, buffer.numel(), self.segment.plan.devices[peer])
        if found.swap > self.number:
            self.hear(Swap(found.swap, found.first_cycle))
        if found.flags & protocol.LONG:
            incoming = self.links.post(peer, lane + LANES, SIZE + found.payload)
            head, buffer = self.links.receive(incoming, peer)
            raw = words(head)
        self.waiting_for = None
        flags = found.flags & ~protocol.LONG
        if flags & TOMBSTONE:
            return Parcel((), flags, found.loss)
        tensors, absent = self.inbox.unpack(raw, buffer)
        return Parcel(tensors, flags, found.loss, absent)

    def ended(self, now: Instance, sent: dict[int, Parcel]) -> None:
        """A block is over: send what the receivers' orders let go."""
        for message, parcel in sent.items():
            self.finished[message, now.iteration] = self._packed(message, now.iteration, parcel)
        self.port.ended(now)
        for _, transfer in self.port.send():
            self._send(transfer.message, self.finished.pop((transfer.message, transfer.iteration)))
        self.post(now.cycle)  # close behind: the same process need not be woken twice

    def flush(self) -> None:
        """Wait until everything has left."""
        for key in list(self.leaving):
            self._retire(key)

    def abandon(self) -> None:
        """After the run, however it has ended: forget all that is on its way, and whom to tell.

        Receives that are still posted would hold the connections open, so that peers would wait.
        """
        self.coming, self.leaving, self.hear = {}, {}, lambda swap: None

    def _packed(self, message: int, iteration: int, parcel: Parcel) -> Header:
        """Copy a parcel into its outbox: nothing else is kept of it until its turn comes."""
        key = self.lines[message].key
        # what this block sent in its last iteration has been consumed, by the plan: no wait; if
        # that was another job of another segment, this comes after all of it in that order too
        self._retire(key)
        payload = 0
        if not parcel.flags & TOMBSTONE:
            outbox = self.outboxes.get(key)
            if outbox is None:
                outbox = self.outboxes[key] = Outbox(self.links.device, self.links.apart)
            payload = outbox.pack(parcel.tensors, parcel.absent)
        slot = slot_of(self.segment, self.number, Transfer(message, 0, iteration))
        return Header(slot, parcel.flags, parcel.loss, payload)

    def _send(self, message: int, made: Header) -> None:
        peer, lane, key = self.lines[message]
        flags, links = made.flags, self.links
        row: list[tuple[int, Tensor, Tensor | None]] = []
        outbox = None if flags & TOMBSTONE else self.outboxes[key]
        if outbox and not links.apart and outbox.buffer.numel() > self.capacity(made.slot):
            row.append((lane + LANES, outbox.head, outbox.buffer))
            flags |= protocol.LONG
            outbox = None
        if outbox:
            head, body, raw = outbox.head, outbox.buffer, outbox.words
        else:  # a header alone
            head, body = torch.empty(SIZE, dtype=torch.uint8), None
            raw = words(head)
        Header(made.slot, flags, made.loss, made.payload, *self.swap).pack_into(raw)
        row.append((lane, head, body))
        self.leaving[key] = [
            (links.send(peer, way, first, rest), peer, first) for way, first, rest in row
        ]

    def _retire(self, key: _Key) -> None:
        for work, peer, _ in self.leaving.pop(key, ()):
            self.links.wait(work, peer)
