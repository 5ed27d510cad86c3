"""The state of a job in a checkpoint: what each stage writes, and how it is restored."""

from __future__ import annotations

import re
import warnings
import zlib
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from optsched.arraypipe.checkpoint.files import copied
from optsched.arraypipe.checkpoint.plain import NotKept, check_kept, empty, kept
from optsched.arraypipe.checkpoint.weights import keeps
from optsched.arraypipe.model.split import (
    first_difference,
    makers_by_name,
    restore_states,
    shard,
    states_by_name,
)
from optsched.arraypipe.runtime.data import cut_batch
from optsched.errors import InputError, OptschedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from optsched.arraypipe.checkpoint.weights import Weights
    from optsched.arraypipe.job import Data, Job
    from optsched.arraypipe.runtime.state import JobRun, JobStage

_SIMPLE: Final = (str, int, float, bool, type(None))
_AGREE: Final = ("seed", "batch_size", "microbatches", "precision", "clip_norm")


def settings_of(run: JobRun) -> dict[str, str]:
    """Return all settings of a fresh job that change its bits, as text by name."""
    rows: dict[str, Any] = {key: getattr(run.job, key) for key in _AGREE}
    model = {
        name: kept(value, None, lambda tensor: tensor) for name, value in run.job.model.items()
    }
    rows |= {f"model[{name!r}]": value for name, value in model.items() if _is_simple(value)}
    scheduler = next((s.scheduler for s in run.stages if s.scheduler is not None), None)
    kind = type(scheduler)
    rows["scheduler"] = "none" if scheduler is None else f"{kind.__module__}.{kind.__qualname__}"
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, made in makers_by_name(run.stages).items():
        groups.setdefault(_text(made), (made, []))[1].append(name)
    for made, names in groups.values():
        first = min(names)
        rows[f"optimizer of {first!r}"] = made["class"]
        rows[f"optimizer of {first!r} trains"] = sorted(names)
        for key, value in made["settings"].items():
            rows[f"optimizer setting {key!r} of {first!r}"] = value
    for key, value in scheduler_state(scheduler, run.title).items():
        rows[f"scheduler setting {key!r}"] = value
    return {key: _text(value) for key, value in rows.items()}


def _text(value: Any) -> str:
    """Return a value in words, the same in every process; tensors by their values."""

    def listed(tensor: Tensor) -> Any:
        return tensor.tolist()

    plain = kept(value, None, listed)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(plain))


