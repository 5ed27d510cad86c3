"""Cut a model at the calls of named modules: every stage runs the model's own forward.

A stage has a skeleton of the model: shallow copies of the modules that contain a cut. All others
are the same objects, or stand-ins where another stage has them.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.compiler import set_stance
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from optsched.arraypipe.job import before_calls
from optsched.arraypipe.model.inputs import Inputs, tensors_in
from optsched.arraypipe.model.stand_ins import (
    First,
    Last,
    Left,
    Passage,
    StandIn,
    first_of,
    shapes_in,
    with_first,
)
from optsched.arraypipe.model.unchanged import unchanged
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


LARGE: Final = 1 << 27
"""Bytes of parameters from which on a forward is looked at without their values."""


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of modules in one forward of a model."""

    order: tuple[str, ...]  # names in the order of the calls
    outputs: Mapping[str, Any] = field(default_factory=dict)  # name -> form, for stand-ins
    hidden: Mapping[str, bool] = field(default_factory=dict)  # whether the first argument can cross
    changed: frozenset[str] = frozenset()  # modules that have buffers which the forward changes
    begins: tuple[int, ...] = ()  # floating point operations before each call
    total: int = 0  # and in the whole forward

    def costs(self, blocks: Sequence[str]) -> list[int]:
        """Operations from the call of each block to that of the next one, at least 1.

        `blocks` are in the order of their calls; what comes before the first counts with the first.
        """
        starts = [self.begins[self.order.index(name)] for name in blocks[1:]]
        return [b - a + 1 for a, b in pairwise([0, *starts, self.total])]


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


class StageModel:
    """One stage of a model; its skeleton has the tensors of the stage under unsplit names."""

    def __init__(self, skeleton: nn.Module, passage: Passage, index: int, cut: Cut) -> None:
        self.skeleton, self.passage, self.index = skeleton, passage, index
        self.last = index + 1 == cut.stages
        self.needs_inputs = index == 0 or not is_chain(skeleton)
        self.names = ("", *cut.names, "")[index : index + 2]

    def __call__(self, hidden: Any, inputs: Inputs) -> Any:
        """The output of the model, or the hidden states for the next stage.

        `hidden` are those of the stage before, None in the first. When the first block is called,
        the random state is as it was seeded before this call.
        """
        passage = self.passage
        passage.hidden, passage.entered, passage.left, passage.sent = hidden, False, False, None
        try:
            output = inputs.call(self.skeleton) if self.needs_inputs else self.skeleton(None)
        except Left:
            output = None
        finally:
            passage.hidden = None
        if self.index and not passage.entered:
            raise InputError(_not_called(self.names[0], self.skeleton))
        if self.last:
            return output
        if not passage.left:
            raise InputError(_not_called(self.names[1], self.skeleton))
        sent, passage.sent = passage.sent, None
        return at_cut(sent)


def _not_called(name: str, model: nn.Module) -> str:
    return (
        f"stages: the forward of {type(model).__name__} does not call {name!r} as a module of its "
        f"own tree in this batch, so that no stage can begin there; cut elsewhere"
    )


def is_chain(module: nn.Module) -> bool:
    """Whether a module is an `nn.Sequential`, which hands on hidden states only."""
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
    """Hidden states as they cross a cut: contiguous, no two of them in the same memory."""
    if not isinstance(hidden, tuple):
        return _crossing(hidden)
    seen: set[int] = set()
    made = []
    for value in hidden:
        if isinstance(value, Tensor):
            memory = value.untyped_storage().data_ptr()
            value = _crossing(value.clone() if memory in seen and memory else value)
            seen.add(memory)
        made.append(value)
    return tuple(made)


