"""Run the stages of a model by its own forward, each on a skeleton of the model.

A skeleton has shallow copies of the modules that contain a cut. All others are the same objects,
or stand-ins where another stage has them.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from optsched.arraypipe.job import before_calls, seed_generator
from optsched.arraypipe.model.inputs import mapped, tensors_in
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.arraypipe.model.inputs import Inputs


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of modules in one forward of a model."""

    order: tuple[str, ...]  # names in the order of the calls
    outputs: Mapping[str, Any] = field(default_factory=dict)  # name -> form, for stand-ins
    # name -> sizes and types of the first argument, None if it cannot cross a cut
    hidden: Mapping[str, Any] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()  # modules that have buffers which the forward changes
    begins: tuple[int, ...] = ()  # floating point operations before each call
    total: int = 0  # and in the whole forward


@dataclass(frozen=True, eq=False)
class Cut:
    """Where a model is cut, and what each stage calls."""

    names: tuple[str, ...]  # of the blocks at which stages 1, 2, ... begin
    calls: Calls
    spans: Mapping[str, tuple[int, int]]  # first and last stage that calls a module
    opened: frozenset[str]  # modules that are copied, because a stage has a part of them

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.names) + 1


UNCUT = Cut((), Calls(()), {}, frozenset())
"""Of a model that has not been cut yet."""


class Left(BaseException):  # passes `except Exception` in a model's forward
    """The forward of a stage is over, with these hidden states for the next stage."""


@dataclass(eq=False)
class Passage:
    """Hidden states on their way through one forward of a stage."""

    hidden: Any = None
    entered: bool = False
    # hidden states and seed by what the first block was given: a checkpoint calls it again
    calls: Any = field(default_factory=WeakTensorKeyDictionary)


class StageModel:
    """One stage of a model; its skeleton has the tensors of the stage under unsplit names."""

    def __init__(self, skeleton: nn.Module, passage: Passage, index: int, cut: Cut) -> None:
        self.skeleton, self.passage, self.index = skeleton, passage, index
        self.last = index + 1 == cut.stages
        self.needs_inputs = index == 0 or not is_chain(skeleton)
        self.names = ("", *cut.names, "")[index : index + 2]

    def __call__(self, hidden: Any, inputs: Inputs) -> Any:
        """Return the output of the model, or the hidden states for the next stage.

        `hidden` are those of the stage before, None in the first. When the first block is called,
        the random state is as it was seeded before this call.
        """
        passage, left, output = self.passage, False, None
        passage.hidden, passage.entered = hidden, False
        try:
            output = inputs.call(self.skeleton) if self.needs_inputs else self.skeleton(None)
        except Left as end:
            left, (output,) = True, end.args
        finally:
            passage.hidden = None
        if (self.index and not passage.entered) or not (left or self.last):
            name = self.names[passage.entered or not self.index]
            raise InputError(
                f"stages: the forward of {type(self.skeleton).__name__} does not call {name!r} as "
                f"a module of its own tree in this batch, so that no stage can begin there; cut "
                f"elsewhere"
            )
        return at_cut(output) if left else output


def is_chain(module: nn.Module) -> bool:
    """Return whether a module is an `nn.Sequential`, which hands on hidden states only."""
    return type(module).forward is nn.Sequential.forward


class _AtCut(torch.autograd.Function):
    """Contiguous hidden states with a contiguous gradient; no leaf, so it may be changed in place.

    Messages do not keep strides, and kernels may choose by them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach().contiguous()  # the same memory and version, no view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.contiguous()


def at_cut(hidden: Any) -> Any:
    """Return hidden states as they cross a cut: contiguous, no two of them in the same memory."""
    seen: set[int] = set()

    def crossing(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value  # refused where stages are run
        memory = value.untyped_storage().data_ptr()
        value = value.clone() if memory in seen and memory else value
        seen.add(memory)
        return _AtCut.apply(value) if value.requires_grad else value.contiguous()  # type: ignore[no-untyped-call]

    return tuple(map(crossing, hidden)) if isinstance(hidden, tuple) else crossing(hidden)


def cut_alone(
    model: nn.Module, names: Sequence[str], seed: Callable[[int], None]
) -> Callable[[], None]:
    """Have the unsplit model do at its cuts what stages do; what is returned ends that."""

    def hooked(name: str, stage: int) -> Callable[[], None]:
        block = model.get_submodule(name)

        def action(arguments: Any, options: Any) -> tuple[Any, Any]:
            hidden = at_cut(first_of(block, arguments, options))
            seed(stage)
            return _with_first(block, arguments, options, hidden)

        return before_calls(block, action)

    undo = [hooked(name, stage) for stage, name in enumerate(names, 1)]

    def remove() -> None:
        for one in undo:
            one()

    return remove


def first_of(block: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the first argument of a call, given by position or by name."""
    return arguments[0] if arguments else options.get(_first_name(block, options))


