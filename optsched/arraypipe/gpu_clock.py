"""Times of GPU events on the clock of the host."""

from __future__ import annotations

import time
from typing import Final

import torch

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
        self.passed = time.perf_counter_ns()

    def time(self, event: torch.cuda.Event) -> int:
        """When an event was that is over."""
        since: int = round(self.origin.elapsed_time(event) * 1e6)
        now = self.passed + since
        if since > _FRESH:
            self.origin, self.passed = event, now
        return now


def timer() -> torch.cuda.Event:
    """An event whose time can be read."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
