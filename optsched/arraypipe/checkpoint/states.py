"""What a checkpoint has of a job, and how the job is put back from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from optsched.arraypipe.checkpoint.files import copied
from optsched.arraypipe.checkpoint.plain import NotKept, check_kept, empty, kept
from optsched.arraypipe.model.optimizers import (
    first_difference,
    makers_by_name,
    restore_states,
    states_by_name,
)
from optsched.arraypipe.model.tied_weights import shard
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from optsched.arraypipe.job import Data, Job
    from optsched.arraypipe.runtime.state import JobRun, JobStage


_PLAIN: Final = (str, int, float, bool, type(None))
_VALUES: Final = 64  # of a tensor that are compared


def model_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint notes of `Job.model`: ``model`` the plain entries, ``model_other`` names.

    Plain are strings, integers, floats, booleans, also of NumPy's, None, and lists, tuples and
    dictionaries of these, not of classes derived from them: what `torch.load(weights_only=True)`
    reads again.
    """
    numbers = {name: kept(value, None, lambda tensor: tensor) for name, value in given.items()}
    plain = {name: value for name, value in numbers.items() if _is_plain(value)}
    return {"model": plain, "model_other": sorted(name for name in given if name not in plain)}


def check_same_arguments(train: Mapping[str, Any], given: Mapping[str, Any], place: Path) -> None:
    """Refuse a job whose arguments are not those of its checkpoint, if plain on both sides."""
    now = model_arguments(given)
    apart = {*train["model_other"], *now["model_other"]}
    before, after = (
        {name: value for name, value in side.items() if name not in apart}
        for side in (train["model"], now["model"])
    )
    check_same(before, after, "model[{!r}]", place)


def check_same(
    before: Mapping[str, Any], now: Mapping[str, Any], what: str, place: Path | str
) -> None:
    """Refuse a job whose settings are not those of its checkpoint; `what` takes the name of one."""
    if found := first_difference(before, now):
        name, old, new = found
        raise InputError(f"{place}: was written with {what.format(name)} {old}, the job has {new}")


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def shard_of(
    run: JobRun, stage: int, copy: Callable[[Any, str], Any] = copied
) -> dict[str, dict[str, Any]]:
    """Copies of all that one stage has trained, under unsplit names.

    ``model`` its entries of the state dict, ``buffers`` those that a state dict leaves out,
    ``parameters`` states and settings of the optimizer, ``masters`` the float32 weights of a
    bfloat16 job, ``scheduler``, ``scaler`` and ``loss`` the states of these;
    ``batch`` is left to the caller.
    `NotKept`: one of these that no checkpoint can keep.
    """
    part = run.stages[stage]
    model, buffers = shard(run.model, run.stages, stage)
    found = {
        "model": model,
        "buffers": buffers,
        "parameters": states_by_name([part]),
        "masters": dict(part.trained) if part.masters is not None else {},
        "scheduler": scheduler_state(part.scheduler, run.title),
        "loss": _loss_state(part.loss),
        "scaler": {} if part.scaler is None else vars(part.scaler),
    }
    return dict(copy(found, f"checkpoint of job {run.title}"))


def _loss_state(loss: Any) -> dict[str, Any]:
    """State of a loss that is a module, under names that begin with ``loss.``."""
    state = loss.state_dict() if isinstance(loss, nn.Module) else {}
    return {f"loss.{name}": value for name, value in state.items()}


def dry_shards(run: JobRun) -> list[dict[str, dict[str, Any]]]:
    """What `shard_of` gives of all stages, its tensors empty; nothing is copied from a GPU."""

    def copy(value: Any, place: str) -> Any:
        return kept(value, place, empty)

    return [{**shard_of(run, stage, copy), "batch": {}} for stage in range(len(run.stages))]


def check_job(run: JobRun) -> None:
    """Find state that comes with the first steps and that no checkpoint can keep (`NotKept`)."""
    rows = [row for stage in run.stages for row in stage.trained]

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return run.job.optimizer([(name, p) for (name, _), p in zip(rows, parameters, strict=True)])

    place = f"checkpoint of job {run.title}"
    check_kept(make, run.job.scheduler, [p for _, p in rows], place)


def joined(shards: Sequence[Mapping[str, Mapping[str, Any]]], title: str) -> dict[str, Any]:
    """The shards of all stages as one.

    The optimizers of all stages have the same groups (`stage_optimizers`), so their schedulers have
    the same state, which is kept once.
    """
    states = [row["scheduler"] for row in shards if row["scheduler"]]
    for state in states:
        if found := first_difference(states[0], state):
            raise NotKept(
                f"checkpoint: the scheduler of job {title} has another {found[0]!r} on every "
                f"stage, so it cannot be kept: {found[1]} and {found[2]}"
            )
    return {
        part: {name: value for row in shards for name, value in row[part].items()}
        for part in shards[0]
    }


def makers(run: JobRun) -> dict[str, dict[str, Any]]:
    """What optimizers and scheduler of a job are made with, while they are fresh (references)."""
    stage = next((stage for stage in run.stages if stage.scheduler is not None), None)
    found = {}
    if stage is not None:
        kind = type(stage.scheduler)
        name = f"{kind.__module__}.{kind.__qualname__}"
        found = {"class": name, "made": scheduler_state(stage.scheduler, run.title)}
    return {"optimizer": makers_by_name(run.stages), "scheduler": found}


