"""A model of CUDA streams on the CPU that reports races: accesses that no event orders.

``cpu:0``, ``cpu:1`` ... are GPUs with streams, and ``cpu`` is the host: which of them has the
memory of a tensor is known by its storage. Every kernel (an operation of torch) runs at once, so
values are right whatever the order; what is checked is whether streams and events force that order.
Streams, events and the host have vector clocks: an access is ordered after another if its stream
has heard of it. Memory is modelled too: whoever gives a tensor back while another stream still
reads it must have recorded that stream, because the allocator hands the bytes to the next tensor of
the stream that made them.

With `delays` kernels run late: any time after all that their stream had heard of when they were
launched, and at the latest when the host waits for them. Until then what they make is not a number,
and what they change is as it was, so that a missing wait shows in the bits of the result.
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections import defaultdict, deque
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

Clock = dict[int, int]  # how far each stream has come
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


class Kernel(NamedTuple):
    """What a stream does later, after all that it had heard of at the launch."""

    number: int
    clock: Clock
    action: Callable[[], None]


class Machine(TorchDispatchMode):
    """A host and its GPUs, their streams, and the storages that they use.

    Parameters
    ----------
    delays
        Seed of the delays of all kernels; None: they run at once.
    """

    def __init__(self, delays: int | None = None) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.here = threading.local()
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.defaults: dict[int, Stream] = {}  # by GPU
        self.gpu: dict[int, int] = {}  # storage -> whose memory it is; others are the host's
        self.locked: set[int] = set()  # page-locked ones of the host
        self.writes: dict[int, tuple[int, int]] = {}  # storage -> stream and tick of the last
        self.reads: dict[int, dict[int, int]] = defaultdict(dict)  # storage -> stream -> tick
        self.made_by: dict[int, int] = {}
        self.recorded: dict[int, set[int]] = defaultdict(set)
        self.met: set[int] = set()  # storages, until they are given back
        self.races: list[str] = []
        self.kernels = 0
        self.waits = 0  # of the host
        self.random = None if delays is None else random.Random(delays)
        self.pending: dict[int, deque[Kernel]] = defaultdict(deque)  # by stream
        self.speed: dict[int, float] = {}
        self.done: Clock = {}

    def stream_of(self, gpu: int) -> Stream:
        """The stream of a GPU that is current in this thread."""
        found: Stream | None = vars(self.here).get("streams", {}).get(gpu)
        if found is None:
            found = self.defaults.get(gpu) or Stream(self, gpu)
            self.defaults[gpu] = found
        return found

    @property
    def current(self) -> Stream:
        """That of the GPU that is current in this thread."""
        return self.stream_of(vars(self.here).get("gpu", 0))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, as a kernel on the current stream or on the host."""
        with self.lock:
            return self._operation(function, args, kwargs or {})

    def page_locked_like(self, t: Tensor) -> Tensor:
        """Memory of the host that streams copy to and from while it goes on."""
        with _disable_current_modes():
            made = torch.empty_like(t)
        return self.lock_pages(made)

    def lock_pages(self, t: Tensor) -> Tensor:
        """Mark it as such."""
        self._meet(t)
        self.locked.add(key(t))
        return t

    def _operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        schema = function._schema
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        changed = self._changed(schema, args, kwargs)
        place = next((self.gpu[key(t)] for t in given if key(t) in self.gpu), None)
        device = kwargs.get("device")
        if device is not None and device.type == "meta":
            return function(*args, **kwargs)
        # a cast in a backward has the device of its input, which has no number in torch
        casts = place is not None and kwargs.get("dtype") not in (None, given[0].dtype)
        goes_to = place if device is None or casts else device.index
        view = schema.name in _VIEWS or any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        if (place is None and goes_to is None) or function.namespace == "c10d":
            for t in given if not view else ():
                self._check_host(t, function, any(t is c for c in changed))
            return function(*args, **kwargs)
        asked = schema.name in _READS_ON_HOST
        stream = self.stream_of(next(p for p in (place, goes_to) if p is not None))
        far = stream
        if schema.name in _COPIES:
            ends = [self.gpu.get(key(t)) for t in (*given[::-1], *changed)]
            ends = [ends[0], goes_to if device is not None else ends[-1]]  # source, target
            used = [self.stream_of(p) for p in ends if p is not None]
            stream, far = used[0], used[-1]
            if stream is not far:  # a copy between GPUs is ordered with what both have
                stream.wait_stream(far)
        action = None
        if self.random is None or view or asked:
            if asked:
                self._catch_up(stream.clock)
            result = function(*args, **kwargs)
        else:
            result, action = self._later(function, args, kwargs, changed)
        old = {key(t) for t in given}
        fresh = [t for t in tree_leaves(result) if isinstance(t, Tensor) and key(t) not in old]
        for t in fresh if goes_to is not None else ():
            self._meet(t)
            self.gpu[key(t)], self.made_by[key(t)] = goes_to, self.stream_of(goes_to).index
        if not (fresh or changed or asked):
            return result  # a view
        self.kernels += 1
        stream.launch()
        for t in given if schema.name not in _LOOKS_AT_SHAPES else ():
            if not any(t is c for c in changed):
                self.read(stream, t, schema.name)
        for t in (*changed, *fresh):
            self.write(stream, t, schema.name)
        if self.random is not None:
            row = self.pending[stream.index]
            row.append(Kernel(self.kernels, dict(stream.clock), action or (lambda: None)))
            self._go_on(self.random)
        if stream is not far:
            far.wait_stream(stream)
        if asked or (schema.name in _COPIES and self._stops_the_host(args, kwargs, given, fresh)):
            self.wait(stream.clock)
        return result

    def _stops_the_host(self, args: Any, kwargs: Any, given: Any, fresh: Any) -> bool:
        """Whether it copies between host and GPU while neither goes on."""
        ours = [key(t) for t in (*given, *fresh) if key(t) not in self.gpu]
        free = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        return bool(ours) and not (free and self.locked.issuperset(ours))

    def _check_host(self, t: Tensor, function: Any, changes: bool) -> None:
        place = key(t)
        uses = [self.writes[place]] if place in self.writes else []
        uses += self.reads[place].items() if changes and place in self.reads else ()
        if any(self.host.get(stream, 0) < tick for stream, tick in uses):
            self.races.append(f"host: {function} uses what a stream still copies")

    def _later(
        self, function: Any, args: Any, kwargs: Any, changed: list[Tensor]
    ) -> tuple[Any, Callable[[], None]]:
        """A result that is no number yet, and what makes it one."""
        copies = {id(t): t.clone() for t in changed}
        own = {id(copies[id(t)]): t for t in changed}
        draws = torch.Tag.nondeterministic_seeded in function.tags
        generator = kwargs.get("generator") or torch.default_generator
        before = generator.get_state() if draws else None
        trial = tree_map(lambda t: copies.get(id(t), t), (args, kwargs))
        result = tree_map(lambda t: own.get(id(t), t), function(*trial[0], **trial[1]))
        fresh = {
            k: t for k, t in enumerate(tree_leaves(result))
            if isinstance(t, Tensor) and not any(t is c for c in changed)
        }  # fmt: skip
        for t in fresh.values():
            t.fill_(float("nan")) if t.is_floating_point() else t.zero_()
        # the memory as it is named now: a parameter may have other memory when this runs; a number
        # of the host is read at the launch
        copying = function._schema.name in _COPIES

        def named(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.data if copying or key(value) in self.gpu else value.detach().clone()

        (at, more), made = tree_map(named, (args, kwargs)), {k: t.data for k, t in fresh.items()}

        def action() -> None:
            now = generator.get_state()
            if before is not None:
                generator.set_state(before)
            rows = tree_leaves(function(*at, **more))
            for k, t in made.items():
                t.copy_(rows[k])
            generator.set_state(now)

        return result, (lambda: None) if "empty" in function._schema.name else action

    def _go_on(self, draw: random.Random) -> None:
        """Let some streams run some of their kernels, each at a speed that changes now and then."""
        for _ in range(draw.randrange(4)):
            where = draw.choice(list(self.pending))
            if where not in self.speed or draw.random() < 0.01:
                self.speed[where] = draw.choice((0.0, 0.1, 1.0, 5.0))
            row = self.pending[where]
            for _ in range(int(self.speed[where] * draw.randrange(20) / 2)):
                if not row or any(
                    self.done.get(s, 0) < n - (s == where) for s, n in row[0].clock.items()
                ):
                    break
                self._run(where)

    def _run(self, stream: int) -> None:
        kernel = self.pending[stream].popleft()
        with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            kernel.action()
        self.done[stream] = self.done.get(stream, 0) + 1

    def _catch_up(self, clock: Clock) -> None:
        """Run what is waited for: all of it has heard of nothing else."""
        if self.random is not None:
            rows = [
                (kernel.number, stream)
                for stream, tick in clock.items()
                for kernel in list(self.pending[stream])[: max(0, tick - self.done.get(stream, 0))]
            ]
            for _, stream in sorted(rows):
                self._run(stream)

    def read(self, stream: Stream, t: Tensor, what: str) -> None:
        """An access that must come after the last write."""
        place = key(t)
        self._meet(t)
        if place in self.writes:
            self._ordered(stream, *self.writes[place], f"{what} reads what is still written")
        self.reads[place][stream.index] = stream.tick

    def write(self, stream: Stream, t: Tensor, what: str) -> None:
        """An access that must come after all others."""
        place = key(t)
        self._meet(t)
        if place in self.writes:
            self._ordered(stream, *self.writes[place], f"{what} writes what is still written")
        for other, tick in self.reads[place].items():
            self._ordered(stream, other, tick, f"{what} writes what is still read")
        self.writes[place] = (stream.index, stream.tick)
        self.reads[place] = {}

    def _meet(self, t: Tensor) -> None:
        if key(t) not in self.met:
            self.met.add(key(t))
            weakref.finalize(t.untyped_storage(), self._freed, key(t))

    def wait(self, clock: Clock) -> None:
        """The host waits for something."""
        with self.lock:
            self.waits += 1
            self._catch_up(clock)
            join(self.host, clock)

    def _changed(self, schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
        found = []
        for k, argument in enumerate(schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or argument.name in _CHANGES.get(schema.name, ()):
                value = args[k] if k < len(args) else kwargs.get(argument.name)
                found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        return found

    def _ordered(self, stream: Stream, other: int, tick: int, what: str) -> None:
        if stream.clock.get(other, 0) < tick:
            self.races.append(f"stream {stream.index}: {what} by stream {other}")

    def _freed(self, place: int) -> None:
        self.met.discard(place)
        self.gpu.pop(place, None)
        self.locked.discard(place)
        owner = self.made_by.pop(place, -1)
        accesses = dict(self.reads.pop(place, {}))
        if place in self.writes:
            stream, tick = self.writes.pop(place)
            accesses[stream] = max(tick, accesses.get(stream, 0))
        recorded = self.recorded.pop(place, set())
        for other, tick in accesses.items():
            if owner < 0:
                break
            known = max(self.streams[owner].clock.get(other, 0), self.host.get(other, 0))
            if other != owner and other not in recorded and known < tick:
                self.races.append(f"stream {owner} gets back memory that stream {other} uses")


class Stream:
    """A queue of kernels; knows how far the others were that it has waited for."""

    def __init__(self, machine: Machine, gpu: int = 0) -> None:
        self.machine, self.gpu, self.index = machine, gpu, len(machine.streams)
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
        with self.machine.lock:
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

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timed, self.clock, self.time = enable_timing, {}, 0

    def record(self, stream: Stream | None = None) -> None:
        """Note how far a stream is."""
        stream = stream or self.machine.current
        with self.machine.lock:
            join(stream.clock, self.machine.host)
            self.clock, self.time = dict(stream.clock), stream.time

    def synchronize(self) -> None:
        """Let the host wait."""
        self.machine.wait(self.clock)

    def query(self) -> bool:
        """Whether the host knows that it is over; without delays not before it has waited."""
        if self.machine.random is not None and all(
            self.machine.done.get(s, 0) >= tick for s, tick in self.clock.items()
        ):
            join(self.machine.host, self.clock)
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
def streams(monkeypatch: pytest.MonkeyPatch, delays: int | None = None) -> Iterator[Machine]:
    """Replace what the executor uses of `torch.cuda`: devices with a number are GPUs."""
    machine = Machine(delays)

    @contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        here = vars(machine.here)
        before = dict(here)
        if stream is not None:
            streams = {**here.get("streams", {}), stream.gpu: stream}
            here.update(streams=streams, gpu=stream.gpu)
        here["watched"] = True
        try:
            with nullcontext() if before.get("watched") else machine:  # in a thread of its own
                yield
        finally:
            here.clear()
            here.update(before)

    @contextmanager
    def chosen(device: torch.device) -> Iterator[None]:
        with on(machine.stream_of(device.index)):
            yield

    def number(device: torch.device | None) -> int:
        found = None if device is None else device.index
        return machine.current.gpu if found is None else found

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
        "Stream": lambda device=None, priority=0: Stream(machine, number(device)),
        "Event": Recorded,
        "stream": on,
        "device": chosen,
        "set_device": lambda device: vars(machine.here).update(gpu=device.index),
        "synchronize": synchronize,
        "current_stream": lambda device=None: machine.stream_of(number(device)),
    }

    def device(t: Tensor) -> torch.device:
        number = machine.gpu.get(key(t))
        return torch.device("cpu") if number is None else torch.device("cpu", number)

    def to(t: Tensor, *given: Any, copy: bool = False, **named: Any) -> Tensor:
        # torch itself takes GPUs and host for one device
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

    def seed_generator(key: int, device: torch.device) -> None:
        with machine.lock:  # another thread may be drawing for a kernel that comes late
            torch.default_generator.manual_seed(key)

    of_tensors = {
        "record_stream": record_stream,
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
        "seed_generator": seed_generator,
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
        machine.here.watched = True
        with machine:
            yield machine
