"""The copy engine of a GPU: one stream per direction beside that of the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from optsched.arraypipe.memory.transfers import IN, OUT, CopyEngine
from optsched.arraypipe.runtime.cuda_streams import recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import Tensor


class CudaEngine(CopyEngine):
    """Copies between page-locked host memory and a GPU, ordered with its blocks by events."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
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
    ) -> Any:
        """Launch a copy on the stream of its direction; the event at its end."""
        stream = self.streams[direction]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            action()
            return stream.record_event()

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
        """The event after all blocks launched so far."""
        return torch.cuda.current_stream(self.device).record_event()

    def finish(self) -> None:
        """Wait until the device has nothing left to do."""
        torch.cuda.synchronize(self.device)
