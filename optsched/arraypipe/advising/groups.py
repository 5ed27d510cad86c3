"""Jobs on equal groups of devices: how many groups there can be, and which jobs go where."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Assignment(NamedTuple):
    """Jobs on machines; `bound` is a lower bound of the best `makespan`."""

    machine: tuple[int, ...]
    makespan: int
    bound: int

    def jobs_on(self, machine: int) -> list[int]:
        """Jobs of one machine, ascending."""
        return [j for j, m in enumerate(self.machine) if m == machine]


def longest_first(times: Sequence[int], machines: int) -> Assignment:
    """P||Cmax by LPT: the longest job first, always on the machine that is free first.

    At most 4/3 - 1/(3 machines) of the best (Graham 1969). The bound is the largest of the longest
    job, the mean load, and the two jobs that must share a machine when there are more than one a
    machine.

    Parameters
    ----------
    times
        Of every job, >= 0.
    machines
        At least 1.
    """
    load = [(0, m) for m in range(machines)]
    machine = [0] * len(times)
    order = sorted(range(len(times)), key=lambda j: (-times[j], j))
    for j in order:
        busy, m = heapq.heappop(load)
        machine[j] = m
        heapq.heappush(load, (busy + times[j], m))
    bound = max(*times, 0, -(-sum(times) // machines))
    if len(times) > machines:
        bound = max(bound, times[order[machines - 1]] + times[order[machines]])
    return Assignment(tuple(machine), max(load)[0], bound)


def moved(times: Sequence[int], machines: int) -> int:
    """The best makespan if jobs may move between machines on the way (McNaughton 1959).

    At most ``machines - 1`` of them do, each once.
    """
    return max(*times, 0, -(-sum(times) // machines))


def groupings(devices: int, most: int) -> list[tuple[int, int]]:
    """Pairs (groups, devices a group) worth trying: 1, 2, 4, ... groups of at most `most` devices.

    Only groups of two devices or more; of equal widths the one with the most groups.
    """
    found: dict[int, int] = {}
    groups = 1
    while devices // groups >= 2 and most >= 2:
        width = min(devices // groups, most)
        found[width] = devices // width
        groups *= 2
    return [(groups, width) for width, groups in found.items()]
