"""Tracing a model's own forward, and cutting the trace in front of named modules.

Only the modules that contain a split point are looked into (by `torch.fx`); all others are called
as they are, so that what they do inside need not be traceable.
"""

from __future__ import annotations

import dis
import random
import sys
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import fx, nn

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

# made anew in every forward; traced plainly, those of fixed shape would become constants
_FACTORIES: Final = (
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "normal", "ones",
    "rand", "randint", "randn", "randperm", "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
_WAY_OUT: Final = (
    "name the modules of every stage, or let build_model return an nn.Sequential or a list of "
    "stages"
)
_SHELL: Final = "model"


def trace(model: nn.Module, points: Sequence[str], title: str) -> fx.Graph:
    """Trace a model once; every node says in ``meta["stage"]`` to which stage it belongs.

    Parameters
    ----------
    points
        Names of the modules before whose calls the model is cut, in the order of the calls.
    title
        Of the job, for messages.

    Returns
    -------
    fx.Graph
        Targets are names of the model's modules and tensors; ``meta["constant"]`` has the value
        of a constant that has no name.

    Raises
    ------
    InputError
        The forward cannot be traced, or does not call the modules once each in this order.
    """
    shell = _Shell(model)
    tracer = _Tracer(model, points, title)
    what = f"the forward of {type(model).__name__} (job {title}) cannot be traced"
    graph = _traced(tracer, shell, title, what)
    if tracer.stage < len(points):
        raise InputError(
            f"stages: the forward of job {title} does not call {points[tracer.stage]!r}, the "
            f"module of a SplitPoint"
        )
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            if node.target.startswith(f"{_SHELL}."):
                node.target = node.target.removeprefix(f"{_SHELL}.")
            else:
                node.meta["constant"] = getattr(shell, node.target)
    return graph


def called_modules(model: nn.Module, title: str) -> list[str]:
    """Names of the modules that the forward calls, in order; plain `nn.Sequential` are opened."""
    tracer = _Tracer(model, (), title)
    tracer.looked_into |= _plain_sequentials(model)
    what = f"a {type(model).__name__} is no nn.Sequential and its forward cannot be traced"
    graph = _traced(tracer, _Shell(model), title, what)
    targets = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    return [target.removeprefix(f"{_SHELL}.") for target in targets]


def looked_into(points: Sequence[str]) -> tuple[str, ...]:
    """Names of all modules that contain one of the points; the model itself is ``""``."""
    found = {""}
    for point in points:
        names = point.split(".")
        found.update(".".join(names[:k]) for k in range(1, len(names)))
    return tuple(sorted(found))


class _Shell(nn.Module):
    """Calls the model as the executor does, with one argument; constants of the trace hang here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model(x)


class _Tracer(fx.Tracer):
    """Symbolic tracer that counts the split points it comes by."""

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, points: Sequence[str], title: str) -> None:
        super().__init__()
        self.points = [model.get_submodule(name) for name in points]
        self.names, self.title, self.stage = list(points), title, 0
        self.looked_into = {model.get_submodule(name) for name in looked_into(points)}
        self.mode = _context()

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return module not in self.looked_into

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        for k, point in enumerate(self.points):
            if point is m:
                self._come_by(k)
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["stage"] = self.stage
        if _context() != self.mode:
            what = str(node.target).removeprefix(f"{_SHELL}.")
            raise InputError(
                f"stages: the forward of job {self.title} calls {what!r} under no_grad, autocast "
                f"or the like, which tracing does not see; put that part into a module of its "
                f"own, or {_WAY_OUT}"
            )
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        """An assert is kept and passed; any other decision by a traced value cannot be followed."""
        if not _is_asserted(sys._getframe(2)):  # the frame of the forward, behind `Proxy.__bool__`
            return super().to_bool(obj)
        self.create_proxy("call_function", torch._assert, (obj, "an assert of the forward"), {})
        return True

    def _come_by(self, k: int) -> None:
        if k == self.stage:
            self.stage += 1
            return
        now = self.names[k]
        wrong = "twice" if k < self.stage else f"before {self.names[self.stage]!r}"
        raise InputError(
            f"stages: the forward of job {self.title} calls {now!r} {wrong}; a SplitPoint needs a "
            f"module that is called once, and they stand in the order of the calls"
        )


def _traced(tracer: _Tracer, shell: _Shell, title: str, what: str) -> fx.Graph:
    """The graph of the model's forward; `what` begins the sentence if there is none."""
    model: nn.Module = shell.model
    with _unchanged(model, title), _factories_traced(tracer):
        try:
            return tracer.trace(shell)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"stages: {what}: {error}{_place(error)}; {_WAY_OUT}") from error


