"""The message protocol between devices as a pure state machine, changes of plan included.

Every message between processes begins with a header of 64 bytes: what it is, news riding on it.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.arraypipe.plan.segments import channel_stream
from optsched.arraypipe.plan.types import FAILED, MESSAGES, STOP, TOMBSTONE, Transfer
from optsched.errors import InputError, InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Instance


AHEAD: Final = 1
"""Cycles that a receive may be posted before the one its device is in (swaps count on it)."""


class Sender:
    """The sending end of a channel: an outbox that is emptied in the receiver's order."""

    def __init__(self, segment: Segment, channel: int) -> None:
        self._messages = _Stream(segment, channel)
        self._ready: set[tuple[int, int]] = set()

    def finished(self, message: int, iteration: int) -> None:
        """A message of this iteration is made; it may be sent."""
        self._ready.add((message, iteration))

    def take(self) -> list[Transfer]:
        """The messages to send now: those next in the receiver's order, as far as they are made."""
        taken: list[Transfer] = []
        while self._ready and (transfer := self._messages.peek()) is not None:
            if (transfer.message, transfer.iteration) not in self._ready:
                break
            self._ready.remove((transfer.message, transfer.iteration))
            taken.append(self._messages.take())
        return taken

    @property
    def waiting(self) -> int:
        """Finished messages that have not been taken yet."""
        return len(self._ready)


class Receiver:
    """The receiving end of a channel: the messages of the next blocks are posted, in order.

    `window` blocks may have messages that are posted and not yet consumed. What one block takes
    from one channel counts once: it needs all of it before it can free anything. A wide window is
    filled up when half of it has been consumed: what is posted together wakes the sender once.
    """

    def __init__(self, segment: Segment, channel: int, window: int = 2) -> None:
        if window < 1:
            raise InputError(f"window: expected an integer >= 1, got {window!r}")
        self._consumer = [m.consumer for m in segment.routes.messages]
        self._messages = _Stream(segment, channel)
        self._window = window
        self._blocks = 0  # distinct consumers among the posted
        self.posted: deque[Transfer] = deque()

    def to_post(self, cycle: int) -> list[Transfer]:
        """The messages to post now that the device is in this cycle."""
        chosen: list[Transfer] = []
        if self._blocks > self._window // 2:
            return chosen
        while (transfer := self._messages.peek()) is not None:
            opens = not self.posted or not self._same_block(self.posted[-1], transfer)
            if transfer.cycle > cycle + AHEAD or (opens and self._blocks == self._window):
                break
            self._blocks += opens
            self.posted.append(self._messages.take())
            chosen.append(transfer)
        return chosen

    def consumed(self, transfer: Transfer) -> None:
        """The block that took this message is over, its buffer is free; in order of posting."""
        if not self.posted or self.posted[0] != transfer:
            due = self.posted[0] if self.posted else "nothing"
            raise InternalError(f"{transfer} was consumed while {due} was due")
        self.posted.popleft()
        self._blocks -= not self.posted or not self._same_block(self.posted[0], transfer)

    def _same_block(self, one: Transfer, other: Transfer) -> bool:
        return (
            one.cycle == other.cycle
            and self._consumer[one.message] == self._consumer[other.message]
        )


