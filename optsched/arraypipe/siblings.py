"""Whether jobs are siblings: tensors of equal names and shapes, and of their own."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeAlias

from torch.nn.parameter import is_lazy

from optsched.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

Shapes: TypeAlias = "dict[str, tuple[str, tuple[int, ...] | None]]"
"""Unsplit name -> ``"parameter"`` or ``"buffer"``, and the shape; None: not known yet."""

Owners: TypeAlias = "dict[int, tuple[weakref.ref[Tensor], str]]"
"""Identity of a tensor -> the tensor, if it is still there, and the name of its job."""


def check_apart(model: nn.Module, title: str, owners: Owners, frozen: bool) -> None:
    """Refuse a model that has a tensor of another job's, and note whose its tensors are.

    Jobs would train each other's weights, each in its turn. Frozen parameters may be shared, as a
    backbone that is loaded once, unless `frozen`: where they are moved or cast, they may not.

    Raises
    ------
    InputError
        The sentence names both jobs and the first tensor that they share.
    """
    buffers = list(model.named_buffers())
    own = {id(buffer) for _, buffer in buffers}
    for name, tensor in [*model.named_parameters(), *buffers]:
        known = owners.get(id(tensor))
        changes = frozen or tensor.requires_grad or id(tensor) in own
        if known is not None and known[0]() is tensor and changes:
            raise InputError(
                f"build_model: jobs {known[1]} and {title} have the same {name!r}, and would train "
                f"it in turn; make new modules on every call"
            )
        owners[id(tensor)] = (weakref.ref(tensor), title)


def shapes_of(model: nn.Module) -> Shapes:
    """Names and shapes of all parameters and buffers of an unsplit model."""
    found = {name: ("parameter", _shape(p)) for name, p in model.named_parameters()}
    found.update((name, ("buffer", _shape(b))) for name, b in model.named_buffers())
    return found


def check_sibling(shapes: Shapes, title: str, first: Shapes, first_title: str) -> None:
    """Refuse a job whose tensors differ from those of the first job in name or shape.

    Values, types and what is trained may differ.

    Raises
    ------
    InputError
        The sentence names the job, the first tensor that differs, and both shapes.
    """
    if shapes == first:
        return
    name = next(name for name in [*first, *shapes] if first.get(name) != shapes.get(name))
    raise InputError(
        f"job {title}: {name!r} is {_told(shapes, name)}, in job {first_title} {_told(first, name)}"
        f"; profile, slots and prediction hold for jobs with equal stages: train this one in an "
        f"array of its own"
    )


def _shape(tensor: Tensor) -> tuple[int, ...] | None:
    return None if is_lazy(tensor) else tuple(tensor.shape)


def _told(shapes: Shapes, name: str) -> str:
    if name not in shapes:
        return "missing"
    kind, shape = shapes[name]
    return f"a {kind} of {'a shape not known yet' if shape is None else f'shape {shape}'}"
