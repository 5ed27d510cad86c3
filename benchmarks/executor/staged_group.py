"""A process group with the rules of NCCL's that stages through memory of the host.

For two ranks on one GPU, which NCCL refuses, and for simulated GPUs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from optsched.arraypipe.distributed.transport import CreditedLinks
from optsched.arraypipe.runtime import cuda_streams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class StagedGroup:
    """Two ranks that send each other tensors of their GPUs.

    As with NCCL an operation runs on a stream of the group, first waits for the stream that is
    current when it is launched, and `Work.wait` lets the stream that is current then wait for its
    end; the host does not wait for a send. A receive is launched when the bytes are there, so here
    the host waits for it.

    Parameters
    ----------
    group
        Of gloo.
    device
        The GPU of this rank.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.sender = ThreadPoolExecutor(1)

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        """Begin to send; the tensor may change behind `Work.wait`."""
        (tensor,) = tensors
        staged = cuda_streams.page_locked_like(tensor)
        work = self._copy(staged, tensor, tensor)
        self.sender.submit(self._forward, staged, work, target)
        return work

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Receive; the tensor is there behind `Work.wait`."""
        (tensor,) = tensors
        staged = cuda_streams.page_locked_like(tensor)
        self.group.recv([staged], source, 0).wait()
        return self._copy(tensor, staged, tensor)

    def _copy(self, target: Tensor, source: Tensor, used: Tensor) -> Work:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            used.record_stream(self.stream)
            return Work(self.device, self.stream.record_event())

    def _forward(self, staged: Tensor, work: Work, target: int) -> None:
        work.ended.synchronize()
        self.group.send([staged], target, 0).wait()


class Work:
    """What was launched."""

    def __init__(self, device: torch.device, ended: torch.cuda.Event) -> None:
        self.device, self.ended = device, ended

    def wait(self) -> None:
        """Let the current stream wait for its end."""
        torch.cuda.current_stream(self.device).wait_event(self.ended)


class StagedLinks(CreditedLinks):
    """The links of GPUs without NCCL."""

    def _group(self, ranks: Sequence[int]) -> Any:
        group = dist.new_group(ranks, backend="gloo", timeout=self.timeout)
        return StagedGroup(group, self.device) if self._cuda and self.rank in ranks else group

    def _abort(self, groups: Sequence[Any]) -> None:
        for group in groups:
            self._destroy(group)

    def _destroy(self, group: Any) -> None:
        if isinstance(group, StagedGroup):
            group.sender.shutdown()
            group = group.group
        dist.destroy_process_group(group)