def check_same_scheduler(saved: Mapping[str, Any], now: Mapping[str, Any], place: str) -> None:
    """Refuse a scheduler of another class or with other settings than the checkpoint's."""
    before, after = (side.get("class", "none") for side in (saved, now))
    if before != after:
        raise InputError(f"{place}: was written with scheduler {before}, the job has {after}")
    check_same(saved.get("made", {}), now.get("made", {}), "scheduler setting {!r}", place)


def scheduler_state(scheduler: Any, title: str) -> dict[str, Any]:
    """The state of a scheduler (references), empty without one; `NotKept` if it has none."""
    if scheduler is None:
        return {}
    if not callable(getattr(scheduler, "state_dict", None)):
        raise NotKept(
            f"checkpoint: the scheduler of job {title}, a {type(scheduler).__name__}, has no "
            f"state_dict(), so it cannot be kept"
        )
    return dict(scheduler.state_dict())


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
        owner, _, last = name.rpartition(".")
        buffers = run.model.get_submodule(owner)._buffers
        # assigned as it is, so that no cast changes a bit
        buffers[last] = value if (old := buffers[last]) is None else value.to(old.device)
    for stage in run.stages:
        restore_states(stage, train["parameters"], str(place))
        for name, master in stage.masters or ():
            with torch.no_grad():
                master.copy_(train["masters"][name])
        _restore_scheduler(stage, train["scheduler"])
        if isinstance(stage.loss, nn.Module):
            saved = {name.removeprefix("loss."): value for name, value in train["loss"].items()}
            stage.loss.load_state_dict(saved)
            for name, old in stage.loss.named_buffers():
                if name in saved:  # assigned as it is, so that no cast changes a bit
                    owner, _, last = name.rpartition(".")
                    stage.loss.get_submodule(owner)._buffers[last] = saved[name].to(old.device)
        if stage.scaler is not None:
            vars(stage.scaler).update(train["scaler"])


@dataclass
class Seen:
    """The newest batch of a job, and the one that its checkpoint was trained on last."""

    start: int  # iteration that the job goes on with
    title: str
    expected: Mapping[str, Any] = field(default_factory=dict)  # `batch` of the checkpoint
    iteration: int = -1  # of the newest batch
    parts: list[dict[str, Any]] = field(default_factory=list)  # its sample

    def batch(self, iteration: int) -> dict[str, Any]:
        """What a checkpoint notes of the batch of its last iteration; nothing if that is gone."""
        return {"iteration": iteration, "parts": self.parts} if self.iteration == iteration else {}

    def check(self, pair: Any) -> None:
        """Refuse data that give another batch than before for the last iteration."""
        what, t = difference(self.expected["parts"], sample_of(pair)), self.start - 1
        if what:
            raise InputError(
                f"data: job {self.title}: data(job, {t}) begins with another batch than the one of "
                f"iteration {t} that the checkpoint was trained on ({what}); data(job, start) must "
                f"begin with the batch of iteration start and depend on nothing else, such as the "
                f"global random state; to train on other data begin a new job with init=model.pt"
            )


def watched(data: Data, seen: Seen, samples: Callable[[], bool]) -> Data:
    """Data that begin one batch earlier, which is compared, and of which samples are taken.

    So data that ignore `start` are found, unless all their batches are equal.
    """

    def batches(job: Job, start: int) -> Iterator[Any]:
        first = start - bool(seen.expected)
        return _followed(iter(data(job, first)), first, seen, samples)

    return batches


def _followed(
    source: Iterator[Any], first: int, seen: Seen, samples: Callable[[], bool]
) -> Iterator[Any]:
    for iteration, pair in enumerate(source, first):
        if iteration < seen.start:
            seen.check(pair)
            continue
        if samples():  # before a forward can change the batch in place
            seen.iteration, seen.parts = iteration, sample_of(pair)
        yield pair


def sample_of(value: Any) -> list[dict[str, Any]]:
    """Shapes, types and a few values of all tensors of a batch, wherever they are in it."""
    if isinstance(value, dict):
        return [part for key in value for part in sample_of(value[key])]
    if isinstance(value, (list, tuple)):
        return [part for inner in value for part in sample_of(inner)]
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        return [{"kind": kind, "shape": repr(value) if isinstance(value, _PLAIN) else ""}]
    found: dict[str, Any] = {"kind": str(value.dtype), "shape": str(tuple(value.shape))}
    if value.device.type == "cpu" and value.layout == torch.strided:  # a GPU is not waited for
        places = torch.arange(0, value.numel(), max(1, value.numel() // _VALUES))
        found["values"] = value.detach().take(places)
    return [found]


def difference(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """The first one, in words; values may differ as much as another processor rounds them."""
    if len(before) != len(now):
        return f"it has {len(now)} parts, not {len(before)}"
    for k, (a, b) in enumerate(zip(before, now, strict=True)):
        for key in ("kind", "shape"):
            if a[key] != b[key]:
                return f"part {k} has {key} {b[key]}, not {a[key]}"
        x, y = a.get("values"), b.get("values")
        if x is None or y is None:
            continue
        floats = x.is_floating_point()
        equal = torch.isclose(x, y, rtol=1e-3, atol=1e-5, equal_nan=True) if floats else x == y
        if not equal.all():
            place = int(equal.logical_not().nonzero()[0])
            return f"part {k} has {y[place].item():.6g} where it had {x[place].item():.6g}"
    return ""
