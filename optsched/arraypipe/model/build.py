"""Make the model of a job: its start weights, and only the tensors that this process needs."""

from __future__ import annotations

import copy
import re
import warnings
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from optsched.arraypipe.checkpoint.weights import open_weights
from optsched.arraypipe.job import PRECISIONS
from optsched.arraypipe.model.lazy import Recorder
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.checkpoint.weights import Weights
    from optsched.arraypipe.job import BuildModel, Job
    from optsched.arraypipe.model.split import ModelStage

_ADAPTER: Final = re.compile(r"(^|\.)(lora_|modules_to_save\.|ia3_|prompt_|trainable_tokens_)")


def build(build_model: BuildModel, job: Job) -> nn.Module:
    """Call `build_model` with the arguments of a job after seeding the global generators.

    A list of modules (also an `nn.ModuleList`) becomes an `nn.Sequential` of them.
    """
    torch.manual_seed(job.seed)
    return module_of(build_model(**job.model))


def module_of(model: Any) -> nn.Module:
    """Return what `build_model` has returned as one module."""
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
    """Return the function that makes a model, from any of the forms that `ArrayTrainer` takes.

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
    """Return a copy of a module; frozen parameters use the memory of the original."""
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
    """Makes the models of the jobs of a run, with frozen parameters that are equal once.

    Parameters
    ----------
    build_model
        Called as ``build_model(**job.model)`` after ``torch.manual_seed(job.seed)``.
    share
        Whether frozen parameters (``requires_grad`` False) that are equal in several jobs, under
        the same name and in the same precision, become one `Parameter`.
    """

    build_model: BuildModel
    share: bool = True
    frozen: dict[str, weakref.ref[nn.Parameter]] = field(default_factory=dict)

    def whole(self, job: Job) -> nn.Module:
        """The unsplit model of a job in its precision, with the weights that it starts from."""
        if job.init is None and not (self.frozen and self.share):
            model = _typed(build(self.build_model, job), job)
            self._register(model)
            return model
        with self.parts(job) as model:
            return model

    @contextmanager
    def parts(self, job: Job) -> Iterator[nn.Module]:
        """A model of which the tensors that are still in use afterwards get memory.

        Inside of the context, large tensors have none while no operation reads them: cut the model,
        make optimizers and drop what other processes train. All weights and random numbers are
        those of the whole model. If `build_model` cannot be run in this way, the whole model is
        built instead, with a warning.
        """
        recorder, model = self._recorded(job)
        recorder.records = "copies"
        with recorder:
            yield model
        recorder.finish()
        self._register(model)

    @contextmanager
    def sketch(self, job: Job) -> Iterator[nn.Module]:
        """A model for one look, for instance a forward; it has no tensors afterwards.

        Each weight has memory only while an operation reads it.
        """
        recorder, model = self._recorded(job)
        recorder.records = "none"
        try:
            with recorder:
                yield model
        finally:
            for _, places, tensor in _distinct(model):
                if recorder.recorded(tensor):  # others may be those of the caller
                    _replace(places, _on_meta(tensor))

    def _recorded(self, job: Job) -> tuple[Recorder, nn.Module]:
        recorder = Recorder()
        try:
            with recorder:
                model = build(self.build_model, job)
        except Exception as error:
            recorder = Recorder()
            model = build(self.build_model, job)  # raises again if the fault is the function's
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            warnings.warn(
                f"build_model: cannot be recorded ({reason}), so every process builds the whole "
                f"model of every job first",
                stacklevel=5,
            )
        with recorder:
            if job.init is not None:
                _load(recorder, model, Path(job.init))
            self._share(recorder, _typed(model, job))
        return recorder, model

    def _share(self, recorder: Recorder, model: nn.Module) -> None:
        """Replace frozen parameters that an earlier job has by those of that job."""
        for names, places, tensor in _distinct(model):
            known = self._known(names[0], tensor)
            if known is None or known is tensor or known.shape != tensor.shape:
                continue
            value = recorder.value(tensor)
            same_memory = value.data_ptr() == known.data_ptr() and value.stride() == known.stride()
            if (same_memory and value.device == known.device) or _same_bits(value, known):
                _replace(places, known)

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

    def _register(self, model: nn.Module) -> None:
        for names, _, tensor in _distinct(model):
            if self._known(names[0], tensor) is None:
                self._note(names[0], tensor)

    def _note(self, name: str, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and tensor.numel():
            self.frozen[f"{name} {tensor.dtype}"] = weakref.ref(tensor)

    def _known(self, name: str, tensor: Tensor) -> nn.Parameter | None:
        if not self.share or not isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            return None
        known = self.frozen.get(f"{name} {tensor.dtype}")
        parameter = None if known is None else known()
        return parameter if parameter is not None and parameter.numel() else None


def _typed(model: nn.Module, job: Job) -> nn.Module:
    """Return the model in the precision of its weights."""
    dtype = PRECISIONS.get(job.precision, torch.float32)
    return model if dtype == torch.float32 else model.to(dtype)


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
    left, right = (t.detach().reshape(-1).view(torch.uint8) for t in (a.to(b.device), b))
    return torch.equal(left, right)


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _replace(places: list[tuple[nn.Module, str]], tensor: Tensor) -> None:
    for module, key in places:
        setattr(module, key, tensor)  # recurrent layers keep a list of their parameters, too


def _load(recorder: Recorder, model: nn.Module, path: Path) -> None:
    """Let the tensors of a model have the values of a file or folder, by name.

    Raises
    ------
    InputError
        A name is missing in the file or in the model, or shapes differ.
    """
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
        recorder.assign(tensor, partial(weights.read, keys[0]))
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for key in weights.shapes.keys() - used:
        if not any(re.search(pattern, key) for pattern in ignored):
            raise InputError(f"init: {path} has {key!r}, which the model does not have")


def _key_of(name: str, model: nn.Module, weights: Weights) -> str:
    """Return how the name of a tensor is found in a folder, as `from_pretrained` does.

    With or without the prefix of the base model of transformers, and without what PEFT wraps.
    """
    if not weights.folder:
        return name
    wrapped: Any = getattr(model, "get_base_model", lambda: model)
    prefix: str = getattr(wrapped(), "base_model_prefix", "")
    bare = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    candidates = [name, bare]
    if prefix:
        candidates += [bare.removeprefix(f"{prefix}."), f"{prefix}.{bare}"]
    return next((key for key in candidates if key in weights.shapes), name)
