"""Send and receive queues of one device: messages travel in the order in which they are made.

Channels cannot deadlock. A send never waits, and a device that waits for a message has posted the
receives of all messages that its source makes before. Devices with such channels are a network of
Kahn (1974): what arrives does not depend on speed, so one complete execution, the topological order
that `compile` has found, proves that all are complete.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch

from optsched.arraypipe.distributed.messages import (
    LONG,
    SIZE,
    Header,
    Inbox,
    Label,
    Outbox,
    ProtocolError,
    capacity,
    host_bytes,
    unpack,
)
from optsched.arraypipe.distributed.transport import CHAIN, DATA, LONGER
from optsched.arraypipe.plan.segments import channel_stream, device_stream
from optsched.arraypipe.plan.types import TOMBSTONE, Transfer
from optsched.arraypipe.runtime.first_forward import FirstForward
from optsched.arraypipe.runtime.types import Payload
from optsched.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from optsched.arraypipe.distributed.transport import Links
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.runtime.state import JobRun


_NORM: Final = torch.float64
_MANY, _LITTLE = 16, 1 << 18  # messages, and their bytes, that are posted together
_FACTOR: Final = capacity([torch.empty((), dtype=_NORM)])


class ReceiveOrder:
    """The receives of one channel in a segment: in the order of the source, `window` ahead."""

    def __init__(self, segment: Segment, channel: int, window: int) -> None:
        self._coming = channel_stream(segment, channel)
        self._window = window
        self.posted: set[Transfer] = set()

    def until(self, transfer: Transfer) -> list[Transfer]:
        """Receives to post before the device may wait for a message."""
        made: list[Transfer] = []
        while transfer not in self.posted:
            following = next(self._coming, None)
            if following is None:
                raise InternalError(f"{transfer} is not among the messages of its channel")
            self.posted.add(following)
            made.append(following)
        return made

    def ahead(self) -> list[Transfer]:
        """Receives to post beyond those, when half of the window has been consumed."""
        made: list[Transfer] = []
        if len(self.posted) > self._window // 2:
            return made
        while len(self.posted) < self._window:
            following = next(self._coming, None)
            if following is None:
                break
            self.posted.add(following)
            made.append(following)
        return made


class Capacity:
    """Bytes of the longest message of every boundary, from the first forward of every job.

    Only sender and receiver know them. A message that turns out longer goes in two parts.
    """

    def __init__(self, window: int = 2) -> None:
        self.window = window  # messages that are posted ahead, per channel
        self._boundary: dict[tuple[int, int], int] = {}  # (job, stage) -> bytes of its output
        self._weights: dict[tuple[int, int, int], int] = {}  # (job, owner, user)

    def note_boundary(self, run: JobRun, stage: int, tensors: Sequence[Tensor]) -> None:
        """Remember the output of a stage, whose gradient travels with norms if the job clips."""
        norms = torch.empty(len(run.unsplit_order) if run.job.needs_norm else 0, dtype=_NORM)
        self._boundary[run.index, stage] = capacity([*tensors, norms])

    def note_weights(self, run: JobRun, local: Collection[int]) -> None:
        """Remember the tied weights of the local stages of a job."""
        for (owner, user), names in run.tied_pairs.items():
            stage = run.stages[owner if owner in local else user]
            weights = [stage.weight(name) for name in names]
            self._weights[run.index, owner, user] = capacity(weights)

    def of(self, segment: Segment, message: int) -> int:
        """Bytes to be ready for; 0 for a job that sends nothing."""
        kind, producer, consumer = segment.routes.messages[message]
        block, other = segment.plan.blocks[producer], segment.plan.blocks[consumer].stage
        low, high = sorted((block.stage, other))
        job = segment.slots[block.job]
        if kind in ("tied", "weight"):
            return self._weights.get((job, low, high), 0)
        return _FACTOR if kind == "factor" else self._boundary.get((job, low), 0)

    def windows(self, segment: Segment, enlarge: bool) -> list[int]:
        """Messages to post ahead by channel; more of small ones, if memory has no limit.

        A receive that is posted wakes the process that sends, which costs as much as a message.
        """
        found = []
        for channel in segment.routes.channels:
            most = max(self.of(segment, k) for k in channel.messages) if enlarge else 0
            found.append(max(self.window, min(_MANY, _LITTLE // most)) if most else self.window)
        return found

    def held(self, segment: Segment, device: int, slots: Collection[int]) -> tuple[int, int]:
        """Most bytes of posted receives of a device, and of its outboxes, for the jobs of slots."""
        routes, blocks = segment.routes, segment.plan.blocks

        def size(message: int) -> int:
            slot = blocks[routes.messages[message].producer].job
            return self.of(segment, message) if slot in slots else 0

        rows = enumerate(routes.channels)
        orders = {
            k: ReceiveOrder(segment, k, self.window) for k, row in rows if row.target == device
        }
        outboxes = sum(size(k) for row in routes.channels if row.source == device for k in row[2])
        held = peak = 0
        for operation, cycle, iteration in device_stream(segment, device):
            if cycle > max(segment.plan.latest) + 2:  # from here on cycles repeat
                break
            taken = [k for k in routes.inputs[operation] if routes.channel_of[k] >= 0]
            for k in taken:
                order = orders[routes.channel_of[k]]
                made = [*order.until(Transfer(k, iteration)), *order.ahead()]
                held += sum(size(row.message) for row in made)
            peak = max(peak, held)
            for k in taken:
                orders[routes.channel_of[k]].posted.discard(Transfer(k, iteration))
                held -= size(k)
        return peak, outboxes


class MessageQueues:
    """Send and receive queues of one device; they live as long as the run."""

    def __init__(self, links: Links, capacity: Capacity) -> None:
        self.links, self.capacity = links, capacity
        self.inbox = Inbox()
        self.outboxes: dict[int, Outbox] = {}  # by message
        self.leaving: dict[int, list[tuple[Any, int]]] = {}
        self.waiting_for = ""  # the message, for a diagnosis
        self.waited_ns = 0  # at receives, since a caller has set it to 0

    def open(self, segment: Segment, number: int, enlarge: bool) -> None:
        """Begin a segment; with `enlarge` many small messages are posted together."""
        self.segment, self.number = segment, number
        windows = self.capacity.windows(segment, enlarge)
        self.orders = {
            k: ReceiveOrder(segment, k, windows[k])
            for k, channel in enumerate(segment.routes.channels)
            if channel.target == self.links.rank
        }
        self.incoming: dict[Transfer, Any] = {}
        for k in self.orders:
            self._post(k, self.orders[k].ahead())

    def receive(self, message: int, iteration: int) -> Payload:
        """Wait for a message of another device."""
        segment, transfer = self.segment, Transfer(message, iteration)
        channel = segment.routes.channel_of[message]
        order, source = self.orders[channel], segment.routes.channels[channel].source
        self._post(channel, order.until(transfer))
        self.waiting_for = f"{self._named(message)}, iteration {iteration}"
        began_ns = time.perf_counter_ns()
        buffer = self.links.receive(self.incoming.pop(transfer), source)
        self.waited_ns += time.perf_counter_ns() - began_ns
        found = unpack(host_bytes(buffer))
        expected = self._label(message, iteration)
        if found.label != expected:
            raise ProtocolError(
                f"from {segment.plan.devices[source]}: expected {self._named(message)}, {expected};"
                f" received {found.label}"
            )
        if found.flags & LONG:
            buffer = self.links.receive(
                self.links.post(source, found.length, LONGER + message), source
            )
        self.waiting_for = ""
        order.posted.discard(transfer)
        self._post(channel, order.ahead())
        flags = found.flags & ~LONG
        if flags & TOMBSTONE:
            return Payload((), flags, found.loss)
        tensors, absent = self.inbox.unpack(found, buffer, self.links.device)
        return Payload(tensors, flags, found.loss, absent)

    def send(self, message: int, iteration: int, payload: Payload) -> None:
        """Begin to send a message; its tensors are copied."""
        channel = self.segment.routes.channels[self.segment.routes.channel_of[message]]
        label = self._label(message, iteration)
        # that of the last iteration or segment has been received: this does not wait
        self._retire(message)
        if payload.flags & TOMBSTONE:
            self._begin(message, channel.target, Header(label, payload.flags, payload.loss))
            return
        outbox = self.outboxes.get(message)
        if outbox is None:
            outbox = self.outboxes[message] = Outbox(self.links.device)
        outbox.pack(payload.tensors, payload.absent)
        header = Header(label, payload.flags, payload.loss, outbox.table, outbox.payload)
        header.pack_into(outbox.raw)
        if header.length > self.capacity.of(self.segment, message):
            self._begin(message, channel.target, header._replace(flags=header.flags | LONG))
            self._leave(message, channel.target, outbox.buffer, LONGER + message)
        else:
            self._leave(message, channel.target, outbox.buffer)

    def close(self) -> None:
        """Make sure that nothing is posted when the device goes on to the next segment."""
        if self.incoming:
            raise InternalError(f"{next(iter(self.incoming))} is posted at the end of a segment")

    def flush(self) -> None:
        """Wait until everything has left."""
        for message in list(self.leaving):
            self._retire(message)

    def abandon(self) -> None:
        """Forget all posted receives, which would keep the connections open."""
        self.incoming, self.leaving = {}, {}

    def _post(self, channel: int, transfers: Sequence[Transfer]) -> None:
        source = self.segment.routes.channels[channel].source
        for transfer in transfers:
            size = max(SIZE, self.capacity.of(self.segment, transfer.message))
            self.incoming[transfer] = self.links.post(source, size)

    def _begin(self, message: int, target: int, header: Header) -> None:
        """Send a header alone."""
        head = torch.empty(SIZE, dtype=torch.uint8)
        header.pack_into(host_bytes(head))
        self._leave(message, target, head)

    def _leave(self, message: int, target: int, data: Tensor, tag: int = DATA) -> None:
        work = self.links.send(target, data, tag)
        self.leaving.setdefault(message, []).append((work, target))

    def _retire(self, message: int) -> None:
        for work, target in self.leaving.pop(message, ()):
            self.links.wait(work, target)

    def _label(self, message: int, iteration: int) -> Label:
        block = self.segment.plan.blocks[self.segment.routes.messages[message].producer]
        return Label(self.number, message, self.segment.slots[block.job], iteration)

    def _named(self, message: int) -> str:
        kind, producer, consumer = self.segment.routes.messages[message]
        taker, maker = (self.segment.plan.blocks[i] for i in (consumer, producer))
        return (
            f"{kind} for job {self.segment.slots[taker.job]}, micro-batch {taker.microbatch}, from "
            f"stage {maker.stage} to stage {taker.stage}"
        )


class Chain(FirstForward):
    """The first forward of a job on ranks: each runs its own stages on what the one before sends.

    All ranks call it for the same jobs in the same order. `homes` are the devices of the stages.
    """

    def __init__(self, links: Links, capacity: Capacity, run: JobRun, homes: Sequence[int]):
        self.links, self.capacity, self.run, self.homes = links, capacity, run, homes
        self.leaving: list[tuple[Any, int, Tensor]] = []

    def is_local(self, stage: int) -> bool:
        """Whether a stage is trained here."""
        return self.homes[stage] == self.links.rank

    def receive(self, stage: int) -> Any:
        """The output of a stage of another rank; None if its first forward has failed."""
        links, source = self.links, self.homes[stage]
        header = unpack(host_bytes(links.receive(links.post(source, SIZE, CHAIN), source)))
        if header.flags & TOMBSTONE:
            return None
        buffer = links.receive(links.post(source, header.length, CHAIN), source)
        tensors, (packed,) = Inbox().unpack(header, buffer, links.device)
        found = tuple(t for t in tensors if t is not None)
        self.capacity.note_boundary(self.run, stage, found)
        return found if packed else found[0]

    def send(self, stage: int, output: Any) -> None:
        """Send the output of a local stage to the next one; None if there is none."""
        if stage + 1 == len(self.homes) or self.is_local(stage + 1):
            return
        label, target = Label(0, stage, self.run.index, self.run.start), self.homes[stage + 1]
        head, outbox = torch.empty(SIZE, dtype=torch.uint8), Outbox(self.links.device)
        header, parts = Header(label, TOMBSTONE), [head]
        if output is not None:
            row = output if isinstance(output, tuple) else (output,)
            self.capacity.note_boundary(self.run, stage, row)
            outbox.pack(row, (int(isinstance(output, tuple)),))
            header = Header(label, 0, 0.0, outbox.table, outbox.payload)
            parts.append(outbox.buffer)
        header.pack_into(host_bytes(head))
        for part in parts:
            self.leaving.append((self.links.send(target, part, CHAIN), target, part))

    def close(self) -> None:
        """Wait until everything has left."""
        for work, target, _ in self.leaving:
            self.links.wait(work, target)
        self.leaving.clear()
