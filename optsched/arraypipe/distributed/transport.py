"""Messages between processes, over gloo; those of GPUs go through page-locked host memory.

No kernel waits for another rank, so that neither memory nor the order of launches can block a GPU.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from optsched.arraypipe.runtime.cuda_streams import staging
from optsched.errors import OptschedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor


DATA, CHAIN, LONGER = range(3)
"""Tags: messages of a plan, of first forwards, and from `LONGER` on those that are longer than was
posted, one tag per message of a plan."""


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


class Links:
    """Links from this rank to all others of its replica; a wait may take `timeout` seconds.

    Ranks count within the replica: they are the devices of the plan.
    """

    def __init__(self, timeout: float, device: torch.device, replicas: int = 1) -> None:
        self.device = device
        self.timeout = timedelta(seconds=timeout)
        self.size = dist.get_world_size() // replicas
        self.replica, self.rank = divmod(dist.get_rank(), self.size)
        self.members = [[*range(k * self.size, (k + 1) * self.size)] for k in range(replicas)]
        # groups of their own: the tags of their messages meet no others
        groups = [dist.new_group(row, self.timeout, "gloo") for row in self.members]
        self.group: Any = groups[self.replica]

    def post(self, source: int, size: int, tag: int = DATA) -> Any:
        """Post a receive of up to `size` bytes."""
        buffer = staging(size, self.device)
        return buffer, self._begin(self.group.recv, buffer, source, tag)

    def receive(self, incoming: tuple[Tensor, Any], source: int) -> Tensor:
        """Wait for a message."""
        buffer, work = incoming
        self.wait(work, source)
        return buffer

    def send(self, target: int, message: Tensor, tag: int = DATA) -> Any:
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
            raise _lost(peer, error) from error

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
