"""Whether jobs are siblings: tensors of equal names and shapes, so that their stages are equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torch.nn.parameter import is_lazy

from optsched.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

Shapes: TypeAlias = "dict[str, tuple[str, tuple[int, ...] | None]]"
"""Unsplit name -> ``"parameter"`` or ``"buffer"``, and the shape; None: not known yet."""


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
