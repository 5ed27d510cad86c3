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
    from collections.abc import Iterable, Mapping, Sequence

    from torch.optim import Optimizer

    from optsched.arraypipe.runtime.state import JobStage


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

    weights: tuple[Place, ...]  # in the order of `JobStage.parameters`
    borrowed: tuple[Place, ...]
    buffers: tuple[Place, ...]  # distinct ones
    buffer_of: tuple[int, ...]  # which of them every holder has
    masters: tuple[Place, ...]
    moments: Mapping[tuple[int, str], Place]  # by (parameter of the optimizer, key)
    bytes: tuple[int, int, int, int]  # per piece


def layout_of(stage: JobStage, title: str) -> Layout:
    """Lay out all that a stage trains; `title` of its job, for messages.

    Optimizer state that does not exist yet is looked up on a copy of the optimizer without data.
    """
    end = [0] * len(ALL)

    def place(piece: int, tensors: Iterable[Tensor]) -> tuple[Place, ...]:
        row = []
        for t in tensors:
            end[piece] = -(-end[piece] // _ALIGNMENT) * _ALIGNMENT
            row.append(
                Place(end[piece], tuple(t.shape), tuple(t.stride()), t.dtype, t.requires_grad)
            )
            end[piece] += row[-1].bytes
        return tuple(row)

    parameters = [p for _, p in stage.parameters]
    borrowed = [b.parameter for b in stage.borrowed]
    masters = [p for _, p in stage.masters or ()]
    for p in (*parameters, *borrowed):
        _check_plain(p, title)
    holders = stage.buffers()
    distinct = {id(t): t for t in holders}
    order = {key: k for k, key in enumerate(distinct)}
    weights, tied = place(WEIGHTS, parameters), place(BORROWED, borrowed)
    buffers, master_places = place(BUFFERS, distinct.values()), place(MOMENTS, masters)
    keys, tensors = [], []
    for i, state in enumerate(_optimizer_states(stage.optimizer, title)):
        for key, value in state.items():
            if moves(value):
                keys.append((i, key))
                tensors.append(value)
    moments = dict(zip(keys, place(MOMENTS, tensors), strict=True))
    sizes = (end[WEIGHTS], end[BORROWED], end[BUFFERS], end[MOMENTS])
    return Layout(
        weights, tied, buffers, tuple(order[id(t)] for t in holders), master_places, moments, sizes
    )


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

    def __init__(
        self, layout: Layout, flats: Sequence[Tensor], like: Sequence[Sequence[nn.Parameter]]
    ) -> None:
        self.parameters = _parameters(layout.weights, flats[WEIGHTS], like[0])
        self.borrowed = _parameters(layout.borrowed, flats[BORROWED], like[1])
        # with a counter each: layers change one buffer in place while a graph holds another
        self.buffers = [place.view(flats[BUFFERS]).data for place in layout.buffers]

    @property
    def all(self) -> list[nn.Parameter]:
        """What has gradients."""
        return [*self.parameters, *self.borrowed]


class OptimizerBuffer:
    """What only the update needs, as views of flat bytes."""

    def __init__(self, layout: Layout, flat: Tensor, like: Sequence[nn.Parameter]) -> None:
        self.masters = _parameters(layout.masters, flat, like)
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
        came_with = (
            [p for _, p in stage.parameters],
            [b.parameter for b in stage.borrowed],
            [p for _, p in stage.masters or ()],
        )
        self.spots = _spots(stage, came_with)
        # parameters of the optimizer: (row above, index there)
        where = {id(p): (r, k) for r, row in enumerate(came_with) for k, p in enumerate(row)}
        parameters = trained(stage.optimizer)
        self.trained = [where[id(p)] for p in parameters]
        states = {} if stage.optimizer is None else stage.optimizer.state
        self.entries: list[dict[str, Any]] = [dict(states.get(p, {})) for p in parameters]
        self.bytes = flat_bytes(self.layout.bytes, torch.device("cpu"), pinned)
        # by slot; -1: the store
        self.weights = {-1: WeightBuffer(self.layout, self.bytes, came_with)}
        self.moments = {-1: OptimizerBuffer(self.layout, self.bytes[MOMENTS], came_with[2])}
        self.graph_slot = -1  # where the last autograd graph was made
        self.gradients = _taken([*came_with[0], *came_with[1]])  # while it is in no slot
        self._fill_store(came_with)
        self._point(-1)
        self._point_optimizer(-1)

    @property
    def has_moments(self) -> bool:
        """Whether there is anything in the flat bytes of the moments yet."""
        return bool(self.layout.masters) or any(
            key in self.entries[i] for i, key in self.layout.moments
        )

    def bind(self, slot: int, flats: Sequence[Tensor]) -> None:
        """Let modules and parameters point into a slot; gradients come along."""
        if slot == self.slot:
            return
        if slot not in self.weights:
            store = self.weights[-1]
            like = (store.parameters, store.borrowed)
            self.weights[slot] = WeightBuffer(self.layout, flats, like)
        self.park()
        self._point(slot)
        for p, gradient in zip(self.weights[slot].all, self.gradients, strict=True):
            p.grad = gradient
        self.gradients = [None] * len(self.gradients)

    def park(self) -> None:
        """Let modules and parameters point at the store; gradients stay where they were made."""
        if self.slot >= 0:
            self.gradients = _taken(self.weights[self.slot].all)
            self._point(-1)

    def bind_optimizer(self, slot: int, flat: Tensor) -> None:
        """Let the optimizer point to where the parameters are, and to its state in a slot."""
        if slot not in self.moments:
            self.moments[slot] = OptimizerBuffer(self.layout, flat, self.moments[-1].masters)
        self._point_optimizer(slot)

    def park_optimizer(self) -> None:
        """Let the optimizer point at the store."""
        self._point_optimizer(-1)

    def absorb(self) -> None:
        """After an update: move state that the optimizer has made anew into the slot."""
        stage, moments = self.stage, self.moments[self.moments_slot].moments
        if stage.optimizer is None:
            return
        for i, p in enumerate(trained(stage.optimizer)):
            entry = stage.optimizer.state.get(p, {})
            self.entries[i] = entry
            for key, value in entry.items():
                view = moments.get((i, key))
                if view is None or value is view:
                    continue
                if value.shape != view.shape or value.dtype != view.dtype:
                    raise InputError(
                        f"job {self.title}: optimizer state {key!r} changed its shape or type "
                        f"while training; run without a memory limit"
                    )
                with torch.no_grad():
                    view.copy_(value)
                entry[key] = view

    def replaced(self) -> list[tuple[Tensor, Tensor]]:
        """Buffers that a layer has replaced by others: (their place in the store, their value).

        They are not copied into the slot, where a graph may still need the old values.
        """
        here, store = self.weights[self.slot], self.weights[-1]
        found: dict[int, Tensor] = {}
        for (module, name), k in zip(self.stage.holders, self.layout.buffer_of, strict=True):
            current, view = module._buffers[name], here.buffers[k]
            if current is view:
                continue
            if current is None or current.shape != view.shape or current.dtype != view.dtype:
                raise InputError(
                    f"job {self.title}: buffer {name!r} changed its shape or type while training; "
                    f"run without a memory limit"
                )
            found[k] = current
        return [(store.buffers[k], value) for k, value in found.items()]

    def size(self, piece: int) -> int:
        """Bytes to copy of a piece; moments exist from the first update on."""
        return 0 if piece == MOMENTS and not self.has_moments else self.layout.bytes[piece]

    def _point(self, slot: int) -> None:
        self.slot = slot  # where modules point
        stage, here = self.stage, self.weights[slot]
        for module, name, row, k in self.spots:
            p = (here.parameters, here.borrowed)[row][k]
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = p
            else:  # it keeps lists of its own, as recurrent layers do
                setattr(module, name, p)
        stage.parameters = [
            (name, p) for (name, _), p in zip(stage.parameters, here.parameters, strict=True)
        ]
        stage.borrowed = tuple(
            b._replace(parameter=p) for b, p in zip(stage.borrowed, here.borrowed, strict=True)
        )
        stage.set_buffers([here.buffers[k] for k in self.layout.buffer_of])

    def _point_optimizer(self, slot: int) -> None:
        self.moments_slot = slot  # where the optimizer points
        stage, here, place = self.stage, self.weights[self.slot], self.moments[slot]
        if stage.masters is not None:
            stage.masters = [
                (name, p) for (name, _), p in zip(stage.masters, place.masters, strict=True)
            ]
        if stage.optimizer is None:
            return
        for (i, key), view in place.moments.items():
            if key in self.entries[i]:
                self.entries[i][key] = view
        rows = (here.parameters, here.borrowed, place.masters)
        new = [rows[r][k] for r, k in self.trained]
        pending = iter(new)
        for group in stage.optimizer.param_groups:
            group["params"] = [next(pending) for _ in group["params"]]
        state = stage.optimizer.state
        for old in [key for key in state if isinstance(key, Tensor)]:
            del state[old]
        state.update((p, entry) for p, entry in zip(new, self.entries, strict=True) if entry)

    def _fill_store(self, came_with: Sequence[Sequence[nn.Parameter]]) -> None:
        weights, moments = self.weights[-1], self.moments[-1]
        rows = (weights.parameters, weights.borrowed, moments.masters)
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


def _spots(
    stage: JobStage, rows: Sequence[Sequence[nn.Parameter]]
) -> list[tuple[nn.Module, str, int, int]]:
    """Every place in the modules where a parameter hangs: (module, name, row, index)."""
    where = {id(p): (r, k) for r, row in enumerate(rows[:2]) for k, p in enumerate(row)}
    seen: dict[int, nn.Module] = {}
    for module in stage.modules:
        seen.update((id(part), part) for part in module.modules())
    return [
        (part, name, *where[id(p)])
        for part in seen.values()
        for name, p in part._parameters.items()
        if p is not None
    ]
