"""Bandwidth and latency of copies: between devices, and between the host and a device."""

from __future__ import annotations

from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final

import torch

from optsched.arraypipe.profile.document import Link, Links

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


SMALL: Final = 4 * 2**10
LARGE: Final = 16 * 2**20
LARGE_GPU: Final = 256 * 2**20  # within a GPU less is over before the host has noticed
LARGE_HOST: Final = 64 * 2**20  # little to page-lock at the beginning of a run
_REPEATS: Final = 20
_HOST: Final = torch.device("cpu")


def measure_links(devices: Sequence[torch.device]) -> Links:
    """Copies of a small and of a large block, medians.

    Parameters
    ----------
    devices
        With two GPUs the link is the one between them; with one it is a copy within its memory,
        on the CPU one within the host's.
    """
    first, second = devices[0], devices[min(1, len(devices) - 1)]
    return Links(activation=_link(first, second), host=_link(_HOST, first))


def measure_host(device: torch.device) -> tuple[Link, Link]:
    """From page-locked memory of the host to a GPU, and back."""
    return _link(_HOST, device, LARGE_HOST), _link(device, _HOST, LARGE_HOST)


def _link(source: torch.device, target: torch.device, most: int = 0) -> Link:
    most = most or (LARGE_GPU if "cuda" in (source.type, target.type) else LARGE)
    small, large = (_time(_blocks(source, target, size)) for size in (SMALL, most))
    # what a byte costs, from the difference: the latency is in both
    per_byte = max(large - small, 1.0) / (most - SMALL)
    return Link(
        bandwidth=max(1, round(1e9 / per_byte)), latency_ns=max(0, round(small - SMALL * per_byte))
    )


def _blocks(source: torch.device, target: torch.device, size: int) -> tuple[Tensor, Tensor]:
    pinned = {source.type, target.type} == {"cpu", "cuda"}

    def block(device: torch.device) -> Tensor:
        locked = pinned and device.type == "cpu"
        return torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=locked)

    return block(source), block(target)


def _time(blocks: tuple[Tensor, Tensor]) -> float:
    """Median nanoseconds of a copy that is over, not only begun."""
    source, target = blocks
    times = []
    for _ in range(3 + _REPEATS):
        began = perf_counter_ns()
        target.copy_(source, non_blocking=True)
        for device in {t.device for t in blocks if t.is_cuda}:
            torch.cuda.synchronize(device)
        times.append(perf_counter_ns() - began)
    return float(median(times[3:]))
