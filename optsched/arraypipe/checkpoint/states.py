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
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from optsched.arraypipe.job import NamedParameters
    from optsched.arraypipe.runtime.state import JobRun, JobStage


_PLAIN: Final = (str, int, float, bool, type(None))


def model_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint notes of `Job.model`: ``model`` the plain entries, ``model_other`` names.

    Plain are strings, integers, floats, booleans, None, and lists, tuples and dictionaries of
    these, not of classes derived from them: what `torch.load(weights_only=True)` reads again.
    """
    plain = {name: value for name, value in given.items() if _is_plain(value)}
    return {"model": plain, "model_other": sorted(name for name in given if name not in plain)}


def check_same_arguments(train: Mapping[str, Any], given: Mapping[str, Any], place: Path) -> None:
    """Refuse a job whose plain arguments are not those of its checkpoint.

    What is not plain on either side is not compared, and nothing is with a file that has no such
    field.

    Raises
    ------
    InputError
        The sentence names the first argument that differs, and both values.
    """
    if "model" not in train:
        return
    before, now = train["model"], model_arguments(given)
    apart = {*train["model_other"], *now["model_other"]}
    sides = (before, now["model"])
    for name in [*before, *now["model"]]:
        there = all(name in side for side in sides)
        if name in apart or (there and _same(*(side[name] for side in sides))):
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


def _same(a: Any, b: Any) -> bool:
    """Equal, a list being as good as a tuple, and no number being equal to no number."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    return bool(a == b) or (a != a and b != b)


_PER_GROUP: Final = frozenset({
    "base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas",
})  # fmt: skip
"""Lists with one value per parameter group; everything else is the same on all stages."""


def scheduler_state(stage: JobStage, title: str) -> dict[str, Any]:
    """State, class and parameter groups (by unsplit names) of a stage's scheduler; ``{}`` if none.

    Parameters
    ----------
    title
        Of the job, for messages.
    """
    scheduler = stage.scheduler
    if scheduler is None:
        return {}
    if not callable(getattr(scheduler, "state_dict", None)):
        raise InputError(
            f"checkpoint: the scheduler of job {title}, a {type(scheduler).__name__}, has no "
            f"state_dict(), so it cannot be kept"
        )
    return {
        "class": f"{type(scheduler).__module__}.{type(scheduler).__qualname__}",
        "groups": _groups(stage),
        "state": copied(scheduler.state_dict()),
    }


def restore_scheduler(stage: JobStage, saved: Mapping[str, Mapping[str, Any]], place: str) -> None:
    """Give a stage's scheduler the state that a checkpoint has for its parameters."""
    if stage.scheduler is not None:
        assert stage.optimizer is not None
        stage.scheduler.load_state_dict(_state_for(_groups(stage), saved, place))
        rates = getattr(stage.scheduler, "_last_lr", ())
        for group, rate in zip(stage.optimizer.param_groups, rates, strict=False):
            if not group["params"]:  # no parameter has brought it from the checkpoint
                group["lr"] = rate


def check_same_class(
    saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], place: str
) -> None:
    """Refuse a scheduler of another class than the checkpoint's.

    Parameters
    ----------
    saved, now
        `scheduler_state` of every stage that has one, right after they were made.
    """
    kinds = [next(iter({e["class"] for e in table.values()}), "none") for table in (saved, now)]
    if kinds[0] != kinds[1]:
        raise InputError(f"{place}: was written with scheduler {kinds[0]}, the job has {kinds[1]}")


def check_same_settings(
    saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], place: str
) -> None:
    """Refuse a scheduler that was made with other settings than the checkpoint's."""
    for entry in now.values():
        before = _state_for(entry["groups"], saved, place)
        for key in {**before, **entry["state"]}:
            a, b = before.get(key), entry["state"].get(key)
            if not same(a, b):
                raise InputError(
                    f"{place}: was written with scheduler setting {key!r} {a!r}, the job has {b!r}"
                )


def _groups(stage: JobStage) -> list[list[str]]:
    assert stage.optimizer is not None
    names = {id(p): name for name, p in stage.trained}
    return [[names[id(p)] for p in group["params"]] for group in stage.optimizer.param_groups]


def _state_for(
    groups: Sequence[Sequence[str]], saved: Mapping[str, Mapping[str, Any]], place: str
) -> dict[str, Any]:
    """The state of a scheduler over these groups, put together from those of all stages."""
    for entry in saved.values():
        if entry["groups"] == groups:  # the same cut: nothing to put together
            return dict(entry["state"])
    found = {
        name: (row, k)
        for row, entry in enumerate(saved.values())
        for k, group in enumerate(entry["groups"])
        for name in group
    }
    picks = [[found[name] for name in group if name in found] for group in groups]
    for k, group in enumerate(groups):  # the same on all stages that have a parameter of it
        if not group:
            rows = enumerate(saved.values())
            picks[k] = [(row, k) for row, e in rows if k < len(e["groups"]) and e["groups"][k]]
    if not all(picks):
        raise InputError(f"{place}: has no scheduler state for {groups[picks.index([])]}")
    joined = _joined("", [entry["state"] for entry in saved.values()], picks, place)
    assert isinstance(joined, dict)
    return joined


def _joined(
    key: str, rows: Sequence[Any], picks: Sequence[Sequence[tuple[int, int]]], place: str
) -> Any:
    """One value for the values of all old stages; a list per group is put together anew."""
    first = rows[0]
    if type(first) is dict:
        return {k: _joined(k, [row[k] for row in rows], picks, place) for k in first}
    if key == "_schedulers":
        parts = zip(*rows, strict=True)
        return [_joined("", part, picks, place) for part in parts]
    if key in _PER_GROUP:
        values = [[rows[row][k] for row, k in pick] for pick in picks]
    else:
        values = [list(rows)]
    for value in values:
        if not all(same(value[0], other) for other in value):
            raise InputError(
                f"{place}: the schedulers of its stages differ in {key!r}: {value}; resume with "
                f"the cuts that it was written with"
            )
    return [value[0] for value in values] if key in _PER_GROUP else first


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
