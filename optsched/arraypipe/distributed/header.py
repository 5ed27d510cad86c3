"""The 64 bytes in front of every message between processes: what it is, news riding on it."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.arraypipe.plan.types import FAILED, MESSAGES, STOP, TOMBSTONE
from optsched.errors import InternalError

if TYPE_CHECKING:
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Transfer


SIZE: Final = 64
MAGIC: Final = b"OSAP"
VERSION: Final = 1
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
