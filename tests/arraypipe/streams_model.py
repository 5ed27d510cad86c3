"""A model of CUDA streams on the CPU that reports races: accesses that no event orders.

Every kernel (an operation of torch) runs at once, so values are right whatever the order; what is
checked is whether streams and events force that order. Streams, events and the host have vector
clocks: an access is ordered after another if its stream has heard of it. Memory is modelled too:
whoever gives a tensor back while another stream still reads it must have recorded that stream,
because the allocator hands the bytes to the next tensor of the stream that made them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

Clock = dict[int, int]  # how far each stream has come
_READS_ON_HOST = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_LOOKS_AT_SHAPES = ("aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like")
_NANOSECONDS = 1000  # that a kernel takes


def join(into: Clock, other: Clock) -> None:
    """Hear of all that another has heard of."""
    for stream, tick in other.items():
        into[stream] = max(into.get(stream, 0), tick)


class Machine(TorchDispatchMode):
    """Streams of one GPU, and the storages that they use."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.current = self.default = Stream(self)
        self.writes: dict[int, tuple[int, int]] = {}  # storage -> stream and tick of the last
        self.reads: dict[int, dict[int, int]] = defaultdict(dict)  # storage -> stream -> tick
        self.made_by: dict[int, int] = {}
        self.recorded: dict[int, set[int]] = defaultdict(set)
        self.races: list[str] = []
        self.kernels = 0
        self.waits = 0  # of the host

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, as a kernel on the current stream."""
        kwargs = kwargs or {}
        schema = function._schema
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        changed = self._changed(schema, args, kwargs)
        result = function(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        old = {key(t) for t in given}
        fresh = [t for t in made if key(t) not in old]
        on_host = schema.name in _READS_ON_HOST
        if not (fresh or changed or on_host):
            return result  # a view
        self.kernels += 1
        stream = self.current
        stream.launch()
        for t in given if schema.name not in _LOOKS_AT_SHAPES else ():
            if key(t) not in {key(c) for c in changed}:
                self.read(stream, t, schema.name)
        for t in (*changed, *fresh):
            self.write(stream, t, schema.name)
        to_host = kwargs.get("device") == torch.device("cpu") and not kwargs.get("non_blocking")
        if on_host or (schema.name == "aten::_to_copy" and to_host):
            self.wait(stream.clock)
        return result

    def read(self, stream: Stream, t: Tensor, what: str) -> None:
        """An access that must come after the last write."""
        place = key(t)
        if place in self.writes:
            self._ordered(stream, *self.writes[place], f"{what} reads what is still written")
        self.reads[place][stream.index] = stream.tick

    def write(self, stream: Stream, t: Tensor, what: str) -> None:
        """An access that must come after all others."""
        place = key(t)
        if place not in self.made_by:
            self.made_by[place] = stream.index
            weakref.finalize(t.untyped_storage(), self._freed, place)
        if place in self.writes:
            self._ordered(stream, *self.writes[place], f"{what} writes what is still written")
        for other, tick in self.reads[place].items():
            self._ordered(stream, other, tick, f"{what} writes what is still read")
        self.writes[place] = (stream.index, stream.tick)
        self.reads[place] = {}

    def wait(self, clock: Clock) -> None:
        """The host waits for something."""
        self.waits += 1
        join(self.host, clock)

    def _changed(self, schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
        found = []
        for k, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[k] if k < len(args) else kwargs.get(argument.name)
                found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        return found

    def _ordered(self, stream: Stream, other: int, tick: int, what: str) -> None:
        if other != stream.index and stream.clock.get(other, 0) < tick:
            self.races.append(f"stream {stream.index}: {what} by stream {other}")

    def _freed(self, place: int) -> None:
        owner = self.made_by.pop(place)
        accesses = dict(self.reads.pop(place, {}))
        if place in self.writes:
            stream, tick = self.writes.pop(place)
            accesses[stream] = max(tick, accesses.get(stream, 0))
        recorded = self.recorded.pop(place, set())
        for other, tick in accesses.items():
            known = max(self.streams[owner].clock.get(other, 0), self.host.get(other, 0))
            if other != owner and other not in recorded and known < tick:
                self.races.append(f"stream {owner} gets back memory that stream {other} uses")


class Stream:
    """A queue of kernels."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.index = machine, len(machine.streams)
        self.clock: Clock = {}
        self.time = 0
        machine.streams.append(self)

    @property
    def tick(self) -> int:
        """Kernels launched so far."""
        return self.clock.get(self.index, 0)

    def launch(self) -> None:
        """Take in a kernel; it comes after all that the host has waited for."""
        join(self.clock, self.machine.host)
        self.clock[self.index] = self.tick + 1
        self.time += _NANOSECONDS

    def record_event(self, event: Any = None) -> Event:
        """An event after all kernels so far."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Kernels launched from now on come after an event."""
        join(self.clock, event.clock)
        self.time = max(self.time, event.time)

    def wait_stream(self, other: Stream) -> None:
        """... after all that another stream has now."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait."""
        self.machine.wait(self.clock)


class Event:
    """How far a stream had come when it was recorded."""

    machine: Machine

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.clock, self.time = enable_timing, {}, 0

    def record(self, stream: Stream | None = None) -> None:
        """Note how far a stream is."""
        stream = stream or self.machine.current
        join(stream.clock, self.machine.host)
        self.clock, self.time = dict(stream.clock), stream.time

    def synchronize(self) -> None:
        """Let the host wait."""
        self.machine.wait(self.clock)

    def query(self) -> bool:
        """Whether the host knows that it is over; it never knows before it has waited."""
        return all(self.machine.host.get(s, 0) >= tick for s, tick in self.clock.items())

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events that are over."""
        assert self.timed and end.timed
        assert self.query() and end.query()  # else torch raises
        return (end.time - self.time) / 1e6


def key(t: Tensor) -> int:
    """The storage of a tensor."""
    return int(t.untyped_storage()._cdata)


@contextmanager
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Replace what the executor uses of `torch.cuda`; all tensors say that they are on a GPU."""
    machine = Machine()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, machine.current = machine.current, stream
        try:
            yield
        finally:
            machine.current = before

    @contextmanager
    def same(device: Any) -> Iterator[None]:
        yield

    def synchronize(device: Any = None) -> None:
        everything: Clock = {}
        for stream in machine.streams:
            join(everything, stream.clock)
        machine.wait(everything)

    def record_stream(t: Tensor, stream: Stream) -> None:
        machine.recorded[key(t)].add(stream.index)

    class Recorded(Event):
        pass

    Recorded.machine = Event.machine = machine
    replaced = {
        "Stream": lambda device=None: Stream(machine),
        "Event": Recorded,
        "stream": on,
        "device": same,
        "synchronize": synchronize,
        "current_stream": lambda device=None: machine.current,
    }
    with monkeypatch.context() as patch:
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(Tensor, "record_stream", record_stream)
        patch.setattr(Tensor, "is_cuda", property(lambda t: True))
        with machine:
            yield machine
