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

from optsched.arraypipe.distributed.messages import host_bytes, unpack
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.errors import OptschedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


DATA, CREDITS, CHAIN, LONGER = range(4)
"""Tags of gloo messages: heads (or whole messages), credits of `CreditedLinks`, messages of first
forwards, and from `LONGER` on one tag per message of a plan, if it is longer than was posted."""


class PeerLost(OptschedError):
    """Another process has ended or cannot be reached any more."""


class Stalled(OptschedError):
    """Nothing has arrived for longer than the timeout; the message says what each device awaits."""


@contextmanager
def collective() -> Iterator[None]:
    """Turn what gloo raises in a collective call into `PeerLost`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"the connection to another rank is lost, its run has ended ({_line(error)})"
        ) from error


class GlooLinks:
    """Links from this rank to all others of its replica; a wait may take `timeout` seconds.

    Ranks count within the replica: they are the devices of the plan.
    """

    device = torch.device("cpu")
    apart = False  # whether headers and tensors travel apart, so that no length need be guessed
    taken = 0  # bytes of the GPU that communicators have, and contexts beyond `CUDA_CONTEXT`

    def __init__(self, timeout: float, replicas: int = 1) -> None:
        self.timeout = timedelta(seconds=timeout)
        self.size = dist.get_world_size() // replicas
        self.replica, self.rank = divmod(dist.get_rank(), self.size)
        self.members = [[*range(k * self.size, (k + 1) * self.size)] for k in range(replicas)]
        # groups of their own: the tags of their messages meet no others
        groups = [dist.new_group(row, self.timeout, "gloo") for row in self.members]
        self.group: Any = groups[self.replica]

    def post(self, source: int, size: int, tag: int = DATA) -> Any:
        """Post a receive of up to `size` bytes."""
        buffer = torch.empty(size, dtype=torch.uint8)
        return buffer, self._begin(self.group.recv, buffer, source, tag)

    def receive(self, incoming: Any, source: int) -> tuple[Tensor, Tensor]:
        """Wait for a message: where its header and table are, and where its tensors are."""
        buffer, work = incoming
        self.wait(work, source)
        return buffer, buffer

    def send(self, target: int, head: Tensor, body: Tensor | None, tag: int = DATA) -> Any:
        """Begin to send; neither part may change before `wait`. On the CPU they are one."""
        return self._begin(self.group.send, head, target, tag)

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

    def close(self) -> None:
        """Leave the group, when everything has been sent and received."""
        self.leave()

    def abort(self) -> None:
        """End kernels that wait for a message that never comes."""

    def leave(self) -> None:
        """Leave the group as things are: peers that still wait for this rank hear of it at once."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def _begin(self, begin: Any, buffer: Tensor, peer: int, tag: int) -> Any:
        try:
            return begin([buffer], peer, tag)
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

Pair = tuple[int, int]
"""Source and target of a channel."""


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
    """Links that carry heads by gloo and bodies by NCCL. Collective.

    A send is launched only when the receiver has posted its receive and said so by a credit, so
    that no kernel waits on a GPU for long. Every ordered pair of ranks has a communicator and, at
    both ends, a thread: a new plan may use any channel.
    """

    apart = True

    def __init__(self, timeout: float, device: torch.device, replicas: int = 1) -> None:
        super().__init__(timeout, replicas)
        self.device = device
        self._cuda = on_gpu(device)
        # or its watchdog would end the process before `abort` and the sentence that says why
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        # every channel is such an operation, on a communicator of its own
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        self._queues: dict[Pair, SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []
        pairs = [(s, t) for s in range(self.size) for t in range(self.size) if s != t]
        every = [
            {pair: self._group(sorted(row[rank] for rank in pair)) for pair in pairs}
            for row in self.members
        ]
        used = {pair: group for pair, group in every[self.replica].items() if self.rank in pair}
        for (source, target), group in used.items():
            # communicators are made at their first use: in order
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            if self.rank == source:
                group.send([byte], self._in_group(target), 0).wait()
            else:
                group.recv([byte], self._in_group(source), 0).wait()
            if self._cuda:
                torch.cuda.synchronize(device)
        self._groups = [*used.values()]
        for pair, group in used.items():
            queue = self._queues[pair] = SimpleQueue()
            work = self._deliver if pair[0] == self.rank else self._collect
            thread = threading.Thread(
                target=self._loop, args=(queue, work, pair, group), name=f"channel {pair}",
                daemon=True,
            )  # fmt: skip
            thread.start()
            self._threads.append(thread)

    def post(self, source: int, size: int, tag: int = DATA) -> Any:
        """Give a credit and post a receive of the head that answers it."""
        if tag != DATA:
            return super().post(source, size, tag)
        head = torch.empty(HEAD, dtype=torch.uint8)
        work = self._begin(self.group.recv, head, source, DATA)
        word = torch.zeros(1, dtype=torch.uint8)
        credit = self._begin(self.group.send, word, source, CREDITS), word
        posted = _Posted(head, work, credit, Future())
        self._queues[source, self.rank].put(posted)
        return posted

    def receive(self, incoming: Any, source: int) -> tuple[Tensor, Tensor]:
        """Wait for the head; the body is there when the GPU comes to using it."""
        if not isinstance(incoming, _Posted):
            return super().receive(incoming, source)
        head, buffer, event = self._result(incoming.done, source)
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            buffer.record_stream(stream)
        return head, buffer

    def send(self, target: int, head: Tensor, body: Tensor | None, tag: int = DATA) -> Any:
        """Begin to send when the receiver has given a credit and the tensors are complete."""
        if tag != DATA:
            return super().send(target, head, body, tag)
        if head.numel() > HEAD:
            raise OptschedError(f"a message has a table of {head.numel()} bytes, at most {HEAD}")
        made = None
        if self._cuda and body is not None:
            made = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            made.record()
        outgoing = _Outgoing(head, body, made, Future())
        self._queues[self.rank, target].put(outgoing)
        return outgoing.done

    def wait(self, work: Any, peer: int) -> None:
        """Wait until a message is launched; what the stream does next may change its buffer."""
        if not isinstance(work, Future):
            super().wait(work, peer)
            return
        launched = self._result(work, peer)
        if launched is not None:
            launched.wait()

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

    def _loop(self, queue: SimpleQueue[Any], work: Any, pair: Pair, group: Any) -> None:
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
                    item.done.set_result(work(item, pair, group))
            except BaseException as error:
                failed = error
                item.done.set_exception(error)

    def _deliver(self, item: _Outgoing, pair: Pair, group: Any) -> Any:
        """Sending end of one message; what was launched for its tensors."""
        target = pair[1]
        credit = torch.empty(1, dtype=torch.uint8)
        super().wait(self._begin(self.group.recv, credit, target, CREDITS), target)
        if item.made is not None:
            item.made.synchronize()
        super().wait(self._begin(self.group.send, item.head, target, DATA), target)
        if item.body is None or not item.body.numel():
            return None
        return group.send([item.body], self._in_group(target), 0)

    def _collect(
        self, item: _Posted, pair: Pair, group: Any
    ) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        """Receiving end of one message: header, tensors, and when they are there."""
        source = pair[0]
        super().wait(item.work, source)
        super().wait(item.credit[0], source)
        payload = unpack(host_bytes(item.head)).payload
        buffer = torch.empty(payload, dtype=torch.uint8, device=self.device)
        if not payload:
            return item.head, buffer, None
        group.recv([buffer], self._in_group(source), 0).wait()
        event = None
        if self._cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return item.head, buffer, event
