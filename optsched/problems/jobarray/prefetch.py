"""Whether model states can be loaded from the host behind the blocks of other jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import integer

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray
    from optsched.problems.jobarray.problem import JobArray

_TICKS = {"ns": 10**9, "us": 10**6, "ms": 10**3, "s": 1}


class ServerPrefetch(NamedTuple):
    """One server: the paper's Eq. 2 holds if `load` <= `window`; times in the array's unit."""

    server: str
    load: int
    """Loading the largest state of each of its stages over the one link to the host, rounded up."""
    window: int
    """Least block on its devices, less the communication that follows the block."""

    @property
    def slack(self) -> int:
        """What is left of the window; negative if a load can delay a block."""
        return self.window - self.load

    @property
    def ok(self) -> bool:
        """Whether no load can delay a block."""
        return self.slack >= 0


def prefetch(array: JobArray, host_bandwidth: int) -> tuple[ServerPrefetch, ...]:
    """Eq. 2 for every server, in order of its first device; see `JobArray.prefetch_ok`.

    Devices whose server has no name count as one server.
    """
    integer("host_bandwidth", host_bandwidth, 1, MAX_INTEGER)
    windows = _windows(array)
    state: dict[str, dict[tuple[int, int], int]] = {name: {} for name in array.servers}
    window: dict[str, int] = {}
    for j in range(array.n_jobs):
        for m in range(1 if isinstance(array.place[0], int) else int(array.micro_batches[j])):
            for v, d in enumerate(array.devices_of(j, m).tolist()):
                name = array.servers[d]
                largest = state[name].get((d, v), 0)
                state[name][d, v] = max(largest, int(array.state[j, v]))
                window[name] = min(window.get(name, int(windows[j, v])), int(windows[j, v]))
    ticks = _TICKS[array.time_unit]
    return tuple(
        ServerPrefetch(name, -(-sum(state[name].values()) * ticks // host_bandwidth), window[name])
        for name in state
        if name in window
    )


def _windows(array: JobArray) -> IntArray:
    """Least block of every job on every stage, less the communication behind it; shape (K, V)."""
    sent_on = np.pad(array.lag_forward, ((0, 0), (0, 1)))
    sent_back = np.pad(array.lag_backward, ((0, 0), (1, 0)))
    least: IntArray = np.minimum(array.forward - sent_on, array.backward - sent_back)
    return least if array.weight is None else np.minimum(least, array.weight)


__all__ = ["ServerPrefetch", "prefetch"]
