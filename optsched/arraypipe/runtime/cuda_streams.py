"""GPU streams of the inline backend, the clock of their events, numbers that come late."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from optsched.arraypipe.distributed.wire import copied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from optsched.arraypipe.plan.types import Record
    from optsched.arraypipe.runtime.types import Parcel, Pause


class Late:
    """The value of a tensor on a GPU, copied behind what its stream has been given so far.

    Reading it waits for that alone, on whichever stream and at whatever time it is read.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = page_locked_like(value)
        self.value.copy_(value.detach(), non_blocking=True)
        self.there = torch.cuda.current_stream(value.device).record_event()

    def item(self) -> float:
        """The number."""
        self.there.synchronize()
        return float(self.value.item())


def page_locked_like(value: Tensor) -> Tensor:
    """Host memory for a tensor, with its strides; a copy to any other would make the host wait."""
    try:
        return torch.empty_like(value, device="cpu", pin_memory=True)
    except RuntimeError as error:  # torch takes it for an error of the GPU
        if "out of memory" not in str(error).lower():
            raise
        size = value.numel() * value.element_size()
        raise torch.OutOfMemoryError(f"the host cannot page-lock {size} bytes") from error


AHEAD: Final = 32
"""Blocks of a device that the host launches ahead.

Enough to keep it busy; few, because memory that another stream has used is free again only when
that stream has got there, so that a host far ahead takes more and more of it.
"""
_NOWHERE: Final = -1
_DRIFT_NS: Final = 60 * 10**9  # after so long the host looks again how far the timers have drifted
_FRESH_NS: Final = 10**9  # events are compared with one of this second: differences are float32


class GpuClock:
    """Times of the host's monotonic clock at which events of one GPU were.

    Events of two GPUs cannot be subtracted, so each is compared with the host once: they agree up
    to the time that the host needs to notice that an event is over.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self.origin = timer()
        self.origin.record(torch.cuda.current_stream(device))
        self.origin.synchronize()
        self.passed_ns = self.looked_ns = time.perf_counter_ns()

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event; if the host had to, it knows now when that was, once a minute."""
        before_ns = time.perf_counter_ns()
        over = event.query()  # type: ignore[no-untyped-call]
        event.synchronize()
        if not over and before_ns - self.looked_ns > _DRIFT_NS:
            self.origin, self.passed_ns = event, time.perf_counter_ns()
            self.looked_ns = self.passed_ns

    def time_ns(self, event: torch.cuda.Event) -> int:
        """When an event was that is over."""
        since_ns: int = round(self.origin.elapsed_time(event) * 1e6)
        now_ns = self.passed_ns + since_ns
        if since_ns > _FRESH_NS:
            self.origin, self.passed_ns = event, now_ns
        return now_ns


class BlockTimes:
    """When blocks ran on one stream: read when they are over, not waited for earlier."""

    def __init__(self, clock: GpuClock) -> None:
        self.clock, self.last_ns = clock, 0
        self.flying: deque[tuple[int, Pause, Sequence[Pause]]] = deque()

    def __len__(self) -> int:
        """Blocks under way."""
        return len(self.flying)

    def add(
        self, row: int, began: torch.cuda.Event, ended: torch.cuda.Event, pauses: Sequence[Pause]
    ) -> None:
        """Note the events around a block and its pauses, and the row that its times are for."""
        self.flying.append((row, (began, ended), pauses))

    def land(self) -> tuple[int, int, int, int] | None:
        """Wait for the oldest block; its row, start, end and pauses, None if it is forgotten.

        As on a CPU what it waited for counts as before its start.
        """
        row, (began, ended), pauses = self.flying.popleft()
        self.clock.wait(ended)
        if row == _NOWHERE:
            return None
        # a host that has looked at the timers again may put back the clock by what they drifted
        start_ns = max(self.last_ns, self.clock.time_ns(began))
        self.last_ns = max(start_ns, self.clock.time_ns(ended))
        waited_ns = round(sum(begin.elapsed_time(end) for begin, end in pauses) * 1e6)
        return row, min(start_ns + waited_ns, self.last_ns), self.last_ns, waited_ns

    def keep(self, place: Mapping[int, int]) -> None:
        """Rows have new numbers; forget those that have none."""
        self.flying = deque((place.get(k, _NOWHERE), both, p) for k, both, p in self.flying)


