"""Forwards that change nothing: buffers and attributes of modules are put back."""

from __future__ import annotations

import copy
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from optsched.arraypipe.model.stand_ins import buffer_holders, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.job import Tensors


def copied(buffers: Tensors) -> Tensors:
    """Copies of buffers; one that hangs in several places is one tensor there again."""
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
    """Let a forward change copies of the buffers, and undo what it does to other attributes.

    Attributes that were set anew, containers and tensors changed in place; not what objects of
    other classes have inside.
    """
    holders = buffer_holders(modules)
    buffers: Any = tuple(module._buffers[name] for module, name in holders)
    before = [
        (part, {k: (v, _duplicate(v)) for k, v in _plain(part).items()}) for part in _parts(modules)
    ]
    try:
        with buffers_at(holders, copied(buffers)):
            yield
    finally:
        for part, attributes in before:
            for name in _plain(part).keys() - attributes.keys():
                del part.__dict__[name]
            for name, (value, kept) in attributes.items():
                part.__dict__[name] = _put_back(value, kept)


def counts_of(modules: Sequence[nn.Module]) -> dict[tuple[nn.Module, str], Any]:
    """Numbers, lists, queues and tensors that modules have as attributes, to be compared later.

    Of a dictionary the numbers: it is often a cache.
    """
    found: dict[tuple[nn.Module, str], Any] = {}
    for part in _parts(modules):
        for name, value in _plain(part).items():
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
    """Attributes that are other ones than they were for `counts_of`."""
    now = counts_of([part for part, _ in before])
    return [key for key, value in before.items() if key in now and now[key] != value]


def _parts(modules: Sequence[nn.Module]) -> dict[nn.Module, None]:
    return {unwrapped(part): None for module in modules for part in module.modules()}


def _plain(module: nn.Module) -> dict[str, Any]:
    registered = ("_parameters", "_buffers", "_modules")
    return {k: v for k, v in module.__dict__.items() if k not in registered}


def _duplicate(value: Any) -> Any:
    """A copy of what can be changed in place, else the value itself."""
    if isinstance(value, Tensor):
        return value.detach().clone(), value._version
    return copy.copy(value) if type(value) in (list, dict, set, deque) else value


def _put_back(value: Any, kept: Any) -> Any:
    """The same object, with what it had in it."""
    if isinstance(value, Tensor):
        content, version = kept
        if value._version != version:  # others may be views that cannot be written to
            value.detach().copy_(content)
    elif type(value) is list:
        value[:] = kept
    elif type(value) in (dict, set, deque):
        value.clear()
        value.extend(kept) if type(value) is deque else value.update(kept)
    return value
