"""Plain attributes of modules: counters and the like, that a forward may change."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_REGISTERED: Final = ("_parameters", "_buffers", "_modules")


@contextmanager
def attributes_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Undo what a forward does to attributes that are neither parameters nor buffers.

    Attributes that were set anew, containers and tensors changed in place; not what objects of
    other classes have inside.
    """
    parts = {id(part): part for module in modules for part in module.modules()}
    before = [
        (part, {k: (v, _copied(v)) for k, v in _plain(part).items()}) for part in parts.values()
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


def _copied(value: Any) -> Any:
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
