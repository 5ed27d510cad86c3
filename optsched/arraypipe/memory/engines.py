"""Copy engines: what runs copies beside the blocks, here one with a virtual clock."""

from __future__ import annotations

import time
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from optsched.errors import InputError

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


class CopyEngine(Protocol):
    """One queue of blocks and one queue of copies per direction; events order them.

    An event is anything that the same engine understands, None for one that is long past. `exposed`
    is the time that blocks have waited for copies.
    """

    copies: list[Copy]  # in nanoseconds of the host's clock; empty if it measures none
    pauses: list[tuple[Any, Any]]  # events around what blocks wait for on a GPU

    @property
    def exposed(self) -> float:
        """Nanoseconds on a real engine."""

    def copy(
        self,
        direction: str,
        size: int,
        action: Callable[[], None],
        after: Iterable[Any],
        state: int = -1,
    ) -> Any:
        """Queue a copy of `size` bytes behind those of its direction and `after`; its event.

        `state` is only noted.
        """

    def wait(self, events: Iterable[Any]) -> None:
        """Let blocks that are queued from now on wait for events."""

    def ran(self) -> Any:
        """The event at which all blocks queued so far are over."""

    def finish(self) -> None:
        """Return when everything that was queued is over."""


class HostEngine:
    """Copies at once: for devices that are the host itself. Blocks wait for every copy."""

    def __init__(self) -> None:
        self.exposed = 0.0
        self.copies: list[Copy] = []
        self.pauses: list[tuple[Any, Any]] = []

    def copy(
        self,
        direction: str,
        size: int,
        action: Callable[[], None],
        after: Iterable[Any],
        state: int = -1,
    ) -> None:
        """Copy; whatever it would wait for has been done before."""
        began = time.perf_counter_ns()
        action()
        ended = time.perf_counter_ns()
        self.exposed += ended - began
        self.copies.append(Copy(direction, state, size, began, ended))

    def wait(self, events: Iterable[Any]) -> None:
        """Nothing is under way."""

    def ran(self) -> None:
        """Everything is over."""

    def finish(self) -> None:
        """Everything is over."""


class Link:
    """A path that carries one copy at a time; engines and directions may share one.

    Parameters
    ----------
    bandwidth
        Bytes per unit of time.
    latency
        Added to every copy, in the same unit of time.
    """

    def __init__(self, bandwidth: float, latency: float = 0.0) -> None:
        if not bandwidth > 0:
            raise InputError(f"bandwidth: expected bytes per time > 0, got {bandwidth!r}")
        if not latency >= 0:
            raise InputError(f"latency: expected a time >= 0, got {latency!r}")
        self.bandwidth, self.latency = bandwidth, latency
        self.busy = 0.0
        self._starts: list[float] = []  # disjoint busy intervals, ascending
        self._ends: list[float] = []

    def time(self, size: int) -> float:
        """How long a copy of so many bytes takes."""
        return self.latency + size / self.bandwidth

    def carry(self, ready: float, size: int) -> float:
        """Take the first gap from `ready` on that is long enough; when the copy ends."""
        duration = self.time(size)
        self.busy += duration
        starts, ends = self._starts, self._ends
        k = bisect_right(ends, ready)  # intervals before k are over by then
        begin = ready
        while k < len(starts) and starts[k] < begin + duration:
            begin = ends[k]
            k += 1
        end = begin + duration
        # joined with neighbours that it touches, so that a full link is one interval
        low = k - 1 if k and ends[k - 1] == begin else k
        high = k + 1 if k < len(starts) and starts[k] == end else k
        first = starts[low] if low < k else begin
        last = ends[k] if high > k else end
        starts[low:high], ends[low:high] = [first], [last]
        return end


class SimulatedEngine:
    """Virtual clock: blocks take the time they are said to take, copies what their link says.

    Parameters
    ----------
    inward, outward
        Links of the two directions; one object for both if they share the bandwidth.
    """

    def __init__(self, inward: Link, outward: Link) -> None:
        self.links = {IN: inward, OUT: outward}
        self.free = {IN: 0.0, OUT: 0.0}  # when the last copy of a direction ends
        self.copied = {IN: 0, OUT: 0}
        self.now = 0.0  # when the last block ends
        self.exposed = 0.0  # time that blocks waited for copies
        self.copies: list[Copy] = []
        self.pauses: list[tuple[Any, Any]] = []

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
        self.free[direction] = self.links[direction].carry(ready, size)
        return self.free[direction]

    def wait(self, events: Iterable[float | None]) -> None:
        """Move the clock to the last of the events."""
        ready = max((t for t in events if t is not None), default=self.now)
        if ready > self.now:
            self.exposed += ready - self.now
            self.now = ready

    def block(self, duration: float) -> None:
        """Let a block run."""
        self.now += duration

    def idle(self, gap: float) -> None:
        """Let the device wait for something else than copies."""
        self.now += gap

    def ran(self) -> float:
        """When the last block ends."""
        return self.now

    def finish(self) -> None:
        """Wait for all copies."""
        self.wait(self.free.values())
