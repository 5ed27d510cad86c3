"""Tracing a model's own forward, and cutting the trace in front of named modules.

Only the modules that contain a split point are looked into (by `torch.fx`); all others are called
as they are, so that what they do inside need not be traceable.
"""

from __future__ import annotations

import copy
import dis
import operator
import random
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import fx, nn

from optsched.arraypipe.model.tied_weights import check_not_compiled
from optsched.arraypipe.model.traced_stage import Program, TracedStage
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
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


def trace(
    model: nn.Module, points: Sequence[str], title: str, opened: Iterable[nn.Module] = ()
) -> fx.Graph:
    """Trace a model once; every node says in ``meta["stage"]`` to which stage it belongs.

    `points` are the modules before whose calls the model is cut, in the order of the calls; beside
    what contains them the modules `opened` are looked into. Targets are names of the model;
    ``meta["constant"]`` has the value of a constant without a name.
    """
    shell = _Shell(model)
    tracer = _Tracer(model, points, title, opened)
    for module in tracer.looked_into:
        check_not_compiled(module, f"stages: a {type(module).__name__} of job {title}")
    with _unchanged(model, title), _factories_traced(tracer):
        try:
            graph = tracer.trace(shell)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"stages: the forward of {type(model).__name__} (job {title}) cannot be traced: "
                f"{' '.join(str(error).split())}{_place(error)}; {_WAY_OUT}"
            ) from error
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
    opened: list[nn.Module] = []
    waiting = [model]
    while waiting:
        for child in waiting.pop().children():
            if type(child).forward is nn.Sequential.forward:
                opened.append(child)
                waiting.append(child)
            elif isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                waiting.append(child)
    graph = trace(model, (), title, opened)
    return [str(node.target) for node in graph.nodes if node.op == "call_module"]


def _looked_into(model: nn.Module, points: Sequence[str]) -> set[nn.Module]:
    """All modules that contain one of the points."""
    names = [point.split(".")[:k] for point in points for k in range(point.count(".") + 1)]
    return {model, *(model.get_submodule(".".join(row)) for row in names)}


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

    def __init__(
        self, model: nn.Module, points: Sequence[str], title: str, opened: Iterable[nn.Module]
    ) -> None:
        super().__init__()
        self.points = [model.get_submodule(name) for name in points]
        self.names, self.title, self.stage = list(points), title, 0
        self.looked_into = {*_looked_into(model, points), *opened}
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
        for k, (point, name) in enumerate(zip(self.points, self.names, strict=True)):
            if point is m and k != self.stage:
                wrong = "twice" if k < self.stage else f"before {self.names[self.stage]!r}"
                raise InputError(
                    f"stages: the forward of job {self.title} calls {name!r} {wrong}; a SplitPoint "
                    f"needs a module that is called once, and they stand in the order of the calls"
                )
        self.stage += any(point is m for point in self.points)
        return super().call_module(m, forward, args, kwargs)

    def create_arg(self, a: Any) -> Any:
        """Objects that hold values, as models return them, are made again in every forward."""
        if isinstance(a, type):
            return self.create_node("call_function", _constant(a), (), {})
        if type(a) is dict or not (isinstance(a, dict) or is_dataclass(a)):
            return super().create_arg(a)
        value: Any = a  # taken apart as `copy.copy` does it, whatever its class
        make, *rest = value.__reduce_ex__(4)
        parts = tuple(list(part) if isinstance(part, Iterator) else part for part in rest)
        made = self.create_node("call_function", _constant(make), (), {})
        return self.create_node("call_function", _made, (made, self.create_arg(parts)), {})

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


def _constant(value: Any) -> Callable[[], Any]:
    """A function that returns a value which no graph can spell."""

    def constant() -> Any:
        return value

    return constant


def _made(make: Callable[..., Any], parts: tuple[Any, ...]) -> Any:
    """An object of what its `__reduce_ex__` gives, the first of which is `make`."""
    return copy.copy(_Parts((make, *parts)))


class _Parts:
    """Copied, it is the object that these are parts of."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.parts


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


def _place(error: Exception) -> str:
    """Where in the caller's code a trace broke off."""
    torch_folder = torch.__path__[0]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(torch_folder) and frame.filename != __file__:
            return f" ({frame.filename}:{frame.lineno})"
    return ""


# what a tensor says of itself without its values: numbers, not tensors
_SHAPE_METHODS: Final = frozenset(
    ("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device",
     "is_floating_point", "is_complex", "__len__")
)  # fmt: skip
_SHAPE_FIELDS: Final = frozenset(
    ("shape", "ndim", "dtype", "device", "is_cuda", "layout", "itemsize", "nbytes")
)
_IN_PLACE: Final = frozenset(
    getattr(operator, name)
    for name in ("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow",
                 "irshift", "isub", "itruediv", "ixor", "setitem")
)  # fmt: skip
_NOT_IN_PLACE: Final = frozenset((operator.and_, operator.or_, operator.not_, operator.is_))


def traced_stages(model: nn.Module, points: Sequence[str], title: str) -> list[TracedStage]:
    """The stages of a model that is cut before the calls of these modules.

    It is traced in the mode it is in. Its modules and tensors stay where they are: the stages call
    and read the same objects.
    """
    cut = _Cut(model, trace(model, points, title), title, points)
    stages = [cut.stage(s) for s in range(len(points) + 1)]
    # what the forward does not read never changes, and trains as it would alone: not at all
    read = {id(t) for stage in stages for t in (*stage.parameters(), *stage.buffers())}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in read:
            stages[0].hold(name)
    return stages


