"""Messages between processes: over gloo, and between GPUs with credits."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from optsched.arraypipe.distributed.protocol import SIZE, unpack
from optsched.arraypipe.plan.types import TOMBSTONE
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.errors import OptschedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


LANES: Final = 8
"""Tags of ordinary messages; the tag of a long one is that much higher."""
CREDITS: Final = 2 * LANES
"""Added to the lane for the credits of `process_credits`."""


Lane = tuple[int, int, int]
"""Source, target, kind of a channel."""


class PeerLost(OptschedError):
    """Another process has ended or cannot be reached any more."""


class Stalled(OptschedError):
    """Nothing has arrived for longer than the timeout; the message says what each device awaits."""


@contextmanager
def hearing() -> Iterator[None]:
    """What gloo raises in a collective call means that another rank is not there any more."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"the connection to another rank is lost, its run has ended ({_line(error)})"
        ) from error


class GlooLinks:
    """Links from this rank to all others; any wait may take `timeout` seconds."""

    device = torch.device("cpu")
    apart = False  # whether headers and tensors travel apart, so that no length need be guessed
    taken = 0  # bytes of the GPU that communicators have, and contexts beyond `CUDA_CONTEXT`

    def __init__(self, timeout: float) -> None:
        self.timeout = timedelta(seconds=timeout)
        # a group of its own: the tags of its messages meet no other's
        self.group: Any = dist.new_group(backend="gloo", timeout=self.timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def post(self, source: int, lane: int, size: int) -> Any:
        """Be ready for a message of up to `size` bytes."""
        buffer = torch.empty(size, dtype=torch.uint8)
        return buffer, self._begin(self.group.recv, buffer, source, lane)

    def receive(self, incoming: Any, source: int) -> tuple[Tensor, Tensor]:
        """Wait for a message: where its header and table are, and where its tensors are."""
        buffer, work = incoming
        self.wait(work, source)
        return buffer, buffer

    def send(self, target: int, lane: int, head: Tensor, body: Tensor | None = None) -> Any:
        """Begin to send; neither part may change before `wait`. On the CPU they are one."""
        return self._begin(self.group.send, head, target, lane)

    def wait(self, work: Any, peer: int) -> None:
        """Wait for a message to arrive or to have left; `Stalled`, `PeerLost`."""
        began = time.monotonic()
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            waited = time.monotonic() - began
            if waited >= 0.95 * self.timeout.total_seconds():
                raise Stalled(f"no message from rank {peer} for {waited:.3g} s") from error
            raise _lost(peer, error) from error

    def missing(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Channels that there are not: gloo makes them as they are needed."""
        return []

    def close(self) -> None:
        """Leave the group, when everything has been sent and received."""
        self.leave()

    def abort(self) -> None:
        """End what was launched for a message that never comes."""

    def leave(self) -> None:
        """Leave the group as things are: peers that still wait for this rank hear of it at once."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def _begin(self, begin: Any, buffer: Tensor, peer: int, lane: int) -> Any:
        try:
            return begin([buffer], peer, lane)
        except RuntimeError as error:
            raise _lost(peer, error) from error


def _lost(peer: int, error: RuntimeError) -> PeerLost:
    return PeerLost(f"the connection to rank {peer} is lost, its run has ended ({_line(error)})")


def _line(error: RuntimeError) -> str:
    # gloo: "[/where/file.cc:537] Read error [address]: what. A hint for its own developers."
    first = str(error).strip().splitlines()[0]
    return (first.partition("] ")[2] or first).partition(". ")[0]


HEAD: Final = 1 << 16
"""Bytes for a header and its table of tensors."""


class _Outgoing(NamedTuple):
    head: Tensor
    body: Tensor | None
    made: torch.cuda.Event | None
    done: Future[Any]


class _Posted(NamedTuple):
    head: Tensor
    work: Any
    credit: Any
    done: Future[tuple[Tensor, Tensor, torch.cuda.Event | None]]


class CreditedLinks(GlooLinks):
    """Links that carry tensors by another backend than their headers. Collective.

    `lanes` are all channels of the run, in the same order on all ranks.
    """

    apart = True

    def __init__(self, timeout: float, lanes: Sequence[Lane], device: torch.device) -> None:
        super().__init__(timeout)
        self.device = device
        self._cuda = on_gpu(device)
        # or its watchdog would end the process before `abort` and the sentence that says why
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        # every channel is such an operation, on a communicator of its own
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        self._every = frozenset(lanes)
        self._queues: dict[Lane, SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []
        every = {lane: self._group(sorted(lane[:2])) for lane in lanes}
        own = {lane: group for lane, group in every.items() if self.rank in lane[:2]}
        for (source, target, _), group in own.items():
            # communicators are made at their first use: in order
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            if self.rank == source:
                group.send([byte], self._in_group(target), 0).wait()
            else:
                group.recv([byte], self._in_group(source), 0).wait()
            if self._cuda:
                torch.cuda.synchronize(device)
        self._groups = [*own.values()]
        for lane, group in own.items():
            queue = self._queues[lane] = SimpleQueue()
            work = self._deliver if lane[0] == self.rank else self._collect
            thread = threading.Thread(
                target=self._loop, args=(queue, work, lane, group), name=f"channel {lane}",
                daemon=True,
            )  # fmt: skip
            thread.start()
            self._threads.append(thread)

    def post(self, source: int, lane: int, size: int) -> Any:
        """Give a credit and be ready for the header that answers it."""
        head = torch.empty(HEAD, dtype=torch.uint8)
        work = self._begin(self.group.recv, head, source, lane)
        word = torch.zeros(1, dtype=torch.uint8)
        credit = self._begin(self.group.send, word, source, lane + CREDITS), word
        posted = _Posted(head, work, credit, Future())
        self._queues[source, self.rank, lane].put(posted)
        return posted

    def receive(self, incoming: Any, source: int) -> tuple[Tensor, Tensor]:
        """Wait for the header; the tensors are there when the GPU comes to using them."""
        head, buffer, event = self._result(incoming.done, source)
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            buffer.record_stream(stream)
        return head, buffer

    def send(self, target: int, lane: int, head: Tensor, body: Tensor | None = None) -> Any:
        """Begin to send when the receiver has given a credit and the tensors are complete."""
        if head.numel() > HEAD:
            raise OptschedError(f"a message has a table of {head.numel()} bytes, at most {HEAD}")
        made = None
        if self._cuda and body is not None:
            made = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            made.record()
        outgoing = _Outgoing(head, body, made, Future())
        self._queues[self.rank, target, lane].put(outgoing)
        return outgoing.done

    def wait(self, work: Any, peer: int) -> None:
        """Wait until a message is launched; what the stream does next may change its buffer."""
        launched = self._result(work, peer)
        if launched is not None:
            launched.wait()

    def missing(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Channels without a communicator, which all ranks would have to make together."""
        return [lane for lane in lanes if lane not in self._every]

    def close(self) -> None:
        """End the threads and leave all groups."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self.leave()

    def abort(self) -> None:
        """End what was launched: a kernel whose partner is gone would run for ever."""
        if self._cuda:
            self._abort(self._groups)
            self._groups = []

    def leave(self) -> None:
        """Leave all groups; threads that still wait for a message end with an error."""
        for group in self._groups:
            self._destroy(group)
        self._groups = []
        super().leave()

    # a group of two ranks; tests have others than NCCL's

    def _group(self, ranks: Sequence[int]) -> Any:
        return dist.new_group(ranks, backend="nccl", timeout=self.timeout)

    def _abort(self, groups: Sequence[Any]) -> None:
        # together, or the abort of one may wait for another's: pytorch/pytorch#119797
        backends = [group._get_backend(self.device) for group in groups]
        for backend in backends[:1]:
            backend._group_start()
        for group in groups:
            _abort_process_group(group)
        for backend in backends[:1]:
            backend._group_end()

    def _destroy(self, group: Any) -> None:
        dist.destroy_process_group(group)

    def _in_group(self, peer: int) -> int:
        """Its rank in a group with this one."""
        return int(peer > self.rank)

    def _result(self, done: Future[Any], peer: int) -> Any:
        try:
            return done.result(self.timeout.total_seconds())
        except Late as error:
            raise Stalled(f"no message from rank {peer} for {self.timeout}") from error

    def _loop(self, queue: SimpleQueue[Any], work: Any, lane: Lane, group: Any) -> None:
        stream = None
        if self._cuda:  # a thread begins on GPU 0, where it would make a context
            torch.cuda.set_device(self.device)
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        failed: BaseException | None = None
        while (item := queue.get()) is not None:
            try:
                if failed is not None:
                    raise failed
                with torch.cuda.stream(stream):
                    item.done.set_result(work(item, lane, group))
            except BaseException as error:
                failed = error
                item.done.set_exception(error)

    def _deliver(self, item: _Outgoing, lane: Lane, group: Any) -> Any:
        """Sending end of one message; what was launched for its tensors."""
        _, target, kind = lane
        credit = torch.empty(1, dtype=torch.uint8)
        super().wait(self._begin(self.group.recv, credit, target, kind + CREDITS), target)
        if item.made is not None:
            item.made.synchronize()
        super().wait(self._begin(self.group.send, item.head, target, kind), target)
        if item.body is None:
            return None
        return group.send([item.body], self._in_group(target), 0)

    def _collect(
        self, item: _Posted, lane: Lane, group: Any
    ) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        """Receiving end of one message: header, tensors, and when they are there."""
        source = lane[0]
        super().wait(item.work, source)
        super().wait(item.credit[0], source)
        found = unpack(memoryview(item.head.numpy()))  # type: ignore[arg-type]
        if found.flags & TOMBSTONE:
            return item.head, item.head[:SIZE], None
        buffer = torch.empty(SIZE + found.payload, dtype=torch.uint8, device=self.device)
        group.recv([buffer], self._in_group(source), 0).wait()
        event = None
        if self._cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return item.head, buffer, event
