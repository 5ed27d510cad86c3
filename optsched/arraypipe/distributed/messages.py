"""Messages between processes: as bytes, over gloo, and in the order of a device's blocks.

Messages cannot deadlock. Each of a plan has a separate tag, sends do not block, and a device that
awaits a message has posted its receive. A message depends on nothing but the block that makes it:
such devices are a network of Kahn (1974), and one complete execution, the topological order that
`compile` has found, proves that all are complete. Messages of GPUs go through page-locked memory of
the host: no kernel depends on another rank.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from datetime import timedelta
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from optsched.arraypipe.distributed.group import Stalled, lost
from optsched.arraypipe.plan.segments import device_stream
from optsched.arraypipe.runtime.cuda_streams import ALIGNMENT, shift_of, staging
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.state import Payload
from optsched.errors import InternalError, OptschedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Channel, Instance
    from optsched.arraypipe.runtime.state import JobRun


AHEAD: Final = 4
"""Most receives that a device has posted at a time; more as soon as half of them are taken."""

_SMALL: Final = 2**16  # bytes; of such messages eight times as many, if memory has no limit
_HEAD: Final = 2048  # bytes for all but the tensors; a longer message goes in two parts
_NORM: Final = 8  # bytes of the norm of a gradient
_PREFIX: Final = 4  # bytes of the length of the head


class Label(NamedTuple):
    """Which message it is, as sender and receiver both know it."""

    segment: int
    message: int  # its index in the routes of the plan
    iteration: int


class Links:
    """Links from this rank to all others of its replica; a wait may take `timeout` seconds."""

    def __init__(self, timeout: float, device: torch.device, replicas: int = 1) -> None:
        self.device = device
        self.timeout = timedelta(seconds=timeout)
        self.size = dist.get_world_size() // replicas
        self.replica, self.rank = divmod(dist.get_rank(), self.size)
        self.members = [[*range(k * self.size, (k + 1) * self.size)] for k in range(replicas)]
        # groups of their own: the tags of their messages meet no others
        groups = [dist.new_group(row, self.timeout, "gloo") for row in self.members]
        self.group: Any = groups[self.replica]

    def post(self, source: int, size: int, tag: int) -> tuple[Tensor, Any]:
        """Post a receive of up to `size` bytes: the buffer, and what to wait for."""
        buffer = staging(size, self.device)
        return buffer, self._begin(self.group.recv, buffer, source, tag)

    def send(self, target: int, message: Tensor, tag: int) -> Any:
        """Begin to send; the message may not change before `wait`."""
        return self._begin(self.group.send, message, target, tag)

    def wait(self, work: Any, peer: int) -> None:
        """Wait for a message to arrive or to have left; `Stalled`, `PeerLost`."""
        began = time.monotonic()
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            waited = time.monotonic() - began
            if waited >= 0.95 * self.timeout.total_seconds():
                raise Stalled(f"no message from rank {peer} for {waited:.3g} s") from error
            raise lost(f"rank {peer}", error) from error

    def leave(self) -> None:
        """Leave the group as things are: peers that still wait for this rank notice it at once."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def _begin(self, begin: Any, buffer: Tensor, peer: int, tag: int) -> Any:
        try:
            return begin([buffer], peer, tag)
        except RuntimeError as error:
            raise lost(f"rank {peer}", error) from error


def pack(label: Label, payload: Payload, device: torch.device) -> Tensor:
    """Return a message in one buffer on the host: a head, and the tensors as they are aligned."""
    rows: list[tuple[Any, ...] | None] = []
    end = 0
    for t in payload.tensors:
        if t is None:
            rows.append(None)
            continue
        if t.layout != torch.strided:
            raise OptschedError(
                f"a {t.dtype} tensor with layout {t.layout} cannot be sent to another process"
            )
        begin = _rounded(end) + shift_of(t)
        end = begin + t.nbytes
        rows.append((t.dtype, tuple(t.shape), t.requires_grad, begin, end))
    head = _head(label, payload._replace(tensors=()), rows)
    place = _rounded(len(head))
    buffer = staging(place + end, device)
    memoryview(buffer.numpy())[: len(head)] = head  # type: ignore[arg-type]
    for row, t in zip(rows, payload.tensors, strict=True):
        if row is not None and t is not None:
            _view(buffer[place:], row).copy_(t.detach(), non_blocking=True)
    if on_gpu(device):
        torch.cuda.current_stream(device).synchronize()
    return buffer


