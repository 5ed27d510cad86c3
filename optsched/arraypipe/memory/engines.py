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
    start_ns: int
    end_ns: int


@dataclass
class CopyEngine:
    """Copies at once, for devices that are the host itself; others have queues beside the blocks.

    Those have one queue of copies per direction. An event is anything that the same engine
    understands, None for one that is long past.
    """

    exposed_ns: float = 0.0  # that blocks have waited for copies, where none has pauses
    copies: list[Copy] = field(default_factory=list)  # if measured, by the host's clock
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
        began_ns = time.perf_counter_ns()
        action()
        ended_ns = time.perf_counter_ns()
        self.exposed_ns += ended_ns - began_ns
        self.copies.append(Copy(direction, state, size, began_ns, ended_ns))

    def wait(self, events: Iterable[Any]) -> None:
        """Let blocks that are queued from now on wait for events."""

    def ran(self) -> Any:
        """The event at which all blocks queued so far are over."""

    def finish(self) -> None:
        """Return when everything that was queued is over."""


@dataclass(frozen=True)
class HostLink:
    """The path between a device and its host, in bytes per second; both directions at once."""

    inward: float  # host to device
    outward: float  # and back
    latency_ns: float = 0.0  # of one copy


PCIE_4: Final = HostLink(25e9, 25e9, 10e3)
"""A cautious guess for a link that was not measured."""


class SimulatedEngine(CopyEngine):
    """Virtual clock: blocks take the time they are said to take, copies what the link says."""

    def __init__(self, link: HostLink) -> None:
        super().__init__()
        self.latency_ns, self.bandwidth = link.latency_ns, {IN: link.inward, OUT: link.outward}
        self.free_ns = {IN: 0.0, OUT: 0.0}  # when the last copy of a direction ends
        self.copied = {IN: 0, OUT: 0}  # bytes
        self.now_ns = 0.0  # when the last block ends

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
        ready_ns = max([self.free_ns[direction], *(t for t in after if t is not None)])
        self.copied[direction] += size
        self.free_ns[direction] = (
            ready_ns + self.latency_ns + size * 1e9 / self.bandwidth[direction]
        )
        return self.free_ns[direction]

    def wait(self, events: Iterable[float | None]) -> None:
        """Move the clock to the last of the events."""
        self.now_ns = max([self.now_ns, *(t for t in events if t is not None)])

    def block(self, duration_ns: float) -> None:
        """Let a block run, or the device wait for something else than copies."""
        self.now_ns += duration_ns

    def ran(self) -> float:
        """When the last block ends."""
        return self.now_ns

    def finish(self) -> None:
        """Wait for all copies."""
        self.wait(self.free_ns.values())
