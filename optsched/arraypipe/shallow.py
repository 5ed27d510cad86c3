"""A trainer of a model with few blocks per stage, for checks where the whole does not fit."""

from __future__ import annotations

import os
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from optsched.arraypipe.model.build import Builder, module_of
from optsched.arraypipe.model.calls import UNCUT
from optsched.arraypipe.model.cuts import calls_of
from optsched.arraypipe.model.lazy import Recorder
from optsched.arraypipe.runtime.data import Feed
from optsched.arraypipe.runtime.environment import global_state_kept
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.job import BuildModel
    from optsched.arraypipe.model.calls import Calls

Trainer = TypeVar("Trainer")  # an ArrayTrainer, which imports this module


def shallow(trainer: Trainer) -> Trainer | None:
    """Return a trainer of the same model with fewer blocks in every stage.

    The others never have memory. None if none can be left out (`few_blocks`).
    """
    made: Any = copy(trainer)
    if not made.cuts or isinstance(made.build_model, _FewBlocks):
        return None
    job = made.jobs[0]
    with global_state_kept(), Builder(made.build_model).sketch(job) as model:
        try:
            inputs, _ = Feed(made.data, job, made.titles[0], 0).peek(torch.device("cpu"))
            kept = few_blocks(model, made.cuts, calls_of(model, inputs))
        except InputError:  # the whole model says what is wrong
            return None
    if kept is None:
        return None
    made.build_model = _FewBlocks(made.build_model, kept)
    made.given_stages = [kept[name] for name in made.cuts]
    made.cut, made.compared = UNCUT, frozenset()
    return made  # type: ignore[no-any-return]


def few_blocks(model: nn.Module, cuts: Sequence[str], calls: Calls) -> Mapping[str, str] | None:
    """Return blocks that suffice to try the cuts of a model: name -> name among these blocks.

    All cuts have to be blocks of one `nn.ModuleList` or `nn.Sequential`. Behind the first block of
    a stage blocks are left out as long as a later one gets the same sizes and types. None if that
    leaves out nothing.
    """
    owner, *others = {name.rpartition(".")[0] for name in cuts}
    parent = model.get_submodule(owner)
    if others or not isinstance(parent, (nn.ModuleList, nn.Sequential)):
        return None
    names = [f"{owner}.{key}".strip(".") for key in parent._modules]
    forms = [calls.hidden.get(name) for name in names]
    starts = [0, *(names.index(name) for name in cuts)]
    kept: list[int] = []
    for first, end in zip(starts, [*starts[1:], len(names)], strict=True):
        kept.append(first)
        second = first + 1
        if second < end:
            later = range(second, min(end + 1, len(names)))
            alike = [k for k in later if forms[k] is not None and forms[k] == forms[second]]
            kept += range(max(alike, default=second), end)
    if len(kept) == len(names):
        return None
    listed = isinstance(parent, nn.ModuleList)  # which finds its blocks by number
    new = [f"{owner}.{k}".strip(".") if listed else name for k, name in enumerate(names)]
    return {names[k]: new[place if listed else k] for place, k in enumerate(kept)}


def fits(model: nn.Module) -> bool:
    """Whether the host has memory for the gradients of a model and what is computed of them."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * sum(p.numel() * p.element_size() for p in model.parameters()) < free


@dataclass(frozen=True)
class _FewBlocks:
    """Builds a model and removes blocks of one of its lists."""

    build_model: BuildModel
    kept: Mapping[str, str]  # name -> new name

    def __call__(self, **arguments: Any) -> nn.Module:
        recorder = Recorder()
        with recorder:
            model = module_of(self.build_model(**arguments))
            blocks = {
                new.rpartition(".")[2]: model.get_submodule(name) for name, new in self.kept.items()
            }
            parent = model.get_submodule(next(iter(self.kept)).rpartition(".")[0])
            parent._modules.clear()
            parent._modules.update(blocks)
            del parent, blocks
        recorder.finish()
        return model
