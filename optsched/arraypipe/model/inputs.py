"""Containers of tensors, and forwards that leave buffers and attributes as they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.arraypipe.job import Tensors


class Inputs(NamedTuple):
    """Arguments of a model for one micro-batch."""

    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}

    def call(self, model: nn.Module) -> Any:
        """Run the forward of the model."""
        return model(*self.arguments, **self.options)

    def copied(self) -> Inputs:
        """Return arguments that may be changed in place."""
        made: Inputs = mapped(self, Tensor.clone)
        return made

    def tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments."""
        return tensors_in([*self.arguments, *self.options.values()])


def mapped(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Replace the tensors (or other leaves of a `kind`) in containers, which keep their classes."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        parts = [mapped(part, change, kind) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        made: Any = copy(value)
        for key in value:
            made[key] = mapped(value[key], change, kind)
        return made
    if is_dataclass(value) and not isinstance(value, type):
        made = copy(value)
        for entry in fields(value):
            part = mapped(getattr(value, entry.name), change, kind)
            object.__setattr__(made, entry.name, part)
        return made
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors of an output, an input or a target."""
    if isinstance(value, Tensor):
        return [value]
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, entry.name) for entry in fields(value)]
    return [tensor for part in parts for tensor in tensors_in(part)]


def same(a: Any, b: Any) -> bool:
    """Whether two settings, states or outputs are equal; not a number is the same as itself."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return bool(a == b) or (a != a and b != b)


def unwrapped(module: nn.Module) -> nn.Module:
    """The block behind the first module of a stage (`calls.first_block`), or the module itself."""
    return getattr(module, "_stage_block", module)


def all_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return every module below the roots, once."""
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def buffer_holders(modules: Sequence[nn.Module]) -> tuple[tuple[nn.Module, str], ...]:
    """Return every place in the modules where a buffer hangs."""
    return tuple(
        (part, name)
        for part in all_modules(modules)
        for name, buffer in part._buffers.items()
        if buffer is not None
    )


def copied(buffers: Tensors) -> Tensors:
    """Return copies of buffers; one that hangs in several places is one tensor there again."""
    copies = {id(buffer): buffer.clone() for buffer in buffers}
    return tuple(copies[id(buffer)] for buffer in buffers)


@contextmanager
def buffers_at(
    holders: Sequence[tuple[nn.Module, str]], values: Sequence[Tensor]
) -> Iterator[None]:
    """Point modules at other buffers for a while, and then back."""
    before = [module._buffers[name] for module, name in holders]
    for (module, name), value in zip(holders, values, strict=True):
        module._buffers[name] = value
    try:
        yield
    finally:
        for (module, name), buffer in zip(holders, before, strict=True):
            module._buffers[name] = buffer


@contextmanager
def unchanged(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let a forward change copies of the buffers, and undo what it does to other attributes."""
    holders = buffer_holders(modules)
    buffers: Any = tuple(module._buffers[name] for module, name in holders)
    before = [
        (part, {name: (value, _duplicate(value)) for name, value in _attributes(part).items()})
        for part in dict.fromkeys(map(unwrapped, all_modules(modules)))
    ]
    try:
        with buffers_at(holders, copied(buffers)):
            yield
    finally:
        for part, attributes in before:
            for name in _attributes(part).keys() - attributes.keys():
                del part.__dict__[name]
            for name, (value, kept) in attributes.items():
                part.__dict__[name] = _put_back(value, kept)


def counts_of(modules: Sequence[nn.Module]) -> dict[tuple[nn.Module, str], Any]:
    """Numbers, lists, queues and tensors that modules have as attributes, to be compared later.

    Of a dictionary the numbers: it is often a cache.
    """
    found: dict[tuple[nn.Module, str], Any] = {}
    for part in map(unwrapped, all_modules(modules)):
        for name, value in _attributes(part).items():
            if isinstance(value, (int, float)):
                found[part, name] = value
            elif isinstance(value, (list, deque)):
                found[part, name] = [*map(id, value)]
            elif isinstance(value, Tensor):
                found[part, name] = id(value), value._version
            elif type(value) is dict:
                found[part, name] = [v for v in value.values() if isinstance(v, (int, float))]
    return found


def changed_since(before: dict[tuple[nn.Module, str], Any]) -> list[tuple[nn.Module, str]]:
    """Return attributes that differ from those of `counts_of`."""
    now = counts_of([part for part, _ in before])
    return [key for key, value in before.items() if key in now and now[key] != value]


def _attributes(module: nn.Module) -> dict[str, Any]:
    registered = ("_parameters", "_buffers", "_modules")
    return {k: v for k, v in module.__dict__.items() if k not in registered}


def _duplicate(value: Any) -> Any:
    """Return a copy of what can be changed in place, else the value itself."""
    if isinstance(value, Tensor):
        return value.detach().clone(), value._version
    return copy(value) if type(value) in (list, dict, set, deque) else value


def _put_back(value: Any, kept: Any) -> Any:
    """Return the same object, with what it had in it."""
    if isinstance(value, Tensor):
        content, version = kept
        if value._version != version:  # others may be views that cannot be written to
            value.detach().copy_(content)
    elif type(value) in (list, dict, set, deque):
        value.clear()
        value.update(kept) if type(value) in (dict, set) else value.extend(kept)
    return value