class _Cut:
    """Divides the nodes of a trace; a value that is used later rides through all stages between.

    Shapes are no tensors: they are read again, in the stage that needs them, from the tensor they
    belong to. Parameters are read in every stage that uses them, as tied weights.
    """

    def __init__(
        self, model: nn.Module, graph: fx.Graph, title: str, points: Sequence[str]
    ) -> None:
        self.model, self.title = model, title
        self.traced = tuple(_looked_into(model, points))
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        _merge_constants(graph)
        self.nodes = list(graph.nodes)
        self.changed = {_changed_in_place(node) for node in self.nodes}
        self.again = {node for node in self.nodes if self._is_read_again(node)}
        self.home = {node: node.meta["stage"] for node in self.nodes}
        self.crossing = self._crossing(len(points) + 1)
        self._check(points)

    def _is_read_again(self, node: fx.Node) -> bool:
        """Whether a stage that needs the value makes it itself."""
        if "constant" in node.meta:
            return node not in self.changed
        if node.op == "get_attr":
            return node.target not in self.buffers
        return _is_plain(node)

    def _crossing(self, stages: int) -> list[list[fx.Node]]:
        """Values that stage s takes from the stage before, in the order they were made."""
        last: dict[fx.Node, int] = {}
        for node in self.nodes:
            if node not in self.again:
                for value in self._inputs(node):
                    last[value] = max(last.get(value, 0), self.home[node])
        return [
            [n for n in self.nodes if n not in self.again and self.home[n] < s <= last.get(n, 0)]
            for s in range(stages)
        ]

    def _inputs(self, node: fx.Node) -> Iterator[fx.Node]:
        """Values a node needs, seen through those that are made again."""
        for value in node.all_input_nodes:
            if value in self.again:
                yield from self._inputs(value)
            else:
                yield value

    def _check(self, points: Sequence[str]) -> None:
        at_work = {
            self.home[n] for n in self.nodes if n not in self.again and n.op.startswith("call_")
        }
        for s, values in enumerate(self.crossing):
            if s not in at_work or (s > 0 and not values):
                point = points[max(s - 1, 0)]
                raise InputError(
                    f"stages: the cut before {point!r} of job {self.title} leaves stage {s} with "
                    f"nothing to do; leave out that SplitPoint"
                )
        for node in self.nodes:
            target = _changed_in_place(node)
            if (
                target is not None
                and target.op == "get_attr"
                and target.target in self.buffers
                and self.home[target] != self.home[node]
            ):
                raise InputError(
                    f"stages: buffer {target.target!r} of job {self.title} is changed in stage "
                    f"{self.home[node]} and read in stage {self.home[target]}; cut elsewhere"
                )

    def stage(self, s: int) -> TracedStage:
        """The code of a stage, with the modules and tensors that it names."""
        graph = fx.Graph()
        twins: dict[fx.Node, fx.Node] = {}

        def twin(node: fx.Node) -> fx.Node:
            if node not in twins:
                assert node in self.again or node.op == "get_attr", node
                copied = graph.node_copy(node, twin)
                # made anew, as the model would, in case it is changed in place
                constant = "constant" in node.meta
                twins[node] = graph.call_method("clone", (copied,)) if constant else copied
            return twins[node]

        sources = self.crossing[s] if s > 0 else [n for n in self.nodes if n.op == "placeholder"]
        for node in sources:
            twins[node] = graph.placeholder(node.name)
        for node in self.nodes:
            if self.home[node] == s and node not in self.again and node.op.startswith("call_"):
                twins[node] = graph.node_copy(node, twin)
        row: list[fx.Node] = []
        if s + 1 == len(self.crossing):
            graph.output(fx.node.map_arg(self.nodes[-1].args[0], twin))
        else:
            row = self.crossing[s + 1]
            values = tuple(map(twin, row))
            graph.output(values[0] if len(values) == 1 else values)
        outputs = [str(n.target) if n.op in ("call_module", "get_attr") else n.name for n in row]
        called = sorted({str(n.target) for n in graph.nodes if n.op == "call_module"})
        read = {str(n.target): n for n in graph.nodes if n.op == "get_attr"}
        code = graph.python_code("self")
        names = dict(code.globals)
        exec(compile(code.src, f"<stage {s} of {type(self.model).__name__}>", "exec"), names)
        modes = [module.training for module in self.traced]
        program = Program(s, names["forward"], len(sources), outputs, self.traced, modes)
        stage = TracedStage(self.model, program)
        for target in called:  # parents first
            stage.hold(target)
        for target, node in read.items():
            if "constant" in node.meta:
                stage.__dict__[target] = node.meta["constant"]
            else:
                stage.hold(target)
        return stage


def _merge_constants(graph: fx.Graph) -> None:
    """One node for each constant: what changes it in place changes it for all that come after."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if "constant" in node.meta and first.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(first[node.target])
            graph.erase_node(node)


def _is_plain(node: fx.Node) -> bool:
    """Whether the value is a number, a shape, a type: read from a tensor, or reckoned from such."""
    if node.op == "call_method" and node.target in _SHAPE_METHODS:
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in _SHAPE_FIELDS or _is_plain(node.args[0])  # type: ignore[arg-type]
    if node.op == "call_function":
        home = getattr(node.target, "__module__", None)
        if home not in ("_operator", "math", "builtins"):
            return False
    elif node.op != "call_method":
        return False
    return bool(node.all_input_nodes) and all(map(_is_plain, node.all_input_nodes))


def _changed_in_place(node: fx.Node) -> fx.Node | None:
    """The value that a node changes in place, by the name of what it calls."""
    if node.op not in ("call_method", "call_function") or not node.args:
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    by_name = name.endswith("_") and not name.endswith("__") and node.target not in _NOT_IN_PLACE
    changed = by_name or node.target in _IN_PLACE or node.kwargs.get("inplace") is True
    return node.args[0] if changed and isinstance(node.args[0], fx.Node) else None
