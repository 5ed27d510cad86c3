"""Jobs are siblings with tensors of their own; others may be shared."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeAlias

from torch.nn.parameter import is_lazy

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from optsched.arraypipe.runtime.state import JobRun

Shapes: TypeAlias = dict[str, str]
"""Unsplit name -> what it is, in words."""

Owners: TypeAlias = "dict[int, tuple[weakref.ref[Tensor], str]]"
"""Identity of a tensor -> the tensor, if it is still there, and the name of its job."""


def check_apart(model: nn.Module, title: str, owners: Owners, why_not: str) -> None:
    """Refuse a model that trains a tensor of another job's, and note the owners of its tensors.

    Others may be shared, as a backbone that is loaded once, unless the sentence `why_not` is given.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        known = owners.get(id(tensor))
        reason = "and would train it in turn" if tensor.requires_grad else why_not
        if known is not None and known[0]() is tensor and reason:
            raise InputError(
                f"build_model: jobs {known[1]} and {title} have the same {name!r}, {reason}; make "
                f"new modules on every call"
            )
        owners[id(tensor)] = (weakref.ref(tensor), title)


def note_shared(runs: Sequence[JobRun]) -> None:
    """Note in every stage which of its tensors other jobs have, too."""
    places = [
        (run, stage, part, name, tensor)
        for run in runs
        for stage in run.stages
        for part in stage.parts
        for table in (part._parameters, part._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    jobs: dict[int, dict[str, None]] = {}
    for run, *_, tensor in places:
        jobs.setdefault(id(tensor), {})[run.title] = None
    names: dict[int, str] = {}
    for run in runs:
        names |= {id(t): n for n, t in (*run.model.named_parameters(), *run.model.named_buffers())}
        for stage in run.stages:
            stage.shared = []
    for _, stage, part, name, tensor in places:
        if len(jobs[id(tensor)]) > 1:
            first, second, *_ = jobs[id(tensor)]
            known = names.get(id(tensor), name)
            sentence = f"build_model: jobs {first} and {second} have the same {known!r}"
            stage.shared.append((part, name, sentence))


def shapes_of(model: nn.Module) -> Shapes:
    """Names and shapes of all parameters and buffers of an unsplit model."""
    rows = [("parameter", *entry) for entry in model.named_parameters()]
    return {
        name: f"a {kind} of "
        + ("a shape not known yet" if is_lazy(t) else f"shape {tuple(t.shape)}")
        for kind, name, t in [*rows, *(("buffer", *entry) for entry in model.named_buffers())]
    }


def check_sibling(shapes: Shapes, title: str, first: Shapes, first_title: str) -> None:
    """Refuse a job whose tensors differ from those of the first job in name or shape."""
    for name in [*first, *shapes]:
        one, other = (row.get(name, "missing") for row in (shapes, first))
        if one != other:
            raise InputError(
                f"job {title}: {name!r} is {one}, in job {first_title} {other}; profile, slots "
                f"and prediction hold for jobs with equal stages: train this one in an array of "
                f"its own"
            )
