"""The copy engine of a GPU: one stream per direction beside that of the blocks; speed of links."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch

from optsched.arraypipe.memory.engines import IN, OUT, Copy, CopyEngine
from optsched.arraypipe.runtime.cuda_streams import GpuClock, timer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import Tensor


class CudaEngine(CopyEngine):
    """Copies between pinned host memory and a GPU, ordered with its blocks by events.

    Blocks are whatever is launched on the device's current stream. A copy into a slot waits for
    the event after the last block there (*free*), a block for the event after the copy (*ready*).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.flying: deque[tuple[str, int, int, Any, Any]] = deque()  # and events around each
        self.clock = GpuClock(device)
        self.streams = {
            # an urgent one is never the same as one of blocks, which torch deals out in turn
            direction: torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for direction in (IN, OUT)
        }

    def adopt(self, flats: Collection[Tensor]) -> None:
        """Tell the allocator that these tensors are used on the copy streams too.

        The streams wait for what the current stream does to them, such as filling new memory.
        """
        for stream in self.streams.values():
            stream.wait_stream(torch.cuda.current_stream(self.device))
            for flat in flats:
                flat.record_stream(stream)

    def copy(
        self,
        direction: str,
        size: int,
        action: Callable[[], None],
        after: Iterable[Any],
        state: int = -1,
    ) -> Any:
        """Launch a copy on the stream of its direction; the event at its end."""
        stream = self.streams[direction]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        begin, end = timer(), timer()
        begin.record(stream)
        with torch.cuda.stream(stream):
            action()
        end.record(stream)
        self.flying.append((direction, state, size, begin, end))
        while self.flying and self.flying[0][-1].query():
            self._land()
        return end

    def wait(self, events: Iterable[Any]) -> None:
        """Let blocks that are launched from now on wait for events."""
        row = [event for event in events if event is not None and not event.query()]
        if not row:
            return
        stream = torch.cuda.current_stream(self.device)
        begin, end = timer(), timer()
        begin.record(stream)
        for event in row:
            stream.wait_event(event)
        end.record(stream)
        self.pauses.append((begin, end))

    def ran(self) -> Any:
        """The event after all blocks launched so far."""
        return torch.cuda.current_stream(self.device).record_event()

    def finish(self) -> None:
        """Wait until the device has nothing left to do."""
        torch.cuda.synchronize(self.device)
        while self.flying:
            self._land()

    def _land(self) -> None:
        direction, state, size, begin, end = self.flying.popleft()
        start_ns = self.clock.time_ns(begin)
        self.copies.append(
            Copy(direction, state, size, start_ns, max(start_ns, self.clock.time_ns(end)))
        )


_SMALL: Final = 4 * 2**10
_LARGE: Final = 16 * 2**20
_LARGE_GPU: Final = 256 * 2**20  # within a GPU less is over before the host has noticed
_REPEATS: Final = 20


def link_speed(
    source: torch.device, target: torch.device, most: int | None = None
) -> tuple[float, float]:
    """Bytes per second and nanoseconds of latency of copies, from a small and from a large one."""
    most = most or (_LARGE_GPU if "cuda" in (source.type, target.type) else _LARGE)
    small_ns, large_ns = (_copy_time_ns(source, target, size) for size in (_SMALL, most))
    # what a byte costs, from the difference: the latency is in both
    per_byte_ns = max(large_ns - small_ns, 1.0) / (most - _SMALL)
    return 1e9 / per_byte_ns, max(0.0, small_ns - _SMALL * per_byte_ns)


def _copy_time_ns(source: torch.device, target: torch.device, size: int) -> float:
    """Median time of a copy that is over, not only begun."""
    pinned = {source.type, target.type} == {"cpu", "cuda"}
    there, here = (
        torch.zeros(size, dtype=torch.uint8, device=d, pin_memory=pinned and d.type == "cpu")
        for d in (source, target)
    )
    times_ns = []
    for _ in range(3 + _REPEATS):
        began_ns = time.perf_counter_ns()
        here.copy_(there, non_blocking=True)
        for device in {t.device for t in (there, here) if t.is_cuda}:
            torch.cuda.synchronize(device)
        times_ns.append(time.perf_counter_ns() - began_ns)
    return float(median(times_ns[3:]))
