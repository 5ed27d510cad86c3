"""A trainer of a model with one block per stage, for checks where the whole does not fit."""

from __future__ import annotations

import os
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from optsched.arraypipe.model.calls import UNCUT
from optsched.arraypipe.model.lazy import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.job import BuildModel

Trainer = TypeVar("Trainer")  # an ArrayTrainer, which imports this module


def shallow(trainer: Trainer) -> Trainer | None:
    """Return a trainer of the same model with the first block of every stage, and no other.

    The other blocks never have memory. None if the cuts are not blocks of one `nn.ModuleList`.
    """
    made: Any = copy(trainer)
    places = [name.rpartition(".") for name in made.cuts]
    owner = places[0][0] if places and not isinstance(made.build_model, _Shallow) else ""
    indices = [last for _, _, last in places]
    if not owner or any(row[0] != owner for row in places) or not all(map(str.isdigit, indices)):
        return None
    made.build_model = _Shallow(made.build_model, owner, [0, *map(int, indices)])
    made.given_stages = [f"{owner}.{k}" for k in range(1, len(indices) + 1)]
    made.cut, made.compared = UNCUT, frozenset()
    return made  # type: ignore[no-any-return]


def fits(model: nn.Module) -> bool:
    """Whether the host has memory for the gradients of a model and what is computed of them."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * sum(p.numel() * p.element_size() for p in model.parameters()) < free


class _Shallow:
    """Builds a model and removes all but some blocks of one of its lists."""

    def __init__(self, build_model: BuildModel, owner: str, kept: Sequence[int]) -> None:
        self.build_model, self.owner, self.kept = build_model, owner, kept

    def __call__(self, **arguments: Any) -> nn.Module:
        recorder = Recorder()
        with recorder:
            model = self.build_model(**arguments)
            parent, _, name = self.owner.rpartition(".")
            blocks: Any = model.get_submodule(self.owner)
            setattr(model.get_submodule(parent), name, nn.ModuleList(blocks[k] for k in self.kept))
            del blocks
        recorder.finish()
        return model
