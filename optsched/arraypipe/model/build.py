"""Make the model of a job with its start weights, and frozen ones once for all jobs."""

from __future__ import annotations

import copy
import ctypes
import gc
import re
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from optsched.arraypipe.checkpoint.weights import open_weights
from optsched.arraypipe.job import PRECISIONS
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.checkpoint.weights import Weights
    from optsched.arraypipe.job import BuildModel, Job
    from optsched.arraypipe.model.split import ModelStage

_ADAPTER: Final = re.compile(r"(^|\.)(lora_|modules_to_save\.|ia3_|prompt_|trainable_tokens_)")


def build(build_model: BuildModel, job: Job) -> nn.Module:
    """Call `build_model` with the arguments of a job after seeding the global generators."""
    torch.manual_seed(job.seed)
    return module_of(build_model(**job.model))


def module_of(model: Any) -> nn.Module:
    """What `build_model` has returned as one module."""
    if isinstance(model, (list, tuple, nn.ModuleList)):
        if not model or not all(isinstance(module, nn.Module) for module in model):
            raise InputError("build_model: expected a list of nn.Modules, the stages")
        return nn.Sequential(*model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"build_model: returned {type(model).__name__}, expected an nn.Module or a list of them"
        )
    return model


def model_function(model: Any) -> BuildModel:
    """The function that makes a model, from any of the forms that `ArrayTrainer` takes.

    A function or class is returned as it is. A pair of a class and a configuration is called with
    a copy of the configuration, on which `Job.model` sets attributes. An `nn.Module` is copied;
    the copies share its frozen parameters.
    """
    if isinstance(model, nn.Module):
        return partial(_copy_of, model)
    if isinstance(model, tuple) and len(model) == 2 and callable(model[0]):
        return partial(_configured, *model)
    if callable(model):
        return model  # type: ignore[no-any-return]
    raise InputError(
        f"model: expected a function or class, a pair (class, config) or an nn.Module, got "
        f"{model!r:.60}"
    )


def _copy_of(original: nn.Module, /, **arguments: Any) -> nn.Module:
    """A copy of a module; frozen parameters use the memory of the original."""
    if arguments:
        raise InputError(
            f"model: a module is copied for every job, so Job.model must be empty, got "
            f"{', '.join(map(repr, arguments))}; pass a function that makes the model"
        )
    frozen = {
        id(p): nn.Parameter(p.detach(), requires_grad=False)
        for p in original.parameters()
        if not p.requires_grad
    }
    return copy.deepcopy(original, dict(frozen))


def _configured(kind: Any, config: Any, /, **arguments: Any) -> nn.Module:
    """Call a class, also an Auto class of transformers, with a configuration."""
    config = copy.deepcopy(config)
    for name, value in arguments.items():
        if not hasattr(config, name):
            raise InputError(
                f"model: {type(config).__name__} has no attribute {name!r} for Job.model to set"
            )
        setattr(config, name, value)
    model: nn.Module = getattr(kind, "from_config", kind)(config)
    return model


