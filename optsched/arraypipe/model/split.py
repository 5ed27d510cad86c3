"""Cutting a model into stages: which modules run where, and the unsplit names of all they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from optsched.arraypipe.model.checks import compare, values_of
from optsched.arraypipe.model.optimizers import stage_optimizers
from optsched.arraypipe.model.tied_weights import (
    ModelStage,
    buffer_holders,
    check_hooks,
    share_out,
)
from optsched.errors import InputError
from optsched.pipelines.cuts import balanced

if TYPE_CHECKING:
    from optsched.arraypipe.job import Job


@dataclass(frozen=True)
class SplitPoint:
    """A cut in front of the call of a module, for a model with a forward of its own."""

    name: str


Stages: TypeAlias = int | Sequence[int] | Sequence[Sequence[str]] | Sequence[SplitPoint]
Names: TypeAlias = tuple[tuple[str, ...], ...]
"""What `split` cuts by, and what a checkpoint notes: a row for every stage.

Either the names of the modules that the stage calls, or, if the first row is ``("",)`` and there
are more, the one module in front of whose call the stage begins (``""`` is the model itself). In
both cases the stage begins with the call of ``row[0]``.
"""


def stage_names(model: nn.Module, stages: Stages, sample: Any) -> Names:
    """Names of the modules of every stage, from any of the forms that `ArrayTrainer` takes.

    A number of stages is balanced by counted floating point operations, which unlike times give the
    same cuts in every run. `sample` is an input of the model, for counting, and for comparing a
    traced model with itself; None leaves out the comparison.
    """
    no_form = isinstance(stages, (bool, str, bytes, Mapping, SplitPoint))
    if no_form or not isinstance(stages, (int, Iterable)):
        raise InputError(
            f"stages: expected a number, cut indices, names or SplitPoints, got {stages!r:.200}"
        )
    rows: list[Any] = [] if isinstance(stages, int) else list(stages)
    if any(isinstance(row, SplitPoint) for row in rows):
        return _by_points(model, rows, sample)
    if rows and not isinstance(rows[0], int):
        names = _by_names(model, rows)
    elif type(model).forward is nn.Sequential.forward:
        names = _by_cuts(model, stages, rows, sample)
    elif isinstance(stages, int):
        return _by_number(model, stages, sample)
    else:
        raise InputError(
            f"stages: a {type(model).__name__} is no nn.Sequential; name the modules of every "
            f'stage, e.g. [["embed", "block0"], ["block1", "head"]], or the modules to cut at, '
            f'e.g. [SplitPoint("block1")]'
        )
    called = [model.get_submodule(name) for row in names for name in row]
    for s, row in enumerate(names[1:], 1):  # there the random key is set
        if sum(module is model.get_submodule(row[0]) for module in called) > 1:
            raise InputError(
                f"stages: module {row[0]!r} occurs twice in the model, and once begins "
                f"stage {s}; make one for each place (they may share weights)"
            )
    return names


def split(model: nn.Module, names: Names, job: Job, title: str) -> list[ModelStage]:
    """The stages of one job, each with its own optimizer; refuses what would not be exact.

    A parameter that several stages use belongs to the earliest; the others get a copy in its
    place (`ModelStage.borrowed`), so the model is whole again only after `restore_ties`.
    """
    if _is_traced(names):
        from optsched.arraypipe.model.tracing import traced_stages

        for row in names:
            _module(model, row[0], title)
        traced = traced_stages(model, [row[0] for row in names[1:]], title)
        modules: list[tuple[nn.Module, ...]] = [(stage,) for stage in traced]
    else:
        modules = [tuple(_module(model, name, title) for name in row) for row in names]
    check_hooks(model, modules, title)
    parameters, borrowed = share_out(model, modules, title)
    masters = [
        [(n, nn.Parameter(p.detach().float(), p.requires_grad)) for n, p in row]
        for row in (parameters if job.precision == "bf16" else ())
    ]
    trained = masters or parameters
    by_name = {name: p for row in trained for name, p in row}
    unsplit = [(name, by_name[name]) for name, _ in model.named_parameters() if name in by_name]
    optimizers = stage_optimizers(job, trained, unsplit, title)
    return [
        ModelStage(
            index=s,
            modules=modules[s],
            parameters=parameters[s],
            masters=masters[s] if masters else None,
            optimizer=optimizers[s],
            holders=buffer_holders(modules[s]),
            borrowed=borrowed[s],
        )
        for s in range(len(names))
    ]


def _is_traced(names: Names) -> bool:
    return len(names) > 1 and names[0] == ("",)


def _by_cuts(model: nn.Module, stages: Stages, cuts: list[int], sample: Any) -> Names:
    """Cuts of an `nn.Sequential`."""
    children = list(model._modules)
    if isinstance(stages, int):
        if not 1 <= stages <= len(children):
            raise InputError(f"stages: expected 1..{len(children)} (the modules), got {stages}")
        cuts = balanced(counted_costs(model, list(model), sample), stages)[1:-1]  # type: ignore[call-overload]
    bounds = [0, *cuts, len(children)]
    if not all(isinstance(c, int) for c in cuts) or any(b <= a for a, b in pairwise(bounds)):
        raise InputError(
            f"stages: expected ascending cut indices in 1..{len(children) - 1}, got {cuts}"
        )
    return tuple(tuple(children[a:b]) for a, b in pairwise(bounds))


def _by_names(model: nn.Module, stages: Sequence[Sequence[str]]) -> Names:
    rows: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for s, row in enumerate(stages):
        named = isinstance(row, Iterable) and not isinstance(row, str)
        if not named or not row or not all(isinstance(n, str) for n in row):
            raise InputError(f"stages[{s}]: expected a list of module names, got {row!r}")
        for name in row:
            _module(model, name, "0")
            if name in seen:
                raise InputError(f"stages[{s}]: module {name!r} is named twice")
            if not name and len(stages) > 1:
                raise InputError(f"stages[{s}]: '' is the whole model, which is no part of it")
            seen.add(name)
        rows.append(tuple(row))
    return tuple(rows)


def check_chain(model: nn.Module, names: Names, sample: Any) -> None:
    """Refuse names whose modules, called one after the other, are not the model's forward."""
    if sample is None or _is_traced(names) or type(model).forward is nn.Module.forward:
        return
    try:
        whole = values_of(model, [row[0] for row in names[1:]], sample)
    except Exception:
        return  # it is called in another way, so there is nothing to compare with
    stages = [nn.Sequential(*(model.get_submodule(name) for name in row)) for row in names]
    sentence = (
        f"stages: the modules of the stages, called one after the other, do not give what the "
        f"forward of {type(model).__name__} gives; name them in the order in which it calls them, "
        f'or cut it by SplitPoints, e.g. [SplitPoint("{names[-1][0]}")]'
    )
    compare(whole, model, stages, sample, sentence)


