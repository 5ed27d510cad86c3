"""Optimizers per stage must equal one over all parameters: which do, and how it is found out."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn, optim

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.job import MakeOptimizer, NamedParameters


PER_TENSOR: Final = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop,
    optim.Rprop, optim.Adagrad, optim.Adadelta, optim.ASGD,
)  # fmt: skip
"""Classes that treat every tensor by itself; any other class is tried."""

_UNSET: Final = "(not set)"


class Group(NamedTuple):
    """A parameter group of an optimizer: unsplit names and settings."""

    names: list[str]
    settings: dict[str, Any]


def make_optimizer(
    make: MakeOptimizer,
    parameters: NamedParameters,
    job: str,
    unsplit: NamedParameters | None = None,
) -> optim.Optimizer | None:
    """The optimizer of one stage, None for a stage without parameters; refuses foreign tensors.

    Where it cannot be made of this stage's alone, because a group has none of them, it is made of
    all, `unsplit`, and those of other stages taken out again.
    """
    if not parameters:
        return None
    try:
        optimizer = make(list(parameters))
    except Exception:
        if not unsplit:
            raise
        optimizer = _part_of_whole(make, dict(parameters), unsplit)
    own = {id(parameter) for _, parameter in parameters}
    for group in optimizer.param_groups:
        if any(id(parameter) not in own for parameter in group["params"]):
            raise InputError(f"job {job}: the optimizer holds tensors that it was not given")
    return optimizer


def check_per_tensor(make: MakeOptimizer, parameters: NamedParameters, job: str) -> list[Group]:
    """Refuse an optimizer that looks across tensors; the groups of one over all parameters.

    A class not known is tried: three steps on the first and the last parameter, with random values
    and gradients, together in one optimizer and apart in two, have to give the same bits.
    """
    copies = [(name, nn.Parameter(p.detach().clone(), p.requires_grad)) for name, p in parameters]
    try:
        sample = make(list(copies))
    except Exception as error:
        raise InputError(f"job {job}: the optimizer cannot be made ({error})") from error
    if not isinstance(sample, optim.Optimizer):
        raise InputError(f"job {job}: optimizer returned {type(sample).__name__}, no Optimizer")
    own = {id(parameter) for _, parameter in copies}
    foreign = any(id(p) not in own for group in sample.param_groups for p in group["params"])
    groups = [] if foreign else groups_of(sample, copies)  # foreign tensors: refused per stage
    hooked = sample._optimizer_step_pre_hooks or sample._optimizer_step_post_hooks
    if type(sample) in PER_TENSOR and not hooked:
        return groups
    sentence = f"job {job}: optimizer {type(sample).__name__}"
    if isinstance(sample, optim.LBFGS):
        raise InputError(f"{sentence} looks across tensors, so stages cannot update one by one")
    held = {name for group in groups for name in group.names}
    trained = [entry for entry in parameters if entry[0] in held]
    if len(trained) < 2:
        return groups
    # one of the first stage and one of the last: what is tried is what will be apart
    pair = [trained[0], trained[-1]]
    try:
        together = _trial(make, [pair], job)
        apart = _trial(make, [[entry] for entry in pair], job)
    except Exception as error:
        raise InputError(
            f"{sentence} cannot be tried on two tensors, together and apart ({error})"
        ) from error
    if not all(torch.equal(a, b) for a, b in zip(together, apart, strict=True)):
        raise InputError(
            f"{sentence} looks across tensors: two updated together and apart differ, so stages "
            f"cannot update one by one"
        )
    return groups


def check_same_settings(
    groups: Sequence[Group],
    optimizers: Sequence[optim.Optimizer | None],
    parameters: Sequence[NamedParameters],
    job: str,
) -> None:
    """Refuse a function that treats a parameter otherwise in a stage than in the whole model."""
    stages = zip(optimizers, parameters, strict=True)
    rows = [g for made, row in stages if made is not None for g in groups_of(made, row)]
    whole, apart = (
        {name: group.settings for group in found for name in group.names}
        for found in (groups, rows)
    )
    found = _difference(whole, apart) if groups else None
    if found is None:
        return
    name, key, a, b = found
    if key is None:
        here, there = ("the whole model", "its stage")[:: 1 if a else -1]
        raise InputError(
            f"job {job}: the optimizer trains {name!r} in {here}, but not in {there}; let it "
            f"depend on names, not on places in the list"
        )
    raise InputError(
        f"job {job}: the optimizer gives {name!r} {key} {a!r} in the whole model, and {b!r} in its "
        f"stage; let it depend on names, not on places in the list"
    )


def _difference(
    one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]
) -> tuple[str, str | None, Any, Any] | None:
    """Parameter, setting and both values that differ; no setting: which of the two train it."""
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other:
            return name, None, name in one, name in other
        for key in dict.fromkeys([*one[name], *other[name]]):
            a, b = one[name].get(key, _UNSET), other[name].get(key, _UNSET)
            if not same(a, b):
                return name, key, a, b
    return None


def groups_of(optimizer: optim.Optimizer, parameters: NamedParameters) -> list[Group]:
    """Names and settings of the groups of an optimizer (copies)."""
    names = {id(p): name for name, p in parameters}
    return [
        Group([names[id(p)] for p in group["params"]], copy.deepcopy(_settings(group)))
        for group in optimizer.param_groups
    ]


def align_groups(
    optimizer: optim.Optimizer | None, parameters: NamedParameters, groups: Sequence[Group]
) -> None:
    """Give the optimizer of a stage all groups of the unsplit one, some of them empty.

    Schedulers with one value per group go by the number of a group.
    """
    if optimizer is None or not groups:
        return
    own = dict(parameters)
    current = groups_of(optimizer, parameters)
    wanted = [[name for name in group.names if name in own] for group in groups]
    if [set(group.names) for group in current] == list(map(set, wanted)):
        return
    named = any("param_names" in group for group in optimizer.param_groups)
    optimizer.param_groups[:] = [
        {
            "params": [own[name] for name in row],
            **copy.deepcopy(group.settings),
            **({"param_names": row} if named else {}),
        }
        for row, group in zip(wanted, groups, strict=True)
    ]


def states_by_name(
    optimizers: Sequence[optim.Optimizer | None], parameters: Sequence[NamedParameters]
) -> dict[str, dict[str, Any]]:
    """State and settings of every parameter under its unsplit name (references, not copies)."""
    names = {id(p): name for stage in parameters for name, p in stage}
    found: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups if optimizer is not None else ():
            settings = _settings(group)
            for parameter in group["params"]:
                assert optimizer is not None
                state = dict(optimizer.state.get(parameter, {}))
                found[names[id(parameter)]] = {"state": state, "settings": settings}
    return found


def makers_by_name(
    optimizers: Sequence[optim.Optimizer | None], parameters: Sequence[NamedParameters]
) -> dict[str, dict[str, Any]]:
    """Class and settings of the optimizer of every parameter, as they are now (copies)."""
    names = {id(p): name for stage in parameters for name, p in stage}
    return {
        names[id(parameter)]: {
            "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            "settings": copy.deepcopy(_settings(group)),
        }
        for optimizer in optimizers
        for group in (optimizer.param_groups if optimizer is not None else ())
        for parameter in group["params"]
    }


def check_same_makers(
    saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], place: str
) -> None:
    """Refuse an optimizer of another class or with other settings than the checkpoint's."""
    before, after = (
        {
            name: {"class": row["class"]}
            | {f"setting {key!r}": value for key, value in row["settings"].items()}
            for name, row in makers.items()
        }
        for makers in (saved, now)
    )
    found = _difference(before, after)
    if found is None:
        return
    name, key, a, b = found
    if key is None:
        side = "the job" if a else "the checkpoint"
        raise InputError(f"{place}: the optimizer of {side} does not train {name!r}")
    raise InputError(
        f"{place}: was written with optimizer {key} {a!r} for {name!r}, the job has {b!r}"
    )