def _with_first(
    block: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any], value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if arguments:
        return (value, *arguments[1:]), dict(options)
    return (), {**options, _first_name(block, options): value}


def _first_name(block: nn.Module, options: Mapping[str, Any]) -> str:
    known = signature(block.forward).parameters
    return next((name for name in known if name in options), next(iter(options), ""))


class Form(NamedTuple):
    """A tensor of an output, relative to the first tensor among the arguments."""

    dims: tuple[int | None, ...]  # None: as the argument has it
    dtype: torch.dtype


def form_of(output: Any, arguments: Sequence[Any]) -> Any:
    """The form of an output, to be returned by a stand-in; objects of other classes are None."""
    given = next(iter(tensors_in(arguments)), None)
    known = () if given is None else given.shape

    def form(t: Tensor) -> Form:
        same = (k < len(known) and known[k] == size for k, size in enumerate(t.shape))
        dims = (None if alike else size for alike, size in zip(same, t.shape, strict=True))
        return Form(tuple(dims), t.dtype)

    return _without_objects(mapped(output, form))


def _without_objects(value: Any) -> Any:
    """Return containers, forms and plain values; None for all else, such as caches."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_without_objects, value))
    if isinstance(value, dict):
        for key in value:
            value[key] = _without_objects(value[key])
        return value
    simple = value is None or isinstance(value, (bool, int, float, str, tuple))
    return value if simple else None


def unknown(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of no memory; its values are not a number (0 if it has integers)."""
    numbers = dtype.is_floating_point or dtype.is_complex
    value = torch.full((), math.nan if numbers else 0, dtype=dtype, device=device)
    return value.expand(size)


@cache
def _replacing(kind: Any, hides: bool) -> Any:
    """A class of modules that pass for those of `kind`, and call a function in place of them."""

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return self._stage_call(arguments, options)

    def attribute(self: Any, name: str) -> Any:
        value = getattr(self._stage_module, name)
        if isinstance(value, Tensor):
            return unknown(value.shape, value.dtype, value.device)
        return stand_in(value, name) if isinstance(value, nn.Module) else value

    content: dict[str, Any] = {"__call__": call, "__module__": kind.__module__}
    if hides:
        content |= {"__slots__": ("_stage_call", "_stage_module"), "__getattr__": attribute}
    else:
        content |= {"__slots__": ("_stage_call", "_stage_block")}
    return type(kind)(kind.__name__, (kind,), content)


def stand_in(module: nn.Module, name: str, output: Any = None, leaves: bool = False) -> nn.Module:
    """Return a module of another stage, without its tensors.

    A call computes nothing. It returns NaN in the recorded form `output`, so that no result can
    depend on them unnoticed; or it ends the forward, if it `leaves`.
    """

    def call(arguments: Any, options: Any) -> Any:
        if leaves:
            raise Left(first_of(module, arguments, options))
        if output is None:
            raise InputError(
                f"stages: the forward calls {name!r} in another stage than on the first batch"
            )
        given = next(iter(tensors_in([*arguments, *options.values()])), None)
        weight = next((p for p in module.parameters() if p.is_floating_point()), None)
        sources = [t for t in (given, weight) if t is not None]
        device = sources[0].device if sources else torch.device("cpu")
        floating = next((t.dtype for t in sources if t.is_floating_point()), None)

        def made(form: Form) -> Tensor:
            dtype = floating if floating and form.dtype.is_floating_point else form.dtype
            known = given.shape if given is not None else ()
            size = [known[k] if d is None else d for k, d in enumerate(form.dims)]
            return unknown(size, dtype, device)

        return mapped(output[0], made, Form)

    kind: Any = type(module)
    made: Any = object.__new__(_replacing(kind, True))
    made.__dict__.update(module.__dict__, _parameters={}, _buffers={}, _modules={})
    object.__setattr__(made, "_stage_call", call)
    object.__setattr__(made, "_stage_module", module)
    return made  # type: ignore[no-any-return]