def _by_points(model: nn.Module, points: Sequence[Any], sample: Any) -> Names:
    """Cuts of a traced model; it is traced here only to refuse what does not fit."""
    from optsched.arraypipe.model.tracing import traced_stages

    for k, point in enumerate(points):
        if not isinstance(point, SplitPoint):
            raise InputError(f"stages[{k}]: expected a SplitPoint like the others, got {point!r}")
        if not isinstance(point.name, str) or not point.name:
            raise InputError(f"stages: expected the name of a module in SplitPoint({point.name!r})")
        _module(model, point.name, "0")
    names = [point.name for point in points]
    stages = traced_stages(model, names, "0")
    if sample is not None:
        sentence = (
            f"stages: {type(model).__name__}, traced and cut, gives other values than by "
            f"itself: its forward does something that tracing does not see (isinstance, `is None`, "
            f"a value of the data, a view changed in place after a cut); name the modules of every "
            f"stage instead, or let build_model return an nn.Sequential or a list of stages"
        )
        compare(values_of(model, names, sample), model, stages, sample, sentence)
    return (("",), *((point.name,) for point in points))


def _by_number(model: nn.Module, stages: int, sample: Any) -> Names:
    """Balanced cuts at the modules that the model's own forward calls, each called once."""
    from optsched.arraypipe.model.tracing import called_modules

    if stages == 1:
        return (("",),)
    called = called_modules(model, "0")
    places = [name for name in called if called.count(name) == 1]
    if not 1 <= stages <= len(places):
        raise InputError(
            f"stages: the forward of {type(model).__name__}, which is no nn.Sequential, calls "
            f"{len(places)} modules once each, too few for {stages} stages; give SplitPoints"
        )
    costs = counted_costs(model, [model.get_submodule(name) for name in places], sample)
    cuts = balanced(costs, stages)[1:-1]
    return _by_points(model, [SplitPoint(places[cut]) for cut in cuts], sample)


def _module(model: nn.Module, name: str, title: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise InputError(f"stages: the model of job {title} has no module {name!r}") from None


def counted_costs(model: nn.Module, modules: Sequence[nn.Module], sample: Any) -> list[int]:
    """Work from the call of each module to the call of the next one, on a sample.

    `modules` are in the order in which the model calls them; what it does before the first call
    counts with the first. To the operations the size of the module's output is added, so that no
    module is free.
    """
    from torch.compiler import set_stance

    begins: list[int] = []
    sizes: list[int] = []
    counter = _Operations()  # type: ignore[no-untyped-call]

    def before(module: nn.Module, arguments: Any) -> None:
        begins.append(counter.total)

    def after(module: nn.Module, arguments: Any, output: Any) -> None:
        row = output if isinstance(output, tuple) else (output,)
        sizes.append(sum(t.numel() for t in row if isinstance(t, Tensor)))

    distinct = list(dict.fromkeys(modules))  # one without tensors may stand at several places
    handles = [module.register_forward_pre_hook(before) for module in distinct]
    handles += [module.register_forward_hook(after) for module in distinct]
    try:
        for grad in (False, True):  # the graph needs memory; some forwards take gradients
            begins.clear()
            sizes.clear()
            counter.total = 0
            try:
                # compiled code would hide its operations
                with set_stance("force_eager"), torch.set_grad_enabled(grad), counter:
                    model(sample)
                break
            except Exception as error:
                if grad:
                    raise InputError(
                        f"stages: the forward of {type(model).__name__} cannot be counted on the "
                        f"first batch ({' '.join(str(error).split()):.300}); say where to cut: "
                        f"indices, names of modules or SplitPoints"
                    ) from error
        ends = [*begins[1:], counter.total]
    finally:
        for handle in handles:
            handle.remove()
    begins[0] = 0
    return [b - a + size for a, b, size in zip(begins, ends, sizes, strict=True)]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count floating point operations by torch's formulas.

    `FlopCounterMode` has hooks on modules beside that, which forbid `torch.autograd.grad` inside.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        counted = flop_registry.get(getattr(func, "_overloadpacket", None))
        if counted is not None:
            self.total += int(counted(*args, **kwargs, out_val=result))
        return result
