"""Reports about a job array: iterations per epoch, and whether states load behind blocks."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import integer
from optsched.problems.jobarray.checks import table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray
    from optsched.problems.jobarray.fields import JobArrayFields

TOLERATED: Final = Fraction(1, 100)
"""Error at which larger multiplicities are not worth their larger graph."""


def epoch_multiplicity(
    array: JobArrayFields, samples: int | Sequence[int], max_copies: int
) -> IntArray:
    """The smallest multiplicities of tolerated error, else the best; shape (K,).

    The best may be far off where `max_copies` binds (batches of 1 and 1000): `epoch_error` tells.
    """
    integer("max_copies", max_copies, 1, MAX_INTEGER)
    epochs = iterations(array, samples)
    longest = max(epochs)
    best, least = [1] * len(epochs), spread(epochs, [1] * len(epochs))
    for copies in range(1, max_copies + 1):
        found = [_nearest(Fraction(copies * one, longest)) for one in epochs]
        error = spread(epochs, found)
        if error < least:
            best, least = found, error
        if least <= TOLERATED:
            break
    return np.array(best, np.int64)


def epoch_error(array: JobArrayFields, samples: int | Sequence[int]) -> float:
    """Longest epoch over the shortest, in cycles, minus 1."""
    return float(spread(iterations(array, samples), array.multiplicity.tolist()))


def iterations(array: JobArrayFields, samples: int | Sequence[int]) -> list[int]:
    """Iterations of one epoch of every job; the last one may be a smaller batch."""
    if not array.batch_size.all():
        j = int(np.argmin(array.batch_size))
        raise InputError(
            f"jobs[{j}].batch_size: not said, and without it nobody knows how many iterations an "
            "epoch has; give JobArray(batch_size=[...])"
        )
    sizes = zip(
        table_of("samples", samples, (array.n_jobs,), 1).tolist(),
        array.batch_size.tolist(),
        strict=True,
    )
    return [-(-count // batch) for count, batch in sizes]


def spread(epochs: Sequence[int], copies: Sequence[int]) -> Fraction:
    """Largest over smallest number of cycles that an epoch takes, minus 1."""
    cycles = [Fraction(one, n) for one, n in zip(epochs, copies, strict=True)]
    return max(cycles) / min(cycles) - 1


def _nearest(share: Fraction) -> int:
    """The integer >= 1 of nearest ratio to a share."""
    below = max(1, int(share))
    return below if share * share <= below * (below + 1) else below + 1


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


def prefetch(array: JobArrayFields, host_bandwidth: int) -> tuple[ServerPrefetch, ...]:
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


def _windows(array: JobArrayFields) -> IntArray:
    """Least block of every job on every stage, less the communication behind it; shape (K, V)."""
    sent_on = np.pad(array.lag_forward, ((0, 0), (0, 1)))
    sent_back = np.pad(array.lag_backward, ((0, 0), (1, 0)))
    least: IntArray = np.minimum(array.forward - sent_on, array.backward - sent_back)
    return least if array.weight is None else np.minimum(least, array.weight)
