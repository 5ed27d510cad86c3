"""The tensors of a job on a stage: their bytes, and flat memory that they can be pointed into."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from optsched.arraypipe.memory.budget import StageBytes
from optsched.arraypipe.runtime import blocks
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim import Optimizer

    from optsched.arraypipe.job import Tensors
    from optsched.arraypipe.model.inputs import Inputs
    from optsched.arraypipe.runtime.losses import Criterion
    from optsched.arraypipe.runtime.state import JobRun, JobStage


_ALIGNMENT: Final = 256  # bytes; as CUDA allocates, so that kernels choose as they would alone


class Place(NamedTuple):
    """Where a tensor lies in the flat bytes of its piece; `stride` in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """Behind its last element."""
        if 0 in self.shape:
            return self.offset
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset + (1 + reach) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """Return the tensor in these bytes."""
        return flat[self.offset : self.end].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Layout:
    """The tensors of one state.

    Optimizer state of one element, such as a step counter, is not in it: it stays where it is.
    """

    weights: tuple[tuple[Tensor, Place], ...]
    masters: tuple[tuple[Tensor, Place], ...]
    moments: dict[tuple[int, str], Place]  # by (parameter of the optimizer, key)
    bytes: tuple[int, int]  # of weights; of masters and moments
    resident: tuple[Tensor, ...]  # buffers, and copies of tied weights
    shared: tuple[Tensor, ...]  # that other jobs have too