@dataclass(eq=False)
class Builder:
    """Makes the models of the jobs of a run.

    With `share` frozen parameters (``requires_grad`` False) that are equal in several jobs, under
    the same name and in the same precision, become one `Parameter`.
    """

    build_model: BuildModel
    share: bool = True
    frozen: dict[str, weakref.ref[nn.Parameter]] = field(default_factory=dict)

    def whole(self, job: Job) -> nn.Module:
        """The unsplit model of a job in its precision, with the weights that it starts from."""
        model = build(self.build_model, job)
        if job.init is not None:
            _load(model, Path(job.init))
        dtype = PRECISIONS.get(job.precision, torch.float32)
        model = model if dtype == torch.float32 else model.to(dtype)
        for names, places, tensor in _distinct(model):
            known = self._known(names[0], tensor)
            if known is None:
                self._note(names[0], tensor)
            elif known.shape == tensor.shape and _same_bits(tensor, known):
                _replace(places, known)
        return model

    def share_copies(self, stages: Sequence[ModelStage]) -> None:
        """Have frozen copies of tied weights in later stages once for all jobs, too."""
        for stage in stages:
            for entry in stage.tied:
                name, copied = f"{entry.name} in stage {stage.index}", entry.parameter
                known = self._known(name, copied)
                if known is None:
                    self._note(name, copied)
                elif known.shape == copied.shape and _same_bits(copied, known):
                    stage.replace_tied(copied, known)

    def _note(self, name: str, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and tensor.numel():
            self.frozen[f"{name} {tensor.dtype}"] = weakref.ref(tensor)

    def _known(self, name: str, tensor: Tensor) -> nn.Parameter | None:
        if not self.share or not isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            return None
        known = self.frozen.get(f"{name} {tensor.dtype}")
        parameter = None if known is None else known()
        return parameter if parameter is not None and parameter.numel() else None


def _distinct(model: nn.Module) -> Iterator[tuple[list[str], list[tuple[nn.Module, str]], Tensor]]:
    """All unsplit names, all places and the tensor of every parameter and buffer, once each."""
    found: dict[int, tuple[list[str], list[tuple[nn.Module, str]], Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    names, places, _ = found.setdefault(id(tensor), ([], [], tensor))
                    names.append(f"{path}.{key}" if path else key)
                    places.append((module, key))
    yield from found.values()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.device == b.device:
        return True
    left, right = (t.detach().reshape(-1).view(torch.uint8) for t in (a.to(b.device), b))
    return torch.equal(left, right)


def _replace(places: list[tuple[nn.Module, str]], tensor: Tensor) -> None:
    for module, key in places:
        setattr(module, key, tensor)  # recurrent layers keep a list of their parameters, too


def _load(model: nn.Module, path: Path) -> None:
    """Let the tensors of a model have the values of a file or folder, by name."""
    try:
        weights = open_weights(path)
    except InputError as error:
        raise InputError(f"init: {error}") from error
    state = model.state_dict(keep_vars=True).items()
    kept = {name for name, value in state if isinstance(value, Tensor)}
    used = set[str]()
    for names, _, tensor in _distinct(model):
        here = [name for name in names if name in kept]
        keys = [key for name in here if (key := _key_of(name, model, weights)) in weights.shapes]
        used.update(keys)
        if not here or (not keys and weights.folder and all(map(_ADAPTER.search, here))):
            continue  # adapters begin as `build_model` makes them
        if not keys:
            raise InputError(
                f"init: {path} has no {here[0]!r}; save all weights of the model, or let "
                f"build_model make it with from_pretrained"
            )
        if tuple(tensor.shape) != (shape := weights.shapes[keys[0]]):
            raise InputError(
                f"init: {path}: {here[0]!r} has shape {shape}, in the model {tuple(tensor.shape)}"
            )
        with torch.no_grad():
            tensor.copy_(weights.read(keys[0]))
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for key in weights.shapes.keys() - used:
        if not any(re.search(pattern, key) for pattern in ignored):
            raise InputError(f"init: {path} has {key!r}, which the model does not have")


def _key_of(name: str, model: nn.Module, weights: Weights) -> str:
    """How the name of a tensor is found in a folder, as `from_pretrained` does."""
    if not weights.folder:
        return name
    wrapped: Any = getattr(model, "get_base_model", lambda: model)
    prefix: str = getattr(wrapped(), "base_model_prefix", "")
    bare = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    candidates = [name, bare]
    if prefix:
        candidates += [bare.removeprefix(f"{prefix}."), f"{prefix}.{bare}"]
    return next((key for key in candidates if key in weights.shapes), name)


def collect() -> None:
    """Free the tensors of objects that refer to each other, and return memory to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc alone has it; malloc keeps some memory
        ctypes.CDLL(None).malloc_trim(0)
