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


class Whole(NamedTuple):
    """What is known of one optimizer over all parameters of a job."""

    makers: dict[str, dict[str, Any]]
    groups: list[Group]


def make_optimizer(
    make: MakeOptimizer,
    parameters: NamedParameters,
    job: str,
    unsplit: NamedParameters | None = None,
) -> optim.Optimizer | None:
    """The optimizer of one stage, None for a stage without parameters; refuses foreign tensors.

    `unsplit` are the parameters of all stages: of these it is made, and those of other stages taken
    out again, where it cannot be made of this stage's alone. A group may have none of them
    (the head's; what is not frozen), and torch makes no optimizer without parameters.
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


def check_per_tensor(make: MakeOptimizer, parameters: NamedParameters, job: str) -> Whole:
    """Refuse an optimizer that looks across tensors; a class not known is tried on two tensors.

    Returns class and settings of every parameter in one optimizer over all (`makers_by_name`), and
    its groups.

    The trial runs three steps on the first and the last parameter, with random values and
    gradients, together in one optimizer and apart in two, and compares the bits.
    """
    copies = _copies(parameters)
    try:
        sample = make(list(copies))
    except Exception as error:
        raise InputError(f"job {job}: the optimizer cannot be made ({error})") from error
    if not isinstance(sample, optim.Optimizer):
        raise InputError(f"job {job}: optimizer returned {type(sample).__name__}, no Optimizer")
    kind = type(sample)
    own = {id(parameter) for _, parameter in copies}
    foreign = any(id(p) not in own for group in sample.param_groups for p in group["params"])
    makers = {} if foreign else makers_by_name([sample], [copies])  # foreign: refused per stage
    whole = Whole(makers, [] if foreign else groups_of(sample, copies))
    hooked = sample._optimizer_step_pre_hooks or sample._optimizer_step_post_hooks
    if kind in PER_TENSOR and not hooked:
        return whole
    sentence = f"job {job}: optimizer {kind.__name__}"
    if isinstance(sample, optim.LBFGS):
        raise InputError(f"{sentence} looks across tensors, so stages cannot update one by one")
    held = {name for group in whole.groups for name in group.names}
    trained = [entry for entry in parameters if entry[0] in held]
    if len(trained) < 2:
        return whole
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
    return whole


def check_same_settings(
    whole: Mapping[str, Mapping[str, Any]],
    optimizers: Sequence[optim.Optimizer | None],
    parameters: Sequence[NamedParameters],
    job: str,
) -> None:
    """Refuse a function that treats a parameter otherwise in a stage than in the whole model.

    `whole` is `Whole.makers`, from `check_per_tensor`.
    """
    apart = makers_by_name(optimizers, parameters)
    for name in (*whole, *(name for name in apart if name not in whole)) if whole else ():
        if name not in whole or name not in apart:
            here, there = ("its stage", "the whole model")[:: 1 if name in apart else -1]
            raise InputError(
                f"job {job}: the optimizer trains {name!r} in {here}, but not in {there}; let it "
                f"depend on names, not on places in the list"
            )
        maker = apart[name]
        for key in maker["settings"].keys() | whole[name]["settings"].keys():
            a, b = (m["settings"].get(key, _UNSET) for m in (whole[name], maker))
            if not same(a, b):
                raise InputError(
                    f"job {job}: the optimizer gives {name!r} {key} {a!r} in the whole model, and "
                    f"{b!r} in its stage; let it depend on names, not on places in the list"
                )


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
    """Give the optimizer of a stage these groups of one over more parameters, some of them empty.

    Schedulers with one value per group go by the number of a group, and a function that makes an
    optimizer may leave out those that have no parameter on a stage, or make them in another order.
    Parameters must have the settings that they have in these groups (`check_same_settings`).
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
    """Class and settings of the optimizer of every parameter, as they are now (copies).

    Taken right after the optimizers are made, it tells what they were made with: some classes
    change their own settings while they train.
    """
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
    for name in (*now, *(name for name in saved if name not in now)):
        if name not in saved or name not in now:
            side = "the checkpoint" if name not in saved else "the job"
            raise InputError(f"{place}: the optimizer of {side} does not train {name!r}")
        pairs = {"class": (saved[name]["class"], now[name]["class"])}
        before, after = saved[name]["settings"], now[name]["settings"]
        for key in (*before, *(key for key in after if key not in before)):
            pairs[f"setting {key!r}"] = (before.get(key, _UNSET), after.get(key, _UNSET))
        for key, (a, b) in pairs.items():
            if not same(a, b):
                raise InputError(
                    f"{place}: was written with optimizer {key} {a!r} for {name!r}, the job "
                    f"has {b!r}"
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


def _copies(parameters: NamedParameters) -> NamedParameters:
    return [
        (name, nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad))
        for name, p in parameters
    ]


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