def layout_of(stage: JobStage, title: str) -> Layout:
    """Return lay out all that a stage trains; `title` of its job, for messages."""
    end = [0, 0]

    def place(piece: int, t: Tensor) -> Place:
        offset = -(-end[piece] // _ALIGNMENT) * _ALIGNMENT
        made = Place(offset, tuple(t.shape), tuple(t.stride()), t.dtype)
        end[piece] = made.end
        return made

    parameters, tied, masters = rows_of(stage)
    shared = {id(t): t for t in stage.shared_tensors()}
    weights = [p for p in parameters if id(p) not in shared]
    resident = {id(t): t for t in (*tied, *stage.buffers()) if id(t) not in shared}
    rows = [(t, Place(t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.dtype)) for t in weights]
    ends = sorted((p.offset, p.end) for t, p in rows if not t.is_meta and p.end > p.offset)
    if any(end > start for (_, end), (start, _) in pairwise(ends)):
        raise InputError(
            f"job {title}: two parameters share memory, which cannot be moved; run without a "
            f"memory limit"
        )
    return Layout(
        tuple((p, place(0, p)) for p in weights),
        tuple((p, place(1, p)) for p in masters),
        {
            (i, key): place(1, value)
            for i, state in enumerate(_optimizer_states(stage.optimizer, title))
            for key, value in state.items()
            if _moves(value)
        },
        (end[0], end[1]),
        tuple(resident.values()),
        tuple(shared.values()),
    )


def rows_of(stage: JobStage) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Return parameters of a stage, its copies of tied parameters, and float32 masters."""
    masters = [p for _, p in stage.masters or ()]
    return [p for _, p in stage.parameters], [b.parameter for b in stage.tied], masters


def _moves(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1


def _trained(optimizer: Optimizer | None) -> list[nn.Parameter]:
    groups = optimizer.param_groups if optimizer is not None else ()
    return [p for group in groups for p in group["params"]]


def _optimizer_states(optimizer: Optimizer | None, title: str) -> list[dict[str, Any]]:
    """Return state of every parameter of the optimizer, as it is or as it will be after a step."""
    row = _trained(optimizer)
    if optimizer is None or all(optimizer.state.get(p) for p in row):
        return [optimizer.state[p] for p in row] if optimizer is not None else []
    tried: Exception | None = None
    random = torch.get_rng_state()
    for device in ("meta", "cpu"):  # without memory if the optimizer can do that
        try:
            return _after_a_step(optimizer, device)
        except Exception as error:
            tried = error
        finally:
            torch.set_rng_state(random)
    raise InputError(
        f"job {title}: what the optimizer {type(optimizer).__name__} keeps cannot be found by a "
        f"step on a copy ({tried})"
    )


def _after_a_step(optimizer: Optimizer, device: str) -> list[dict[str, Any]]:
    def hollow(t: Tensor) -> Tensor:
        return torch.zeros_like(t, device=device, requires_grad=False)

    memo: dict[int, Any] = {}
    for p in _trained(optimizer):
        twin = memo[id(p)] = nn.Parameter(hollow(p), requires_grad=p.requires_grad)
        twin.grad = hollow(p) if p.requires_grad else None
        memo.update((id(t), hollow(t)) for t in optimizer.state.get(p, {}).values() if _moves(t))
    clone = copy.deepcopy(optimizer, memo)
    with torch.no_grad():
        type(clone).step(clone)  # the instance's step may count for a scheduler
    return [dict(clone.state.get(p, {})) for p in _trained(clone)]


# states that move


def flat_bytes(sizes: Sequence[int], device: torch.device, pinned: bool) -> list[Tensor]:
    """Return a flat tensor of bytes per size."""
    return [torch.empty(n, dtype=torch.uint8, device=device, pin_memory=pinned) for n in sizes]


class BoundState:
    """A state with its store in host memory, used in slots.

    The job keeps its modules, parameters, gradients and optimizer; a switch points their tensors at
    other memory (``tensor.data``). Autograd does not notice, so that a state with an open graph may
    not leave its slot: `graph_slot` guards that. `title` of its job is for messages; copies between
    a `pinned` store and a GPU run beside its blocks.
    """

    def __init__(self, stage: JobStage, title: str, pinned: bool) -> None:
        self.stage, self.title, self.layout = stage, title, layout_of(stage, title)
        self.trained = _trained(stage.optimizer)
        self.store = flat_bytes(self.layout.bytes, torch.device("cpu"), pinned)
        self.views: dict[tuple[int, int], list[tuple[Any, Tensor]]] = {}  # by piece and slot
        self.slots = [-1, -1]  # where its tensors point, by piece; -1: the store
        self.graph_slot = -1  # where the last autograd graph was made
        for piece in (0, 1):
            with torch.no_grad():
                for at, view in self._views(piece, -1, self.store[piece]):
                    if (value := self._tensor(at)) is not None:
                        view.copy_(value)
            self.point(piece, -1, self.store[piece])

    def point(self, piece: int, slot: int, flat: Tensor) -> None:
        """Let the tensors of a piece point into a slot, or into the store (-1)."""
        for at, view in self._views(piece, slot, flat):
            if (value := self._tensor(at)) is not None:
                value.data = view
        self.slots[piece] = slot

    def version(self) -> int:
        """A number that a layer changes with the weights."""
        return sum(t._version for t, _ in self.layout.weights)

    def has_graphs(self) -> bool:
        """Return whether a graph that refers to the weights has its backward ahead."""
        return any(kept.roots is not None or kept.branches for kept in self.stage.kept.values())

    def absorb(self) -> None:
        """After an update: copy state that the optimizer has made anew into the slot."""
        for at, view in self.views[1, self.slots[1]]:
            value = self._tensor(at)
            if value is None or value.data_ptr() == view.data_ptr():
                continue
            if value.shape != view.shape or value.dtype != view.dtype:
                raise InputError(
                    f"job {self.title}: optimizer state {at[1]!r} changed its shape or type while "
                    f"training; run without a memory limit"
                )
            view.copy_(value.detach())
            value.data = view

    def size(self, piece: int) -> int:
        """Return bytes to copy of a piece; moments exist from the first update on."""
        exists = piece == 0 or self.stage.masters is not None
        exists = exists or any(self._tensor(at) is not None for at in self.layout.moments)
        return self.layout.bytes[piece] * exists

    def _views(self, piece: int, slot: int, flat: Tensor) -> list[tuple[Any, Tensor]]:
        """Return tensors, or where the optimizer has them, and their views in a slot."""
        if (piece, slot) not in self.views:
            rows: Sequence[tuple[Any, Place]] = self.layout.weights
            if piece:
                rows = (*self.layout.masters, *self.layout.moments.items())
            self.views[piece, slot] = [(at, place.view(flat)) for at, place in rows]
        return self.views[piece, slot]

    def _tensor(self, at: Any) -> Tensor | None:
        if isinstance(at, Tensor):
            return at
        index, key = at
        assert self.stage.optimizer is not None
        found: Tensor | None = self.stage.optimizer.state.get(self.trained[index], {}).get(key)
        return found


# bytes


def bytes_of_stage(run: JobRun, stage: JobStage) -> StageBytes:
    """What a job takes on a stage; the first forward has measured what is kept from F to B."""
    weights = moments = resident = 0
    problem = ""
    try:
        layout = layout_of(stage, run.title)
    except InputError as error:
        problem = str(error)
    else:
        (weights, moments), resident = layout.bytes, boundary_bytes(layout.resident)
    gradients, tied, masters = map(_trained_bytes, rows_of(stage))
    saved, inputs = run.saved.get(stage.index, (0, 0))
    return StageBytes(
        weights, moments, resident, gradients, tied, masters, saved, inputs, run.job.recompute,
        run.title, problem,
    )  # fmt: skip


def measured(stage: JobStage, x: Tensors, batch: Inputs, end: Criterion | None) -> tuple[int, int]:
    """Bytes kept of a micro-batch, without and with recomputation; nothing of the stage changes."""
    before, device = stage.buffers(), stage.device
    stage.set_buffers([buffer.clone() for buffer in before])
    try:
        with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
            return saved_bytes(stage, x, batch, end)[:2]
    finally:
        stage.set_buffers(before)
        stage.kept.clear()


def saved_bytes(
    stage: JobStage, x: Tensors, batch: Inputs, end: Criterion | None
) -> tuple[int, int, Tensors]:
    """Run F; bytes kept until B without and with recomputation, and the output.

    Every storage counts once; those of parameters and buffers not at all. The stage keeps the
    graph, for `blocks.backward`.
    """
    states = {t.untyped_storage().data_ptr() for t in (*stage.used(), *stage.buffers())}
    found: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        _count(t, found, states)
        return t.detach()  # not the tensor itself, which would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        output = blocks.forward(stage, 0, x, batch, 1, end, False)
    inputs: dict[int, int] = {}
    given = (*x, *(batch.tensors() if stage.model.needs_inputs else ()))
    for t in given:
        _count(t, inputs, states)
    for t in (*given, *output):
        _count(t, found, states)
    return sum(found.values()), sum(inputs.values()) + boundary_bytes(stage.buffers()), output


def boundary_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return payload of a message."""
    return sum(t.nbytes for t in tensors if t is not None)


def gradients_bytes(stage: JobStage) -> int:
    """Return gradients of all parameters that are trained."""
    return _trained_bytes(stage.used())


def state_bytes(stage: JobStage) -> int:
    """Return parameters, their masters, buffers, and the state of the optimizer."""
    tensors = [*chain(*rows_of(stage)), *stage.buffers()]
    if stage.optimizer is not None:
        entries = stage.optimizer.state.values()
        tensors += [t for entry in entries for t in entry.values() if isinstance(t, Tensor)]
    return boundary_bytes(tensors)


def _trained_bytes(parameters: Iterable[Tensor]) -> int:
    return boundary_bytes(p for p in parameters if p.requires_grad)


def _count(t: Tensor, found: dict[int, int], without: set[int]) -> None:
    """Note the storage of a tensor, unless it has none in plain memory."""
    try:
        storage = t.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and other wrapped tensors
        found[id(t)] = t.numel() * t.element_size()
        return
    if storage.data_ptr() not in without and storage.nbytes():
        found[storage.data_ptr()] = storage.nbytes()
