"""How long the messages of every job are expected to be, on all ranks alike."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from optsched.arraypipe.planning.segments import Transfer
from optsched.arraypipe.ranks.header import slot_of
from optsched.arraypipe.ranks.links import hearing
from optsched.arraypipe.ranks.wire import capacity
from optsched.arraypipe.rehearsal import rehearse
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from optsched.arraypipe.job_run import JobRun
    from optsched.arraypipe.planning.messages import Channel
    from optsched.arraypipe.planning.segments import Segment
    from optsched.arraypipe.ranks.header import Slot
    from optsched.arraypipe.worker import Worker

_NORM: Final = torch.float64
_MANY, _LITTLE = 16, 1 << 18  # blocks, and bytes of their messages, that are posted together
_FACTOR: Final = capacity([torch.empty((), dtype=_NORM)])


class Capacity:
    """Bytes of the longest message of every slot, from a first forward of every job.

    A message that turns out longer (a later batch of another shape) goes in two parts; only sender
    and receiver must not differ about what is longer.
    """

    def __init__(self) -> None:
        self._boundary: dict[tuple[int, int], int] = {}  # (job, stage) -> bytes of its output
        self._weights: dict[tuple[int, int, int], int] = {}  # (job, owner, user)
        self._known: set[int] = set()  # jobs of which all are known

    def of(self, slot: Slot) -> int:
        """Bytes to be ready for, the header included."""
        low, high = sorted((slot.origin, slot.stage))
        if slot.kind in ("tied", "weight"):
            return self._weights[slot.job, low, high]
        if slot.kind == "factor":
            return _FACTOR
        return self._boundary[slot.job, low]

    def held(
        self, segment: Segment, device: int, window: int, seats: Collection[int]
    ) -> tuple[int, int]:
        """Most bytes of a device's receive windows, and of its outboxes, for some seats.

        A window has the messages of so many blocks, however large they are; an outbox has one
        message of every block that sends any.
        """
        windows, outboxes = 0, 0
        for channel in segment.routes.channels:
            if device not in (channel.source, channel.target):
                continue
            blocks = self._blocks(segment, channel, seats)
            if channel.source == device:
                outboxes += sum(blocks)
            else:
                windows += window * max(blocks, default=0)
        return windows, outboxes

    def windows(self, segment: Segment, device: int, window: int) -> list[int]:
        """Blocks whose messages to post at a time, by channel: `window`, more of small messages.

        For devices with room to spare: every receive that is posted wakes the process that sends,
        which costs about as much as a small message.
        """
        seats, found = range(len(segment.seats)), []
        for channel in segment.routes.channels:
            mine = channel.target == device
            most = max(self._blocks(segment, channel, seats), default=0) if mine else 0
            found.append(max(window, min(_MANY, _LITTLE // most)) if most else window)
        return found

    def _blocks(self, segment: Segment, channel: Channel, seats: Collection[int]) -> list[int]:
        """Bytes that every block takes from a channel, for some seats."""
        blocks: dict[int, int] = defaultdict(int)
        for k in channel.messages:
            consumer = segment.routes.messages[k].consumer
            seat = segment.plan.blocks[consumer].job
            if seat in seats and self._is_known(segment.seats[seat]):
                blocks[consumer] += self.of(slot_of(segment, 0, Transfer(k, 0, 0)))
        return [*blocks.values()]

    def _is_known(self, job: int) -> bool:
        """False for a job that sends nothing: it is complete, or its first forward has failed."""
        return job in self._known

    def measure(self, run: JobRun, worker: Worker) -> None:
        """Look at the first forward of a job; the first micro-batch is the largest."""
        norms = torch.empty(len(run.unsplit_order) if run.job.clip_norm else 0, dtype=_NORM)
        for stage, output in enumerate(rehearse(run, worker)):
            self._boundary[run.index, stage] = capacity([*output, norms])
        if run.feed is not None:
            self._known.add(run.index)
        for (owner, user), names in run.lent.items():
            weights = [run.stages[owner].weight(name) for name in names]
            self._weights[run.index, owner, user] = capacity(weights)

    def rows(self, jobs: Collection[int]) -> list[list[list[int]]]:
        """The sizes of some jobs: rows (job, stage, bytes), and rows (job, owner, user, bytes)."""
        return [
            [[*key, size] for key, size in sorted(sizes.items()) if key[0] in jobs]
            for sizes in (self._boundary, self._weights)
        ]

    def take(self, rows: Sequence[Sequence[Sequence[int]]]) -> None:
        """Use the sizes that another rank has measured."""
        for job, stage, size in rows[0]:
            self._boundary[job, stage] = size
        for job, owner, user, size in rows[1]:
            self._weights[job, owner, user] = size

    def agree(self, jobs: Collection[int], group: Any) -> None:
        """`InputError` if another rank has measured other sizes of these jobs (collective)."""
        rows: list[object] = [None] * dist.get_world_size()
        with hearing():
            dist.all_gather_object(rows, self.rows(jobs), group)
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise InputError(
                    f"data: rank {rank} sees other shapes in the first batches than rank 0; all "
                    f"ranks must build the same models and read the same data"
                )
