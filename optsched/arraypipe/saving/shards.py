"""What one stage of a job brings to a checkpoint, and how a job is put back from all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from optsched.arraypipe.optimizers import makers_by_name, restore_states, states_by_name
from optsched.arraypipe.saving.files import copied
from optsched.arraypipe.saving.scheduler_states import restore_scheduler, scheduler_state
from optsched.arraypipe.split import passing_buffers, shard
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from optsched.arraypipe.job import JobStage, NamedParameters
    from optsched.arraypipe.job_run import JobRun

PARTS: Final = ("model", "buffers", "parameters", "masters", "schedulers")


def shard_of(run: JobRun, stage: int) -> dict[str, dict[str, Any]]:
    """Copies of all that one stage has trained, under unsplit names.

    ``model`` its entries of the state dict, ``buffers`` those that a state dict leaves out,
    ``parameters`` states and settings of the optimizer, ``masters`` the float32 weights of a
    bfloat16 job, ``schedulers`` the state of the scheduler by number of the stage.
    """
    part = run.stages[stage]
    own = part.trained
    state = scheduler_state(part, run.title)
    return {
        "model": copied(shard(run.model, run.stages, stage)),
        "buffers": copied(passing_buffers(run.model, run.stages, stage)),
        "parameters": copied(states_by_name([part.optimizer], [own])),
        "masters": copied(dict(own)) if part.masters is not None else {},
        "schedulers": {str(stage): state} if state else {},
    }


def joined(shards: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The shards of all stages as one."""
    whole: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for row in shards:
        for part in PARTS:
            whole[part].update(row[part])
    return whole


def makers(run: JobRun) -> dict[str, dict[str, Any]]:
    """What the optimizers and schedulers of a job are made with, as long as they are fresh."""
    own = [stage.trained for stage in run.stages]
    states = {str(stage.index): scheduler_state(stage, run.title) for stage in run.stages}
    return {
        "optimizer": makers_by_name([stage.optimizer for stage in run.stages], own),
        "scheduler": {key: state for key, state in states.items() if state},
    }


def check_same_model(model: nn.Module, saved: Any, place: Path) -> None:
    """Refuse the state dict of another model; the sentence names the first key that differs."""
    own = model.state_dict()
    if not isinstance(saved, dict):
        raise InputError(f"{place}: is not a dictionary of tensors")
    for name in [*own, *saved]:
        if name not in saved or name not in own:
            side = "the checkpoint has no" if name not in saved else "the model has no"
            raise InputError(f"{place}: {side} {name!r}; it belongs to another model")
        a, b = own[name], saved[name]
        if isinstance(a, Tensor) and (a.shape != b.shape or a.dtype != b.dtype):
            raise InputError(
                f"{place}: {name!r} is {b.dtype} {tuple(b.shape)}, the model has {a.dtype} "
                f"{tuple(a.shape)}"
            )


def restore(run: JobRun, model: Any, train: Mapping[str, Any], place: Path) -> None:
    """Give a job with fresh stages all that its checkpoint has (`check_same_model` first)."""
    run.model.load_state_dict(model)
    for name, value in train["buffers"].items():
        _set_buffer(run.model, name, value, place / "train.pt")
    for stage in run.stages:
        own = stage.trained
        states = _placed(train["parameters"], stage, own)
        restore_states(stage.optimizer, own, states, str(place))
        if stage.masters is not None:
            _restore_masters(own, train["masters"], place / "train.pt")
        restore_scheduler(stage, train["schedulers"], str(place))


def _placed(
    saved: Mapping[str, Mapping[str, Any]], stage: JobStage, own: NamedParameters
) -> dict[str, Mapping[str, Any]]:
    """States on the device of their parameter; counters stay on the CPU unless kernels read them.

    As in `torch.optim.Optimizer.load_state_dict`, but without a cast.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name, parameter in own:
        if name not in saved:
            continue
        settings = saved[name]["settings"]
        counts = bool(settings.get("capturable") or settings.get("fused"))
        state = {
            key: value.to(parameter.device)
            if isinstance(value, Tensor) and (key != "step" or counts)
            else value
            for key, value in saved[name]["state"].items()
        }
        found[name] = {"state": state, "settings": settings}
    return found


def _restore_masters(own: NamedParameters, saved: Mapping[str, Tensor], place: Path) -> None:
    with torch.no_grad():
        for name, master in own:
            if name not in saved:
                raise InputError(f"{place}: there is no float32 copy of {name!r}")
            master.copy_(saved[name])


def _set_buffer(model: nn.Module, name: str, value: Tensor, place: Path) -> None:
    """Hang a buffer into the model; assigned as it is, so that no cast changes a bit."""
    owner, _, last = name.rpartition(".")
    try:
        buffers = model.get_submodule(owner)._buffers
        before = buffers[last]
    except (AttributeError, KeyError):
        raise InputError(f"{place}: the model has no buffer {name!r}") from None
    buffers[last] = value if before is None else value.to(before.device)
