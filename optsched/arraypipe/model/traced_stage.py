"""A stage of a traced model: the modules of the user, called by generated code."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


T = TypeVar("T")

_SAME: Final = (0, 7919)  # begins the shape of an empty tensor: "the same tensor as number ..."


class Share(MutableMapping[str, T]):
    """Some entries of the dictionary of another module, read and written there.

    So a tensor that is replaced, on either side, is replaced for both. Those in `own` are kept here
    instead.
    """

    def __init__(self, whole: MutableMapping[str, T]) -> None:
        self.whole = whole
        self.names: dict[str, None] = {}
        self.own: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        if name in self.names:
            return self.whole[name]
        raise KeyError(name)

    def __setitem__(self, name: str, value: T) -> None:
        if name in self.own:
            self.own[name] = value
        elif name in self.names:
            self.whole[name] = value
        else:
            raise KeyError(f"{name} is no part of this stage")

    def __delitem__(self, name: str) -> None:
        del self.names[name]
        self.own.pop(name, None)

    def __contains__(self, name: object) -> bool:  # asked at every `self.something` of a forward
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.names))

    def __len__(self) -> int:
        return len(self.names)


class Part(nn.Module):
    """What one stage uses of a module whose other uses are in other stages.

    Its children are the modules of the user, or parts of them, under the same names, so that
    everything has its unsplit name.
    """

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.__dict__["_whole"] = whole  # not a child
        self._parameters: Any = Share(whole._parameters)
        self._buffers: Any = Share(whole._buffers)

    def hold(self, path: str) -> None:
        """Take in what this stage calls or reads: a module, parameter, buffer or other tensor."""
        whole: nn.Module = self.__dict__["_whole"]
        first, _, rest = path.partition(".")
        if rest:
            child = self._modules.setdefault(first, Part(whole.get_submodule(first)))
            if isinstance(child, Part):
                child.hold(rest)
        elif first in whole._modules:
            self._modules[first] = whole._modules[first]
        elif first in whole._parameters:
            self._parameters.names[first] = None
        elif first in whole._buffers:
            self._buffers.names[first] = None
        else:
            self.__dict__[first] = getattr(whole, first)


class Program(NamedTuple):
    """What a stage does."""

    stage: int
    function: Callable[..., Any]
    inputs: int
    outputs: Sequence[str]  # names of the values that cross the next cut, for messages
    traced: tuple[nn.Module, ...]  # looked into
    modes: list[bool]  # whether they were in train mode then


class TracedStage(Part):
    """One stage of a traced model, which keeps all its tensors."""

    def __init__(self, whole: nn.Module, program: Program) -> None:
        super().__init__(whole)
        self._program = program  # with an underscore: any other name may be that of a module

    def forward(self, x: Any) -> Any:
        """The stage on its input: the model's, or what crosses the cut before it."""
        program = self._program
        if [module.training for module in program.traced] != program.modes:
            raise InputError(
                "stages: the traced model changed its mode: it is traced once, when its job begins"
            )
        row = _known_again(x) if program.inputs > 1 else (x,)
        output = program.function(self, *row)
        if not program.outputs:
            return output
        values = output if len(program.outputs) > 1 else (output,)
        for name, value in zip(program.outputs, values, strict=True):
            if not isinstance(value, Tensor):
                raise InputError(
                    f"stages: {name!r}, a {type(value).__name__}, crosses the cut after stage "
                    f"{program.stage}, where only tensors can; take it apart before the cut "
                    f"(a, b = ...), or cut elsewhere"
                )
        return _sent_once(values) if len(values) > 1 else output


def _sent_once(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Replace a tensor that is one of those before it by a note that says which.

    Layers may return their input itself. Sent twice it would be two tensors: gradients would be
    summed in another order, and a change in place of one not seen in the other.
    """
    first: dict[int, int] = {}
    return tuple(
        torch.empty((*_SAME, first[id(value)]), dtype=torch.bool, device=value.device)
        if first.setdefault(id(value), k) != k
        else value
        for k, value in enumerate(values)
    )


def _known_again(values: Sequence[Tensor]) -> list[Tensor]:
    return [values[v.shape[2]] if v.shape[:2] == _SAME else v for v in values]
