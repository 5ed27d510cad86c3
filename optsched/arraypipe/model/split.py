"""What each stage of a job trains: parameters, copies of tied weights, an optimizer; its state."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn, optim
from torch.nn.parameter import is_lazy

from optsched.arraypipe.checkpoint.plain import python_settings
from optsched.arraypipe.model.calls import stage_models
from optsched.arraypipe.model.cuts import canonical
from optsched.arraypipe.model.inputs import all_modules, buffer_holders, same, unwrapped
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optsched.arraypipe.job import Job, NamedParameters, Tensors
    from optsched.arraypipe.model.calls import Cut, StageModel

Owners: TypeAlias = "dict[int, tuple[weakref.ref[Tensor], str]]"
"""Identity of a tensor -> the tensor, if it is still there, and the name of its job."""

_UNSET: Final = "(not set)"


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
    optimizer: optim.Optimizer | None
    holders: tuple[tuple[nn.Module, str], ...]  # where the buffers hang
    tied: tuple[TiedCopy, ...]

    @property
    def trained(self) -> NamedParameters:
        """What the optimizer updates: the parameters, or their masters."""
        return self.parameters if self.masters is None else self.masters

    def buffers(self) -> Tensors:
        """Return the buffers in the order of `holders`."""
        return tuple(module._buffers[name] for module, name in self.holders)  # type: ignore[misc]

    def replace_tied(self, copied: nn.Parameter, other: nn.Parameter) -> None:
        """Use another copy of a tied weight, which jobs may have in common."""
        rows = ((part, n) for part in all_modules(self.modules) for n in part._parameters)
        _put([(part, n) for part, n in rows if part._parameters[n] is copied], other)
        self.tied = tuple(
            entry._replace(parameter=other) if entry.parameter is copied else entry
            for entry in self.tied
        )


def split(
    model: nn.Module, cut: Cut, job: Job, title: str, loss: nn.Module | None = None
) -> list[ModelStage]:
    """Return the stages of one job, each with its own optimizer; refuses what would not be exact.

    The last stage trains the parameters of `loss`, under names that begin with ``loss.``.

    A parameter that several stages use belongs to the earliest; the others get a copy in its
    place (`ModelStage.tied`), so the model is whole again only after `restore_ties`.
    """
    for name in cut.names:
        canonical(model, name)
    stages = stage_models(model, cut, title)
    skeletons: list[tuple[nn.Module, ...]] = [(stage.skeleton,) for stage in stages]
    parameters, tied = _share_out(model, skeletons, title)
    named = list(model.named_parameters())
    if loss is not None:
        skeletons[-1] = (*skeletons[-1], loss)
        of_loss = [(f"loss.{name}", p) for name, p in loss.named_parameters()]
        for name in dict(of_loss).keys() & dict(named).keys():
            raise InputError(f"loss: {name!r} is a parameter of the model, too; rename the module")
        parameters[-1] += of_loss
        named += of_loss
    masters = [
        [(n, nn.Parameter(p.detach().float(), p.requires_grad)) for n, p in row]
        for row in (parameters if job.precision == "bf16" else ())
    ]
    trained = masters or parameters
    by_name = {name: p for row in trained for name, p in row}
    unsplit = [(name, by_name[name]) for name, _ in named if name in by_name]
    return [
        ModelStage(
            index=s,
            model=stages[s],
            modules=skeletons[s],
            parameters=parameters[s],
            masters=masters[s] if masters else None,
            optimizer=_optimizer(job, trained[s], unsplit, title) if trained[s] else None,
            holders=buffer_holders(skeletons[s]),
            tied=tied[s],
        )
        for s in range(cut.stages)
    ]


def _share_out(
    model: nn.Module, modules: Sequence[Sequence[nn.Module]], title: str
) -> tuple[list[NamedParameters], list[tuple[TiedCopy, ...]]]:
    """Give every parameter to the earliest stage that uses it, and later users a copy."""
    places: dict[int, dict[int, list[tuple[nn.Module, str]]]] = {}  # id -> stage -> places
    stage_of: dict[int, int] = {}  # of modules and buffers
    for s, row in enumerate(modules):
        for module in all_modules(row):
            buffers = [b for b in module._buffers.values() if b is not None]
            parameters = [(n, p) for n, p in module._parameters.items() if p is not None]
            first = stage_of.setdefault(id(module), s)
            if first != s and (buffers or parameters):
                names = (name for name, found in model.named_modules() if found is module)
                raise InputError(
                    f"stages: module {next(names, '')!r} of job {title} occurs twice, in stages "
                    f"{first} and {s}; make one for each place (they may share weights)"
                )
            for name, parameter in parameters:
                places.setdefault(id(parameter), {}).setdefault(s, []).append((module, name))
            for buffer in buffers:
                if stage_of.setdefault(id(buffer), s) != s:
                    names = (n for n, found in model.named_buffers() if found is buffer)
                    raise InputError(
                        f"stages: buffer {next(names, '')!r} of job {title} is used by "
                        f"stages {stage_of[id(buffer)]} and {s}; give each a buffer of its own"
                    )
    _check_storages(model, {id_: min(stages) for id_, stages in places.items()}, title)
    owned: list[NamedParameters] = [[] for _ in modules]
    tied: list[list[TiedCopy]] = [[] for _ in modules]
    for name, parameter in list(model.named_parameters()):
        owner = min(places[id(parameter)])
        owned[owner].append((name, parameter))
        for s, found in places[id(parameter)].items():
            if s != owner:
                twin = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                tied[s].append(TiedCopy(name, owner, twin))
                _put(found, twin)
            elif len(places[id(parameter)]) > 1:  # what the owner reads stays with it
                _put(found, parameter)
    return owned, [tuple(row) for row in tied]


def _put(places: Sequence[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    for module, name in places:
        setattr(module, name, parameter)  # recurrent layers keep a list beside the table


def _check_storages(model: nn.Module, stage_of: Mapping[int, int], title: str) -> None:
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
        stage = stage_of[id(parameter)]
        first, other = seen.setdefault(parameter.untyped_storage().data_ptr(), (name, stage))
        if stage != other:
            raise InputError(
                f"stages: {name!r} and {first!r} of job {title} share their memory and are in "
                f"different stages; use one Parameter in both places, or make a copy"
            )


def tied_pairs(stages: Sequence[ModelStage]) -> dict[tuple[int, int], list[str]]:
    """Return names of the tied weights by pairs (stage, next stage that uses them), in their order.

    Values go down this chain and gradients up: so every stage adds what comes from later stages
    first, as the backward of the unsplit model does.
    """
    found: dict[tuple[int, int], list[str]] = {}
    holder: dict[str, int] = {}
    for stage in stages:
        for entry in stage.tied:
            before = holder.get(entry.name, entry.owner)
            found.setdefault((before, stage.index), []).append(entry.name)
            holder[entry.name] = stage.index
    return found


def shard(
    model: nn.Module, stages: Sequence[ModelStage], index: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What stage `index` holds of the unsplit model's state dict, and of buffers not in it."""
    originals = _originals(stages)
    owner: dict[int, int] = {}  # stage of every tensor and module
    for stage in reversed(stages):
        modules = map(unwrapped, all_modules(stage.modules))
        held = (*(p for _, p in stage.parameters), *stage.buffers(), *modules)
        owner.update((id(one), stage.index) for one in held)
    whole, found = model.state_dict(keep_vars=True), {}
    for name, value in whole.items():
        value = originals.get(id(value), value)
        module = model.get_submodule(name.rpartition(".")[0])  # may have `get_extra_state`
        if owner.get(id(value), owner.get(id(module), 0)) == index:
            found[name] = value.detach() if isinstance(value, Tensor) else value
    return found, {
        name: buffer.detach()
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name not in whole and owner.get(id(buffer)) == index
    }


