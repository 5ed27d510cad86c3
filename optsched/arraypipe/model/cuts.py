"""Where to cut a model, and whether its stages give the loss and the gradients of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from optsched.arraypipe.job import seed_generator
from optsched.arraypipe.model.calls import (
    UNCUT,
    Calls,
    Cut,
    at_cut,
    cut_alone,
    first_of,
    form_of,
    is_chain,
    stage_models,
)
from optsched.arraypipe.model.inputs import mapped, same, tensors_in, unchanged
from optsched.errors import InputError
from optsched.pipelines.cuts import balanced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.arraypipe.model.calls import StageModel
    from optsched.arraypipe.model.inputs import Inputs

    MakeLoss = Callable[[Any], Tensor]

Stages: TypeAlias = int | Sequence[int] | Sequence[str]
"""A number of stages, or the blocks at which stages 1, 2, ... begin: names, or their indices."""

_SEED = 1 << 20
_SUMS = 64  # of a gradient
_WAY_OUT = (
    "cut it at blocks that hand on all they compute as their first argument (a tensor or a tuple "
    "of tensors), or let build_model return an nn.Sequential or a list of stages"
)


def cut_of(model: nn.Module, stages: Stages, sample: Callable[[], Inputs]) -> Cut:
    """Return where to cut a model, from any of the forms that `ArrayTrainer` takes.

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
    calls = _chained(model) if chain else counted
    if isinstance(stages, int):
        blocks = _blocks(model, calls, stages)
        if not 1 <= stages <= len(blocks):
            raise InputError(
                f"stages: expected 1..{max(1, len(blocks))}, the blocks of {type(model).__name__} "
                f"at which a stage can begin, got {stages}; name the blocks at which stages begin, "
                f'e.g. ["layers.2"], or let build_model return an nn.Sequential'
            )
        starts = [counted.begins[counted.order.index(name)] for name in blocks[1:]]
        costs = [b - a + 1 for a, b in pairwise([0, *starts, counted.total])]
        rows = [blocks[cut] for cut in balanced(costs, stages)[1:-1]]
    elif kinds == {int}:
        blocks = _indexed(model)
        if sorted({*rows}) != rows or not 1 <= rows[0] <= rows[-1] < len(blocks):
            raise InputError(
                f"stages: expected ascending cut indices in 1..{len(blocks) - 1}, got {rows}"
            )
        rows = [blocks[k] for k in rows]
    return _cut_at(model, calls, [canonical(model, name) for name in rows])


def canonical(model: nn.Module, name: str) -> str:
    """Return the first of the names that a module has."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        ends = [known for known, _ in model.named_modules() if known.endswith(f".{name}")]
        meant = f"; did you mean {ends[0]!r}?" if ends else ""
        raise InputError(f"stages: the model has no module {name!r}{meant}") from None
    names: dict[int, str] = {id(found): known for known, found in model.named_modules()}
    return names[id(module)]


def _indexed(model: nn.Module) -> list[str]:
    """Return names of the blocks that indices count."""
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not is_chain(model)
    }
    return _children(model, max(sizes, key=lambda name: sizes[name], default=""))


def _blocks(model: nn.Module, calls: Calls, least: int) -> list[str]:
    """Return blocks at which one of `least` stages may begin, in the order of their calls."""
    once = [n for n in calls.order if calls.hidden[n] is not None and calls.order.count(n) == 1]
    found = [[n for n in once if n in rows] for rows in (_indexed(model), _children(model, ""))]
    return found[0] if 1 < least <= len(found[0]) else max(found, key=len)


def _children(model: nn.Module, parent: str) -> list[str]:
    children = model.get_submodule(parent)._modules
    return [f"{parent}.{key}".strip(".") for key, child in children.items() if child is not None]


def _chained(model: Any) -> Calls:
    """Return the calls of an `nn.Sequential`, which are known without a forward."""
    names = {id(module): name for name, module in model.named_children()}
    order = tuple(names[id(module)] for module in model)
    return Calls(order, hidden=dict.fromkeys(order, ()))


def _cut_at(model: nn.Module, calls: Calls, names: Sequence[str]) -> Cut:
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
    if not any(name not in opened for name in calls.order[: places[0]]):
        raise InputError(
            f"stages: nothing is called before {names[0]!r}, so stage 0 has nothing to do; cut "
            f"elsewhere"
        )
    return Cut(tuple(names), calls, spans, frozenset(opened))


def _above(name: str) -> list[str]:
    """Return names of the modules that contain a module, but for the model itself."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts))]