class DevicePort:
    """All channels of one device during one segment.

    A driver calls, for every instance of the device's stream: `post` and starts those receives;
    waits until everything in `needs` has arrived; runs the block; `ended`; `send` and starts those
    sends without waiting for them.
    The window is that of all receivers, or one for each channel.
    """

    def __init__(self, segment: Segment, device: int, window: int | Sequence[int] = 2) -> None:
        self.segment = segment
        channels = segment.routes.channels
        windows = [window] * len(channels) if isinstance(window, int) else window
        self.senders = {
            k: Sender(segment, k) for k, channel in enumerate(channels) if channel.source == device
        }
        self.receivers = {
            k: Receiver(segment, k, windows[k])
            for k, channel in enumerate(channels)
            if channel.target == device
        }
        channel_of = segment.routes.channel_of
        # per operation the pairs (channel, message) that cross the border of a device
        self._inputs, self._outputs = (
            [[(channel_of[k], k) for k in row if channel_of[k] >= 0] for row in rows]
            for rows in (segment.routes.inputs, segment.routes.outputs)
        )
        self._dirty: list[int] = []  # senders with something new in the outbox

    def post(self, cycle: int) -> list[tuple[int, Transfer]]:
        """Pairs (channel, message): receives to post, in this order."""
        return [
            (channel, transfer)
            for channel, receiver in self.receivers.items()
            for transfer in receiver.to_post(cycle)
        ]

    def needs(self, instance: Instance) -> list[tuple[int, Transfer]]:
        """Pairs (channel, message) that come from other devices and that this block takes."""
        return [
            (channel, Transfer(k, instance.cycle, instance.iteration))
            for channel, k in self._inputs[instance.operation]
        ]

    def ended(self, instance: Instance) -> None:
        """The block is over: its inputs are consumed, its outputs are in the outbox."""
        for channel, transfer in self.needs(instance):
            self.receivers[channel].consumed(transfer)
        for channel, message in self._outputs[instance.operation]:
            self.senders[channel].finished(message, instance.iteration)
            self._dirty.append(channel)

    def send(self) -> list[tuple[int, Transfer]]:
        """Pairs (channel, message): sends to start, in this order."""
        if not self._dirty:
            return []
        dirty, self._dirty = self._dirty, []
        return [(k, transfer) for k in dict.fromkeys(dirty) for transfer in self.senders[k].take()]

    def close(self) -> None:
        """Nothing may be posted or unsent when the device goes on to the next segment."""
        for k, receiver in self.receivers.items():
            if receiver.posted:
                raise InternalError(f"channel {k}: {receiver.posted[0]} is posted at the end")
        for k, sender in self.senders.items():
            if sender.waiting:
                raise InternalError(f"channel {k}: a message is unsent at the end")


class _Stream:
    """The messages of a channel with the next one in sight; a swap may take it away again."""

    def __init__(self, segment: Segment, channel: int) -> None:
        self._segment = segment
        self._rest: Iterator[Transfer] = channel_stream(segment, channel)
        self._next: Transfer | None = None

    def peek(self) -> Transfer | None:
        found = self._next
        if found is not None:
            consumer = self._segment.routes.messages[found.message].consumer
            if self._segment.runs(consumer, found.cycle) >= 0:
                return found
        self._next = next(self._rest, None)
        return self._next

    def take(self) -> Transfer:
        found = self._next
        assert found is not None
        self._next = None
        return found


class Swap(NamedTuple):
    """The segment with this number begins where iterations of cycle `first_cycle` would have."""

    number: int
    first_cycle: int


def first_cycle(segment: Segment, cycle: int) -> int:
    """First cycle that a swap announced in this cycle may replace.

    A message that is sent in the next cycle tells of it. Its iteration passes all stages within
    the cycles ``cycle + 1 .. cycle + 1 + largest offset``, so after them every device knows; and
    none has by then posted a receive for more than `AHEAD` cycles later.
    """
    return cycle + 1 + max(segment.plan.latest) + AHEAD + 1


def is_heard(segment: Segment, cycle: int) -> bool:
    """Whether an iteration begins in the next cycle that will tell all devices of a swap.

    True if some job with blocks on every device still has a whole iteration there.
    """
    plan = segment.plan
    devices = set(range(len(plan.devices)))
    for seat, (count, copies) in enumerate(zip(segment.count, plan.copies, strict=True)):
        if count > (cycle + 1) * copies and devices == {
            b.device for b in plan.blocks if b.job == seat and b.device >= 0
        }:
            return True
    return False


def shorten(segment: Segment, cycle: int) -> list[int]:
    """End the segment before the iterations of this cycle; iterations left over, per seat."""
    left = []
    for seat, copies in enumerate(segment.plan.copies):
        kept = min(segment.count[seat], cycle * copies)
        left.append(segment.count[seat] - kept)
        segment.count[seat] = kept
    return left


