"""Flat memory for the state of a (job, stage), the views of it, and its store on the host."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from optsched.arraypipe.memory.types import ALL, BORROWED, BUFFERS, MOMENTS, WEIGHTS
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from optsched.arraypipe.runtime.state import JobStage


_PIECE_OF: Final = (WEIGHTS, BORROWED, MOMENTS)  # of the rows of a layout
_ALIGNMENT: Final = 256  # bytes; as CUDA allocates, so that kernels choose as they would alone


class Place(NamedTuple):
    """Where a tensor lies in the flat bytes of its piece; `stride` in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def bytes(self) -> int:
        """From its first to its last element."""
        if 0 in self.shape:
            return 0
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (1 + reach) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """The tensor in these bytes; it shares their version counter."""
        values = flat[self.offset : self.offset + self.bytes].view(self.dtype)
        return values.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Layout:
    """The tensors of one state.

    Optimizer state of one element, such as step counters, is not in it: it stays with the job.
    """

    rows: tuple[tuple[Place, ...], ...]  # parameters: own ones, borrowed ones, masters
    buffers: tuple[Place, ...]  # distinct ones
    buffer_of: tuple[int, ...]  # which of them every holder has
    moments: dict[tuple[int, str], Place]  # by (parameter of the optimizer, key)
    bytes: tuple[int, ...]  # per piece


def layout_of(stage: JobStage, title: str) -> Layout:
    """Lay out all that a stage trains; `title` of its job, for messages.

    Optimizer state that does not exist yet is looked up on a copy of the optimizer without data.
    """
    end = [0] * len(ALL)

    def place(piece: int, t: Tensor) -> Place:
        offset = -(-end[piece] // _ALIGNMENT) * _ALIGNMENT
        made = Place(offset, tuple(t.shape), tuple(t.stride()), t.dtype, t.requires_grad)
        end[piece] = offset + made.bytes
        return made

    rows = rows_of(stage)
    for p in (*rows[0], *rows[1]):
        _check_plain(p, title)
    holders = stage.buffers()
    distinct = {id(t): t for t in holders}
    order = {key: k for k, key in enumerate(distinct)}
    return Layout(
        tuple(tuple(place(k, p) for p in row) for k, row in zip(_PIECE_OF, rows, strict=True)),
        tuple(place(BUFFERS, t) for t in distinct.values()),
        tuple(order[id(t)] for t in holders),
        {
            (i, key): place(MOMENTS, value)
            for i, state in enumerate(_optimizer_states(stage.optimizer, title))
            for key, value in state.items()
            if moves(value)
        },
        tuple(end),
    )


def rows_of(stage: JobStage) -> tuple[list[nn.Parameter], ...]:
    """All parameters of a stage, as a layout has them."""
    masters = [p for _, p in stage.masters or ()]
    return [p for _, p in stage.parameters], [b.parameter for b in stage.borrowed], masters


def moves(value: Any) -> bool:
    """Whether a value of an optimizer's state lies in flat memory."""
    return isinstance(value, Tensor) and value.numel() > 1


def trained(optimizer: Optimizer | None) -> list[nn.Parameter]:
    """The parameters of an optimizer, group by group."""
    groups = optimizer.param_groups if optimizer is not None else ()
    return [p for group in groups for p in group["params"]]


class WeightBuffer:
    """What forward and backward need, as views of flat bytes on the host or in a slot.

    Parameters are made from views of the flat tensors, never by assigning ``.data``: whoever
    copies into the flat tensor while a graph still needs the old values trips autograd's version
    counter instead of getting wrong gradients.
    """

    def __init__(self, layout: Layout, flats: Sequence[Tensor], like: Sequence[Any]) -> None:
        self.own, self.borrowed = (
            _parameters(layout.rows[k], flats[piece], like[k])
            for k, piece in enumerate((WEIGHTS, BORROWED))
        )
        # with a counter each: layers change one buffer in place while a graph holds another
        self.buffers = [place.view(flats[BUFFERS]).data for place in layout.buffers]


class OptimizerBuffer:
    """What only the update needs, as views of flat bytes."""

    def __init__(self, layout: Layout, flat: Tensor, like: Sequence[nn.Parameter]) -> None:
        self.masters = _parameters(layout.rows[2], flat, like)
        self.moments = {k: place.view(flat) for k, place in layout.moments.items()}


def flat_bytes(sizes: Sequence[int], device: torch.device, pinned: bool) -> list[Tensor]:
    """A flat tensor of bytes per piece; each has its own version counter."""
    return [
        torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned) for size in sizes
    ]


