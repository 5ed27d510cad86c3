"""The copy engine of a GPU: one stream per direction beside that of the blocks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from optsched.arraypipe.memory.transfers import IN, OUT, CopyEngine
from optsched.arraypipe.plan.types import Copied
from optsched.arraypipe.runtime.cuda_streams import GpuClock, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import Tensor


class CudaEngine(CopyEngine):
    """Copies between page-locked host memory and a GPU, ordered with its blocks by events."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.clock = device, GpuClock(device)
        self.pending: deque[tuple[str, Any, int, Any, Any]] = deque()  # and events around each
        self.streams = {
            # an urgent one is never the same as one that torch gives to others
            direction: torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for direction in (IN, OUT)
        }

    def adopt(self, flats: Collection[Tensor]) -> None:
        """Use new memory on the copy streams too, behind what the current stream does to it."""
        for stream in self.streams.values():
            stream.wait_stream(torch.cuda.current_stream(self.device))
            for flat in flats:
                flat.record_stream(stream)

    def copy(
        self,
        direction: str,
        size: int,
        action: Callable[[], object],
        after: Iterable[Any],
        label: tuple[int, int, int] = (0, 0, 0),
    ) -> Any:
        """Launch a copy on the stream of its direction; the event at its end."""
        stream = self.streams[direction]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            begin = recorded()
            action()
            end = recorded()
        self.pending.append((direction, label, size, begin, end))
        while self.pending and self.pending[0][-1].query():
            self._read()
        return end

    def wait(self, events: Iterable[Any]) -> None:
        """Let blocks that are launched from now on wait for events."""
        row = [event for event in events if event is not None and not event.query()]
        if not row:
            return
        begin = recorded()
        for event in row:
            torch.cuda.current_stream(self.device).wait_event(event)
        self.pauses.append((begin, recorded()))

    def ran(self) -> Any:
        """Return the event after all blocks launched so far."""
        return torch.cuda.current_stream(self.device).record_event()

    def finish(self) -> None:
        """Wait until the device has nothing left to do."""
        torch.cuda.synchronize(self.device)
        while self.pending:
            self._read()

    def _read(self) -> None:
        direction, label, size, begin, end = self.pending.popleft()
        device, job, stage = label
        times_ns = self.clock.times_ns(begin, end)
        self.copies.append(Copied(device, direction, job, stage, *times_ns, size))