def _place(model: nn.Module, calls: Calls, name: str) -> int:
    """Return position of the one call of a block at which a stage begins."""
    times = [k for k, called in enumerate(calls.order) if called == name]
    if len(times) != 1 or calls.hidden[name] is None:
        what = "is called more than once by" if times[1:] else "is not called by"
        if len(times) == 1:
            what = "gets no tensor as first argument from"
        raise InputError(
            f"stages: {name!r} {what} the forward of {type(model).__name__} on the first batch, so "
            f"that no stage can begin there; cut elsewhere"
        )
    return times[0]


def calls_of(model: nn.Module, inputs: Inputs) -> Calls:
    """Return the calls in a forward; buffers and attributes are as before afterwards."""
    failed: Exception | None = None
    for grad in (False, True):  # the graph needs memory; some forwards take gradients
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
    hidden: dict[str, Any] = {}
    changed: set[str] = set()
    counter = _Operations()  # type: ignore[no-untyped-call]

    def versions(module: nn.Module) -> list[int]:
        return [b._version for b in module._buffers.values() if b is not None]

    def before(name: str, module: nn.Module, args: Any, options: Any) -> None:
        order.append(name)
        begins.append(counter.total)
        first = first_of(module, args, options)
        row = first if isinstance(first, tuple) else (first,)
        alone = torch._C._functorch.maybe_current_level() is None
        can = bool(row) and all(isinstance(t, Tensor) for t in row) and alone
        hidden[name] = [(t.shape, t.dtype) for t in row] if can else None

    def after(name: str, module: nn.Module, args: Any, options: Any, output: Any) -> None:
        outputs[name] = (form_of(output, [*args, *options.values()]),)
        if known[name] != versions(module):
            changed.add(name)

    with unchanged([model]):
        known = {name: versions(module) for name, module in model.named_modules()}
        # compiled code would hide its operations
        stance = set_stance("force_eager")
        with _hooks(model, before, after), stance, torch.set_grad_enabled(grad), counter:
            inputs.copied().call(model)
    return Calls(tuple(order), outputs, hidden, frozenset(changed), tuple(begins), counter.total)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count floating point operations by torch's formulas."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        counted = flop_registry.get(getattr(func, "_overloadpacket", None))
        if counted is not None:
            self.total += int(counted(*args, **kwargs, out_val=result))
        return result


