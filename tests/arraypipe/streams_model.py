"""A model of a CUDA device on the CPU that reports races: accesses that no event orders.

``cpu:0`` is a GPU with streams, and ``cpu`` is the host: which of them has the memory of a tensor
is known by its storage. Every kernel (an operation of torch) runs at once, so values are right
whatever the order; what is checked is whether streams and events force that order. Streams, events
and the host have vector clocks: an access is ordered after another if its stream has heard of it.
Memory is modelled too: whoever gives a tensor back while another stream still reads it must have
recorded that stream, because the allocator hands the bytes to the next tensor of the stream that
made them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

Clock = dict[int, int]  # how far each stream has come
GPU = torch.device("cpu", 0)
_READS_ON_HOST = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_COPIES = ("aten::copy_", "aten::_to_copy")
_LOOKS_AT_SHAPES = ("aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like")
_VIEWS = ("aten::_unsafe_view", "aten::_reshape_alias")  # which do not say that they are
_CHANGES = {"aten::native_batch_norm": ("running_mean", "running_var")}  # ... do not say either
_NANOSECONDS = 1000  # that a kernel takes


def join(into: Clock, other: Clock) -> None:
    """Hear of all that another has heard of."""
    for stream, tick in other.items():
        into[stream] = max(into.get(stream, 0), tick)


def key(t: Tensor) -> int:
    """The storage of a tensor."""
    return int(t.untyped_storage()._cdata)


class Machine(TorchDispatchMode):
    """A host and its GPU, the streams, and the storages that they use."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()  # a thread writes checkpoints
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.host: Clock = {}
        self.gpu: set[int] = set()  # storages of the GPU; others are the host's
        self.locked: set[int] = set()  # page-locked ones of the host
        self.writes: dict[int, tuple[int, int]] = {}  # storage -> stream and tick of the last
        self.reads: dict[int, dict[int, int]] = defaultdict(dict)  # storage -> stream -> tick
        self.made_by: dict[int, int] = {}
        self.recorded: dict[int, set[int]] = defaultdict(set)
        self.met: set[int] = set()  # storages, until they are given back
        self.races: list[str] = []
        self.waits = 0  # of the host
        self.stood = 0  # nanoseconds that blocks waited for other streams

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, as a kernel on the current stream or on the host."""
        with self.lock:
            return self._operation(function, args, kwargs or {})

    def lock_pages(self, t: Tensor) -> Tensor:
        """Mark memory of the host that streams copy to and from while it goes on."""
        self._meet(t)
        self.locked.add(key(t))
        return t

    def page_locked_like(self, t: Tensor) -> Tensor:
        """Memory that is."""
        with _disable_current_modes():
            made = torch.empty_like(t)
        return self.lock_pages(made)

    def wait(self, clock: Clock) -> None:
        """The host waits for something."""
        with self.lock:
            self.waits += 1
            join(self.host, clock)

    def _operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        schema, device = function._schema, kwargs.get("device")
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        changed = self._changed(schema, args, kwargs)
        here = any(key(t) in self.gpu for t in given)
        # a cast in a backward has the device of its input, which has no number in torch
        casts = here and kwargs.get("dtype") not in (None, given[0].dtype)
        there = here if device is None or casts else device.index is not None
        view = schema.name in _VIEWS or any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        result = function(*args, **kwargs)
        if not (here or there) or function.namespace == "c10d":
            for t in given if not view else ():
                self.check_host(t, function, any(t is c for c in changed))
            return result
        asked = schema.name in _READS_ON_HOST
        old = {key(t) for t in given}
        fresh = [t for t in tree_leaves(result) if isinstance(t, Tensor) and key(t) not in old]
        for t in fresh if there else ():
            self._meet(t)
            self.gpu.add(key(t))
            self.made_by[key(t)] = self.current.index
        if not (fresh or changed or asked):
            return result  # a view
        stream = self.current
        stream.launch()
        for t in given if schema.name not in _LOOKS_AT_SHAPES else ():
            if not any(t is c for c in changed):
                self._ordered(stream, t, schema.name)
                self.reads[key(t)][stream.index] = stream.tick
        for t in (*changed, *fresh):
            self._ordered(stream, t, schema.name, self.reads.pop(key(t), {}))
            self.writes[key(t)] = (stream.index, stream.tick)
        if asked or (schema.name in _COPIES and self._stops_the_host(args, kwargs, given, fresh)):
            self.wait(stream.clock)
        return result

    def _stops_the_host(self, args: Any, kwargs: Any, given: Any, fresh: Any) -> bool:
        """Whether it copies between host and GPU while neither goes on."""
        ours = [key(t) for t in (*given, *fresh) if key(t) not in self.gpu]
        free = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        return bool(ours) and not (free and self.locked.issuperset(ours))

    def check_host(self, t: Tensor, what: object, changes: bool) -> None:
        """An access of the host, which must have waited for the streams that use the memory."""
        place = key(t)
        uses = [self.writes[place]] if place in self.writes else []
        uses += self.reads[place].items() if changes and place in self.reads else ()
        if any(self.host.get(stream, 0) < tick for stream, tick in uses):
            self.races.append(f"host: {what} uses what a stream still copies")

    def _ordered(self, stream: Stream, t: Tensor, what: str, reads: Any = None) -> None:
        """An access that must come after the last write, and one that writes after all reads."""
        self._meet(t)
        before = [self.writes[key(t)]] if key(t) in self.writes else []
        for other, tick in [*before, *(reads or {}).items()]:
            if stream.clock.get(other, 0) < tick:
                self.races.append(f"stream {stream.index}: {what} races with stream {other}")

    def _meet(self, t: Tensor) -> None:
        if key(t) not in self.met:
            self.met.add(key(t))
            weakref.finalize(t.untyped_storage(), self._freed, key(t))

    def _changed(self, schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
        found = []
        for k, argument in enumerate(schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or argument.name in _CHANGES.get(schema.name, ()):
                value = args[k] if k < len(args) else kwargs.get(argument.name)
                found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        return found

    def _freed(self, place: int) -> None:
        self.met.discard(place)
        self.gpu.discard(place)
        self.locked.discard(place)
        owner = self.made_by.pop(place, -1)
        accesses = [*self.reads.pop(place, {}).items()]
        if place in self.writes:
            accesses.append(self.writes.pop(place))
        recorded = self.recorded.pop(place, set())
        for other, tick in accesses if owner >= 0 else ():
            known = max(self.streams[owner].clock.get(other, 0), self.host.get(other, 0))
            if other != owner and other not in recorded and known < tick:
                self.races.append(f"stream {owner} gets back memory that stream {other} uses")


class Stream:
    """A queue of kernels; knows how far the others were that it has waited for."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.index = machine, len(machine.streams)
        self.clock: Clock = {}
        self.time = 0  # in nanoseconds
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
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Kernels launched from now on come after an event."""
        join(self.clock, event.clock)
        if self is self.machine.streams[0]:
            self.machine.stood += max(0, event.time - self.time)
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
        """Whether the host has waited for it: as late as can be."""
        return all(self.machine.host.get(s, 0) >= tick for s, tick in self.clock.items())

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events that are over."""
        assert self.timed and end.timed
        assert self.query() and end.query()  # else torch raises
        return (end.time - self.time) / 1e6


