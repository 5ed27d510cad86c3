"""Times of GPU events on the clock of the host."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AHEAD: Final = 32
"""Blocks of a device that the host launches ahead.

Enough to keep it busy; few, because memory that another stream has used is free again only when
that stream has got there, so that a host far ahead takes more and more of it.
"""
Pause: TypeAlias = tuple[torch.cuda.Event, torch.cuda.Event]
_NOWHERE: Final = -1
_DRIFT: Final = 60 * 10**9  # after so long the host looks again how far the timers have drifted
_FRESH: Final = 10**9  # events are compared with one of this second: differences are float32


class GpuClock:
    """Nanoseconds of the host's monotonic clock at which events of one GPU were.

    Events of two GPUs cannot be subtracted, so each is compared with the host once: they agree up
    to the time that the host needs to notice that an event is over.

    Parameters
    ----------
    device
        A CUDA device; the host waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self.origin = timer()
        self.origin.record(torch.cuda.current_stream(device))
        self.origin.synchronize()
        self.passed = self.looked = time.perf_counter_ns()

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event; if the host had to, it knows now when that was, once a minute."""
        before = time.perf_counter_ns()
        over = event.query()  # type: ignore[no-untyped-call]
        event.synchronize()
        if not over and before - self.looked > _DRIFT:
            self.origin, self.passed = event, time.perf_counter_ns()
            self.looked = self.passed

    def time(self, event: torch.cuda.Event) -> int:
        """When an event was that is over."""
        since: int = round(self.origin.elapsed_time(event) * 1e6)
        now = self.passed + since
        if since > _FRESH:
            self.origin, self.passed = event, now
        return now


class BlockTimes:
    """When blocks ran on one stream: read when they are over, not waited for earlier."""

    def __init__(self, clock: GpuClock) -> None:
        self.clock, self.last = clock, 0
        self.flying: deque[tuple[int, Pause, Sequence[Pause]]] = deque()

    def __len__(self) -> int:
        """Blocks under way."""
        return len(self.flying)

    def add(
        self, row: int, began: torch.cuda.Event, ended: torch.cuda.Event, pauses: Sequence[Pause]
    ) -> None:
        """Note the events around a block and its pauses, and the row that its times are for."""
        self.flying.append((row, (began, ended), pauses))

    def land(self) -> tuple[int, int, int, int] | None:
        """Wait for the oldest block; its row, start, end and pauses, None if it is forgotten.

        As on a CPU what it waited for counts as before its start.
        """
        row, (began, ended), pauses = self.flying.popleft()
        self.clock.wait(ended)
        if row == _NOWHERE:
            return None
        # a host that has looked at the timers again may put back the clock by what they drifted
        start = max(self.last, self.clock.time(began))
        self.last = max(start, self.clock.time(ended))
        waited = round(sum(begin.elapsed_time(end) for begin, end in pauses) * 1e6)
        return row, min(start + waited, self.last), self.last, waited

    def keep(self, place: Mapping[int, int]) -> None:
        """Rows have new numbers; forget those that have none."""
        self.flying = deque((place.get(k, _NOWHERE), both, p) for k, both, p in self.flying)


def timer() -> torch.cuda.Event:
    """An event whose time can be read."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
