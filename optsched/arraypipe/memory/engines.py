"""Copy engines: what runs copies beside the blocks, here at once or on a virtual clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


IN, OUT = "in", "out"
"""Directions: host to device, and back."""


class Copy(NamedTuple):
    """A copy that is over: of which state (its index), how many bytes, and when."""

    direction: str
    state: int
    size: int
    start: int
    end: int


@dataclass
class CopyEngine:
    """Copies at once, for devices that are the host itself; others have queues beside the blocks.

    Those have one queue of copies per direction. An event is anything that the same engine
    understands, None for one that is long past.
    """

    exposed: float = 0.0  # nanoseconds that blocks have waited for copies, where none has pauses
    copies: list[Copy] = field(default_factory=list)  # nanoseconds of the host's clock; if measured
    pauses: list[tuple[Any, Any]] = field(default_factory=list)  # events around waits on a GPU

    def copy(
        self,
        direction: str,
        size: int,
        action: Callable[[], None],
        after: Iterable[Any],
        state: int = -1,
    ) -> Any:
        """Queue a copy behind those of its direction and the events `after`; its own event."""
        began = time.perf_counter_ns()
        action()
        ended = time.perf_counter_ns()
        self.exposed += ended - began
        self.copies.append(Copy(direction, state, size, began, ended))

    def wait(self, events: Iterable[Any]) -> None:
        """Let blocks that are queued from now on wait for events."""

    def ran(self) -> Any:
        """The event at which all blocks queued so far are over."""

    def finish(self) -> None:
        """Return when everything that was queued is over."""


@dataclass(frozen=True)
class HostLink:
    """The path between a device and its host; both directions copy at the same time."""

    inward: float  # bytes per unit of time, host to device
    outward: float  # and back
    latency: float = 0.0  # of one copy, in the same unit

    def scaled(self, unit: float) -> HostLink:
        """The link of bytes per second in a unit of so many seconds."""
        return HostLink(self.inward * unit, self.outward * unit, self.latency / unit)


PCIE_4: Final = HostLink(25e9, 25e9, 10e-6)
"""A cautious guess for a link that nobody has measured, in seconds."""


class SimulatedEngine(CopyEngine):
    """Virtual clock: blocks take the time they are said to take, copies what the link says."""

    def __init__(self, link: HostLink) -> None:
        super().__init__()
        self.latency, self.bandwidth = link.latency, {IN: link.inward, OUT: link.outward}
        self.free = {IN: 0.0, OUT: 0.0}  # when the last copy of a direction ends
        self.copied = {IN: 0, OUT: 0}  # bytes
        self.now = 0.0  # when the last block ends

    def copy(
        self,
        direction: str,
        size: int,
        action: Callable[[], None],
        after: Iterable[float | None],
        state: int = -1,
    ) -> float:
        """Do the copy, and tell when it would end."""
        action()
        ready = max([self.free[direction], *(t for t in after if t is not None)])
        self.copied[direction] += size
        self.free[direction] = ready + self.latency + size / self.bandwidth[direction]
        return self.free[direction]

    def wait(self, events: Iterable[float | None]) -> None:
        """Move the clock to the last of the events."""
        self.now = max([self.now, *(t for t in events if t is not None)])

    def block(self, duration: float) -> None:
        """Let a block run, or the device wait for something else than copies."""
        self.now += duration

    def ran(self) -> float:
        """When the last block ends."""
        return self.now

    def finish(self) -> None:
        """Wait for all copies."""
        self.wait(self.free.values())
