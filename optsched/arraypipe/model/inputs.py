"""What a model is called with, and containers of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class Inputs(NamedTuple):
    """Arguments of a model for one micro-batch."""

    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}

    def call(self, model: nn.Module) -> Any:
        """Run the forward of the model."""
        return model(*self.arguments, **self.options)

    def copied(self) -> Inputs:
        """Arguments that may be changed in place."""
        made: Inputs = mapped(self, Tensor.clone)
        return made

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
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


def flat(value: Any) -> list[Any]:
    """Tensors and numbers of an output, and the types of what holds them, in order."""
    if isinstance(value, Mapping):
        parts = [*value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [*value]
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        return [value]
    return [type(value), *(entry for part in parts for entry in flat(part))]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of an output, an input or a target."""
    return [part for part in flat(value) if isinstance(part, Tensor)]
