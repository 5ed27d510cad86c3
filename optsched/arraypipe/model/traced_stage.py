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

    So a tensor that is replaced, on either side, is replaced for both. A *detached* entry is kept
    here instead.
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
    everything has its unsplit name; its mode (`training`) is that of the whole module.
    """

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.__dict__["_whole"] = whole  # not a child
        self._parameters: Any = Share(whole._parameters)
        self._buffers: Any = Share(whole._buffers)

    @property
    def training(self) -> bool:
        """Mode of the whole module."""
        return bool(self.__dict__["_whole"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_whole" in self.__dict__:
            self.__dict__["_whole"].training = mode

    def detach_parameter(self, name: str) -> None:
        """Keep this parameter here from now on: replacing it does not change the whole module."""
        self._parameters.own[name] = self._parameters[name]

    def hold_module(self, path: str) -> None:
        """Take in a module that this stage calls; `path` begins at this part."""
        first, _, rest = path.partition(".")
        if not rest:
            self._modules[first] = self.__dict__["_whole"].get_submodule(first)
            return
        child = self._child(first)
        if isinstance(child, Part):
            child.hold_module(rest)

    def hold_tensor(self, path: str) -> None:
        """Take in a parameter, buffer or other tensor that this stage reads."""
        first, _, rest = path.partition(".")
        if rest:
            child = self._child(first)
            if isinstance(child, Part):
                child.hold_tensor(rest)
            return
        for share in (self._parameters, self._buffers):
            if first in share.whole:
                share.names[first] = None
                return
        self.__dict__[first] = getattr(self.__dict__["_whole"], first)

    def _child(self, name: str) -> nn.Module:
        if name not in self._modules:
            self._modules[name] = Part(self.__dict__["_whole"].get_submodule(name))
        child = self._modules[name]
        assert child is not None
        return child


class Program(NamedTuple):
    """What a stage does in one mode of the model."""

    function: Callable[..., Any]
    inputs: int
    outputs: tuple[str, ...]  # names of the values that cross the next cut, for messages


class Plan(NamedTuple):
    """What is known of a traced stage beside its modules."""

    stage: int
    looked_into: tuple[nn.Module, ...]  # traced; their modes choose the program
    programs: dict[tuple[bool, ...], Program | str]  # by those modes, or why there is no trace
    prefixes: tuple[str, ...]  # of the unsplit names of all that the stage calls and reads


class TracedStage(Part):
    """One stage of a traced model, which keeps all its tensors."""

    def __init__(self, whole: nn.Module, plan: Plan) -> None:
        super().__init__(whole)
        self._plan = plan  # with an underscore: any other name may be that of a module

    def forward(self, x: Any) -> Any:
        """The stage on its input: the model's, or what crosses the cut before it."""
        plan = self._plan
        mode = tuple([module.training for module in plan.looked_into])
        other = "some of its modules are in train mode and some in eval mode"
        program = plan.programs.get(mode, other)
        if isinstance(program, str):
            raise InputError(f"stages: the traced model changed its mode: {program}")
        row = _known_again(x) if program.inputs > 1 else (x,)
        output = program.function(self, *row)
        if not program.outputs:
            return output
        values = output if len(program.outputs) > 1 else (output,)
        for name, value in zip(program.outputs, values, strict=True):
            if not isinstance(value, Tensor):
                raise InputError(
                    f"stages: {name!r}, a {type(value).__name__}, crosses the cut after stage "
                    f"{plan.stage}, where only tensors can; take it apart before the cut "
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