def first_block(block: nn.Module, name: str, passage: Passage) -> nn.Module:
    """The first block of a stage: it gets what the stage before has sent, and random numbers."""

    def call(arguments: Any, options: Any) -> Any:
        given = tensors_in(first_of(block, arguments, options))
        known = None
        if passage.hidden is None:  # in the backward, by a checkpoint
            known = next((passage.calls[t] for t in given if t in passage.calls), None)
        elif not passage.entered:
            passage.entered, known = True, (passage.hidden, torch.initial_seed())
            passage.calls.update((t, known) for t in given)
        if known is None:
            raise InputError(
                f"stages: {name!r}, at which a stage begins, is called more than once in a "
                f"forward; cut elsewhere"
            )
        hidden, seed = known
        seed_generator(seed, tensors_in(hidden)[0].device)
        arguments, options = _with_first(block, arguments, options, hidden)
        return block(*arguments, **options)

    kind: Any = type(block)
    made: Any = object.__new__(_replacing(kind, False))
    for key, value in (
        ("__dict__", block.__dict__),
        ("_stage_call", call),
        ("_stage_block", block),
    ):
        object.__setattr__(made, key, value)
    return made  # type: ignore[no-any-return]


def stage_models(model: nn.Module, cut: Cut, title: str) -> list[StageModel]:
    """Return the stages of a model, which share its modules and tensors."""
    if not cut.names:
        return [StageModel(model, Passage(), 0, cut)]
    for name in cut.opened:
        module = model.get_submodule(name)
        whole = f"stages: {name or 'the model itself'!r} of job {title}"
        if module._backward_hooks or module._backward_pre_hooks:
            raise InputError(
                f"{whole} has backward hooks, and no stage calls it as a whole; put them on "
                f"modules inside of a stage"
            )
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise InputError(
                f"{whole} is compiled, and no stage calls it as a whole; compile modules inside "
                f"of a stage instead (module.compile(), torch.compile)"
            )
    return [_Skeleton(model, cut, s, title).stage() for s in range(cut.stages)]


class _Skeleton:
    """Makes one stage."""

    def __init__(self, model: nn.Module, cut: Cut, index: int, title: str) -> None:
        self.model, self.cut, self.index, self.title = model, cut, index, title
        self.passage = Passage()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.made: dict[int, nn.Module] = {}

    def stage(self) -> StageModel:
        """The whole skeleton."""
        return StageModel(self._opened(self.model), self.passage, self.index, self.cut)

    def _opened(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module with the parts of this stage.

        Tensors that it has itself belong to stage 0; the others have parameters as tied weights,
        and copies of buffers.
        """
        copy: nn.Module = object.__new__(type(module))
        copy.__dict__.update(module.__dict__)
        self.made[id(module)] = copy
        copy._modules = {}
        if self.index:
            if self.names[id(module)] in self.cut.calls.changed:
                raise InputError(
                    f"stages: the forward of {type(module).__name__} changes its buffers in job "
                    f"{self.title}, and several stages run it; put them into a module inside of a "
                    f"stage"
                )
            copy._parameters = dict(module._parameters)
            copy._buffers = {n: b if b is None else b.clone() for n, b in module._buffers.items()}
        for key, child in self._children(module):
            copy._modules[key] = None if child is None else self._part(child)
        return copy

    def _children(self, module: nn.Module) -> list[tuple[str, nn.Module | None]]:
        """Return all children; of those called one after the other only this stage's."""
        rows = list(module._modules.items())
        if not is_chain(module):
            return rows
        names = [f"{self.names[id(child)]}." for _, child in rows if child is not None]
        cuts = ["", *self.cut.names, ""][self.index : self.index + 2]
        first, last = (
            next((k for k, name in enumerate(names) if f"{cut}.".startswith(name)), None)
            for cut in cuts
        )
        return rows[first or 0 : len(rows) if last is None else last + 1]

    def _part(self, child: nn.Module) -> nn.Module:
        """Return what this stage has in the place of a module."""
        name, cut, index = self.names[id(child)], self.cut, self.index
        if id(child) in self.made:
            return self.made[id(child)]
        low, high = cut.spans.get(name, (0, 0))
        here, output = low <= index <= high, cut.calls.outputs.get(name)
        if name in cut.opened:
            away = output is not None and not here
            return stand_in(child, name, output) if away else self._opened(child)
        if index and name == cut.names[index - 1]:
            return first_block(child, name, self.passage)
        if cut.names[index : index + 1] == (name,):
            return stand_in(child, name, leaves=True)
        held = any(n == name or n.startswith(f"{name}.") for n in cut.calls.changed)
        held |= any(True for _ in child.parameters())
        if here and (index == low or held):
            return child
        if not here and (output is None or held or low > index):
            return stand_in(child, name, output)
        # it really runs, as rotary embeddings, which may keep state
        return self.made.setdefault(id(child), deepcopy(child))