@contextmanager
def _hooks(
    model: nn.Module,
    before: Callable[[str, nn.Module, Any, Any], None],
    after: Callable[[str, nn.Module, Any, Any, Any], None] = lambda *given: None,
) -> Iterator[None]:
    """Call functions before and after the call of every module."""
    handles: list[Any] = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(partial(before, name), with_kwargs=True),
            module.register_forward_hook(partial(after, name), with_kwargs=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_cut(model: nn.Module, cut: Cut, inputs: Inputs, loss: MakeLoss, title: str) -> None:
    """Refuse a cut with which loss or gradients are not those of the model.

    `loss` makes the loss from the model's output. Values that cross a cut beside the hidden states
    are not a number in the stages, which finds skip connections, attention of other layers, caches.
    """
    if not cut.names or not cut.calls.outputs:  # an nn.Sequential hands on nothing else
        return
    stages = stage_models(model, cut, title)
    cause: Exception | None = None
    # compiled code cannot run while tensors are recorded
    with unchanged([model, *(stage.skeleton for stage in stages)]), set_stance("force_eager"):
        expected, gradients = _whole(model, cut, inputs, loss)
        try:
            value, found = _staged(stages, model, inputs, loss)
            what = _difference(expected, gradients, value, found)
        except InputError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            what, cause = f"raises in its stages on the first batch ({reason:.300})", error
        if what:
            raise InputError(
                f"stages: {type(model).__name__}, cut at {list(cut.names)}, {what}; "
                f"{_culprit(stages, inputs)}{_WAY_OUT}"
            ) from cause


_Gradients: TypeAlias = dict[str, tuple[torch.dtype, list[Tensor]]]


def _difference(loss: Tensor, gradients: _Gradients, value: Tensor, found: _Gradients) -> str:
    """Return the first difference between a whole model and its stages, in words.

    A gradient of a weight of several stages is a sum in another order, rounded by its type.
    """
    what = "" if same(loss, value) else f"the loss {value.item():.9g} instead of {loss.item():.9g}"
    for name, (dtype, whole) in gradients.items():
        rows = found[name][1]
        a, b = (torch.stack(sums).sum(0) if sums else torch.zeros(1) for sums in (whole, rows))
        share = max(1e-3, math.sqrt(torch.finfo(dtype).eps)) if len(rows) > 1 else 0.0
        near = same(a, b) or bool((a - b).norm() <= share * (a.norm() + b.norm()))
        if not what and (bool(whole) != bool(rows) or not near):
            what = f"another gradient of {name!r}"
    crosses = "on the first batch: a value crosses a cut beside the hidden states"
    return f"has {what} {crosses}" if what else ""


def _whole(model: nn.Module, cut: Cut, inputs: Inputs, loss: MakeLoss) -> tuple[Tensor, _Gradients]:
    undo = cut_alone(model, cut.names, _seed)
    try:
        _seed(0)
        with _gradients(model) as found:
            value = loss(inputs.copied().call(model))
            _backward([value], [None])
    finally:
        undo()
    return value.detach(), found


def _staged(
    stages: Sequence[StageModel], model: nn.Module, inputs: Inputs, loss: MakeLoss
) -> tuple[Tensor, _Gradients]:
    rows: list[tuple[list[Tensor], list[Tensor]]] = []
    hidden: Any = None
    with _gradients(model) as found:
        for stage in stages:
            _seed(stage.index)
            received = tensors_in(hidden)
            output = stage(at_cut(hidden), inputs.copied())
            output = loss(output) if stage.last else output
            rows.append((received, tensors_in(output)))
            hidden = mapped(output, lambda t: t.detach().requires_grad_(t.requires_grad))
        given: list[Tensor | None] = [None]
        for received, outputs in reversed(rows):
            _backward(outputs, given)
            given = [t.grad for t in received]
    return rows[-1][1][0].detach(), found


def _seed(stage: int) -> None:
    seed_generator(_SEED + stage, torch.device("cpu"))


def _backward(outputs: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
    """By `backward`, as reentrant checkpoints know no other way."""
    pairs = zip(outputs, given, strict=True)
    rows = [(t, g) for t, g in pairs if t.requires_grad and (g is not None or not t.dim())]
    if rows:
        torch.autograd.backward([t for t, _ in rows], [g for _, g in rows])


@contextmanager
def _gradients(model: nn.Module) -> Iterator[_Gradients]:
    """Sums of the gradients of parameters, one row for each backward; gradients are freed at once.

    Weighted, as behind a layer norm the entries of a row add up to zero.
    """
    parameters: list[tuple[str, Any]] = [
        (name, p) for name, p in model.named_parameters() if p.requires_grad
    ]
    before = [p.grad for _, p in parameters]
    model.zero_grad(set_to_none=True)
    found: _Gradients = {name: (p.dtype, []) for name, p in parameters}

    def note(name: str, p: Tensor) -> None:
        if p.grad is not None:
            rows = p.grad.to_dense().flatten().tensor_split(_SUMS)
            draw = torch.Generator().manual_seed(_SEED)
            factors = torch.randn(len(rows[0]), generator=draw, dtype=torch.float64)
            sums = torch.stack([row.double() @ factors[: len(row)] for row in rows])
            found[name][1].append(sums)
            p.grad = None

    ends = [p.register_post_accumulate_grad_hook(partial(note, name)) for name, p in parameters]
    try:
        yield found
    finally:
        for end in ends:
            end.remove()
        for (_, p), grad in zip(parameters, before, strict=True):
            p.grad = grad


def _culprit(stages: Sequence[StageModel], inputs: Inputs) -> str:
    """Return the first module of a stage with an argument that is not a number, in words."""
    found: list[str] = []

    def before(name: str, module: nn.Module, arguments: Any, options: Any) -> None:
        named = {f"number {k}": value for k, value in enumerate(arguments)} | options
        for key, value in named.items() if stage.passage.entered else ():
            tensors = [t for t in tensors_in(value) if t.is_floating_point() and t.numel()]
            if any(bool(t.isnan().all()) for t in tensors):
                found.append(f"{name!r} gets its argument {key} from an earlier stage; ")

    hidden: Any = None
    for stage in stages:
        with torch.no_grad(), suppress(Exception), _hooks(stage.skeleton, before):
            hidden = stage(hidden, inputs.copied())
        if found:
            return found[0]
    return ""
