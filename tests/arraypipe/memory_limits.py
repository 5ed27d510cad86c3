"""Runs whose devices have memory for a few states: the limit follows from what they need."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from runs import run

from optsched import InputError
from optsched.arraypipe import RunConfig
from optsched.arraypipe.memory.budget import Limits, budget, cycle_of
from optsched.arraypipe.memory.manager import SlotMemory, memory_of, note_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def needs(runs: Any, segment: Any, device: int, share: Any = None) -> tuple[int, int]:
    """Bytes of a device beside what is in slots, and of one slot of each kind."""
    limits = Limits()
    note_bytes(limits, runs)
    known = limits.of(segment)
    states = [known[pair] for pair in cycle_of(segment.plan, device, known)[0]]
    messages = 0 if share is None else share.windows + share.outboxes
    rest = budget(segment.plan, device, known).total + sum(state.resident for state in states)
    slot = max(state.weights for state in states) + max(state.moments for state in states)
    return rest + messages, slot


@contextmanager
def little(factor: Callable[[], float], grow: bool = False) -> Iterator[list[Any]]:
    """Let runs with `memory` have so many times the bytes of a slot; the memories they make.

    With `grow` more if more states are between F and B.
    """
    made: list[Any] = []

    def limited(runs: Any, segments: Any, limit: int | None, share: Any = None) -> Any:
        devices = range(len(segments[0].plan.sequences)) if share is None else [share.device]
        rows = [needs(runs, segments[0], d, share) for d in devices]
        times = factor()
        while True:
            most = max(int(rest + times * slot) + 1 for rest, slot in rows)
            try:
                made.append(memory_of(runs, segments, most, share))
            except InputError:
                if not grow or times > 50:
                    raise
                times *= 1.3
            else:
                return made[-1]

    with mock.patch("optsched.arraypipe.training_run.memory_of", limited):
        yield made


def least(array: Any, schedule: Any) -> int:
    """A limit with which some states of a trainer's jobs are in slots, found by one iteration."""
    array = array.with_jobs(array.jobs, RunConfig(memory=1))
    with little(lambda: 1.0, grow=True) as made:
        run(array, schedule, 1)
    return next(device.limit for device in made[-1].limits.devices.values())


def moving(made: list[Any]) -> int:
    """Runs in which states of this process were in slots."""
    return sum(isinstance(memory, SlotMemory) for memory in made)