def restore_ties(model: nn.Module, stages: Sequence[ModelStage]) -> None:
    """Put the shared parameter back to all its places; the stages must not be used after that."""
    originals = _originals(stages)
    for module in all_modules([model, *(m for stage in stages for m in stage.modules)]):
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in originals:
                _put([(module, name)], originals[id(parameter)])


def _originals(stages: Sequence[ModelStage]) -> dict[int, nn.Parameter]:
    """Return the owner's parameter by the identity of every copy."""
    owners = [dict(stage.parameters) for stage in stages]
    return {id(b.parameter): owners[b.owner][b.name] for stage in stages for b in stage.tied}


def _optimizer(
    job: Job, parameters: NamedParameters, unsplit: NamedParameters, title: str
) -> optim.Optimizer:
    """Return the optimizer of the whole model without the parameters of other stages.

    These are placeholders when it is made, so that places in the list and groups are those of
    training alone.
    """
    local = dict(parameters)

    def placeholder(p: nn.Parameter) -> nn.Parameter:
        value = torch.zeros((), dtype=p.dtype, device=p.device)
        return nn.Parameter(value.expand(p.shape), p.requires_grad)

    given = [(name, local[name] if name in local else placeholder(p)) for name, p in unsplit]
    try:
        optimizer: Any = python_settings(job.optimizer(list(given)))
        if not isinstance(optimizer, optim.Optimizer):
            raise InputError(f"optimizer returned {type(optimizer).__name__}, no Optimizer")
        if isinstance(optimizer, optim.LBFGS):
            raise InputError("LBFGS evaluates the model several times a step; take another")
        known = {id(p) for _, p in given}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise InputError("the optimizer holds tensors that it was not given")
    except InputError as error:
        raise InputError(f"job {title}: {error}") from error
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"job {title}: the optimizer cannot be made ({reason}); its function gets a list of "
            f"(name, parameter) pairs, {sum(p.requires_grad for _, p in given)} of "
            f"{len(given)} with a gradient"
        ) from error
    kept_ids = {id(p) for p in local.values()}
    for group in optimizer.param_groups:
        kept = [k for k, parameter in enumerate(group["params"]) if id(parameter) in kept_ids]
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][k] for k in kept]
    for parameter in [p for p in optimizer.state if id(p) not in kept_ids]:
        del optimizer.state[parameter]
    if job.scheduler is None:  # else it may have a value for every group
        optimizer.param_groups[:] = [g for g in optimizer.param_groups if g["params"]] or [
            optimizer.param_groups[0]
        ]
    return optimizer


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[str, str, str] | None:
    """Return the first entry that is not the same in both, with its two values in words."""
    for key in {**one, **other}:
        a, b = one.get(key, _UNSET), other.get(key, _UNSET)
        if not same(a, b):
            texts = (value if isinstance(value, str) else repr(value) for value in (a, b))
            old, new = (" ".join(f"{text:.200}".split()) for text in texts)
            return key, old, new
    return None


