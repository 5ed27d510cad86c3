"""Trained jobs of a run on ranks: each rank has its stages until all are gathered on the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from optsched.arraypipe.distributed.group import meeting
from optsched.arraypipe.distributed.transport import collective
from optsched.arraypipe.model.split import states_by_name
from optsched.arraypipe.train_alone import Trained

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.runtime.state import JobRun


class LocalJob(NamedTuple):
    """A job and the stages of it that this rank has trained."""

    run: JobRun
    stages: Sequence[int]


class Part(NamedTuple):
    """Tensors of some stages under the names of the unsplit model."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]


def gather(local: Sequence[LocalJob]) -> list[tuple[nn.Module, Trained]]:
    """Bring all stages of all jobs to rank 0; empty on the others (collective)."""
    with meeting() as group:
        parts = group.agree(lambda: [_part(*row) for row in local])
        rows: list[Any] = [None] * group.size
        with collective():
            dist.gather_object(parts, None if group.rank else rows, 0, group.group)
    if group.rank:
        return []
    return [_merged(row.run, [parts[k] for parts in rows]) for k, row in enumerate(local)]


def _part(run: JobRun, stages: Sequence[int]) -> Part:
    chosen = [run.stages[stage] for stage in stages]
    prefix = {id(module): name for name, module in run.model.named_modules()}
    if run.loss_module is not None:
        prefix |= {
            id(m): ".".join(filter(None, ("loss", n))) for n, m in run.loss_module.named_modules()
        }
    buffers = {
        ".".join(filter(None, (prefix[id(module)], name))): module._buffers[name]
        for stage in chosen
        for module, name in stage.holders
        if id(module) in prefix
    }
    parameters = {name: p.detach() for stage in chosen for name, p in stage.parameters}
    states = states_by_name(chosen)
    moments = {name: states[name]["state"] if name in states else {} for name in parameters}
    return Part(*tree_map_only(Tensor, _compact, (parameters, buffers, moments)))


def _merged(run: JobRun, parts: Sequence[Part]) -> tuple[nn.Module, Trained]:
    """The unsplit model of a job with all its tensors."""
    found = Part({}, {}, {})
    for part in parts:
        found.parameters.update(part.parameters)
        found.buffers.update(part.buffers)
        found.optimizer.update(part.optimizer)
    made: dict[int, nn.Parameter] = {}
    modules = dict(run.model.named_modules())
    for name, p in list(run.model.named_parameters(remove_duplicate=False)):
        value = found.parameters.get(name)
        owner, _, attribute = name.rpartition(".")
        if id(p) not in made and value is not None:
            made[id(p)] = nn.Parameter(value, p.requires_grad)
        modules[owner]._parameters[attribute] = made[id(p)]
    for name in [name for name, _ in run.model.named_buffers()]:
        owner, _, attribute = name.rpartition(".")
        modules[owner]._buffers[attribute] = found.buffers.get(name)
    parameters = {name: p.detach() for name, p in run.model.named_parameters()}
    buffers = dict(run.model.named_buffers())
    for all_of, rows in ((parameters, found.parameters), (buffers, found.buffers)):
        all_of.update({n: t for n, t in rows.items() if n.startswith("loss.") and n not in all_of})
    moments = {name: found.optimizer.get(name, {}) for name in parameters}
    return run.model, Trained(parameters, buffers, moments, tuple(run.losses))


def _compact(t: Tensor) -> Tensor:
    """On the host, and by itself: a view would be sent with all of its storage."""
    t = t.cpu()
    return t.clone() if t.untyped_storage().nbytes() > t.nbytes else t
