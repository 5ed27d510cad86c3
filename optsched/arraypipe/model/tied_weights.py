"""Which stage owns a tensor: tied weights get a copy in every later stage, and go back together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from optsched.arraypipe.model.stand_ins import all_modules, unwrapped
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from optsched.arraypipe.job import NamedParameters, Tensors
    from optsched.arraypipe.model.calls import StageModel


class TiedCopy(NamedTuple):
    """A stage's copy of a parameter that an earlier stage owns and updates."""

    name: str
    owner: int
    parameter: nn.Parameter


@dataclass(eq=False)
class ModelStage:
    """What one stage has of a model, under the names of the unsplit model."""

    index: int
    model: StageModel
    modules: tuple[nn.Module, ...]  # its skeleton; in the last stage also the loss
    parameters: NamedParameters
    masters: NamedParameters | None  # float32, what the optimizer of a bf16 job updates
    optimizer: Optimizer | None
    holders: tuple[tuple[nn.Module, str], ...]  # where the buffers hang
    tied: tuple[TiedCopy, ...]

    @property
    def trained(self) -> NamedParameters:
        """What the optimizer updates: the parameters, or their masters."""
        return self.parameters if self.masters is None else self.masters

    def buffers(self) -> Tensors:
        """The buffers in the order of `holders`."""
        return tuple(module._buffers[name] for module, name in self.holders)  # type: ignore[misc]


def share_out(
    model: nn.Module, modules: Sequence[Sequence[nn.Module]], title: str
) -> tuple[list[NamedParameters], list[tuple[TiedCopy, ...]]]:
    """Give every parameter to the earliest stage that uses it, and later users a copy.

    What every stage owns and what it borrows, in the order of the unsplit model. The copies are put
    into the modules, one for all places of a stage; `restore_ties` puts the shared parameter back.
    """
    parameters: dict[int, dict[int, list[tuple[nn.Module, str]]]] = {}  # id -> stage -> places
    buffers: dict[int, int] = {}  # the stage of each
    stage_of: dict[int, int] = {}  # of modules
    for s, row in enumerate(modules):
        for module in all_modules(row):
            tensors = (*module._parameters.values(), *module._buffers.values())
            first = stage_of.setdefault(id(module), s)
            if first != s and any(t is not None for t in tensors):
                names = (name for name, found in model.named_modules() if found is module)
                raise InputError(
                    f"stages: module {next(names, '')!r} of job {title} occurs twice, in stages "
                    f"{first} and {s}; make one for each place (they may share weights)"
                )
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places = parameters.setdefault(id(parameter), {})
                    places.setdefault(s, []).append((module, name))
            for name, buffer in module._buffers.items():
                if buffer is not None and buffers.setdefault(id(buffer), s) != s:
                    names = (n for n, found in model.named_buffers() if found is buffer)
                    raise InputError(
                        f"stages: buffer {next(names, name)!r} of job {title} is used by "
                        f"stages {buffers[id(buffer)]} and {s}; give each a buffer of its own"
                    )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in parameters and id(tensor) not in buffers:
            raise InputError(f"stages: {name} of job {title} belongs to no stage")
    _check_storages(model, {id_: set(p) for id_, p in parameters.items()}, title)
    owned: list[NamedParameters] = [[] for _ in modules]
    tied: list[list[TiedCopy]] = [[] for _ in modules]
    for name, parameter in list(model.named_parameters()):
        places = parameters[id(parameter)]
        owner = min(places)
        owned[owner].append((name, parameter))
        if len(places) == 1:
            continue
        for s in sorted(places):  # the owner first: what it reads there stays with it
            twin = parameter
            if s != owner:
                twin = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                tied[s].append(TiedCopy(name, owner, twin))
            for module, attribute in places[s]:
                _put(module, attribute, twin)
    return owned, [tuple(row) for row in tied]


def tied_pairs(stages: Sequence[ModelStage]) -> dict[tuple[int, int], list[str]]:
    """Names of the tied weights by pairs (stage, next stage that uses them), in their order.

    Values go down this chain and gradients up: so every stage adds what comes from later stages
    first, as the backward of the unsplit model does.
    """
    found: dict[tuple[int, int], list[str]] = {}
    holder: dict[str, int] = {}
    for stage in stages:
        for entry in stage.tied:
            lender = holder.get(entry.name, entry.owner)
            found.setdefault((lender, stage.index), []).append(entry.name)
            holder[entry.name] = stage.index
    return found


def shard(
    model: nn.Module, stages: Sequence[ModelStage], index: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What stage `index` holds of the unsplit model's state dict, and of buffers not in it.

    A tied weight has all its names. The values are references to the tensors of the stage,
    detached, as in `torch.nn.Module.state_dict`.
    """
    shared = _originals(stages)
    owner: dict[int, int] = {}  # stage of every tensor and module
    for stage in reversed(stages):
        modules = map(unwrapped, all_modules(stage.modules))
        held = (*(p for _, p in stage.parameters), *stage.buffers(), *modules)
        owner.update((id(one), stage.index) for one in held)
    whole, found = model.state_dict(keep_vars=True), {}
    for name, value in whole.items():
        value = shared.get(id(value), value)
        module = model.get_submodule(name.rpartition(".")[0])  # whose `get_extra_state` it may be
        if owner.get(id(value), owner.get(id(module), 0)) == index:
            found[name] = value.detach() if isinstance(value, Tensor) else value
    return found, {
        name: buffer.detach()
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name not in whole and owner.get(id(buffer)) == index
    }


def restore_ties(model: nn.Module, stages: Sequence[ModelStage]) -> None:
    """Put the shared parameter back to all its places; the stages must not be used after that."""
    shared = _originals(stages)
    for module in all_modules([model, *(m for stage in stages for m in stage.modules)]):
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in shared:
                _put(module, name, shared[id(parameter)])


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    setattr(module, name, parameter)  # not in the table: recurrent layers keep a list beside it


def _originals(stages: Sequence[ModelStage]) -> dict[int, nn.Parameter]:
    """The owner's parameter by the identity of every copy."""
    owners = [dict(stage.parameters) for stage in stages]
    return {id(b.parameter): owners[b.owner][b.name] for stage in stages for b in stage.tied}


def _check_storages(model: nn.Module, stages: dict[int, set[int]], title: str) -> None:
    """Refuse parameters of different stages that are views of the same memory."""
    seen: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise InputError(
                f"build_model: {name!r} of job {title} has no shape yet; run the lazy modules once "
                f"on a batch when the model is built"
            )
        if parameter.is_meta or not parameter.numel():
            continue
        first, stage_of = seen.setdefault(
            parameter.untyped_storage().data_ptr(), (name, min(stages[id(parameter)]))
        )
        if stage_of != min(stages[id(parameter)]):
            raise InputError(
                f"stages: {name!r} and {first!r} of job {title} share their memory and are in "
                f"different stages; use one Parameter in both places, or make a copy"
            )