def _entries(
    stages: Sequence[ModelStage],
) -> Iterator[tuple[str, nn.Parameter, dict[str, Any], optim.Optimizer]]:
    """Yield unsplit name, parameter and group of all that the optimizers of stages update."""
    for stage in stages:
        names = {id(p): name for name, p in stage.trained}
        for group in stage.optimizer.param_groups if stage.optimizer is not None else ():
            for parameter in group["params"]:
                assert stage.optimizer is not None
                yield names[id(parameter)], parameter, group, stage.optimizer


def states_by_name(stages: Sequence[ModelStage]) -> dict[str, dict[str, Any]]:
    """State and settings of every parameter under its unsplit name (references, not copies)."""
    return {
        name: {"state": dict(optimizer.state.get(p, {})), "settings": _settings(group)}
        for name, p, group, optimizer in _entries(stages)
    }


def makers_by_name(stages: Sequence[ModelStage]) -> dict[str, dict[str, Any]]:
    """Class and settings of the optimizer of every parameter, as they are now (references)."""
    return {
        name: {
            "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            "settings": _settings(group),
        }
        for name, _, group, optimizer in _entries(stages)
    }


def restore_states(stage: ModelStage, saved: Mapping[str, Mapping[str, Any]], place: str) -> None:
    """Give an optimizer the saved states; assigned as they are, so that no cast changes a bit."""
    for name, parameter, group, optimizer in _entries([stage]):
        if name not in saved:
            raise InputError(f"{place}: there is no optimizer state of parameter {name!r}")
        settings = saved[name]["settings"]
        # as in `load_state_dict`: counters stay on the CPU unless kernels read them
        counts = bool(settings.get("capturable") or settings.get("fused"))
        state = {}
        for key, value in saved[name]["state"].items():
            device = "cpu" if key == "step" and not counts else parameter.device
            state[key] = value.to(device, copy=True) if isinstance(value, Tensor) else value
        if state:
            optimizer.state[parameter] = state
        group.update(settings)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def check_apart(model: nn.Module, title: str, owners: Owners, why_not: str) -> None:
    """Refuse a model that trains a tensor of another job's, and note the owners of its tensors."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        known = owners.get(id(tensor))
        reason = "and would train it in turn" if tensor.requires_grad else why_not
        if known is not None and known[0]() is tensor and reason:
            raise InputError(
                f"build_model: jobs {known[1]} and {title} have the same {name!r}, {reason}; make "
                f"new modules on every call"
            )
        owners[id(tensor)] = (weakref.ref(tensor), title)


def note_shared(runs: Sequence[Any]) -> None:
    """Note in every stage of jobs (`JobRun`) which of its tensors other jobs have, too."""
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
    names: dict[int, str] = {}
    for run, stage, _, _, tensor in places:
        stage.shared = []
        jobs.setdefault(id(tensor), {})[run.title] = None
    for run in runs:
        names |= {id(t): n for n, t in (*run.model.named_parameters(), *run.model.named_buffers())}
    for _, stage, part, name, tensor in places:
        if len(jobs[id(tensor)]) > 1:
            first, second, *_ = jobs[id(tensor)]
            known = names.get(id(tensor), name)
            sentence = f"build_model: jobs {first} and {second} have the same {known!r}"
            stage.shared.append((part, name, sentence))


def shapes_of(model: nn.Module) -> dict[str, str]:
    """Return what every parameter and buffer of an unsplit model is, in words, by name."""
    kinds = (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
    return {
        name: f"a {kind} of "
        + ("a shape not known yet" if is_lazy(t) else f"shape {tuple(t.shape)}")
        for kind, rows in kinds
        for name, t in rows
    }


def check_sibling(
    shapes: Mapping[str, str], title: str, first: Mapping[str, str], first_title: str
) -> None:
    """Refuse a job if its tensors differ from those of the first job in name or shape."""
    if found := first_difference(first, shapes):
        name, other, one = (text.replace(_UNSET, "missing") for text in found)
        raise InputError(
            f"job {title}: {name!r} is {one}, in job {first_title} {other}; profile, slots "
            f"and prediction hold for jobs with equal stages: train this one in an array of "
            f"its own"
        )
