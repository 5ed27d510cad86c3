"""The stages of a job ready for training: weights, precision, optimizers, schedulers, devices."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from optsched.arraypipe.checkpoint.plain import python_numbers
from optsched.arraypipe.job import PRECISIONS
from optsched.arraypipe.model.build import Builder
from optsched.arraypipe.model.inputs import buffer_holders
from optsched.arraypipe.model.split import split
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.state import JobStage, LossScale
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.job import BuildModel, Job, Loss
    from optsched.arraypipe.model.calls import Cut


def fresh_model(build_model: BuildModel, job: Job) -> nn.Module:
    """Return the unsplit model of a job in its precision, with the weights that it starts from."""
    return Builder(build_model).whole(job)


def fresh_stages(
    model: nn.Module,
    cut: Cut,
    job: Job,
    index: int,
    title: str,
    devices: Sequence[torch.device] = (),
    away: bool = False,
    loss: Loss | None = None,
) -> list[JobStage]:
    """Return the stages of a model with everything that trains them."""
    loss = loss_copy(loss, job)
    with_tensors = loss if isinstance(loss, nn.Module) else None
    stages = [
        JobStage(**vars(part), job=index, last=part.index == len(cut.names))
        for part in split(model, cut, job, title, with_tensors)
    ]
    stages[-1].loss = loss
    for stage in stages:
        stage.precision = job.precision
        if job.precision == "amp-fp16":
            stage.scaler = LossScale()
        if job.scheduler is not None and stage.optimizer is not None:
            stage.scheduler = _scheduler(job, stage, title)
        if devices and away:
            stage.place, stage.away = devices[stage.index], True
        elif devices:  # with what has been made of it on the host
            move(stage, devices[stage.index])
    return stages


def loss_copy(loss: Loss | None, job: Job) -> Loss | None:
    """Return the loss of one job: a copy of a module, in the precision of the job's weights."""
    if not isinstance(loss, nn.Module):
        return loss
    made = deepcopy(loss)
    return made if job.precision not in ("fp64", "bf16") else made.to(PRECISIONS[job.precision])


def move(stage: JobStage, device: torch.device) -> None:
    """Put all tensors of a stage on a device, its place from now on; parameters stay the same."""
    stage.place, stage.away = device, False
    _carry(stage, device)


def take_off(stage: JobStage) -> None:
    """Put all tensors of a stage on the host, unless other jobs have some; its place stays."""
    if stage.shared:
        return
    stage.away = stage.place is not None and on_gpu(stage.place)
    _carry(stage, torch.device("cpu"))


def drop(stage: JobStage) -> None:
    """Give the memory of a stage back that another rank trains; its objects stay."""
    stage.local = False
    shared = set(map(id, stage.shared_tensors()))
    for parameter in (*stage.used(), *(p for _, p in stage.trained)):
        if id(parameter) not in shared:
            parameter.data = parameter.data.new_empty(0)
    stage.set_buffers([b if id(b) in shared else b.new_empty(0) for b in stage.buffers()])
    if stage.optimizer is not None:
        stage.optimizer.state.clear()


@contextmanager
def in_place(stage: JobStage) -> Iterator[None]:
    """Have the tensors of a stage in their place for a while."""
    if not stage.away:
        yield
        return
    move(stage, stage.device)
    try:
        yield
    finally:
        take_off(stage)


def _carry(stage: JobStage, device: torch.device) -> None:
    for module in stage.modules:
        module.to(device)
    stage.holders = buffer_holders(stage.modules)
    for _, master in stage.masters or ():
        master.data = master.data.to(device)
    if stage.optimizer is None:
        return
    for group in stage.optimizer.param_groups:
        # step counters stay on the host unless kernels read them, as in `load_state_dict`
        counted = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            entry = stage.optimizer.state.get(parameter, {})
            for key, value in entry.items():
                if isinstance(value, Tensor) and (key != "step" or counted):
                    entry[key] = value.to(device)


def waits_for_all(job: Job) -> bool:
    """Return whether the updates of a job wait for the gradients or the loss of all its stages."""
    if job.needs_norm:
        return True
    if job.scheduler is None:
        return False
    probe = [("probe", nn.Parameter(torch.zeros(1)))]
    try:
        optimizer = job.optimizer(probe)
    except Exception:  # one of its groups may be empty then; what a scheduler is needs no other
        optimizer = SGD(probe, lr=0.1, momentum=0.9)
    named = any("param_names" in group for group in optimizer.param_groups)
    for k in range(16):  # it may have a value for each of several groups
        try:
            return isinstance(job.scheduler(optimizer), ReduceLROnPlateau)
        except Exception:
            more = nn.Parameter(torch.zeros(1))
            optimizer.add_param_group({"params": [(f"probe{k}", more)] if named else [more]})
    return False


def _scheduler(job: Job, stage: JobStage, title: str) -> Any:
    assert job.scheduler is not None
    assert stage.optimizer is not None
    try:
        scheduler = job.scheduler(stage.optimizer)
    except Exception as error:
        text = " ".join(str(error).split())
        raise InputError(f"job {title}: the scheduler cannot be made ({text})") from error
    if isinstance(scheduler, ReduceLROnPlateau) and not waits_for_all(job):
        raise InputError(
            f"job {title}: the scheduler looks at the loss, and cannot be made for an optimizer of "
            f"one other parameter, by which such schedulers are known; let it take any optimizer"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise InputError(
            f"job {title}: scheduler returned {type(scheduler).__name__}, no scheduler"
        )
    python_numbers(stage.optimizer, scheduler)
    return scheduler
