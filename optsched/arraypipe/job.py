"""`Job`, one training run of an array: its settings, and what becomes of it."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optsched.errors import InputError, OptschedError
from optsched.io.values import as_python, boolean, format_value, integer, number, one_of

Tensors: TypeAlias = tuple[Tensor, ...]
NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]
MakeOptimizer: TypeAlias = Callable[[NamedParameters], Optimizer]
MakeScheduler: TypeAlias = Callable[[Optimizer], Any]
BuildModel: TypeAlias = Callable[..., nn.Module]
Loss: TypeAlias = Callable[[Any, Any], Tensor]
Data: TypeAlias = Callable[["Job", int], Iterator[tuple[Any, Any]]]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,99}")
PRECISIONS: Final = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "amp-bf16": torch.float32,
    "amp-fp16": torch.float32,
}
"""Types of weights."""


class JobFailed(OptschedError):
    """Error of a block of a job, or a loss that is not finite.

    Examples
    --------
    >>> from optsched.arraypipe import JobFailed
    >>> print(JobFailed("lr0.1", job=0, stage=1, iteration=7, reason="the loss is nan"))
    job lr0.1, stage 1, iteration 7: the loss is nan
    """

    def __init__(self, name: str, job: int, stage: int, iteration: int, reason: str) -> None:
        super().__init__(f"job {name}, stage {stage}, iteration {iteration}: {reason}")
        self.job, self.stage, self.iteration = job, stage, iteration


@dataclass(frozen=True, eq=False)
class Job:
    """One of the sibling training runs.

    Parameters
    ----------
    seed
        Of the initial weights (``torch.manual_seed(seed)`` before the model is built) and of all
        random numbers of its blocks; 0..2^63 - 1.
    batch_size
        Samples an iteration; for `data` to read.
    optimizer
        Gets ``(unsplit name, Parameter)`` pairs and returns an optimizer; called once per stage.
    name
        Folder of its checkpoints; by default ``job0``, ``job1``, ... by position.
    microbatches
        Parts an iteration is cut into (`torch.tensor_split`); gradients add up.
    scheduler
        Gets an optimizer and returns its learning-rate scheduler; one step per iteration. One that
        needs a metric (``ReduceLROnPlateau``) gets the iteration's loss.
    precision
        ``"fp32"``, ``"fp64"``, or ``"bf16"``: weights and gradients in bfloat16, the optimizer
        works on a float32 master copy. ``"amp-bf16"``: forward and loss under `torch.autocast`.
        ``"amp-fp16"``: likewise, with losses scaled as by `torch.amp.GradScaler`: an update with
        gradients that are not finite is left out.
    clip_norm
        Largest norm of the gradient of all parameters (`torch.nn.utils.clip_grad_norm_`).
    recompute
        Keep only the inputs of a stage and run its forward again in the backward block.
    model
        Keyword arguments of `build_model`.
    init
        Weights to start from instead of those that the seed gives: a file with a state dict
        (``torch.load(weights_only=True)``), a safetensors file, or a folder of ``save_pretrained``.

    Examples
    --------
    >>> from functools import partial
    >>> from torch.optim import AdamW
    >>> from optsched.arraypipe import Job
    >>> rates = (1e-3, 3e-3, 1e-2)
    >>> jobs = [Job(seed=0, batch_size=8, optimizer=partial(AdamW, lr=lr)) for lr in rates]
    >>> [job.status for job in jobs]
    ['ready', 'ready', 'ready']
    """

    seed: int
    batch_size: int
    optimizer: MakeOptimizer
    name: str = ""
    microbatches: int = 1
    scheduler: MakeScheduler | None = None
    precision: str = "fp32"
    clip_norm: float | None = None
    recompute: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    init: str | PathLike[str] | None = None
    life: JobLife = field(default_factory=lambda: JobLife(), init=False, repr=False)

    def __post_init__(self) -> None:
        values: dict[str, Any] = {  # as Python's numbers, which checkpoints keep
            "seed": integer("seed", self.seed, 0, 2**63 - 1),
            "batch_size": (size := integer("batch_size", self.batch_size, 1)),
            "microbatches": integer("microbatches", self.microbatches, 1, size),
            "precision": one_of("precision", as_python(self.precision), tuple(PRECISIONS)),
            "recompute": boolean("recompute", self.recompute),
            "name": as_python(self.name),
        }
        if self.clip_norm is not None:
            values["clip_norm"] = number("clip_norm", self.clip_norm, above=True)
        self.__dict__.update(values)
        if not callable(self.optimizer):
            raise InputError(f"optimizer: expected a function, got {format_value(self.optimizer)}")
        if self.scheduler is not None and not callable(self.scheduler):
            raise InputError(f"scheduler: expected a function, got {format_value(self.scheduler)}")
        if not isinstance(self.model, Mapping):
            raise InputError(f"model: expected arguments by name, got {self.model!r}")
        if self.init is not None and not isinstance(self.init, (str, PathLike)):
            raise InputError(f"init: expected the path of a state dict, got {self.init!r:.60}")
        if not isinstance(self.name, str) or (self.name and not _NAME.fullmatch(self.name)):
            raise InputError(
                f"name: expected letters, digits and . _ = + - for a folder, got {self.name!r}"
            )

    @property
    def title(self) -> str:
        """Its name; without one ``job0``, ``job1``, ... by position in its run."""
        return self.name or self.life.title

    @property
    def needs_norm(self) -> bool:
        """Whether updates need the norm of all gradients: to clip, or to find infinities."""
        return self.clip_norm is not None or self.precision == "amp-fp16"

    @property
    def status(self) -> str:
        """``"ready"``, ``"running"``; after a run ``"stopped"``, ``"failed"`` or ``"done"``."""
        return self.life.status

    @property
    def error(self) -> JobFailed | None:
        """Why it failed."""
        return self.life.error

    def stop(self) -> None:
        """End the job with the iteration of the last known loss; others are not held up.

        Only while it runs: before and after a run it does nothing.
        """
        self.life.stopping = True

    def key(self, iteration: int, microbatch: int, stage: int) -> int:
        """Seed of the random numbers of one block: a hash, of the 32 bits that generators read."""
        fields = struct.pack("<4q", self.seed, iteration, microbatch, stage)
        return int.from_bytes(hashlib.blake2b(fields, digest_size=4).digest(), "little")


@dataclass(eq=False)
class JobLife:
    """What becomes of a job in its latest run."""

    status: str = "ready"
    error: JobFailed | None = None
    stopping: bool = False  # `Job.stop` was called
    title: str = ""

    def begin(self, title: str) -> None:
        """Forget an earlier run."""
        self.status, self.error, self.stopping, self.title = "ready", None, False, title


def seed_generator(key: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of a GPU alone (much cheaper than `torch.manual_seed`)."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)


def before_calls(
    module: nn.Module, action: Callable[[Any, Any], tuple[Any, Any]]
) -> Callable[[], None]:
    """Call a function before every call of a module; what is returned ends that.

    It gets the arguments by position and by name, and returns those for the module. A hook would be
    compiled with the module after `torch.nn.Module.compile`.
    """
    compiled: Any = module._compiled_call_impl
    if compiled is None:
        hook = module.register_forward_pre_hook(lambda _, *given: action(*given), with_kwargs=True)
        return hook.remove

    def call(*arguments: Any, **options: Any) -> Any:
        arguments, options = action(arguments, options)
        return compiled(*arguments, **options)

    module._compiled_call_impl = call
    return lambda: setattr(module, "_compiled_call_impl", compiled)