def _is_asserted(frame: FrameType) -> bool:
    """Whether the frame is about to jump over the raising part of an ``assert``."""
    ahead = [i.opname for i in dis.get_instructions(frame.f_code) if i.offset >= frame.f_lasti]
    ahead = [name for name in ahead[:5] if name not in ("TO_BOOL", "CACHE")]
    return (
        len(ahead) > 1
        and ahead[0].startswith("POP_JUMP")
        and ahead[0].endswith("IF_TRUE")
        and ahead[1] in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")
    )


def _context() -> tuple[bool, ...]:
    """What a `with` around some lines may have changed."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


@contextmanager
def _factories_traced(tracer: fx.Tracer) -> Iterator[None]:
    """Record calls such as ``torch.arange(n)``, also those without a traced argument."""
    plain = {name: getattr(torch, name) for name in _FACTORIES}

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: tracer.create_proxy("call_function", function, args, kwargs)

    try:
        for name, function in plain.items():
            setattr(torch, name, traced(function))
        yield
    finally:
        for name, function in plain.items():
            setattr(torch, name, function)


@contextmanager
def _unchanged(model: nn.Module, title: str) -> Iterator[None]:
    """Put back what a forward assigned to its modules, and refuse one that assigned or drew."""
    places: list[dict[str, Any]] = []
    for module in model.modules():
        places += [module._buffers, module._parameters, module.__dict__]
    before = [dict(place) for place in places]
    generators = _generators()
    try:
        yield
        for place, values in zip(places, before, strict=True):
            for name in sorted(place.keys() | values.keys()):
                if place.get(name) is not values.get(name):
                    raise InputError(
                        f"stages: the forward of job {title} assigns to {name!r} of a module, "
                        f"which tracing would do once and never again; put that part into a "
                        f"module of its own, or {_WAY_OUT}"
                    )
        if _generators() != generators:
            raise InputError(
                f"stages: the forward of job {title} draws random numbers while it is traced, "
                f"which would be the same ones for ever; put that part into a module of its own, "
                f"or {_WAY_OUT}"
            )
    finally:
        for place, values in zip(places, before, strict=True):
            place.clear()
            place.update(values)


def _generators() -> tuple[Any, ...]:
    """States of the global random generators, comparable."""
    legacy: Any = np.random.get_state()  # noqa: NPY002
    torch_state = torch.get_rng_state().numpy().tobytes()
    return torch_state, random.getstate(), legacy[1].tobytes(), legacy[2]


def _plain_sequentials(model: nn.Module) -> set[nn.Module]:
    """Sequentials that are reached through sequentials and lists alone."""
    found: set[nn.Module] = set()
    waiting = [model]
    while waiting:
        for child in waiting.pop().children():
            if type(child).forward is nn.Sequential.forward:
                found.add(child)
                waiting.append(child)
            elif isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                waiting.append(child)
    return found


def _place(error: Exception) -> str:
    """Where in the caller's code a trace broke off."""
    torch_folder = torch.__path__[0]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(torch_folder) and frame.filename != __file__:
            return f" ({frame.filename}:{frame.lineno})"
    return ""
