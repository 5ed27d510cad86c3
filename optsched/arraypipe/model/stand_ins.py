"""What stands in the place of a module in the skeleton of a stage."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from inspect import getattr_static, signature
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from optsched.arraypipe.job import seed_generator
from optsched.arraypipe.model.inputs import mapped, tensors_in
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Left(BaseException):  # passes `except Exception` in a model's forward
    """The forward of a stage is over: the first block of the next stage is called."""


@dataclass(eq=False)
class Passage:
    """Hidden states on their way through one forward of a stage."""

    hidden: Any = None
    entered: bool = False
    sent: Any = None
    left: bool = False
    # hidden states and seed by what the first block was given: a checkpoint calls it again
    calls: Any = field(default_factory=WeakTensorKeyDictionary)


@dataclass(frozen=True)
class Shape:
    """A tensor of an output, relative to the first tensor among the arguments."""

    dims: tuple[int | None, ...]  # None: as the argument has it
    dtype: torch.dtype
    like: str = ""  # "argument" or "weight": what gives the dtype


class StandIn(nn.Module):
    """A module of another stage, without its tensors.

    A call computes nothing. It returns NaN in the recorded form, so that
    no result can depend on them unnoticed; the same holds for tensors that are its attributes.
    """

    def __init__(self, module: nn.Module, name: str, output: Any = None) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(_replaced=(module, name, output), training=module.training)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the module, for `isinstance`."""
        return type(self.__dict__["_replaced"][0])

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module; its methods see this one in its place."""
        module = self.__dict__["_replaced"][0]
        found = getattr_static(type(module), name, None)
        if isinstance(found, FunctionType):
            return MethodType(found, self)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)
        value = getattr(module, name)
        if isinstance(value, Tensor):
            return unknown(value.shape, value.dtype, value.device)
        if isinstance(value, nn.Module):
            return StandIn(value, f"{self.__dict__['_replaced'][1]}.{name}")
        return value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Values of the recorded form."""
        module, name, output = self.__dict__["_replaced"]
        if output is None:
            raise InputError(
                f"stages: the forward calls {name!r} in another stage than on the first batch"
            )
        given = next(iter(tensors_in([*arguments, *options.values()])), None)
        weight = next((p for p in module.parameters() if p.is_floating_point()), None)
        source = given if given is not None else weight
        device = torch.device("cpu") if source is None else source.device

        def made(leaf: Shape) -> Tensor:
            dtype = leaf.dtype
            if leaf.like == "argument" and given is not None:
                dtype = given.dtype
            elif leaf.like == "weight" and weight is not None:
                dtype = weight.dtype
            size = [
                given.shape[k] if d is None and given is not None else d
                for k, d in enumerate(leaf.dims)
            ]
            return unknown(size, dtype, device)

        return mapped(output[0], made, Shape)


class First(nn.Module):
    """The first block of a stage: it gets what the stage before has sent, and random numbers.

    It has the attributes of the block, tensors included, and calls the block itself.
    """

    __slots__ = ("_first",)  # not in the dictionary, which is that of the block

    def __init__(self, block: nn.Module, name: str, passage: Passage) -> None:
        object.__setattr__(self, "__dict__", block.__dict__)
        object.__setattr__(self, "_first", (block, name, passage))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the block, for `isinstance`."""
        return type(self._first[0])

    def __getattr__(self, name: str) -> Any:
        """Attributes of the block."""
        return getattr(self._first[0], name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the block on the received hidden states."""
        block, name, passage = self._first
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
        arguments, options = with_first(block, arguments, options, hidden)
        return block(*arguments, **options)


class Last(StandIn):
    """The first block of the next stage: its call ends the forward."""

    def __init__(self, block: nn.Module, name: str, passage: Passage) -> None:
        StandIn.__init__(self, block, name)
        self.__dict__["_passage"] = passage

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Keep the hidden states and leave."""
        passage: Passage = self.__dict__["_passage"]
        passage.sent = first_of(self.__dict__["_replaced"][0], arguments, options)
        passage.left = True
        raise Left


def unwrapped(module: nn.Module) -> nn.Module:
    """The block behind a `First`, or the module itself."""
    return module._first[0] if type(module) is First else module


def all_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Every module below the roots, once."""
    seen: dict[int, nn.Module] = {}
    for root in roots:
        seen.update((id(module), module) for module in root.modules())
    return list(seen.values())


def buffer_holders(modules: Sequence[nn.Module]) -> tuple[tuple[nn.Module, str], ...]:
    """Every place in the modules where a buffer hangs."""
    return tuple(
        (part, name)
        for part in all_modules(modules)
        for name, buffer in part._buffers.items()
        if buffer is not None
    )


def first_of(block: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """The first argument of a call, given by position or by name."""
    return arguments[0] if arguments else options.get(_first_name(block, options))


def with_first(
    block: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any], value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another first one."""
    if arguments:
        return (value, *arguments[1:]), dict(options)
    return (), {**options, _first_name(block, options): value}


def _first_name(block: nn.Module, options: Mapping[str, Any]) -> str:
    known = signature(block.forward).parameters
    return next((name for name in known if name in options), next(iter(options), ""))


def shapes_in(output: Any, given: Tensor | None, module: nn.Module) -> Any:
    """The form of an output, to be returned by a `StandIn`; objects of other classes are None."""
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)

    def shape(t: Tensor) -> Shape:
        known = () if given is None else given.shape
        dims = tuple(
            None if k < len(known) and known[k] == size else size for k, size in enumerate(t.shape)
        )
        like = ""
        if given is not None and t.is_floating_point() and given.dtype == t.dtype:
            like = "argument"
        elif weight is not None and weight.dtype == t.dtype:
            like = "weight"
        return Shape(dims, t.dtype, like)

    return _without_objects(mapped(output, shape))


def _without_objects(value: Any) -> Any:
    """Containers, shapes and plain values; None for all else, such as caches."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_without_objects, value))
    if isinstance(value, dict):
        for key in value:
            value[key] = _without_objects(value[key])
        return value
    simple = value is None or isinstance(value, (Shape, bool, int, float, str, tuple))
    return value if simple else None


def unknown(size: Sequence[int | None], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of no memory whose values are not a number (0 if it has integers)."""
    numbers = dtype.is_floating_point or dtype.is_complex
    value = torch.full((), math.nan if numbers else 0, dtype=dtype, device=device)
    return value.expand(size)  # type: ignore[arg-type]