def _parameters(
    places: Sequence[Place], flat: Tensor, like: Sequence[nn.Parameter]
) -> list[nn.Parameter]:
    """Fresh ones in flat bytes; Python attributes of the old ones are passed on."""
    row = []
    for place, old in zip(places, like, strict=True):
        row.append(nn.Parameter(place.view(flat), requires_grad=place.requires_grad))
        row[-1].__dict__.update(old.__dict__)
    return row


def _check_plain(parameter: nn.Parameter, title: str) -> None:
    if type(parameter) is not nn.Parameter:
        raise InputError(
            f"job {title}: a {type(parameter).__name__} cannot be moved between memories; run "
            f"without a memory limit"
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise InputError(
            f"job {title}: a hook on a parameter would be lost when its state is moved; run "
            f"without a memory limit"
        )


def _optimizer_states(optimizer: Optimizer | None, title: str) -> list[dict[str, Any]]:
    """State of every parameter of the optimizer, as it is or as it will be after a step."""
    if optimizer is None:
        return []
    row = trained(optimizer)
    if all(optimizer.state.get(p) for p in row):
        return [optimizer.state[p] for p in row]
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
    memo: dict[int, Any] = {}
    for p in trained(optimizer):
        twin = nn.Parameter(_hollow(p, device), requires_grad=p.requires_grad)
        twin.grad = _hollow(p, device).zero_() if p.requires_grad else None
        memo[id(p)] = twin
        for value in optimizer.state.get(p, {}).values():
            if moves(value):
                memo[id(value)] = _hollow(value, device)
    clone = copy.deepcopy(optimizer, memo)
    with torch.no_grad():
        type(clone).step(clone)  # the instance's own may count steps for a scheduler
    return [dict(clone.state.get(p, {})) for p in trained(clone)]


def _hollow(t: Tensor, device: str) -> Tensor:
    return torch.zeros_like(t, device=device, requires_grad=False)


class MovingState:
    """A state that has its store in host memory and works in slots.

    The job keeps its own modules, optimizer, scheduler, kept activations and gradients; moving it
    means pointing those at the views of another buffer. That costs microseconds per parameter, and
    the optimizer is pointed anew only for an update. `title` of its job is for messages; copies
    between a `pinned` store and a GPU can run beside its blocks.
    """

    def __init__(self, stage: JobStage, title: str, pinned: bool) -> None:
        self.stage, self.title, self.layout = stage, title, layout_of(stage, title)
        rows = rows_of(stage)
        where = {id(p): (r, k) for r, row in enumerate(rows) for k, p in enumerate(row)}
        # every place in the modules where a parameter hangs: module, name, row, index
        modules = {id(part): part for module in stage.modules for part in module.modules()}
        self.spots = [
            (part, name, *where[id(p)])
            for part in modules.values()
            for name, p in part._parameters.items()
            if p is not None
        ]
        parameters = trained(stage.optimizer)
        self.trained = [where[id(p)] for p in parameters]
        states = {} if stage.optimizer is None else stage.optimizer.state
        self.entries: list[dict[str, Any]] = [dict(states.get(p, {})) for p in parameters]
        self.bytes = flat_bytes(self.layout.bytes, torch.device("cpu"), pinned)
        # by slot; -1: the store
        self.weights = {-1: WeightBuffer(self.layout, self.bytes, rows)}
        self.moments = {-1: OptimizerBuffer(self.layout, self.bytes[MOMENTS], rows[2])}
        self.graph_slot = -1  # where the last autograd graph was made
        self.gradients = _taken([*rows[0], *rows[1]])  # while it is in no slot
        self._fill_store(rows)
        self._point(-1)
        self.bind_optimizer(-1)

    def bind(self, slot: int, flats: Sequence[Tensor]) -> None:
        """Let modules and parameters point into a slot; gradients come along."""
        if slot == self.slot:
            return
        if slot not in self.weights:
            store = self.weights[-1]
            self.weights[slot] = WeightBuffer(self.layout, flats, (store.own, store.borrowed))
        self.park()
        self._point(slot)
        here = self.weights[slot]
        for p, gradient in zip((*here.own, *here.borrowed), self.gradients, strict=True):
            p.grad = gradient
        self.gradients = [None] * len(self.gradients)

    def park(self) -> None:
        """Let modules and parameters point at the store; gradients stay where they were made."""
        if self.slot >= 0:
            here = self.weights[self.slot]
            self.gradients = _taken([*here.own, *here.borrowed])
            self._point(-1)

    def bind_optimizer(self, slot: int, flat: Tensor | None = None) -> None:
        """Let the optimizer point to where the parameters are, and to its state in a slot.

        That of the store is -1.
        """
        if slot not in self.moments:
            assert flat is not None
            self.moments[slot] = OptimizerBuffer(self.layout, flat, self.moments[-1].masters)
        self.moments_slot = slot  # where the optimizer points
        stage, here, place = self.stage, self.weights[self.slot], self.moments[slot]
        if stage.masters is not None:
            names = [name for name, _ in stage.masters]
            stage.masters = list(zip(names, place.masters, strict=True))
        if stage.optimizer is None:
            return
        for (i, key), view in place.moments.items():
            if key in self.entries[i]:
                self.entries[i][key] = view
        rows = (here.own, here.borrowed, place.masters)
        new = [rows[r][k] for r, k in self.trained]
        pending = iter(new)
        for group in stage.optimizer.param_groups:
            group["params"] = [next(pending) for _ in group["params"]]
        state = stage.optimizer.state
        for old in [key for key in state if isinstance(key, Tensor)]:
            del state[old]
        state.update((p, entry) for p, entry in zip(new, self.entries, strict=True) if entry)

    def absorb(self) -> None:
        """After an update: move state that the optimizer has made anew into the slot."""
        optimizer, moments = self.stage.optimizer, self.moments[self.moments_slot].moments
        for i, p in enumerate(trained(optimizer)):
            assert optimizer is not None
            entry = self.entries[i] = optimizer.state.get(p, {})
            for key, value in entry.items():
                view = moments.get((i, key))
                if view is None or value is view:
                    continue
                with torch.no_grad():
                    view.copy_(self._alike(f"optimizer state {key!r}", value, view))
                entry[key] = view

    def replaced(self) -> list[tuple[Tensor, Tensor]]:
        """Buffers that a layer has replaced by others: (their place in the store, their value).

        They are not copied into the slot, where a graph may still need the old values.
        """
        here, store = self.weights[self.slot], self.weights[-1]
        found: dict[int, Tensor] = {}
        for (module, name), k in zip(self.stage.holders, self.layout.buffer_of, strict=True):
            current = module._buffers[name]
            if current is not here.buffers[k]:
                found[k] = self._alike(f"buffer {name!r}", current, here.buffers[k])
        return [(store.buffers[k], value) for k, value in found.items()]

    def size(self, piece: int) -> int:
        """Bytes to copy of a piece; moments exist from the first update on."""
        there = piece != MOMENTS or self.layout.rows[2]
        if there or any(key in self.entries[i] for i, key in self.layout.moments):
            return self.layout.bytes[piece]
        return 0

    def _alike(self, what: str, new: Tensor | None, old: Tensor) -> Tensor:
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            raise InputError(
                f"job {self.title}: {what} changed its shape or type while training; run without a "
                f"memory limit"
            )
        return new

    def _point(self, slot: int) -> None:
        self.slot = slot  # where modules point
        stage, here = self.stage, self.weights[slot]
        for p, old in zip((*here.own, *here.borrowed), stage.used(), strict=True):
            p.requires_grad_(old.requires_grad)
        for module, name, row, k in self.spots:
            p = (here.own, here.borrowed)[row][k]
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = p
            else:  # it keeps lists of its own, as recurrent layers do
                setattr(module, name, p)
        stage.parameters = [
            (name, p) for (name, _), p in zip(stage.parameters, here.own, strict=True)
        ]
        stage.borrowed = tuple(
            b._replace(parameter=p) for b, p in zip(stage.borrowed, here.borrowed, strict=True)
        )
        stage.set_buffers([here.buffers[k] for k in self.layout.buffer_of])

    def _fill_store(self, came_with: Sequence[Sequence[nn.Parameter]]) -> None:
        weights, moments = self.weights[-1], self.moments[-1]
        rows = (weights.own, weights.borrowed, moments.masters)
        with torch.no_grad():
            for new, old in zip(rows, came_with, strict=True):
                for p, before in zip(new, old, strict=True):
                    p.copy_(before)
            for k, value in zip(self.layout.buffer_of, self.stage.buffers(), strict=True):
                weights.buffers[k].copy_(value)
            for (i, key), view in moments.moments.items():
                if key in self.entries[i]:
                    view.copy_(self.entries[i][key])


def _taken(row: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Take the gradients away from some parameters."""
    gradients = [p.grad for p in row]
    for p in row:
        p.grad = None
    return gradients
