"""Flat memory for the state of a (job, stage): its layout, and the views that training works on."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from optsched.arraypipe.states.visits import ALL, BORROWED, BUFFERS, MOMENTS, WEIGHTS
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.optim import Optimizer

    from optsched.arraypipe.job import JobStage

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

    Parameters
    ----------
    weights, borrowed, masters
        In the order of `JobStage.parameters`, `borrowed` and `masters`.
    buffers
        Distinct buffers; `buffer_of` says which one every holder has.
    moments
        Optimizer state of more than one element, by (parameter of the optimizer, key). Smaller
        tensors such as step counters stay with the job.
    bytes
        Per piece.
    """

    weights: tuple[Place, ...]
    borrowed: tuple[Place, ...]
    buffers: tuple[Place, ...]
    buffer_of: tuple[int, ...]
    masters: tuple[Place, ...]
    moments: Mapping[tuple[int, str], Place]
    bytes: tuple[int, int, int, int]


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


class Home:
    """One place for what forward and backward need: views of flat bytes, on the host or in a slot.

    Parameters are made from views of the flat tensors, never by assigning ``.data``: whoever
    copies into the flat tensor while a graph still needs the old values trips autograd's version
    counter instead of getting wrong gradients.

    Parameters
    ----------
    layout
        What lies where.
    flats
        Bytes of the weights, the borrowed weights and the buffers, at least as many as they are.
    like
        Parameters whose Python attributes are passed on: own and borrowed.
    """

    def __init__(
        self, layout: Layout, flats: Sequence[Tensor], like: Sequence[Sequence[nn.Parameter]]
    ) -> None:
        self.parameters = _parameters(layout.weights, flats[WEIGHTS], like[0])
        self.borrowed = _parameters(layout.borrowed, flats[BORROWED], like[1])
        # with a counter each: layers change one buffer in place while a graph holds another
        self.buffers = [place.view(flats[BUFFERS]).data for place in layout.buffers]


class Shelf:
    """One place for what only the update needs, like `Home`; `like`: the masters."""

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