def _crossing(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value  # refused where stages are run
    if not value.requires_grad:
        return value.contiguous()
    return _AtCut.apply(value)  # type: ignore[no-untyped-call]


def cut_alone(
    model: nn.Module, names: Sequence[str], seed: Callable[[int], None]
) -> Callable[[], None]:
    """Have the unsplit model do at its cuts what stages do; what is returned ends that.

    There `seed` is called with the number of the stage, and hidden states are as `at_cut`.
    """

    def hooked(name: str, stage: int) -> Callable[[], None]:
        block = model.get_submodule(name)

        def action(arguments: Any, options: Any) -> tuple[Any, Any]:
            hidden = at_cut(first_of(block, arguments, options))
            seed(stage)
            return with_first(block, arguments, options, hidden)

        return before_calls(block, action)

    undo = [hooked(name, stage) for stage, name in enumerate(names, 1)]

    def remove() -> None:
        for one in undo:
            one()

    return remove


def chained(model: nn.Sequential) -> Calls:
    """The calls of an `nn.Sequential`, which are known without a forward."""
    names = {id(module): name for name, module in model.named_children()}
    order = tuple(names[id(module)] for module in model)
    return Calls(order, hidden=dict.fromkeys(order, True))


def calls_of(model: nn.Module, inputs: Inputs) -> Calls:
    """The calls in a forward; buffers and attributes are as before afterwards.

    Large models run with parameters that have no memory and no values, unless the forward takes a
    branch by a value that depends on them.
    """
    failed: Exception | None = None
    large = sum(p.numel() * p.element_size() for p in model.parameters()) >= LARGE
    # the graph needs memory; some forwards take gradients
    for fake, grad in ((True, False),) * large + ((False, False), (False, True)):
        with _fake_parameters(model) if fake else nullcontext():
            try:
                return _recorded(model, inputs, grad)
            except Exception as error:
                failed = error
    raise InputError(
        f"stages: the forward of {type(model).__name__} raises on the first batch "
        f"({' '.join(str(failed).split()):.300})"
    ) from failed


def _recorded(model: nn.Module, inputs: Inputs, grad: bool) -> Calls:
    order: list[str] = []
    begins: list[int] = []
    outputs: dict[str, Any] = {}
    hidden: dict[str, bool] = {}
    changed: set[str] = set()
    counter = _Operations()  # type: ignore[no-untyped-call]

    def versions(module: nn.Module) -> list[int]:
        return [b._version for b in module._buffers.values() if b is not None]

    with unchanged([model]):
        known = {name: versions(module) for name, module in model.named_modules()}

        def before(name: str, module: nn.Module, args: Any, options: Any) -> None:
            order.append(name)
            begins.append(counter.total)
            first = first_of(module, args, options)
            row = first if isinstance(first, tuple) else (first,)
            alone = torch._C._functorch.maybe_current_level() is None
            can = bool(row) and all(isinstance(t, Tensor) for t in row) and alone
            hidden[name] = can and hidden.get(name, True)

        def after(name: str, module: nn.Module, args: Any, options: Any, output: Any) -> None:
            given = next(iter(tensors_in([*args, *options.values()])), None)
            outputs[name] = (shapes_in(output, given, module),)
            if known[name] != versions(module):
                changed.add(name)

        # compiled code would hide its operations
        stance = set_stance("force_eager")
        with hooks(model, before, after), stance, torch.set_grad_enabled(grad), counter:
            inputs.copied().call(model)
    return Calls(tuple(order), outputs, hidden, frozenset(changed), tuple(begins), counter.total)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count floating point operations by torch's formulas.

    `FlopCounterMode` also has hooks on modules, which forbid `torch.autograd.grad` inside.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        counted = flop_registry.get(getattr(func, "_overloadpacket", None))
        if counted is not None:
            self.total += int(counted(*args, **kwargs, out_val=result))
        return result


@contextmanager
def _fake_parameters(model: nn.Module) -> Iterator[None]:
    """Have parameters without memory in a model for a while; what depends on them has none, too.

    The mode is not entered, so that masks and positions have values for conditions.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, nn.Parameter] = {}
    for p in model.parameters():
        with mode:
            fake = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        made[id(p)] = nn.Parameter(fake, p.requires_grad)
    places = [
        (module, name, p)
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is not None
    ]
    for module, name, p in places:  # by attribute, as recurrent layers keep a list of them
        setattr(module, name, made[id(p)])
    try:
        yield
    finally:
        for module, name, p in places:
            setattr(module, name, p)


@contextmanager
def hooks(
    model: nn.Module,
    before: Callable[[str, nn.Module, Any, Any], None],
    after: Callable[[str, nn.Module, Any, Any, Any], None] = lambda *given: None,
) -> Iterator[None]:
    """Call functions before and after the call of every module."""
    handles: list[Any] = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(
                lambda m, a, k, name=name: before(name, m, a, k), with_kwargs=True
            ),
            module.register_forward_hook(
                lambda m, a, k, o, name=name: after(name, m, a, k, o), with_kwargs=True
            ),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def cut_at(model: nn.Module, calls: Calls, names: Sequence[str]) -> Cut:
    """Assign the modules of a model to stages; refuses blocks at which no stage can begin."""
    places = [_place(model, calls, name) for name in names]
    if any(b <= a for a, b in pairwise(places)):
        raise InputError(
            f"stages: the forward of {type(model).__name__} does not call {list(names)} in this "
            f"order"
        )
    opened = {"", *(above for name in names for above in _above(name))}
    if both := opened & {*names}:
        raise InputError(
            f"stages: {min(both)!r} contains a module at which another stage begins; name blocks "
            f"beside each other"
        )
    called = {*calls.order}
    for name in called:  # a list of modules is not called, but its modules are
        opened.update(above for above in _above(name) if above not in called)
    spans: dict[str, tuple[int, int]] = {}
    for time, name in enumerate(calls.order):
        stage = sum(time >= place for place in places)
        for path in (name, *_above(name)):
            low, high = spans.get(path, (stage, stage))
            spans[path] = min(low, stage), max(high, stage)
    if places and not any(name not in opened for name in calls.order[: places[0]]):
        raise InputError(
            f"stages: nothing is called before {names[0]!r}, so stage 0 has nothing to do; cut "
            f"elsewhere"
        )
    return Cut(tuple(names), calls, spans, frozenset(opened))


def _above(name: str) -> list[str]:
    """Names of the modules that contain a module, but for the model itself."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts))]


def _place(model: nn.Module, calls: Calls, name: str) -> int:
    """Position of the one call of a block at which a stage begins."""
    times = [k for k, called in enumerate(calls.order) if called == name]
    if len(times) != 1 or not calls.hidden[name]:
        what = {0: "is not called by", 1: "gets no tensor as first argument from"}.get(
            len(times), "is called more than once by"
        )
        raise InputError(
            f"stages: {name!r} {what} the forward of {type(model).__name__} on the first batch, so "
            f"that no stage can begin there; cut elsewhere"
        )
    return times[0]


def stage_models(model: nn.Module, cut: Cut, title: str) -> list[StageModel]:
    """The stages of a model, which share its modules and tensors."""
    if not cut.names:
        return [StageModel(model, Passage(), 0, cut)]
    for name in cut.opened:
        _check_opened(model.get_submodule(name), name, title)
    return [_Skeleton(model, cut, s, title).stage() for s in range(cut.stages)]


def _check_opened(module: nn.Module, name: str, title: str) -> None:
    """Refuse what would have no effect on a module that no stage calls as a whole."""
    whole = f"stages: {name or 'the model itself'!r} of job {title}"
    if module._backward_hooks or module._backward_pre_hooks:
        raise InputError(
            f"{whole} has backward hooks, and no stage calls it as a whole; put them on modules "
            f"inside of a stage"
        )
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        raise InputError(
            f"{whole} is compiled, and no stage calls it as a whole; compile modules inside of a "
            f"stage instead (module.compile(), torch.compile)"
        )


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
        """A copy of a module with the parts of this stage.

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
        """All children; of those called one after the other only this stage's."""
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
        """What this stage has in the place of a module."""
        name = self.names[id(child)]
        if id(child) in self.made:
            return self.made[id(child)]
        cut, index = self.cut, self.index
        low, high = cut.spans.get(name, (0, 0))
        output = cut.calls.outputs.get(name)
        if name in cut.opened:
            if output is not None and not low <= index <= high:
                return StandIn(child, name, output)
            return self._opened(child)
        if index and name == cut.names[index - 1]:
            return First(child, name, self.passage)
        if cut.names[index : index + 1] == (name,):
            return Last(child, name, self.passage)
        trained = any(True for _ in child.parameters())
        inner = [n for n in cut.calls.changed if n == name or n.startswith(f"{name}.")]
        if low <= index <= high and (index == low or trained or inner):
            return child
        if not low <= index <= high and (output is None or inner or trained or low > index):
            return StandIn(child, name, output)
        made = deepcopy(child)  # it really runs, as rotary embeddings, which may keep state
        self.made[id(child)] = made
        return made
