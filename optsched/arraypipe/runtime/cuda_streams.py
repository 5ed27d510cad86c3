"""Blocks on a GPU: their times by events, page-locked memory, numbers that are read late."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from optsched.arraypipe.runtime.environment import on_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.runtime.types import Pause


class Late:
    """The value of a tensor on a GPU, copied behind what its stream has been given so far."""

    def __init__(self, value: Tensor) -> None:
        self.value = page_locked_like(value)
        self.value.copy_(value.detach(), non_blocking=True)
        self.copied = torch.cuda.current_stream(value.device).record_event()

    def item(self) -> float:
        """Wait for the copy alone; the number."""
        self.copied.synchronize()
        return float(self.value.item())


def page_locked_like(value: Tensor) -> Tensor:
    """Host memory for a tensor, with its strides; a copy to any other would block the host."""
    try:
        return torch.empty_like(value, device="cpu", pin_memory=True)
    except RuntimeError as error:  # torch takes it for an error of the GPU
        if "out of memory" not in str(error).lower():
            raise
        size = value.numel() * value.element_size()
        raise torch.OutOfMemoryError(f"the host cannot page-lock {size} bytes") from error


def staging(size: int, device: torch.device) -> Tensor:
    """Bytes of the host for messages of a device."""
    found = torch.empty(size, dtype=torch.uint8)
    return page_locked_like(found) if on_gpu(device) else found


def uploaded(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a GPU, in its current stream; the host goes on at once."""
    if value.is_cuda or value.is_pinned():
        return value.to(device, non_blocking=True)
    return page_locked_like(value).copy_(value).to(device, non_blocking=True)


AHEAD: Final = 32
"""Blocks that the host launches ahead: enough to keep the GPU busy."""
_DRIFT_NS: Final = 60 * 10**9  # interval at which the clocks are compared again
_FRESH_NS: Final = 10**9  # events are compared with one of this second: differences are float32


class GpuClock:
    """Times of the host's monotonic clock at which events of a GPU were.

    Accurate up to the time that the host needs to notice that an event is over.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self.origin = timer()
        self.origin.record(torch.cuda.current_stream(device))
        self.origin.synchronize()
        self.passed_ns = self.compared_ns = time.perf_counter_ns()

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event; once a minute the clocks are compared at its end."""
        before_ns = time.perf_counter_ns()
        over = event.query()  # type: ignore[no-untyped-call]
        event.synchronize()
        if not over and before_ns - self.compared_ns > _DRIFT_NS:
            self.origin, self.passed_ns = event, time.perf_counter_ns()
            self.compared_ns = self.passed_ns

    def time_ns(self, event: torch.cuda.Event) -> int:
        """When an event was that is over."""
        since_ns: int = round(self.origin.elapsed_time(event) * 1e6)
        now_ns = self.passed_ns + since_ns
        if since_ns > _FRESH_NS:
            self.origin, self.passed_ns = event, now_ns
        return now_ns


class BlockTimes:
    """Start and end of the blocks on the current stream, read after they are over."""

    def __init__(self, device: torch.device) -> None:
        self.clock, self.last_ns = GpuClock(device), 0
        self.pending: deque[tuple[list[int], Pause, Sequence[Pause]]] = deque()

    def add(
        self,
        row: list[int],
        began: torch.cuda.Event,
        ended: torch.cuda.Event,
        pauses: Sequence[Pause],
    ) -> None:
        """Note the events around a block and around its pauses, and its record (`Past`)."""
        self.pending.append((row, (began, ended), pauses))

    def read(self, pending: int = 0) -> None:
        """Wait for all but the last few blocks; write start, end and pauses into their records.

        As on a CPU, pauses count as before the start.
        """
        while len(self.pending) > pending:
            row, (began, ended), pauses = self.pending.popleft()
            self.clock.wait(ended)
            # a comparison of the clocks may put the time back by what they drifted
            start_ns = max(self.last_ns, self.clock.time_ns(began))
            self.last_ns = max(start_ns, self.clock.time_ns(ended))
            row[7] = round(sum(begin.elapsed_time(end) for begin, end in pauses) * 1e6)
            row[4:6] = min(start_ns + row[7], self.last_ns), self.last_ns


def timer() -> torch.cuda.Event:
    """An event with a time that can be read."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def recorded() -> torch.cuda.Event:
    """The time at which the current stream arrives here."""
    event = timer()
    event.record()
    return event
