"""Cutting a model into stages: where, and what each stage trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from optsched.arraypipe.model.calls import (
    UNCUT,
    Calls,
    Cut,
    calls_of,
    chained,
    cut_at,
    is_chain,
    stage_models,
)
from optsched.arraypipe.model.optimizers import stage_optimizers
from optsched.arraypipe.model.stand_ins import buffer_holders
from optsched.arraypipe.model.tied_weights import ModelStage, share_out
from optsched.errors import InputError
from optsched.pipelines.cuts import balanced

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.arraypipe.job import Job
    from optsched.arraypipe.model.inputs import Inputs


Stages: TypeAlias = int | Sequence[int] | Sequence[str]
"""A number of stages, or the blocks at which stages 1, 2, ... begin: names, or their indices."""


def cut_of(model: nn.Module, stages: Stages, sample: Callable[[], Inputs]) -> Cut:
    """Where to cut a model, from any of the forms that `ArrayTrainer` takes.

    A number of stages is balanced by counted floating point operations, which unlike times give the
    same cuts in every run. `sample` gives the inputs of a micro-batch, to look at the forward.
    """
    listed = isinstance(stages, Sequence) and not isinstance(stages, (str, bytes))
    rows: list[Any] = list(stages) if listed else [stages]  # type: ignore[arg-type]
    kinds = {type(row) for row in rows}
    if kinds not in ({int}, {str}) or (kinds == {str} and not listed):
        raise InputError(
            f"stages: expected a number, names of the blocks at which stages begin, or their "
            f"indices, got {stages!r:.200}"
        )
    if stages == 1:
        return UNCUT
    chain = is_chain(model) and not any("." in row for row in rows if isinstance(row, str))
    counted = Calls(()) if chain and listed else calls_of(model, sample())
    calls = chained(model) if chain else counted  # type: ignore[arg-type]
    if isinstance(stages, int):
        blocks = blocks_of(model, calls, stages)
        if not 1 <= stages <= len(blocks):
            raise InputError(
                f"stages: expected 1..{max(1, len(blocks))}, the blocks of {type(model).__name__} "
                f"at which a stage can begin, got {stages}; name the blocks at which stages begin, "
                f'e.g. ["layers.2"], or let build_model return an nn.Sequential'
            )
        rows = [blocks[cut] for cut in balanced(counted.costs(blocks), stages)[1:-1]]
    elif kinds == {int}:
        blocks = children_of(model)
        if sorted({*rows}) != rows or not 1 <= rows[0] <= rows[-1] < len(blocks):
            raise InputError(
                f"stages: expected ascending cut indices in 1..{len(blocks) - 1}, got {rows}"
            )
        rows = [blocks[k] for k in rows]
    return cut_at(model, calls, [_canonical(model, name) for name in rows])


def _canonical(model: nn.Module, name: str) -> str:
    """The first of the names that a module has."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise InputError(f"stages: the model has no module {name!r}") from None
    names: dict[int, str] = {id(found): known for known, found in model.named_modules()}
    return names[id(module)]


def children_of(model: nn.Module) -> list[str]:
    """Names of the blocks that indices count.

    The children of an `nn.Sequential`, else the blocks of the largest list of modules, else the
    children of the model.
    """
    lists = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    }
    listed = is_chain(model) or not lists
    parent = "" if listed else max(lists, key=lambda name: lists[name])
    return _children(model, parent)


def blocks_of(model: nn.Module, calls: Calls, least: int) -> list[str]:
    """Blocks at which one of `least` stages may begin, in the order of their calls.

    Those that indices count, if they are called once each, else the children of the model, or of
    the only child that is called.
    """
    once = [n for n in calls.order if calls.hidden[n] and calls.order.count(n) == 1]
    names, parent = children_of(model), ""
    while len(found := [n for n in once if n in names]) < max(least, 2):
        if not parent and names != _children(model, ""):
            names = _children(model, "")
            continue
        called = [n for n in _children(model, parent) if _calls_within(n, calls)]
        if len(called) != 1:
            break
        (parent,) = called
        names = _children(model, parent)
    return found


def _children(model: nn.Module, parent: str) -> list[str]:
    children = model.get_submodule(parent)._modules
    return [f"{parent}.{key}".strip(".") for key, child in children.items() if child is not None]


def _calls_within(name: str, calls: Calls) -> bool:
    return any(f"{called}.".startswith(f"{name}.") for called in calls.order)


def split(
    model: nn.Module, cut: Cut, job: Job, title: str, loss: nn.Module | None = None
) -> list[ModelStage]:
    """The stages of one job, each with its own optimizer; refuses what would not be exact.

    The last stage trains the parameters of `loss`, under names that begin with ``loss.``.

    A parameter that several stages use belongs to the earliest; the others get a copy in its
    place (`ModelStage.tied`), so the model is whole again only after `restore_ties`.
    """
    for name in cut.names:
        _canonical(model, name)
    stages = stage_models(model, cut, title)
    skeletons: list[tuple[nn.Module, ...]] = [(stage.skeleton,) for stage in stages]
    parameters, tied = share_out(model, skeletons, title)
    named = list(model.named_parameters())
    if loss is not None:
        skeletons[-1] = (*skeletons[-1], loss)
        of_loss = [(f"loss.{name}", p) for name, p in loss.named_parameters()]
        for name in dict(of_loss).keys() & {name for name, _ in named}:
            raise InputError(f"loss: {name!r} is a parameter of the model, too; rename the module")
        parameters[-1] += of_loss
        named += of_loss
    masters = [
        [(n, nn.Parameter(p.detach().float(), p.requires_grad)) for n, p in row]
        for row in (parameters if job.precision == "bf16" else ())
    ]
    trained = masters or parameters
    by_name = {name: p for row in trained for name, p in row}
    unsplit = [(name, by_name[name]) for name, _ in named if name in by_name]
    optimizers = stage_optimizers(job, trained, unsplit, title)
    return [
        ModelStage(
            index=s,
            model=stages[s],
            modules=skeletons[s],
            parameters=parameters[s],
            masters=masters[s] if masters else None,
            optimizer=optimizers[s],
            holders=buffer_holders(skeletons[s]),
            tied=tied[s],
        )
        for s in range(cut.stages)
    ]
