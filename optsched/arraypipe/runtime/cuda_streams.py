"""Tensors and times of a GPU: page-locked and aligned memory, numbers read late, events."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from torch import Tensor

from optsched.arraypipe.runtime.environment import on_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

Pause: TypeAlias = tuple[torch.cuda.Event, torch.cuda.Event]

ALIGNMENT: Final = 256  # cuBLASLt looks at up to so many bytes
_OF_HOST: Final = 64  # where torch's memory begins on a CPU


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
        raise torch.OutOfMemoryError(f"the host cannot page-lock {value.nbytes} bytes") from error


def staging(size: int, device: torch.device) -> Tensor:
    """Return bytes of the host for messages of a device."""
    found = torch.empty(size, dtype=torch.uint8)
    return page_locked_like(found) if on_gpu(device) else found


def uploaded(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a GPU, in its current stream; the host goes on at once."""
    if value.is_cuda or value.is_pinned():
        return value.to(device, non_blocking=True)
    return page_locked_like(value).copy_(value).to(device, non_blocking=True)


def shift_of(t: Tensor) -> int:
    """Bytes from where memory of the device may begin to the tensor; 0 unless it is a slice."""
    shift = t.data_ptr() % (ALIGNMENT if t.is_cuda else _OF_HOST)
    return shift - shift % t.dtype.itemsize


def aligned_copy(t: Tensor) -> Tensor:
    """A contiguous copy as aligned as the tensor, on which the bits of kernels may depend."""
    begin = shift_of(t) // t.dtype.itemsize
    made = t.new_empty(begin + t.numel())[begin:].view(t.shape)
    return made.copy_(t.detach(), non_blocking=True).requires_grad_(t.requires_grad)


AHEAD: Final = 32
"""Blocks that the host launches ahead: enough to keep the GPU busy."""
_FRESH_NS: Final = 10**9  # events are compared with one of this second: differences are float32


class GpuClock:
    """Times of the host's monotonic clock at which events of a GPU were."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self.origin = recorded()
        self.origin.synchronize()
        self.origin_ns = time.perf_counter_ns()

    def times_ns(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> tuple[int, int]:
        """Wait for the second of two events; when they were."""
        over = ended.query()  # type: ignore[no-untyped-call]
        ended.synchronize()
        now_ns = time.perf_counter_ns()
        since_ns = round(self.origin.elapsed_time(ended) * 1e6)
        ended_ns = self.origin_ns + since_ns
        if since_ns > _FRESH_NS:
            ended_ns = ended_ns if over else now_ns
            self.origin, self.origin_ns = ended, ended_ns
        return ended_ns - round(began.elapsed_time(ended) * 1e6), ended_ns


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
        """Wait for all but the last few blocks; write start, end and pauses into their records."""
        while len(self.pending) > pending:
            row, events, pauses = self.pending.popleft()
            start_ns, end_ns = self.clock.times_ns(*events)
            # a comparison of the clocks may put the time back by what they drifted
            start_ns = max(self.last_ns, start_ns)
            self.last_ns = max(start_ns, end_ns)
            row[7] = round(sum(begin.elapsed_time(end) for begin, end in pauses) * 1e6)
            row[4:6] = min(start_ns + row[7], self.last_ns), self.last_ns


def recorded() -> torch.cuda.Event:
    """Return the time at which the current stream arrives here."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
