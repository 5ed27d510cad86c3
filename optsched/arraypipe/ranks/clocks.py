"""How far apart the clocks of the ranks are, from messages that go forth and back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.course import Record
    from optsched.arraypipe.ranks.links import GlooLinks

_ROUNDS = 5


class Reading(NamedTuple):
    """At `at` on a rank's clock that of rank 0 showed ``at + offset``, give or take `error`."""

    at: int
    offset: int
    error: int


def read_clocks(links: GlooLinks) -> list[Reading]:
    """Compare all clocks with that of rank 0; empty on other ranks (collective, nanoseconds).

    The reply that came back soonest bounds the error by half of its time (Cristian 1989).
    """
    found = [Reading(time.perf_counter_ns(), 0, 0)]
    for rank in range(1, links.size):
        if links.rank == 0:
            found.append(min((_ask(rank, links) for _ in range(_ROUNDS)), key=lambda r: r.error))
        elif links.rank == rank:
            for _ in range(_ROUNDS):
                _answer(links)
    return found if links.rank == 0 else []


def on_first_clock(records: Sequence[Record], before: Reading, after: Reading) -> list[Record]:
    """Records of a rank in the time of rank 0."""
    moved = to_first(before, after)
    return [r._replace(start=moved(r.start), end=moved(r.end)) for r in records]


def to_first(before: Reading, after: Reading) -> Callable[[int], int]:
    """From the time of a rank to that of rank 0; the offset drifts evenly between two readings.

    An offset within its error is none: processes of one machine share a clock.
    """
    if max(abs(r.offset) - r.error for r in (before, after)) <= 0:
        return int
    span = max(1, after.at - before.at)

    def moved(t: int) -> int:
        return t + before.offset + (after.offset - before.offset) * (t - before.at) // span

    return moved


def _ask(rank: int, links: GlooLinks) -> Reading:
    asked = time.perf_counter_ns()
    _send(0, rank, links)
    there = _receive(rank, links)
    back = time.perf_counter_ns()
    return Reading(there, (asked + back) // 2 - there, (back - asked + 1) // 2)


def _answer(links: GlooLinks) -> None:
    _receive(0, links)
    _send(time.perf_counter_ns(), 0, links)


def _send(value: int, rank: int, links: GlooLinks) -> None:
    links.tell(rank, torch.tensor([value]).view(torch.uint8))


def _receive(rank: int, links: GlooLinks) -> int:
    return int(links.hear(rank, 8).view(torch.int64).item())