def restore_states(
    optimizer: optim.Optimizer | None,
    parameters: NamedParameters,
    saved: Mapping[str, Mapping[str, Any]],
    place: str,
) -> None:
    """Give an optimizer the saved states; assigned as they are, so that no cast changes a bit."""
    names = {id(p): name for name, p in parameters}
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name not in saved:
                raise InputError(f"{place}: there is no optimizer state of parameter {name!r}")
            assert optimizer is not None
            if saved[name]["state"]:
                # as in `load_state_dict`: counters stay on the CPU unless kernels read them
                settings = saved[name]["settings"]
                counts = bool(settings.get("capturable") or settings.get("fused"))
                optimizer.state[parameter] = {
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
    """Whether two settings or states are equal, tensors bit by bit."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b) or (a != a and b != b)  # not a number is the same setting too


def _part_of_whole(
    make: MakeOptimizer, own: Mapping[str, nn.Parameter], unsplit: NamedParameters
) -> optim.Optimizer:
    """An optimizer over stand-ins for all parameters but these, without the stand-ins then."""
    optimizer = make(
        [
            (n, own[n] if n in own else nn.Parameter(torch.empty_like(p), p.requires_grad))
            for n, p in unsplit
        ]
    )
    here = {id(parameter) for parameter in own.values()}
    for group in optimizer.param_groups:
        kept = [k for k, parameter in enumerate(group["params"]) if id(parameter) in here]
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][k] for k in kept]
    for parameter in [p for p in optimizer.state if id(p) not in here]:
        del optimizer.state[parameter]
    return optimizer


def _trial(make: MakeOptimizer, groups: Sequence[NamedParameters], job: str) -> list[Tensor]:
    """Values of the parameters after three steps with one optimizer per group."""
    draw = torch.Generator().manual_seed(0)
    copies = [[(name, _random(p, draw)) for name, p in group] for group in groups]
    pair = [entry for group in copies for entry in group]
    optimizers = [make_optimizer(make, group, job, pair) for group in copies]
    for _ in range(3):
        for group in copies:
            for _, parameter in group:
                parameter.grad = _random(parameter, draw).detach()
        for optimizer in optimizers:
            assert optimizer is not None
            optimizer.step()
    return [parameter.detach() for group in copies for _, parameter in group]


def _random(like: Tensor, draw: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(like.shape, generator=draw).to(like.dtype))