SIZE: Final = 64
MAGIC: Final = b"OSAP"
VERSION: Final = 2
LONG: Final = 8
_FLAGS: Final = STOP | FAILED | TOMBSTONE | LONG
# magic, version, kind, flags | job, micro-batch | iteration | origin, stage, segment | loss |
# payload | number and first cycle of an announced swap; little-endian, no padding
_LAYOUT: Final = struct.Struct("<4sBBHiiqHHidqqq")
assert _LAYOUT.size == SIZE


class ProtocolError(InternalError):
    """A message is not the one that the receiver's order says comes next."""


class Slot(NamedTuple):
    """Which message it is, as sender and receiver both know it; named after the block it is for."""

    segment: int
    kind: str
    job: int
    iteration: int
    origin: int  # stage that it comes from
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return (
            f"{self.kind} for job {self.job}, iteration {self.iteration}, micro-batch "
            f"{self.microbatch}, from stage {self.origin} to stage {self.stage} "
            f"(segment {self.segment})"
        )


class Header(NamedTuple):
    """What is known of a message before its payload is looked at."""

    slot: Slot
    flags: int = 0  # as in `plan.types`; `LONG`: it follows as a longer message than was posted
    loss: float = math.nan  # of the micro-batch's iteration
    payload: int = 0  # bytes after the header
    swap: int = -1  # number of the segment announced last; -1: none
    first_cycle: int = -1  # with which it begins

    def pack_into(self, buffer: bytearray | memoryview) -> None:
        """Write the header into the first `SIZE` bytes."""
        s = self.slot
        _LAYOUT.pack_into(
            buffer, 0, MAGIC, VERSION, MESSAGES.index(s.kind), self.flags, s.job, s.microbatch,
            s.iteration, s.origin, s.stage, s.segment, self.loss, self.payload, self.swap,
            self.first_cycle,
        )  # fmt: skip


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """The header in the first `SIZE` bytes; `ProtocolError` if there is none."""
    if len(data) < SIZE:
        raise ProtocolError(f"expected a header of {SIZE} bytes, received {len(data)} bytes")
    (magic, version, kind, flags, job, microbatch, iteration, origin, stage, segment, loss, payload,
     swap, first_cycle) = _LAYOUT.unpack_from(data)  # fmt: skip
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(
            f"expected a message that begins with {MAGIC!r}, version {VERSION}, received "
            f"{magic!r}, version {version}; do all ranks run the same release?"
        )
    if kind >= len(MESSAGES) or flags & ~_FLAGS or payload < 0:
        raise ProtocolError(
            f"received a damaged header: kind {kind}, flags {flags}, payload {payload} bytes"
        )
    slot = Slot(segment, MESSAGES[kind], job, iteration, origin, stage, microbatch)
    return Header(slot, flags, loss, payload, swap, first_cycle)


def slot_of(segment: Segment, number: int, transfer: Transfer) -> Slot:
    """What the header of this transfer must say; `number` is that of the segment."""
    message = segment.routes.messages[transfer.message]
    taker = segment.plan.blocks[message.consumer]
    origin = segment.plan.blocks[message.producer].stage
    return Slot(
        number, message.kind, segment.seats[taker.job], transfer.iteration, origin, taker.stage,
        taker.microbatch,
    )  # fmt: skip


def check(expected: Slot, header: Header, length: int, sender: str) -> None:
    """`ProtocolError` unless this is the expected message, and all of it, `length` bytes."""
    if header.slot != expected:
        raise ProtocolError(f"from {sender}: expected {expected}; received {header.slot}")
    short = header.payload > length - SIZE and not header.flags & LONG
    if short or bool(header.flags & TOMBSTONE) != (header.payload == 0):
        raise ProtocolError(
            f"from {sender}: {expected} should carry {header.payload} bytes of payload, flags "
            f"{header.flags}; received {length} bytes"
        )
