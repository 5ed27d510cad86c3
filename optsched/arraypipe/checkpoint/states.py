"""What one stage of a job brings to a checkpoint, and how a job is put back from all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from optsched.arraypipe.checkpoint.files import copied
from optsched.arraypipe.model.optimizers import makers_by_name, restore_states, same, states_by_name
from optsched.arraypipe.model.tied_weights import passing_buffers, shard
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from optsched.arraypipe.job import NamedParameters
    from optsched.arraypipe.runtime.state import JobRun, JobStage


_PLAIN: Final = (str, int, float, bool, type(None))
PARTS: Final = ("model", "buffers", "parameters", "masters", "batch")


def model_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint notes of `Job.model`: ``model`` the plain entries, ``model_other`` names.

    Plain are strings, integers, floats, booleans, None, and lists, tuples and dictionaries of
    these, not of classes derived from them: what `torch.load(weights_only=True)` reads again.
    """
    plain = {name: value for name, value in given.items() if _is_plain(value)}
    return {"model": plain, "model_other": sorted(name for name in given if name not in plain)}


def check_same_arguments(train: Mapping[str, Any], given: Mapping[str, Any], place: Path) -> None:
    """Refuse a job whose arguments are not those of its checkpoint, if plain on both sides."""
    before, now = train["model"], model_arguments(given)
    apart = {*train["model_other"], *now["model_other"]}
    sides = (before, now["model"])
    for name in [*before, *now["model"]]:
        there = all(name in side for side in sides)
        if name in apart or (there and same(*(side[name] for side in sides))):
            continue
        told = [f"{side[name]!r:.200}" if name in side else "no such entry" for side in sides]
        raise InputError(
            f"{place}: was written with model[{name!r}] {told[0]}, the job has {told[1]}"
        )


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def shard_of(run: JobRun, stage: int) -> dict[str, dict[str, Any]]:
    """Copies of all that one stage has trained, under unsplit names.

    ``model`` its entries of the state dict, ``buffers`` those that a state dict leaves out,
    ``parameters`` states and settings of the optimizer, ``masters`` the float32 weights of a
    bfloat16 job, ``scheduler`` the state of the scheduler; ``batch`` is left to the caller.
    """
    part = run.stages[stage]
    own = part.trained
    return {
        "model": copied(shard(run.model, run.stages, stage)),
        "buffers": copied(passing_buffers(run.model, run.stages, stage)),
        "parameters": copied(states_by_name([part.optimizer], [own])),
        "masters": copied(dict(own)) if part.masters is not None else {},
        "scheduler": _scheduler_state(part, run.title),
    }


def joined(shards: Iterable[Mapping[str, Mapping[str, Any]]], title: str) -> dict[str, Any]:
    """The shards of all stages as one.

    The optimizers of all stages have the same groups (`align_groups`), so their schedulers have the
    same state, which is kept once.
    """
    whole: dict[str, dict[str, Any]] = {part: {} for part in (*PARTS, "scheduler")}
    for row in shards:
        for part in PARTS:
            whole[part].update(row[part])
        state, first = row["scheduler"], whole["scheduler"]
        if state and first and not same(state, first):
            key = next(
                key for key in {**first, **state} if not same(first.get(key), state.get(key))
            )
            raise InputError(
                f"checkpoint: the scheduler of job {title} has another {key!r} on every stage, so "
                f"it cannot be kept: {first.get(key)!r:.60} and {state.get(key)!r:.60}"
            )
        whole["scheduler"] = first or dict(state)
    return whole


def makers(run: JobRun) -> dict[str, dict[str, Any]]:
    """What the optimizers and the scheduler of a job are made with, as long as they are fresh."""
    own = [stage.trained for stage in run.stages]
    found: dict[str, Any] = {}
    for stage in run.stages:
        if not found and stage.scheduler is not None:
            kind = type(stage.scheduler)
            state = _scheduler_state(stage, run.title)
            found = {"class": f"{kind.__module__}.{kind.__qualname__}", "made": state}
    optimizers = [stage.optimizer for stage in run.stages]
    return {"optimizer": makers_by_name(optimizers, own), "scheduler": found}


def check_same_scheduler(saved: Mapping[str, Any], now: Mapping[str, Any], place: str) -> None:
    """Refuse a scheduler of another class or with other settings than the checkpoint's."""
    kinds = [side.get("class", "none") for side in (saved, now)]
    if kinds[0] != kinds[1]:
        raise InputError(f"{place}: was written with scheduler {kinds[0]}, the job has {kinds[1]}")
    if not now:
        return
    for key in {**saved["made"], **now["made"]}:
        a, b = saved["made"].get(key), now["made"].get(key)
        if not same(a, b):
            raise InputError(
                f"{place}: was written with scheduler setting {key!r} {a!r}, the job has {b!r}"
            )


def _scheduler_state(stage: JobStage, title: str) -> dict[str, Any]:
    scheduler = stage.scheduler
    if scheduler is None:
        return {}
    if not callable(getattr(scheduler, "state_dict", None)):
        raise InputError(
            f"checkpoint: the scheduler of job {title}, a {type(scheduler).__name__}, has no "
            f"state_dict(), so it cannot be kept"
        )
    return dict(copied(scheduler.state_dict()))


def _restore_scheduler(stage: JobStage, saved: Mapping[str, Any]) -> None:
    if stage.scheduler is None:
        return
    assert stage.optimizer is not None
    stage.scheduler.load_state_dict(copied(saved["state"]))  # stages share no list
    rates = getattr(stage.scheduler, "_last_lr", ())
    for group, rate in zip(stage.optimizer.param_groups, rates, strict=False):
        if not group["params"]:  # no parameter has brought it from the checkpoint
            group["lr"] = rate


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
        restore_states(stage.optimizer, own, train["parameters"], str(place))
        if stage.masters is not None:
            _restore_masters(own, train["masters"], place / "train.pt")
        _restore_scheduler(stage, train["scheduler"])


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
