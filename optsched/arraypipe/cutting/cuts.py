"""From a trace to stages: what each one does, and which values cross the cuts."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import fx, nn

from optsched.arraypipe.cutting.traced_stage import Plan, Program, TracedStage
from optsched.arraypipe.cutting.tracer import looked_into, trace
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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

    The model is traced in the mode it is in, in train mode and in eval mode, so that `train()` and
    `eval()` work afterwards. Its modules and tensors stay where they are: the stages call and read
    the same objects.

    Raises
    ------
    InputError
        The model cannot be traced in the mode it is in, or a stage would be empty.
    """
    names = looked_into(points)
    now = [(module, module.training) for module in model.modules()]
    whole = [model.get_submodule(name) for name in names]
    mode = tuple(module.training for module in whole)
    cuts = {mode: _Cut(model, trace(model, points, title), len(points) + 1, title, points)}
    refusals: dict[tuple[bool, ...], str] = {}
    try:
        for flag in (True, False):
            other = (flag,) * len(whole)
            for module in whole:
                module.training = flag
            if other not in cuts:
                try:
                    graph = trace(model, points, title)
                    cuts[other] = _Cut(model, graph, len(points) + 1, title, points)
                except InputError as error:
                    refusals[other] = str(error)
    finally:
        for module, flag in now:
            module.training = flag
    stages = [
        _stage(model, s, names, {key: cut.pieces[s] for key, cut in cuts.items()}, refusals)
        for s in range(len(points) + 1)
    ]
    # what the forward does not read never changes, and trains as it would alone: not at all
    read = {id(t) for stage in stages for t in (*stage.parameters(), *stage.buffers())}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in read:
            stages[0].hold_tensor(name)
    return stages


@dataclass(frozen=True)
class _Piece:
    """One stage of one trace."""

    graph: fx.Graph
    inputs: int
    outputs: tuple[str, ...]


class _Cut:
    """Divides the nodes of a trace; a value that is used later rides through all stages between.

    Shapes are no tensors: they are read again, in the stage that needs them, from the tensor they
    belong to. Parameters are read in every stage that uses them, as tied weights.
    """

    def __init__(
        self, model: nn.Module, graph: fx.Graph, stages: int, title: str, points: Sequence[str]
    ) -> None:
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.title = title
        _merge_constants(graph)
        self.nodes = list(graph.nodes)
        self.changed = {_changed_in_place(node) for node in self.nodes}
        self.again = {node for node in self.nodes if self._is_read_again(node)}
        self.home = {node: node.meta["stage"] for node in self.nodes}
        crossing = self._crossing(stages)
        self._check(crossing, points)
        self.pieces = [self._piece(s, stages, crossing) for s in range(stages)]

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

    def _check(self, crossing: Sequence[Sequence[fx.Node]], points: Sequence[str]) -> None:
        at_work = {
            self.home[n] for n in self.nodes if n not in self.again and n.op.startswith("call_")
        }
        for s in range(len(crossing)):
            if s not in at_work or (s > 0 and not crossing[s]):
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

    def _piece(self, s: int, stages: int, crossing: Sequence[Sequence[fx.Node]]) -> _Piece:
        graph = fx.Graph()
        twins: dict[fx.Node, fx.Node] = {}

        def twin(node: fx.Node) -> fx.Node:
            if node not in twins:
                assert node in self.again or node.op == "get_attr", node
                twins[node] = self._copied(graph, node, twin)
            return twins[node]

        sources = crossing[s] if s > 0 else [n for n in self.nodes if n.op == "placeholder"]
        for node in sources:
            twins[node] = graph.placeholder(node.name)
        for node in self.nodes:
            if self.home[node] == s and node not in self.again and node.op.startswith("call_"):
                twins[node] = graph.node_copy(node, twin)
        if s + 1 == stages:
            final = next(node for node in self.nodes if node.op == "output")
            graph.output(fx.node.map_arg(final.args[0], twin))
            outputs: tuple[str, ...] = ()
        else:
            row = [twin(node) for node in crossing[s + 1]]
            graph.output(row[0] if len(row) == 1 else tuple(row))
            outputs = tuple(_title_of(node) for node in crossing[s + 1])
        return _Piece(graph, len(sources), outputs)

    def _copied(self, graph: fx.Graph, node: fx.Node, twin: Any) -> fx.Node:
        copied = graph.node_copy(node, twin)
        if "constant" in node.meta:  # made anew, as the model would, in case it is changed in place
            return graph.call_method("clone", (copied,))
        return copied


def _stage(
    model: nn.Module,
    index: int,
    names: tuple[str, ...],
    pieces: dict[tuple[bool, ...], _Piece],
    refusals: dict[tuple[bool, ...], str],
) -> TracedStage:
    """Compile the pieces, and give the stage the modules and tensors they name."""
    programs = {
        mode: Program(_compiled(piece.graph, model, index), piece.inputs, piece.outputs)
        for mode, piece in pieces.items()
    }
    nodes = [node for piece in pieces.values() for node in piece.graph.nodes]
    called = sorted({str(n.target) for n in nodes if n.op == "call_module"})  # parents first
    read = sorted({str(n.target) for n in nodes if n.op == "get_attr"})
    prefixes = (*(f"{target}." for target in called), *read)
    whole = tuple(model.get_submodule(name) for name in names)
    stage = TracedStage(model, Plan(index, whole, programs, refusals, prefixes))
    for target in called:
        stage.hold_module(target)
    for node in nodes:
        if node.op == "get_attr" and "constant" in node.meta:
            stage.__dict__[str(node.target)] = node.meta["constant"]
        elif node.op == "get_attr":
            stage.hold_tensor(str(node.target))
    return stage


def _merge_constants(graph: fx.Graph) -> None:
    """One node for each constant: what changes it in place changes it for all that come after."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if "constant" in node.meta and first.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(first[node.target])
            graph.erase_node(node)


def _compiled(graph: fx.Graph, model: nn.Module, index: int) -> Any:
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, f"<stage {index} of {type(model).__name__}>", "exec"), names)
    return names["forward"]


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


def _title_of(node: fx.Node) -> str:
    return str(node.target) if node.op in ("call_module", "get_attr") else node.name