def _is_simple(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_simple(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple):
        return all(map(_is_simple, value))
    return type(value) in _SIMPLE


def check_same(
    before: Mapping[str, Any], now: Mapping[str, Any], what: str, place: Path | str
) -> None:
    """Refuse a job with other settings than its checkpoint; `what` takes the name of one."""
    if found := first_difference(before, now):
        name, old, new = found
        raise InputError(f"{place}: was written with {what.format(name)} {old}, the job has {new}")


def stage_state(
    run: JobRun, stage: int, copy: Callable[[Any, str], Any] = copied
) -> dict[str, dict[str, Any]]:
    """Return copies of all that one stage has, under unsplit names.

    ``model`` its tensors of the state dict; ``frozen`` those that other jobs have too, which no
    job may change, uncopied; ``extra`` other entries of the state dict; ``buffers`` those that it
    leaves out; ``parameters`` states and settings of the optimizer; ``masters`` the float32 weights
    of a bfloat16 job; ``scheduler``, ``scaler`` and ``loss`` their states. `NotKept`: one of these
    that no checkpoint can keep.
    """
    part = run.stages[stage]
    state, buffers = shard(run.model, run.stages, stage)
    shared = {(t.data_ptr(), t.device) for t in part.shared_tensors() if t.numel()}
    known = {t.data_ptr() for t in (*run.model.parameters(), *run.model.buffers())}
    found: dict[str, Any] = {"model": {}, "extra": {}}
    frozen = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and (value.data_ptr(), value.device) in shared:
            frozen[name] = value
            continue
        found["model" if keeps(value) else "extra"][name] = value
        if keeps(value) and value.numel() and value.data_ptr() not in known:  # made by a hook
            found["extra"][name] = value
    scaler = part.scaler
    found |= {
        "buffers": buffers,
        "parameters": states_by_name([part]),
        "masters": dict(part.trained) if part.masters is not None else {},
        "scheduler": scheduler_state(part.scheduler, run.title),
        "scaler": {} if scaler is None else dict(vars(scaler)),
        "loss": part.loss.state_dict() if isinstance(part.loss, nn.Module) else {},
    }
    return {**copy(found, f"checkpoint of job {run.title}"), "frozen": frozen}


def check_keeps(run: JobRun) -> None:
    """Find state that no checkpoint can keep before training (`NotKept`); nothing is copied."""

    def dry(value: Any, place: str) -> Any:
        return kept(value, place, empty)

    for stage in range(len(run.stages)):
        stage_state(run, stage, dry)
    rows = [row for stage in run.stages for row in stage.trained]

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return run.job.optimizer([(name, p) for (name, _), p in zip(rows, parameters, strict=True)])

    place = f"checkpoint of job {run.title}"
    check_kept(make, run.job.scheduler, [p for _, p in rows], place)


def scheduler_state(scheduler: Any, title: str) -> dict[str, Any]:
    """Return the state of a scheduler (references), empty without one; `NotKept` if it has none."""
    if scheduler is None:
        return {}
    if not callable(getattr(scheduler, "state_dict", None)):
        raise NotKept(
            f"checkpoint: the scheduler of job {title}, a {type(scheduler).__name__}, has no "
            f"state_dict(), so it cannot be kept"
        )
    return dict(scheduler.state_dict())


def check_same_model(run: JobRun, weights: Weights, extra: Collection[str], place: Path) -> None:
    """Refuse the weights of another model; the sentence names the first key that differs."""
    saved = weights.shapes
    here: dict[str, Any] = {}
    for stage in run.stages:
        if stage.local:  # a tied weight has its shape where it is trained
            here |= shard(run.model, run.stages, stage.index)[0]
    state = run.model.state_dict()
    for name in [*state, *saved]:
        if name not in state or (name not in saved and name not in extra):
            side = "the checkpoint has no" if name in state else "the model has no"
            raise InputError(f"{place}: {side} {name!r}; it belongs to another model")
        value = here.get(name)
        if name in saved and isinstance(value, Tensor) and (*value.shape,) != saved[name]:
            raise InputError(
                f"{place}: {name!r} has shape {saved[name]}, the model has {(*value.shape,)}"
            )


def restore(
    run: JobRun,
    stages: Sequence[JobStage],
    weights: Weights,
    train: Mapping[str, Any],
    shared: Collection[int],
    place: Path,
) -> None:
    """Give stages of a fresh job all that its checkpoint has, one tensor at a time."""
    frozen = {p.data_ptr() for p in run.model.parameters() if not p.requires_grad}
    changed = []
    for stage in stages:
        state, buffers = shard(run.model, run.stages, stage.index)
        for name, target in state.items():
            if name not in train["extra"]:
                value, at = weights.read(name), target.data_ptr()
                if at in frozen and target.numel() and at not in shared:
                    changed += [name] * (not torch.equal(target.cpu(), value))
                _restore_tensor(target, value, at in shared, name, place)
        if extra := {name: value for name, value in train["extra"].items() if name in state}:
            run.model.load_state_dict(extra, strict=False)
        for name, old in buffers.items():
            _set_buffer(run.model, name, train["buffers"][name], old)
        restore_states(stage, train["parameters"], str(place))
        for name, master in stage.masters or ():
            with torch.no_grad():
                master.copy_(train["masters"][name])
        if stage.scaler is not None:
            vars(stage.scaler).update(train["scaler"])
        if isinstance(stage.loss, nn.Module):
            stage.loss.load_state_dict(train["loss"])
            for name, old in stage.loss.named_buffers():
                if name in train["loss"]:
                    _set_buffer(stage.loss, name, train["loss"][name], old)
        _restore_scheduler(stage, train["scheduler"])
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        warnings.warn(
            f"{place}: frozen {changed[0]!r}{more} differ from the model of job {run.title}, as "
            f"with another base; it continues with the weights of the checkpoint",
            stacklevel=2,
        )


def _set_buffer(module: nn.Module, name: str, value: Tensor, old: Tensor) -> None:
    """Assign a buffer as it is, so that no cast changes a bit."""
    owner, _, last = name.rpartition(".")
    module.get_submodule(owner)._buffers[last] = value.to(old.device, copy=True)


def _restore_tensor(target: Tensor, value: Tensor, shared: bool, name: str, place: Path) -> None:
    if target.dtype != value.dtype:
        raise InputError(f"{place}: {name!r} is {value.dtype}, the model has {target.dtype}")
    value = value.to(target.device)
    if not shared:
        target.copy_(value)
    elif not torch.equal(target, value):
        raise InputError(
            f"{place}: {name!r} is frozen and shared with other jobs, and differs from the "
            f"checkpoint; resume with the base that it was written with"
        )


def _restore_scheduler(stage: JobStage, saved: Mapping[str, Any]) -> None:
    if stage.scheduler is None:
        return
    assert stage.optimizer is not None
    stage.scheduler.load_state_dict(copied(saved))  # stages share no list
    rates = getattr(stage.scheduler, "_last_lr", ())
    for group, rate in zip(stage.optimizer.param_groups, rates, strict=False):
        if not group["params"]:  # no parameter has brought it from the checkpoint
            group["lr"] = rate


def digest(batch: Any) -> str:
    """Return types, shapes and a checksum of the values of all tensors of a batch."""
    if isinstance(batch, dict):
        return " ".join(f"{key}: {digest(value)}" for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return " ".join(map(digest, batch))
    if not isinstance(batch, Tensor):
        return repr(batch) if isinstance(batch, _SIMPLE) else type(batch).__name__
    value = batch.detach().cpu().contiguous().reshape(-1)
    data = value.view(torch.uint8).numpy().data if value.numel() else b""
    return f"{value.dtype}{list(batch.shape)}#{zlib.crc32(data):08x}"


def check_restart(data: Data, job: Job, title: str, at: int, known: str) -> None:
    """Refuse data that give another batch for iteration `at` when they begin with it.

    Warn if the batch before is not that of the checkpoint, of which the digest is known.
    """
    try:
        rows = islice(data(job, at - 1), 2)
        last = digest(cut_batch(next(rows), job.microbatches)[1])
        before = [digest(batch) for batch in rows]  # one by one: data may use a buffer again
        now = [digest(batch) for batch in islice(data(job, at), 1)]
    except OptschedError:
        raise
    except Exception:  # the job fails with it when the batch is drawn
        return
    if before != now:
        raise InputError(
            f"data: job {title}: data(job, {at}) begins with another batch than the second of "
            f"data(job, {at - 1}); data(job, start) must begin with the batch of iteration start "
            f"and depend on nothing else, such as the global random state"
        )
    if known not in ("", last):
        warnings.warn(
            f"data: job {title}: the batch of iteration {at - 1} differs from that of the "
            f"checkpoint; it continues with the data of this call",
            stacklevel=2,
        )
