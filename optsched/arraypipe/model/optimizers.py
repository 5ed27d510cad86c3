"""Optimizers per stage must equal one over all parameters: which do, and how it is found out."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn, optim

from optsched.arraypipe.checkpoint.plain import python_settings
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optsched.arraypipe.job import Job, MakeOptimizer, NamedParameters
    from optsched.arraypipe.model.tied_weights import ModelStage


PER_TENSOR: Final = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop,
    optim.Rprop, optim.Adagrad, optim.Adadelta, optim.ASGD,
)  # fmt: skip
"""Classes that treat every tensor by itself; any other class is tried."""

_UNSET: Final = "(not set)"


def stage_optimizers(
    job: Job, stages: Sequence[NamedParameters], unsplit: NamedParameters, title: str
) -> list[optim.Optimizer | None]:
    """The optimizer of every stage, None for one without parameters.

    Refuses those that look across tensors, and functions that treat a parameter otherwise in a
    stage than in the whole model. Where a scheduler may have a value for every group, a stage has
    all groups of the unsplit optimizer, some of them empty.
    """
    sentence = f"job {title}: the optimizer"

    def make(named: NamedParameters) -> optim.Optimizer:
        return python_settings(job.optimizer(named))

    apart = [(name, nn.Parameter(p.detach().clone(), p.requires_grad)) for name, p in unsplit]
    try:
        sample = make(list(apart))
    except Exception as error:
        raise InputError(f"{sentence} cannot be made ({' '.join(str(error).split())})") from error
    if not isinstance(sample, optim.Optimizer):
        raise InputError(f"job {title}: optimizer returned {type(sample).__name__}, no Optimizer")
    groups = _groups_of(sample, apart, sentence)
    whole = {name: settings for names, settings in groups for name in names}
    _check_per_tensor(make, sample, [e for e in unsplit if e[0] in whole], title)
    optimizers: list[optim.Optimizer | None] = []
    for row in stages:
        if not row:
            optimizers.append(None)
            continue
        optimizer, here = _made(make, row, unsplit), dict(row).keys()
        found_groups = _groups_of(optimizer, row, sentence)
        found = _difference(
            {name: settings for name, settings in whole.items() if name in here},
            {name: settings for names, settings in found_groups for name in names},
        )
        if found is not None:
            name, key, a, b = found
            raise InputError(
                f"{sentence} {_difference_of(name, key, a, b)}; let it depend on names, not on "
                f"places in the list"
            )
        if job.scheduler is not None and (
            [set(names) for names, _ in found_groups] != [here & set(names) for names, _ in groups]
        ):
            optimizer = _part_of_whole(make, row, unsplit)
        optimizers.append(optimizer)
    return optimizers


def _difference_of(name: str, key: str | None, a: Any, b: Any) -> str:
    if key is not None:
        return f"gives {name!r} {key} {a} in the whole model, and {b} in its stage"
    one, other = ("the whole model", "its stage")[:: 1 if a else -1]
    return f"trains {name!r} in {one}, but not in {other}"


def _check_per_tensor(
    make: MakeOptimizer, sample: optim.Optimizer, trained: NamedParameters, title: str
) -> None:
    """Refuse an optimizer that looks across tensors.

    A class not known is tried: three steps on the first and the last parameter, with random values
    and gradients, together in one optimizer and apart in two, have to give the same bits.
    """
    hooked = sample._optimizer_step_pre_hooks or sample._optimizer_step_post_hooks
    if type(sample) in PER_TENSOR and not hooked:
        return
    sentence = f"job {title}: optimizer {type(sample).__name__}"
    if isinstance(sample, optim.LBFGS):
        raise InputError(f"{sentence} looks across tensors, so stages cannot update one by one")
    if len(trained) < 2:
        return
    # one of the first stage and one of the last: what is tried is what will be apart
    pair = [trained[0], trained[-1]]
    try:
        together, apart = _trial(make, [pair]), _trial(make, [[entry] for entry in pair])
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{sentence} cannot be tried on two tensors, together and apart ({reason})"
        ) from error
    if not all(map(torch.equal, together, apart)):
        raise InputError(
            f"{sentence} looks across tensors: two updated together and apart differ, so stages "
            f"cannot update one by one"
        )


def _trial(make: MakeOptimizer, groups: Sequence[NamedParameters]) -> list[Tensor]:
    """Values of the parameters after three steps with one optimizer per group."""
    draw = torch.Generator().manual_seed(0)

    def random(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=draw).to(like.dtype)

    copies = [[(name, nn.Parameter(random(p))) for name, p in group] for group in groups]
    pair = [entry for group in copies for entry in group]
    optimizers = [_made(make, group, pair) for group in copies]
    for _ in range(3):
        for _, parameter in pair:
            parameter.grad = random(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for _, parameter in pair]


def _made(
    make: MakeOptimizer, parameters: NamedParameters, unsplit: NamedParameters
) -> optim.Optimizer:
    """The optimizer of a stage; where a group would have nothing of it, a part of the whole."""
    try:
        return make(list(parameters))
    except Exception:
        return _part_of_whole(make, parameters, unsplit)


def _part_of_whole(
    make: MakeOptimizer, parameters: NamedParameters, unsplit: NamedParameters
) -> optim.Optimizer:
    """An optimizer over stand-ins for all parameters but these, without the stand-ins then."""
    given = dict(parameters)
    here = set(map(id, given.values()))
    optimizer = make(
        [
            (
                name,
                given[name]
                if name in given
                else nn.Parameter(torch.empty_like(p), p.requires_grad),
            )
            for name, p in unsplit
        ]
    )
    for group in optimizer.param_groups:
        kept = [k for k, parameter in enumerate(group["params"]) if id(parameter) in here]
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][k] for k in kept]
    for parameter in [p for p in optimizer.state if id(p) not in here]:
        del optimizer.state[parameter]
    return optimizer


def _difference(
    one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]
) -> tuple[str, str | None, Any, Any] | None:
    """Parameter, setting and both values that differ; no setting: which of the two train it."""
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other:
            return name, None, name in one, name in other
        if found := first_difference(one[name], other[name]):
            return name, *found
    return None


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[str, str, str] | None:
    """The first entry that is not the same in both, with its two values in words."""
    for key in {**one, **other}:
        a, b = one.get(key, _UNSET), other.get(key, _UNSET)
        if not same(a, b):
            old, new = (" ".join(f"{value!r:.200}".split()) for value in (a, b))
            return key, old, new
    return None


def _groups_of(
    optimizer: optim.Optimizer, parameters: NamedParameters, sentence: str
) -> list[tuple[list[str], dict[str, Any]]]:
    """Names and settings of the groups of an optimizer (copies); refuses foreign tensors."""
    names = {id(p): name for name, p in parameters}
    if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
        raise InputError(f"{sentence} holds tensors that it was not given")
    return [
        ([names[id(p)] for p in group["params"]], copy.deepcopy(_settings(group)))
        for group in optimizer.param_groups
    ]


def _entries(stage: ModelStage) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    """Unsplit name, parameter and group of all that the optimizer of a stage updates."""
    names = {id(p): name for name, p in stage.trained}
    for group in stage.optimizer.param_groups if stage.optimizer is not None else ():
        for parameter in group["params"]:
            yield names[id(parameter)], parameter, group


def states_by_name(stages: Sequence[ModelStage]) -> dict[str, dict[str, Any]]:
    """State and settings of every parameter under its unsplit name (references, not copies)."""
    return {
        name: {"state": dict(stage.optimizer.state.get(p, {})), "settings": _settings(group)}
        for stage in stages
        if stage.optimizer is not None
        for name, p, group in _entries(stage)
    }


def makers_by_name(stages: Sequence[ModelStage]) -> dict[str, dict[str, Any]]:
    """Class and settings of the optimizer of every parameter, as they are now (references)."""
    return {
        name: {
            "class": f"{type(stage.optimizer).__module__}.{type(stage.optimizer).__qualname__}",
            "settings": _settings(group),
        }
        for stage in stages
        for name, _, group in _entries(stage)
    }


def restore_states(stage: ModelStage, saved: Mapping[str, Mapping[str, Any]], place: str) -> None:
    """Give an optimizer the saved states; assigned as they are, so that no cast changes a bit."""
    for name, parameter, group in _entries(stage):
        if name not in saved:
            raise InputError(f"{place}: there is no optimizer state of parameter {name!r}")
        assert stage.optimizer is not None
        if saved[name]["state"]:
            # as in `load_state_dict`: counters stay on the CPU unless kernels read them
            settings = saved[name]["settings"]
            counts = bool(settings.get("capturable") or settings.get("fused"))
            stage.optimizer.state[parameter] = {
                key: value.to(
                    "cpu" if key == "step" and not counts else parameter.device, copy=True
                )
                if isinstance(value, Tensor)
                else value
                for key, value in saved[name]["state"].items()
            }
        group.update(saved[name]["settings"])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def same(a: Any, b: Any) -> bool:
    """Whether two settings, states or outputs are equal; not a number is the same as itself."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return False
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b) or (a != a and b != b)
