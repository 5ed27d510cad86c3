"""Optimizers per stage must equal one over all parameters: which do, and how it is found out."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

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


def make_optimizer(
    make: MakeOptimizer, parameters: NamedParameters, job: str
) -> optim.Optimizer | None:
    """The optimizer of one stage, None for a stage without parameters; refuses foreign tensors."""
    if not parameters:
        return None
    optimizer = make(list(parameters))
    own = {id(parameter) for _, parameter in parameters}
    for group in optimizer.param_groups:
        if any(id(parameter) not in own for parameter in group["params"]):
            raise InputError(f"job {job}: the optimizer holds tensors that it was not given")
    return optimizer


def check_per_tensor(make: MakeOptimizer, parameters: NamedParameters, job: str) -> None:
    """Refuse an optimizer that looks across tensors; a class not known is tried on two tensors.

    The trial runs three steps on the first and the last parameter, with random values and
    gradients, together in one optimizer and apart in two, and compares the bits.
    """
    try:
        sample = make(_copies(parameters))
    except Exception as error:
        raise InputError(f"job {job}: the optimizer cannot be made ({error})") from error
    if not isinstance(sample, optim.Optimizer):
        raise InputError(f"job {job}: optimizer returned {type(sample).__name__}, no Optimizer")
    kind = type(sample)
    if kind in PER_TENSOR:
        return
    sentence = f"job {job}: optimizer {kind.__name__}"
    if isinstance(sample, optim.LBFGS):
        raise InputError(f"{sentence} looks across tensors, so stages cannot update one by one")
    if len(parameters) < 2:
        return
    # one of the first stage and one of the last: what is tried is what will be apart
    pair = [parameters[0], parameters[-1]]
    try:
        together = _trial(make, [pair])
        apart = _trial(make, [[entry] for entry in pair])
    except Exception as error:
        raise InputError(
            f"{sentence} cannot be tried on two tensors, together and apart ({error})"
        ) from error
    if not all(torch.equal(a, b) for a, b in zip(together, apart, strict=True)):
        raise InputError(
            f"{sentence} looks across tensors: two updated together and apart differ, so stages "
            f"cannot update one by one"
        )


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
    """Refuse an optimizer of another class or with other settings than the checkpoint's.

    A checkpoint that was written before classes were kept has none to compare.
    """
    for name in (*now, *(name for name in saved if name not in now)):
        if name not in saved or name not in now:
            side = "the checkpoint" if name not in saved else "the job"
            raise InputError(f"{place}: the optimizer of {side} does not train {name!r}")
        pairs = {"class": (saved[name].get("class", now[name]["class"]), now[name]["class"])}
        before, after = saved[name]["settings"], now[name]["settings"]
        for key in (*before, *(key for key in after if key not in before)):
            pairs[f"setting {key!r}"] = (before.get(key, _UNSET), after.get(key, _UNSET))
        for key, (a, b) in pairs.items():
            if not _same(a, b):
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
                optimizer.state[parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in saved[name]["state"].items()
                }
            group.update(saved[name]["settings"])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def _copies(parameters: NamedParameters) -> NamedParameters:
    return [
        (name, nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad))
        for name, p in parameters
    ]


def _trial(make: MakeOptimizer, groups: Sequence[NamedParameters]) -> list[Tensor]:
    """Values of the parameters after three steps with one optimizer per group."""
    draw = torch.Generator().manual_seed(0)
    copies = [[(name, _random(p, draw)) for name, p in group] for group in groups]
    optimizers = [make(list(group)) for group in copies]
    for _ in range(3):
        for group in copies:
            for _, parameter in group:
                parameter.grad = _random(parameter, draw).detach()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for group in copies for _, parameter in group]


def _random(like: Tensor, draw: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(like.shape, generator=draw).to(like.dtype))
