"""What a checkpoint can keep: numbers become Python's, and other state is found before training."""

from __future__ import annotations

import io
import warnings
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from optsched.errors import InputError
from optsched.io.values import as_python

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.job import MakeScheduler

Made = TypeVar("Made")
_LEAVES: Final = (bool, int, float, complex, str, type(None))
_TRIED: Final = 2  # steps


class NotKept(InputError):
    """State that no checkpoint can keep; the message names its place."""


def kept(value: Any, place: str | None, tensor: Callable[[Tensor], Tensor]) -> Any:
    """Copy nested containers of what `torch.load(weights_only=True)` reads again.

    Numbers of NumPy become Python's, tensors what `tensor` returns. `NotKept`: anything else; the
    message extends `place` by keys and indices. Without a place nothing is refused.
    """
    if isinstance(value, Tensor):
        return tensor(value)
    value = as_python(value)
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind in (dict, OrderedDict, Counter):
        rows = ((k, v, place and f"{place}: {k}") for k, v in value.items())
        return kind({kept(k, at, tensor): kept(v, at, tensor) for k, v, at in rows})
    if kind in (list, tuple):
        return kind(kept(v, place and f"{place}[{i}]", tensor) for i, v in enumerate(value))
    if place is None:
        return value
    try:
        found = reread(value)
    except Exception:
        found = None
    if type(found) is not kind:
        raise NotKept(
            f"{place}: a {kind.__name__} cannot be kept in a checkpoint, which is read with "
            f"weights_only=True; keep numbers, strings, tensors, lists and dictionaries of them "
            f"(what state_dict() returns), or train without checkpoints"
        )
    return found


def reread(value: Any) -> Any:
    """Write a value as a checkpoint does, and read it as one is read."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def empty(value: Tensor) -> Tensor:
    """Return a tensor in place of a large one, where only the rest of a state is read."""
    return torch.empty(0, dtype=value.dtype)


def python_settings(made: Made) -> Made:
    """Make the numbers of a new optimizer Python's, and its tensors its own."""
    if isinstance(made, Optimizer):
        for group in made.param_groups:
            for key, value in group.items():
                if isinstance(value, Tensor):
                    group[key] = value.clone()
        python_numbers(made)
    return made


def python_numbers(optimizer: Any, scheduler: Any = None) -> None:
    """Replace NumPy's numbers in settings and states by Python's, after every step.

    NumPy rounds a product with its float32 to float32, Python to float64. So that a job which is
    resumed has the bits of one that is not, it goes on with what a checkpoint keeps.
    """
    seen = set[int]()
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in ("params", "param_names"):
                group[key] = _replaced(_real(value), seen)
    if not type(optimizer).__module__.startswith("torch."):  # those keep tensors
        for state in optimizer.state.values():
            _replaced(state, seen)
    if scheduler is not None:
        _replaced(getattr(scheduler, "__dict__", {}), seen)


def _real(value: Any) -> Any:
    """Return a fraction as a float, an array of several numbers as a tuple."""
    if isinstance(value, (Fraction, Decimal)):
        return float(value)
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return tuple(value.tolist())
    return type(value)(map(_real, value)) if type(value) in (list, tuple) else value


def _replaced(value: Any, seen: set[int]) -> Any:
    """The same with Python's numbers; dictionaries, lists and schedulers are changed in place."""
    if type(value) is tuple:
        return tuple(_replaced(inner, seen) for inner in value)
    if isinstance(value, (Tensor, Optimizer)) or type(value) in _LEAVES:
        return value
    inside = vars(value) if isinstance(value, LRScheduler) else value
    if not isinstance(inside, (dict, list)):
        return as_python(value)
    if id(value) not in seen:
        seen.add(id(value))
        for key, inner in [*(inside.items() if isinstance(inside, dict) else enumerate(inside))]:
            if (found := _replaced(inner, seen)) is not inner:
                inside[key] = found
            if key == "lr_lambdas":  # a checkpoint keeps the attributes of those that have some
                for function in inner:
                    _replaced(getattr(function, "__dict__", {}), seen)
    return value


def check_kept(
    make: Callable[[list[nn.Parameter]], Optimizer],
    schedule: MakeScheduler | None,
    parameters: Sequence[nn.Parameter | Tensor],
    place: str,
) -> None:
    """Find state that a checkpoint cannot keep before anything is trained (`NotKept`)."""
    rows = [  # of the others only shapes: they take no memory
        nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), p.requires_grad)
        for p in parameters
    ]
    trained = [k for k, p in enumerate(rows) if p.requires_grad]
    for k in {*trained[:1], *trained[-1:]}:
        rows[k] = nn.Parameter(torch.zeros(rows[k].shape, dtype=rows[k].dtype))
        rows[k].grad = torch.zeros_like(rows[k])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = python_settings(make(rows))
            scheduler = None if schedule is None else schedule(optimizer)
            before = _forgotten(optimizer)
            for _ in range(_TRIED):
                optimizer.step()
                if scheduler is not None:
                    metric = (1.0,) if isinstance(scheduler, ReduceLROnPlateau) else ()
                    scheduler.step(*metric)
                python_numbers(optimizer, scheduler)
            state = None if scheduler is None else scheduler.state_dict()
            after = _forgotten(optimizer)
    except Exception:  # the training will say it
        return
    if moved := [repr(key) for key, value in before.items() if after.get(key) != value]:
        warnings.warn(
            f"{place}: {type(optimizer).__name__}.step changes {', '.join(moved)}: no checkpoint "
            f"keeps it, so a resumed job begins anew; use `state` or `param_groups` if it is read",
            stacklevel=2,
        )
    for entry in optimizer.state.values():
        kept(entry, f"{place}: optimizer state", empty)
    for group in optimizer.param_groups:
        kept({**group, "params": []}, f"{place}: optimizer setting", empty)
    kept(state, f"{place}: scheduler", empty)


def _forgotten(optimizer: Optimizer) -> dict[str, str]:
    """Return attributes of an optimizer that its checkpoint leaves out, to be compared."""
    rows = dict[str, str]()
    for key, value in vars(optimizer).items():
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            rows[key] = repr(value)
        elif isinstance(value, (list, deque)) and key != "param_groups":
            rows[key] = repr([*map(id, value)])
    return rows