@contextmanager
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Replace what the executor uses of `torch.cuda`: the device with a number is the GPU."""
    machine = Machine()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, machine.current = machine.current, stream
        try:
            yield
        finally:
            machine.current = before

    def synchronize(device: Any = None) -> None:
        for stream in machine.streams:
            machine.wait(stream.clock)

    class Recorded(Event):
        pass

    Recorded.machine = machine
    replaced = {
        "Stream": lambda device=None, priority=0: Stream(machine),
        "Event": Recorded,
        "stream": on,
        "set_device": lambda device: None,
        "synchronize": synchronize,
        "current_stream": lambda device=None: machine.current,
    }

    def device(t: Tensor) -> torch.device:
        return GPU if key(t) in machine.gpu else torch.device("cpu")

    def to(t: Tensor, *given: Any, copy: bool = False, **named: Any) -> Tensor:
        # torch itself takes GPU and host for one device
        if given and isinstance(given[0], Tensor):
            given = given[0].device, given[0].dtype
        where, dtype, free, _ = torch._C._nn._parse_to(*given, **named)
        where, dtype = where or t.device, dtype or t.dtype
        if not copy and (t.device, t.dtype) == (where, dtype):
            return t
        made: Tensor = torch.ops.aten._to_copy(t, dtype=dtype, device=where, non_blocking=free)
        return made

    grouped = torch._C._group_tensors_by_device_and_dtype

    def by_device(rows: Any, with_indices: bool) -> Any:
        found = grouped(rows, with_indices)
        return {(group[0][0][0].device, what[1]): group for what, group in found.items()}

    def flat_bytes(sizes: Sequence[int], device: torch.device, pinned: bool) -> list[Tensor]:
        made = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        return [machine.lock_pages(t) for t in made] if pinned else made

    plain_numpy = Tensor.numpy

    def numpy(t: Tensor) -> Any:  # for files and messages
        machine.check_host(t, "numpy", False)
        return plain_numpy(t)

    of_tensors = {
        "numpy": numpy,
        "record_stream": lambda t, stream: machine.recorded[key(t)].add(stream.index),
        "is_cuda": property(lambda t: key(t) in machine.gpu),
        "is_pinned": lambda t: key(t) in machine.locked,
        "device": property(device),
        "to": to,
        "cpu": lambda t: to(t, "cpu"),
    }
    of_executor = {
        "on_gpu": lambda device: device.index is not None,
        "page_locked_like": machine.page_locked_like,
        "flat_bytes": flat_bytes,
    }
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", by_device)
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
        for name, value in of_tensors.items():
            patch.setattr(Tensor, name, value)
        for module in [m for n, m in sys.modules.items() if n.startswith("optsched.arraypipe")]:
            for name, value in of_executor.items():
                if name in vars(module):
                    patch.setattr(module, name, value)
        with machine:
            yield machine
