"""A traced model gives the bits of the model itself; jobs are siblings with own tensors."""

from __future__ import annotations

import copy
import weakref
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from optsched.arraypipe.job import seed_generator
from optsched.arraypipe.model.tied_weights import buffer_holders
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.arraypipe.job import Tensors


def compare(
    model: nn.Module,
    stages: Sequence[nn.Module],
    points: Sequence[str],
    sample: Any,
    sentence: str = "",
) -> None:
    """Run the model and its stages on a sample, with the same random numbers; refuse other values.

    Finds what tracing does not see, such as ``isinstance(x, Tensor)`` or ``x is None``. `points`
    are the first modules of the second, third, ... stage.
    """
    whole = _flat(_run_whole(model, points, sample))
    parts = _flat(_run_stages(model, stages, sample))
    if len(whole) != len(parts) or not all(map(_same, whole, parts)):
        raise InputError(
            sentence
            or f"stages: {type(model).__name__}, traced and cut, gives other values than by "
            f"itself: its forward does something that tracing does not see (isinstance, `is None`, "
            f"a value of the data, a view changed in place after a cut); name the modules of every "
            f"stage instead, or let build_model return an nn.Sequential or a list of stages"
        )


def runs(model: nn.Module, sample: Any) -> bool:
    """Whether the model itself can be called with a sample."""
    try:
        _run_whole(model, [], sample)
    except Exception:
        return False
    return True


def _run_whole(model: nn.Module, points: Sequence[str], sample: Any) -> Any:
    def reseed(stage: int) -> Callable[[nn.Module, Any], None]:
        return lambda module, arguments: seed_generator(stage, torch.device("cpu"))

    handles = [
        model.get_submodule(name).register_forward_pre_hook(reseed(stage))
        for stage, name in enumerate(["", *points])
    ]
    try:
        with _unchanged(model):
            return model(_copied(sample))
    finally:
        for handle in handles:
            handle.remove()


def _run_stages(model: nn.Module, stages: Sequence[nn.Module], sample: Any) -> Any:
    x = _copied(sample)
    with _unchanged(model):
        for s, stage in enumerate(stages):
            seed_generator(s, torch.device("cpu"))
            x = _copied(stage(x)) if s + 1 < len(stages) else stage(x)  # as if sent
    return x


def copied(buffers: Tensors) -> Tensors:
    """Copies of buffers; one that hangs in several places is one tensor there again."""
    copies = {id(buffer): buffer.clone() for buffer in buffers}
    return tuple(copies[id(buffer)] for buffer in buffers)


@contextmanager
def buffers_at(
    holders: Sequence[tuple[nn.Module, str]], values: Sequence[Tensor]
) -> Iterator[None]:
    """Point modules at other buffers for a while, and then back at their own."""
    own = [module._buffers[name] for module, name in holders]
    for (module, name), value in zip(holders, values, strict=True):
        module._buffers[name] = value
    try:
        yield
    finally:
        for (module, name), buffer in zip(holders, own, strict=True):
            module._buffers[name] = buffer


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Let a forward change copies of the buffers, and put back its attributes."""
    holders = buffer_holders([model])
    own = tuple(module._buffers[name] for module, name in holders)
    with buffers_at(holders, copied(own)), attributes_kept([model]):  # type: ignore[arg-type]
        yield


def _copied(sample: Any) -> Any:
    return tuple(t.clone() for t in sample) if isinstance(sample, tuple) else sample.clone()


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())  # not a number is the same as itself


def _flat(value: Any) -> list[Any]:
    """Tensors and numbers of an output, and the types of what holds them, in order."""
    if isinstance(value, dict):
        parts = [*value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [*value]
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        return [value]
    return [type(value), *(entry for part in parts for entry in _flat(part))]


_REGISTERED: Final = ("_parameters", "_buffers", "_modules")


@contextmanager
def attributes_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Undo what a forward does to attributes that are neither parameters nor buffers.

    Attributes that were set anew, containers and tensors changed in place; not what objects of
    other classes have inside.
    """
    parts = {id(part): part for module in modules for part in module.modules()}
    before = [
        (part, {k: (v, _duplicate(v)) for k, v in _plain(part).items()}) for part in parts.values()
    ]
    try:
        yield
    finally:
        for part, attributes in before:
            for name in _plain(part).keys() - attributes.keys():
                del part.__dict__[name]
            for name, (value, kept) in attributes.items():
                part.__dict__[name] = _put_back(value, kept)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in module.__dict__.items() if k not in _REGISTERED}


def _duplicate(value: Any) -> Any:
    """A copy of what can be changed in place, else the value itself."""
    if isinstance(value, Tensor):
        return value.detach().clone(), value._version
    return copy.copy(value) if type(value) in (list, dict, set) else value


def _put_back(value: Any, kept: Any) -> Any:
    """The same object, with what it had in it."""
    if isinstance(value, Tensor):
        content, version = kept
        if value._version != version:  # others may be views that cannot be written to
            value.detach().copy_(content)
    elif type(value) is list:
        value[:] = kept
    elif type(value) in (dict, set):
        value.clear()
        value.update(kept)
    return value


Shapes: TypeAlias = "dict[str, tuple[str, tuple[int, ...] | None]]"
"""Unsplit name -> ``"parameter"`` or ``"buffer"``, and the shape; None: not known yet."""

Owners: TypeAlias = "dict[int, tuple[weakref.ref[Tensor], str]]"
"""Identity of a tensor -> the tensor, if it is still there, and the name of its job."""


def check_apart(model: nn.Module, title: str, owners: Owners, frozen: bool) -> None:
    """Refuse a model that has a tensor of another job's, and note whose its tensors are.

    Frozen parameters may be shared, as a backbone that is loaded once, unless `frozen`: where they
    are moved or cast, they may not.
    """
    buffers = list(model.named_buffers())
    own = {id(buffer) for _, buffer in buffers}
    for name, tensor in [*model.named_parameters(), *buffers]:
        known = owners.get(id(tensor))
        changes = frozen or tensor.requires_grad or id(tensor) in own
        if known is not None and known[0]() is tensor and changes:
            raise InputError(
                f"build_model: jobs {known[1]} and {title} have the same {name!r}, and would train "
                f"it in turn; make new modules on every call"
            )
        owners[id(tensor)] = (weakref.ref(tensor), title)


def shapes_of(model: nn.Module) -> Shapes:
    """Names and shapes of all parameters and buffers of an unsplit model."""
    found = {name: ("parameter", _shape(p)) for name, p in model.named_parameters()}
    found.update((name, ("buffer", _shape(b))) for name, b in model.named_buffers())
    return found


def check_sibling(shapes: Shapes, title: str, first: Shapes, first_title: str) -> None:
    """Refuse a job whose tensors differ from those of the first job in name or shape."""
    if shapes == first:
        return
    name = next(name for name in [*first, *shapes] if first.get(name) != shapes.get(name))
    raise InputError(
        f"job {title}: {name!r} is {_told(shapes, name)}, in job {first_title} {_told(first, name)}"
        f"; profile, slots and prediction hold for jobs with equal stages: train this one in an "
        f"array of its own"
    )


def _shape(tensor: Tensor) -> tuple[int, ...] | None:
    return None if is_lazy(tensor) else tuple(tensor.shape)


def _told(shapes: Shapes, name: str) -> str:
    if name not in shapes:
        return "missing"
    kind, shape = shapes[name]
    return f"a {kind} of {'a shape not known yet' if shape is None else f'shape {shape}'}"
