"""Replicas: every stage on several ranks, each with its part of every batch, as in DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from optsched.arraypipe.distributed.group import collective
from optsched.arraypipe.model.inputs import mapped
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from optsched.arraypipe.job import Data, Job
    from optsched.arraypipe.runtime.state import JobStage


class _Pending(NamedTuple):
    """All-reduces of one stage that have been started, one per dtype."""

    works: list[Any]
    flat: list[Tensor]
    rows: list[list[nn.Parameter]]
    present: Tensor  # for every parameter, how many replicas have a gradient


class Replicas:
    """One of `count` replicas; `group` has the ranks that train the same stages.

    The gradients of a stage are averaged as DDP does: divided by `count`, then summed.
    """

    def __init__(self, index: int, count: int, group: Any) -> None:
        self.index, self.count, self.group = index, count, group
        self._pending: dict[tuple[int, int], _Pending] = {}

    def start(self, job: int, stage: JobStage) -> None:
        """Begin to average the gradients of a stage, behind its last backward."""
        rows: dict[torch.dtype, list[nn.Parameter]] = {}
        for _, p in stage.parameters:
            if p.requires_grad:
                rows.setdefault(p.dtype, []).append(p)
        if not rows:
            return
        parameters = [p for row in rows.values() for p in row]
        flat = [torch.cat([self._part(p) for p in row]) for row in rows.values()]
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
        present = present.to(flat[0].device)
        with collective():
            works = [dist.all_reduce(t, group=self.group, async_op=True) for t in (*flat, present)]
        self._pending[job, stage.index] = _Pending(works, flat, [*rows.values()], present)

    def finish(self, job: int, stage: JobStage) -> None:
        """Wait for the averages and make them the gradients; before clipping and the update."""
        pending = self._pending.pop((job, stage.index), None)
        if pending is None:
            return
        with collective():
            for work in pending.works:
                work.wait()
        k = 0
        for flat, row in zip(pending.flat, pending.rows, strict=True):
            begin = 0
            for p in row:
                found = flat[begin : begin + p.numel()].view_as(p)
                if p.grad is not None:
                    p.grad.copy_(found)
                elif pending.present[k]:  # else no replica has used it
                    p.grad = found.clone()
                begin, k = begin + p.numel(), k + 1

    def leave(self) -> None:
        """Close the connections, also those of sums that have been started."""
        self._pending.clear()
        dist.destroy_process_group(self.group)
        self.group = None

    def mean(self, value: float) -> float:
        """Return the mean of a number over the replicas."""
        found = torch.tensor(value / self.count, dtype=torch.float64)
        with collective():
            dist.all_reduce(found, group=self.group)
        return float(found)

    def part_of(self, data: Data) -> Data:
        """Return data of which a replica sees its part of every batch."""

        def parts(job: Job, start: int) -> Iterator[Any]:
            for batch in data(job, start):
                yield mapped(batch, self._cut)

        return parts

    def check(self, model: nn.Module, title: str) -> None:
        """Refuse running statistics, which replicas would update from different batches."""
        for name, module in model.named_modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                raise InputError(
                    f"replicas: module {name!r} of job {title} ({type(module).__name__}) has "
                    f"running statistics of its part of the batch; use a layer without them, such "
                    f"as LayerNorm or GroupNorm, or replicas=1"
                )

    def _cut(self, value: Tensor) -> Tensor:
        if not value.dim():
            return value
        if len(value) < self.count:
            raise InputError(
                f"replicas: a batch of {len(value)} samples cannot be cut for {self.count} replicas"
            )
        return value.tensor_split(self.count)[self.index]

    def _part(self, p: nn.Parameter) -> Tensor:
        if p.grad is None:
            return torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
        return p.grad.reshape(-1) * (1.0 / self.count)