def timer() -> torch.cuda.Event:
    """An event whose time can be read."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Posted(NamedTuple):
    """A parcel, the lane whose stream made its tensors (-1: that of a link), and when."""

    parcel: Parcel
    lane: int
    ready: torch.cuda.Event


class Lanes:
    """One stream per device of the schedule, whose GPUs may repeat.

    `pauses` gives the events around what the block that is launched has to wait for.
    """

    def __init__(
        self, devices: Sequence[torch.device], pauses: Callable[[], Sequence[Pause]] = list
    ) -> None:
        self.devices, self.pauses = tuple(devices), pauses
        self.streams = [_stream(device) for device in devices]
        self.links: dict[tuple[int, int], tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self.sides: dict[torch.device, torch.cuda.Stream] = {}  # of `aside`
        self.clocks = {device: GpuClock(device) for device in dict.fromkeys(devices)}
        self.flying = [BlockTimes(self.clocks[device]) for device in devices]
        # of all blocks, in the order of their launch: start, end, waited before the start
        self.times_ns: list[tuple[int, int, int]] = []

    def follow(self) -> None:
        """Let blocks launched from now on find what the host has put on the devices itself."""
        for stream, device in zip(self.streams, self.devices, strict=True):
            stream.wait_stream(torch.cuda.current_stream(device))

    def gather(self) -> None:
        """Let what the host itself launches from now on find what all blocks have made."""
        for device in self.clocks:
            current = torch.cuda.current_stream(device)
            for stream in self.streams:
                current.wait_stream(stream)

    @contextmanager
    def aside(self, lanes: Collection[int]) -> Iterator[None]:
        """What is launched inside finds what blocks of some lanes have made; no later one waits.

        On streams that are only used here: the host has to wait for them before it goes on.
        """
        with ExitStack() as stack:
            for device in dict.fromkeys(self.devices[lane] for lane in lanes):
                if device not in self.sides:
                    self.sides[device] = _stream(device)
                for lane in lanes:
                    self.sides[device].wait_stream(self.streams[lane])
                stack.enter_context(torch.cuda.stream(self.sides[device]))
            yield

    @contextmanager
    def block(self, lane: int, posted: Mapping[int, Posted]) -> Iterator[dict[int, Parcel]]:
        """Launch everything inside on the stream of a device, and note when it runs there.

        Gives the parcels, from whichever device they are; waiting for them is not the block's time.
        """
        flying, stream = self.flying[lane], self.streams[lane]
        if len(flying) == AHEAD:
            self._land(lane)
        began, ended = timer(), timer()
        with torch.cuda.device(self.devices[lane]), torch.cuda.stream(stream):
            received = {k: _taken(one, lane, stream) for k, one in posted.items()}
            began.record(stream)
            yield received
            ended.record(stream)
        flying.add(len(self.times_ns), began, ended, self.pauses())
        self.times_ns.append((0, 0, 0))

    def post(
        self, sent: Mapping[int, Parcel], lane: int, targets: Sequence[int]
    ) -> dict[int, Posted]:
        """Inside `block`: parcels by message, on their way to the `targets`, lanes by message."""
        if not sent:
            return {}
        ready = _event()
        ready.record(self.streams[lane])
        found = {}
        for k, parcel in sent.items():
            if parcel.tensors and self.devices[targets[k]] != self.devices[lane]:
                found[k] = self._pushed(parcel, lane, targets[k], ready)
            else:
                found[k] = Posted(parcel, lane, ready)
        return found

    def keep(self, place: Mapping[int, int]) -> None:
        """Rows have new numbers, in the same order; forget those that have none."""
        self.times_ns = [self.times_ns[k] for k in place]
        for flying in self.flying:
            flying.keep(place)

    def synchronize(self) -> None:
        """Wait for all devices."""
        for device in self.clocks:
            torch.cuda.synchronize(device)

    def finish(self, records: Sequence[Record]) -> list[Record]:
        """Wait for all devices; the records with the times of the GPU instead of the host's."""
        self.synchronize()
        for lane, flying in enumerate(self.flying):
            while flying:
                self._land(lane)
        return [
            record._replace(start_ns=start, end_ns=end)
            for record, (start, end, _) in zip(records, self.times_ns, strict=True)
        ]

    def _land(self, lane: int) -> None:
        """Wait for the oldest block in flight, and read its times."""
        if landed := self.flying[lane].land():
            self.times_ns[landed[0]] = landed[1:]

    def _pushed(self, parcel: Parcel, lane: int, target: int, ready: torch.cuda.Event) -> Posted:
        """Copy to another GPU, beside the blocks of both; a stream on either side does it.

        A copy between GPUs runs on the source's current stream, and waits for that of the target.
        """
        device = self.devices[target]
        if (lane, target) not in self.links:
            self.links[lane, target] = _stream(self.devices[lane]), _stream(device)
        outward, inward = self.links[lane, target]
        arrived = _event()
        outward.wait_event(ready)
        with torch.cuda.stream(outward), torch.cuda.stream(inward):
            tensors = tuple(
                None if t is None else _copied(t, device, outward) for t in parcel.tensors
            )
            arrived.record(inward)
        return Posted(parcel._replace(tensors=tensors), _NOWHERE, arrived)


def _taken(posted: Posted, lane: int, stream: torch.cuda.Stream) -> Parcel:
    """A parcel, for what is launched on the stream from now on."""
    if posted.lane != lane:
        stream.wait_event(posted.ready)
        for tensor in posted.parcel.tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)  # its memory is not used again before that
    return posted.parcel


def _copied(tensor: Tensor, device: torch.device, stream: torch.cuda.Stream) -> Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return copied(tensor, device)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
