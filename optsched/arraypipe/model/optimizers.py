"""Optimizers of stages that equal one over all parameters."""

from __future__ import annotations

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

    Each is the optimizer of the whole model without the parameters of other stages, so that places
    in the list and groups are those of training alone. Refuses one that looks across tensors.
    """

    def make(named: NamedParameters) -> optim.Optimizer:
        return python_settings(job.optimizer(named))

    try:
        made = [_part(make, row, unsplit) if row else None for row in stages]
    except InputError as error:
        raise InputError(f"job {title}: {error}") from error
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(f"job {title}: the optimizer cannot be made ({reason})") from error
    updated = {id(p) for one in made if one is not None for p in _tensors(one)}
    trained = [(name, p) for name, p in unsplit if id(p) in updated]
    for one in made:
        if one is not None:
            _check_per_tensor(make, one, trained, title)
            if job.scheduler is None:  # else it may have a value for every group
                one.param_groups[:] = [g for g in one.param_groups if g["params"]] or [
                    one.param_groups[0]
                ]
    return made


def _part(
    make: MakeOptimizer, parameters: NamedParameters, unsplit: NamedParameters
) -> optim.Optimizer:
    """An optimizer over all parameters, others than these as placeholders, which it then drops."""
    local = dict(parameters)

    def placeholder(p: nn.Parameter) -> nn.Parameter:
        value = torch.zeros((), dtype=p.dtype, device=p.device)
        return nn.Parameter(value.expand(p.shape), p.requires_grad)

    given = [(name, local[name] if name in local else placeholder(p)) for name, p in unsplit]
    optimizer: Any = make(list(given))
    if not isinstance(optimizer, optim.Optimizer):
        raise InputError(f"optimizer returned {type(optimizer).__name__}, no Optimizer")
    if not {id(p) for p in _tensors(optimizer)} <= {id(p) for _, p in given}:
        raise InputError("the optimizer holds tensors that it was not given")
    kept_ids = {id(p) for p in local.values()}
    for group in optimizer.param_groups:
        kept = [k for k, parameter in enumerate(group["params"]) if id(parameter) in kept_ids]
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][k] for k in kept]
    for parameter in [p for p in optimizer.state if id(p) not in kept_ids]:
        del optimizer.state[parameter]
    return optimizer


def _tensors(optimizer: optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _check_per_tensor(
    make: MakeOptimizer, sample: optim.Optimizer, trained: NamedParameters, title: str
) -> None:
    """Refuse an optimizer that looks across tensors.

    A class not known is tried: three steps on the first and the last parameter, with random values
    and gradients, together in one optimizer and apart in two, have to give the same bits.
    """
    hooked = sample._optimizer_step_pre_hooks or sample._optimizer_step_post_hooks
    if (type(sample) in PER_TENSOR and not hooked) or len(trained) < 2:
        return
    sentence = f"job {title}: optimizer {type(sample).__name__}"
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
    optimizers = [_part(make, group, pair) for group in copies]
    for _ in range(3):
        for _, parameter in pair:
            parameter.grad = random(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for _, parameter in pair]


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[str, str, str] | None:
    """The first entry that is not the same in both, with its two values in words."""
    for key in {**one, **other}:
        a, b = one.get(key, _UNSET), other.get(key, _UNSET)
        if not same(a, b):
            texts = (value if isinstance(value, str) else repr(value) for value in (a, b))
            old, new = (" ".join(f"{text:.200}".split()) for text in texts)
            return key, old, new
    return None


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
