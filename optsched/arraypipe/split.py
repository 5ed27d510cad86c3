"""Cutting a model into stages: which modules run where, and the unsplit names of all they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from optsched.arraypipe.job import JobStage, buffer_holders
from optsched.arraypipe.optimizers import check_per_tensor, make_optimizer
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.arraypipe.job import BuildModel, Job, NamedParameters

Stages: TypeAlias = int | Sequence[int] | Sequence[Sequence[str]]
Names: TypeAlias = tuple[tuple[str, ...], ...]


def build(build_model: BuildModel, job: Job) -> nn.Module:
    """The unsplit model of a job, with the weights it would start from alone."""
    torch.manual_seed(job.seed)
    model = build_model(**job.model)
    if not isinstance(model, nn.Module):
        raise InputError(f"build_model: returned {type(model).__name__}, expected an nn.Module")
    return model


def stage_names(model: nn.Module, stages: Stages, sample: Any) -> Names:
    """Names of the modules of every stage, from any of the forms that `ArrayTrainer` takes.

    Parameters
    ----------
    model
        An `nn.Sequential` for the first two forms.
    stages
        A number of stages (balanced by counted floating point operations, which unlike times give
        the same cuts in every run), the indices that start the second, third, ... stage, or the
        names of the modules of every stage.
    sample
        An input of the model, used for counting.
    """
    if isinstance(stages, (bool, str, bytes, Mapping)):
        raise InputError(f"stages: expected a number, cut indices or names, got {stages!r}")
    rows: list[Any] = [] if isinstance(stages, int) else list(stages)
    if rows and not isinstance(rows[0], int):
        return _by_names(model, rows)
    if type(model).forward is not nn.Sequential.forward:
        raise InputError(
            f"stages: a {type(model).__name__} is no nn.Sequential; name the modules of every "
            f'stage, e.g. [["embed", "block0"], ["block1", "head"]]'
        )
    children = [name for name, _ in model.named_children()]
    if len(children) != len(model):  # type: ignore[arg-type]
        raise InputError(
            "stages: a module occurs twice in the model; tied stages are not supported"
        )
    if isinstance(stages, int):
        if not 1 <= stages <= len(children):
            raise InputError(f"stages: expected 1..{len(children)} (the modules), got {stages}")
        cuts = _balanced(_costs(model, sample), stages)
    else:
        cuts = rows
    bounds = [0, *cuts, len(children)]
    if not all(isinstance(c, int) for c in cuts) or any(b <= a for a, b in pairwise(bounds)):
        raise InputError(
            f"stages: expected ascending cut indices in 1..{len(children) - 1}, got {cuts}"
        )
    return tuple(tuple(children[a:b]) for a, b in pairwise(bounds))


def split(model: nn.Module, names: Names, job: Job, index: int, title: str) -> list[JobStage]:
    """The stages of one job, each with its own optimizer; refuses what would not be exact."""
    modules = [[_module(model, name, title) for name in row] for row in names]
    owner = _owners(model, modules, names, title)
    parameters: list[NamedParameters] = [[] for _ in names]
    for name, parameter in model.named_parameters():
        parameters[owner[id(parameter)]].append((name, parameter))
    check_per_tensor(job.optimizer, [entry for row in parameters for entry in row], title)
    return [
        JobStage(
            job=index,
            index=s,
            last=s == len(names) - 1,
            modules=tuple(modules[s]),
            parameters=parameters[s],
            prefixes=tuple(f"{name}." for name in names[s]),
            optimizer=make_optimizer(job.optimizer, parameters[s], title),
            holders=buffer_holders(modules[s]),
        )
        for s in range(len(names))
    ]


def _by_names(model: nn.Module, stages: Sequence[Sequence[str]]) -> Names:
    rows: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for s, row in enumerate(stages):
        if isinstance(row, (str, int)) or not row or not all(isinstance(n, str) for n in row):
            raise InputError(f"stages[{s}]: expected a list of module names, got {row!r}")
        for name in row:
            _module(model, name, "0")
            if name in seen:
                raise InputError(f"stages[{s}]: module {name!r} is named twice")
            seen.add(name)
        rows.append(tuple(row))
    return tuple(rows)


def _module(model: nn.Module, name: str, title: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise InputError(f"stages: the model of job {title} has no module {name!r}") from None


def _owners(
    model: nn.Module, modules: Sequence[Sequence[nn.Module]], names: Names, title: str
) -> dict[int, int]:
    """Stage of every parameter and buffer by identity; each must have exactly one."""
    owner: dict[int, int] = {}
    home: dict[int, str] = {}
    for s, row in enumerate(modules):
        for name, module in zip(names[s], row, strict=True):
            if id(module) in home:
                raise InputError(
                    f"stages: {name!r} and {home[id(module)]!r} of job {title} are one module; "
                    f"make one for each place"
                )
            home[id(module)] = name
            tensors = [*module.named_parameters(), *module.named_buffers()]
            for inner, tensor in tensors:
                if owner.setdefault(id(tensor), s) != s:
                    raise InputError(
                        f"stages: {name}.{inner} of job {title} is tied to stage "
                        f"{owner[id(tensor)]}; weights tied across stages are not supported yet"
                    )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in owner:
            raise InputError(f"stages: {name} of job {title} belongs to no stage")
    return owner


def _costs(model: nn.Module, sample: Any) -> list[int]:
    """Counted operations of every child on a sample, plus its output size so that none is free."""
    from torch.utils.flop_counter import FlopCounterMode

    costs = []
    x = sample
    with torch.no_grad():
        for child in model.children():
            with FlopCounterMode(display=False) as counter:
                x = child(x)
            outputs = x if isinstance(x, tuple) else (x,)
            size = sum(t.numel() for t in outputs if isinstance(t, Tensor))
            costs.append(int(counter.get_total_flops()) + size)
    return costs


def _balanced(costs: Sequence[int], parts: int) -> list[int]:
    """Cuts with the least largest part, the earliest cuts among equals (dynamic programming)."""
    n = len(costs)
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = {(0, 0): (0, -1)}  # (parts, prefix) -> (largest part, previous cut)
    for part in range(1, parts + 1):
        for end in range(part, n - (parts - part) + 1):
            best[part, end] = min(
                (max(best[part - 1, cut][0], total[end] - total[cut]), cut)
                for cut in range(part - 1, end)
                if (part - 1, cut) in best
            )
    cuts, end = [], n
    for part in range(parts, 0, -1):
        end = best[part, end][1]
        cuts.append(end)
    return cuts[::-1][1:]