def unpack(buffer: Tensor, device: torch.device) -> tuple[Label, int, Payload]:
    """Return label and content of a message that has arrived; its length if it comes by itself."""
    raw = memoryview(buffer.numpy())  # type: ignore[arg-type]
    size = _PREFIX + int.from_bytes(raw[:_PREFIX], "little")
    label, payload, rows, longer = pickle.loads(raw[_PREFIX:size])  # of a rank of this run
    place, end = _rounded(size), max((row[-1] for row in rows if row), default=0)
    data = buffer[place : place + end].to(device, non_blocking=True)
    tensors = tuple([row and _view(data, row).requires_grad_(row[2]) for row in rows])
    return label, longer, payload._replace(tensors=tensors)


def message_bytes(tensors: Sequence[Tensor], norms: int = 0) -> int:
    """Bytes to be ready for, of a message with tensors of these shapes, and norms of gradients."""
    sizes = [_rounded(t.nbytes) + ALIGNMENT for t in tensors]
    return _HEAD + sum(sizes) + _rounded(norms * _NORM)


class Capacity:
    """Bytes of the longest message of every boundary, from the first forward of every job."""

    def __init__(self) -> None:
        self.runs: dict[int, JobRun] = {}
        self.boundary: dict[tuple[int, int], int] = {}  # (job, stage) -> bytes of its output

    def note(self, run: JobRun, stage: int, output: Any) -> None:
        """Remember the output of a stage; its gradient travels with norms if the job clips."""
        self.runs[run.index] = run
        row = output if isinstance(output, tuple) else (output,)
        norms = len(run.unsplit_order) if run.job.needs_norm else 0
        self.boundary[run.index, stage] = message_bytes(row, norms)

    def of(self, segment: Segment, message: int) -> int:
        """Return bytes to be ready for."""
        kind, producer, consumer = segment.routes.messages[message]
        block, other = segment.plan.blocks[producer], segment.plan.blocks[consumer].stage
        pair = min(block.stage, other), max(block.stage, other)
        job = segment.slots[block.job]
        if kind not in ("tied", "weight"):
            return _HEAD if kind == "factor" else self.boundary.get((job, pair[0]), _HEAD)
        run = self.runs.get(job)
        local = [] if run is None else [k for k in pair if run.stages[k].local]
        if run is None or not local:
            return _HEAD
        return message_bytes([run.stages[local[0]].weight(n) for n in run.tied_pairs[pair]])

    def held(self, segment: Segment, device: int) -> tuple[int, int]:
        """Return most bytes of posted receives of a device, and of its outgoing messages."""
        channels = segment.routes.channels
        sizes = [self.of(segment, k) for k in range(len(segment.routes.messages))]
        steady = max(segment.plan.latest) + 2  # from here on cycles repeat
        stream = device_stream(segment, device)
        early = takewhile(lambda now: now.cycle <= steady, stream)
        row = [sizes[k] for k, _ in incoming(segment, early)]
        posted = max((sum(row[k : k + AHEAD]) for k in range(len(row))), default=0)
        sent = (k for row in channels if row.source == device for k in row.messages)
        return posted, sum(sizes[k] for k in sent)


def incoming(segment: Segment, stream: Iterator[Instance]) -> Iterator[tuple[int, int]]:
    """Yield messages of other devices that blocks take, with their iterations."""
    inputs, channel_of = segment.routes.inputs, segment.routes.channel_of
    for now in stream:
        for k in inputs[now.operation]:
            if channel_of[k] >= 0:
                yield k, now.iteration


