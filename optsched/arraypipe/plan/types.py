"""What a plan is made of and what a run leaves: blocks, messages, channels, records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

KINDS: Final = ("F", "B", "R", "W", "U")
"""Kinds of blocks. With W blocks a B block has the gradients of the inputs alone (I)."""
MARK: Final = "end"  # an operation without a resource: the end of a job, no work


class Block(NamedTuple):
    """One operation of the schedule as the executor sees it; `copy` counts within one cycle."""

    operation: int
    kind: str
    job: int
    stage: int
    microbatch: int
    copy: int
    device: int
    offset: int

    def __str__(self) -> str:
        copy = f", copy {self.copy}" if self.copy else ""
        part = "" if self.kind in ("U", MARK) else f", micro-batch {self.microbatch}"
        where = "" if self.kind == MARK else f", stage {self.stage}"
        return f"{self.kind} of job {self.job}{where}{part}{copy} (operation {self.operation})"


MESSAGES: Final = ("activation", "gradient", "tied", "weight", "factor")
COPIES: Final = {"in": "copy in", "out": "copy out"}  # kinds of copies of states, by direction
STOP: Final = 1  # flags of a message: its job ends with this iteration,
FAILED: Final = 2  # it has failed,
TOMBSTONE: Final = 4  # and nothing is carried


class Message(NamedTuple):
    """What one block makes and another takes, both in the same iteration of their job.

    ``"activation"`` F(s) to F(s+1), ``"gradient"`` B(s+1) to B(s), ``"tied"`` the gradient of a
    shared weight from B(user) to B(owner), ``"weight"`` its value from the owner's first F to the
    user's, ``"factor"`` (the norm of all gradients) from the last B(0) to U(s). All of them follow
    from the chain of the blocks, so they add no precedence.
    """

    kind: str
    producer: int
    consumer: int


class Channel(NamedTuple):
    """Messages from one device to another, in the order in which the source makes them."""

    source: int
    target: int
    messages: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Routes:
    """All messages of a plan."""

    messages: tuple[Message, ...]  # one per cycle each
    inputs: tuple[tuple[int, ...], ...]  # messages by consuming operation,
    outputs: tuple[tuple[int, ...], ...]  # and by producing one
    channels: tuple[Channel, ...]  # those between different devices
    channel_of: tuple[int, ...]  # channel of every message, -1 if it stays on its device


class Instance(NamedTuple):
    """One execution of an operation: in which cycle, and which iteration of its job it is."""

    operation: int
    cycle: int
    iteration: int


class Transfer(NamedTuple):
    """One message of one iteration of its job."""

    message: int
    iteration: int


class Record(NamedTuple):
    """One executed block; times of a monotonic clock."""

    segment: int  # its position in the run
    operation: int
    cycle: int
    iteration: int
    start_ns: int
    end_ns: int
    waited_ns: int = 0  # for messages, before the start
    exposed_ns: int = 0  # for copies of its state, before the start


class Copied(NamedTuple):
    """Bytes of a job's state that went from the host to a device (``"in"``), or back."""

    device: int
    direction: str  # "in" or "out"
    job: int
    stage: int
    start_ns: int
    end_ns: int
    size: int = 0
