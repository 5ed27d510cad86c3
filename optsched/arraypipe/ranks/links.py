"""Messages between processes over gloo: receives posted ahead, sends that nobody waits for.

A gloo send is a rendezvous that reads its buffer late, a posted receive takes any message that is
not longer, and messages of one pair of ranks and one tag keep their order. `is_completed` tells
nothing before `wait`, so nothing here ever asks for it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from optsched.errors import OptschedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

LANES: Final = 8
"""Tags of ordinary messages; the tag of a long one is that much higher."""
CREDITS: Final = 2 * LANES
"""Added to the lane for the credits of `process_credits`."""
_ASIDE: Final = 4 * LANES


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


class Incoming(NamedTuple):
    """A posted receive."""

    buffer: Tensor
    work: Any


class GlooLinks:
    """Links from this rank to all others.

    Parameters
    ----------
    timeout
        Seconds that any wait may take.
    """

    device = torch.device("cpu")
    apart = False  # whether headers and tensors travel apart, so that no length need be guessed
    taken = 0  # bytes of the GPU that communicators have, and contexts beyond `CUDA_CONTEXT`

    def __init__(self, timeout: float) -> None:
        self.timeout = timedelta(seconds=timeout)
        # a group of its own: the tags of its messages meet no other's
        self.group: Any = dist.new_group(backend="gloo", timeout=self.timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def post(self, source: int, lane: int, size: int) -> Incoming:
        """Be ready for a message of up to `size` bytes."""
        buffer = torch.empty(size, dtype=torch.uint8)
        return Incoming(buffer, self._begin(self.group.recv, buffer, source, lane))

    def receive(self, incoming: Incoming, source: int) -> tuple[Tensor, Tensor]:
        """Wait for a message: where its header and table are, and where its tensors are."""
        self.wait(incoming.work, source)
        return incoming.buffer, incoming.buffer

    def send(self, target: int, lane: int, head: Tensor, body: Tensor | None = None) -> Any:
        """Begin to send; neither part may change before `wait`. On the CPU they are one."""
        return self._begin(self.group.send, head, target, lane)

    def wait(self, work: Any, peer: int) -> int | None:
        """Wait for a message to arrive or to have left; `Stalled`, `PeerLost`.

        Returns when it could leave, if that is later than it was handed over.
        """
        _finish(work, peer, self.timeout)
        return None

    def tell(self, target: int, word: Tensor) -> None:
        """Send a few bytes beside the channels, and wait until they are read."""
        _finish(self._begin(self.group.send, word, target, _ASIDE), target, self.timeout)

    def hear(self, source: int, size: int) -> Tensor:
        """Wait for such bytes."""
        word = torch.empty(size, dtype=torch.uint8)
        _finish(self._begin(self.group.recv, word, source, _ASIDE), source, self.timeout)
        return word

    def missing(self, lanes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
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


def _finish(work: Any, peer: int, timeout: timedelta) -> None:
    began = time.monotonic()
    try:
        work.wait(timeout)
    except RuntimeError as error:
        waited = time.monotonic() - began
        if waited >= 0.95 * timeout.total_seconds():
            raise Stalled(f"no message from rank {peer} for {waited:.3g} s") from error
        raise _lost(peer, error) from error


def _lost(peer: int, error: RuntimeError) -> PeerLost:
    return PeerLost(f"the connection to rank {peer} is lost, its run has ended ({_line(error)})")


def _line(error: RuntimeError) -> str:
    # gloo: "[/where/file.cc:537] Read error [address]: what. A hint for its own developers."
    first = str(error).strip().splitlines()[0]
    return (first.partition("] ")[2] or first).partition(". ")[0]
