"""Flat memory for the state of a (job, stage), and the tensors of the job that point into it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from optsched.arraypipe.runtime.state import JobStage


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
        """The tensor in these bytes."""
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
    """Lay out all that a stage trains; `title` of its job, for messages.

    Optimizer state that does not exist yet is found by a step on a copy of the optimizer.
    """
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
    _check_apart([*weights, *masters], title)
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
    """Parameters of a stage, its copies of tied ones, and float32 masters."""
    masters = [p for _, p in stage.masters or ()]
    return [p for _, p in stage.parameters], [b.parameter for b in stage.tied], masters


def _check_apart(tensors: Sequence[Tensor], title: str) -> None:
    """Refuse tensors that overlap: they would be apart in flat memory."""
    rows = [(t, Place(t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.dtype)) for t in tensors]
    ends = sorted((p.offset, p.end) for t, p in rows if not t.is_meta and p.end > p.offset)
    if any(end > start for (_, end), (start, _) in pairwise(ends)):
        raise InputError(
            f"job {title}: two parameters share memory, which cannot be moved; run without a "
            f"memory limit"
        )


def _moves(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1


def _trained(optimizer: Optimizer | None) -> list[nn.Parameter]:
    groups = optimizer.param_groups if optimizer is not None else ()
    return [p for group in groups for p in group["params"]]


def _optimizer_states(optimizer: Optimizer | None, title: str) -> list[dict[str, Any]]:
    """State of every parameter of the optimizer, as it is or as it will be after a step."""
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


def flat_bytes(sizes: Sequence[int], device: torch.device, pinned: bool) -> list[Tensor]:
    """A flat tensor of bytes per size."""
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
        """Bytes to copy of a piece; moments exist from the first update on."""
        exists = piece == 0 or self.stage.masters is not None
        exists = exists or any(self._tensor(at) is not None for at in self.layout.moments)
        return self.layout.bytes[piece] * exists

    def _views(self, piece: int, slot: int, flat: Tensor) -> list[tuple[Any, Tensor]]:
        """Tensors, or where the optimizer has them, and their views in a slot."""
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
