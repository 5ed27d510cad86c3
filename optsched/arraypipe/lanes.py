"""GPU streams of the inline backend: one a device, so that blocks of several devices overlap.

The host launches blocks one after the other; what a block needs from another device waits on the
GPU for an event, not on the host. Logical devices on one GPU have streams of their own too.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from optsched.arraypipe.gpu_clock import AHEAD, BlockTimes, GpuClock, timer
from optsched.arraypipe.ranks.wire import copied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from optsched.arraypipe.course import Record
    from optsched.arraypipe.gpu_clock import Pause
    from optsched.arraypipe.worker import Parcel

_NOWHERE: Final = -1


class Posted(NamedTuple):
    """A parcel, the lane whose stream made its tensors (-1: that of a link), and when."""

    parcel: Parcel
    lane: int
    ready: torch.cuda.Event


class Carried(NamedTuple):
    """When a parcel went from one GPU to another, on the clock of the host.

    Its message has number `message` in the routes of `segment`, and was made in `cycle`.
    """

    segment: int
    message: int
    cycle: int
    start: int
    end: int


class Lanes:
    """One stream per device of the schedule.

    Parameters
    ----------
    devices
        The GPU of every device of the schedule; entries may repeat.
    pauses
        Gives the events around what the block that is launched has to wait for.
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
        self.times: list[tuple[int, int, int]] = []
        self.carried: list[Carried] = []
        self._pushes: deque[tuple[tuple[int, int, int], _Push]] = deque()  # under way

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
        flying.add(len(self.times), began, ended, self.pauses())
        self.times.append((0, 0, 0))

    def post(
        self,
        sent: Mapping[int, Parcel],
        lane: int,
        targets: Sequence[int],
        segment: int = 0,
        cycle: int = 0,
    ) -> dict[int, Posted]:
        """Inside `block`: what the block has made, on its way to the lanes that want it.

        Parameters
        ----------
        sent
            Parcels by message.
        targets
            Lane of every message.
        segment, cycle
            Of the block, for `carried`.
        """
        if not sent:
            return {}
        ready = _event()
        ready.record(self.streams[lane])
        found = {}
        for k, parcel in sent.items():
            if parcel.tensors and self.devices[targets[k]] != self.devices[lane]:
                found[k], push = self._pushed(parcel, lane, targets[k], ready)
                self._pushes.append(((segment, k, cycle), push))
            else:
                found[k] = Posted(parcel, lane, ready)
        return found

    def keep(self, blocks: Sequence[int], since: tuple[int, int]) -> None:
        """Forget the times of all other blocks, and of parcels made before (segment, cycle)."""
        place = {old: new for new, old in enumerate(blocks)}
        self.times = [self.times[k] for k in blocks]
        for flying in self.flying:
            flying.keep(place)
        self.carried = [c for c in self.carried if (c.segment, c.cycle) >= since]

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
        while self._pushes:
            self._arrive()
        return [
            record._replace(start=start, end=end)
            for record, (start, end, _) in zip(records, self.times, strict=True)
        ]

    def _land(self, lane: int) -> None:
        """Wait for the oldest block in flight, and read its times."""
        if landed := self.flying[lane].land():
            self.times[landed[0]] = landed[1:]

    def _arrive(self) -> None:
        """Wait for the oldest copy between GPUs, and read its times."""
        key, push = self._pushes.popleft()
        self.clocks[push.target].wait(push.ended)
        start = self.clocks[push.source].time(push.began)
        end = self.clocks[push.target].time(push.ended)
        self.carried.append(Carried(*key, start, max(start, end)))

    def _pushed(
        self, parcel: Parcel, lane: int, target: int, ready: torch.cuda.Event
    ) -> tuple[Posted, _Push]:
        """Copy to another GPU, beside the blocks of both; a stream on either side does it.

        A copy between GPUs runs on the source's current stream, and waits for that of the target.
        """
        device = self.devices[target]
        if (lane, target) not in self.links:
            self.links[lane, target] = _stream(self.devices[lane]), _stream(device)
        outward, inward = self.links[lane, target]
        if len(self._pushes) >= AHEAD * len(self.devices):  # older than all blocks in flight
            self._arrive()
        began, arrived = timer(), timer()
        outward.wait_event(ready)
        began.record(outward)
        with torch.cuda.stream(outward), torch.cuda.stream(inward):
            tensors = tuple(
                None if t is None else _copied(t, device, outward) for t in parcel.tensors
            )
            arrived.record(inward)
        push = _Push(self.devices[lane], device, began, arrived)
        return Posted(parcel._replace(tensors=tensors), _NOWHERE, arrived), push


class _Push(NamedTuple):
    source: torch.device
    target: torch.device
    began: torch.cuda.Event
    ended: torch.cuda.Event


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