class MessageQueues:
    """Messages to and from one device; they live as long as the run."""

    def __init__(self, links: Links, capacity: Capacity) -> None:
        self.links, self.capacity = links, capacity
        self.posted: deque[tuple[Tensor, Any]] = deque()  # receives, in the order of the blocks
        self.leaving: dict[int, list[tuple[Any, int, Tensor]]] = {}  # by message
        self.waiting_for = ""  # the message, for a diagnosis
        self.waited_ns = 0  # at receives, since a caller has set it to 0

    def open(self, segment: Segment, number: int, limited: bool) -> None:
        """Begin a segment; `limited`: memory is, by the bytes of `Capacity.held`."""
        self.segment, self.number = segment, number
        self.sizes = [self.capacity.of(segment, k) for k in range(len(segment.routes.messages))]
        self.ahead = AHEAD if limited or max(self.sizes, default=0) > _SMALL else 8 * AHEAD
        self.coming = incoming(segment, device_stream(segment, self.links.rank))

    def receive(self, message: int, iteration: int) -> Payload:
        """Wait for the next message of another device."""
        if len(self.posted) <= self.ahead // 2:
            self._post()
        buffer, work = self.posted.popleft()
        source, expected = self._channel(message).source, Label(self.number, message, iteration)
        self.waiting_for = f"{self._named(message)}, iteration {iteration}"
        began_ns = time.perf_counter_ns()
        self.links.wait(work, source)
        label, longer, payload = unpack(buffer, self.links.device)
        if longer:
            buffer, work = self.links.post(source, longer, 2 * message + 2)
            self.links.wait(work, source)
            label, _, payload = unpack(buffer, self.links.device)
        self.waited_ns += time.perf_counter_ns() - began_ns
        if label != expected:
            raise InternalError(
                f"from rank {source}: expected {self._named(message)}, {expected}; received {label}"
            )
        self.waiting_for = ""
        return payload

    def send(self, message: int, iteration: int, payload: Payload) -> None:
        """Begin to send a message; its tensors are copied."""
        target, label = self._channel(message).target, Label(self.number, message, iteration)
        # that of the last iteration or segment has been received: this does not wait
        self._retire(message)
        buffer, tag = pack(label, payload, self.links.device), 2 * message + 1
        parts = self.leaving[message] = []
        if buffer.numel() > self.sizes[message]:
            head = bytearray(_head(label, Payload(()), [], buffer.numel()))
            first = torch.frombuffer(head, dtype=torch.uint8)
            parts.append((self.links.send(target, first, tag), target, first))
            tag += 1
        parts.append((self.links.send(target, buffer, tag), target, buffer))

    def flush(self) -> None:
        """Wait until everything has left."""
        for message in list(self.leaving):
            self._retire(message)

    def abandon(self) -> None:
        """Forget all posted receives, which would keep the connections open."""
        self.posted.clear()
        self.leaving = {}

    def _post(self) -> None:
        for k, _ in islice(self.coming, self.ahead - len(self.posted)):
            source = self._channel(k).source
            self.posted.append(self.links.post(source, self.sizes[k], 2 * k + 1))

    def _retire(self, message: int) -> None:
        for work, target, _ in self.leaving.pop(message, ()):
            self.links.wait(work, target)

    def _channel(self, message: int) -> Channel:
        return self.segment.routes.channels[self.segment.routes.channel_of[message]]

    def _named(self, message: int) -> str:
        kind, producer, consumer = self.segment.routes.messages[message]
        taker, maker = (self.segment.plan.blocks[i] for i in (consumer, producer))
        return (
            f"{kind} for job {self.segment.slots[taker.job]}, micro-batch {taker.microbatch}, from "
            f"stage {maker.stage} to stage {taker.stage}"
        )


def _head(label: Label, payload: Payload, rows: Sequence[Any], longer: int = 0) -> bytes:
    head = pickle.dumps((label, payload, rows, longer))
    return len(head).to_bytes(_PREFIX, "little") + head


def _view(data: Tensor, row: tuple[Any, ...]) -> Tensor:
    dtype, shape, _, begin, end = row
    return data[begin:end].view(dtype).view(shape)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
