"""`Job`, one training run of an array, and `JobStage`: its modules and optimizer on one stage."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optsched.errors import InputError, OptschedError

Tensors: TypeAlias = tuple[Tensor, ...]
NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]
MakeOptimizer: TypeAlias = Callable[[NamedParameters], Optimizer]
BuildModel: TypeAlias = Callable[..., nn.Module]
Loss: TypeAlias = Callable[[Any, Any], Tensor]
Data: TypeAlias = Callable[["Job", int], Iterator[tuple[Any, Any]]]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,99}")


class JobFailed(OptschedError):
    """A block of a job raised or its loss is not finite; `job`, `stage`, `iteration` say where.

    Nothing of the run is kept except the checkpoints that were complete before.
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
    recompute
        Keep only the inputs of a stage and run its forward again in the backward block.
    model
        Keyword arguments of `build_model`.
    """

    seed: int
    batch_size: int
    optimizer: MakeOptimizer
    name: str = ""
    microbatches: int = 1
    recompute: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, least, most in (
            ("seed", 0, 2**63 - 1),
            ("batch_size", 1, 2**53),
            ("microbatches", 1, self.batch_size),
        ):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise InputError(f"{key}: expected an integer in {least}..{most}, got {value!r}")
        if not callable(self.optimizer):
            raise InputError(f"optimizer: expected a function, got {self.optimizer!r}")
        if self.name and not _NAME.fullmatch(self.name):
            raise InputError(
                f"name: expected letters, digits and . _ = + - for a folder, got {self.name!r}"
            )

    def key(self, iteration: int, microbatch: int, stage: int) -> int:
        """Seed of the random numbers of one block: a 32-bit hash of all that names it.

        The CPU generator reads only the low 32 bits of a seed, so the fields are hashed, never
        packed side by side.
        """
        fields = struct.pack("<4q", self.seed, iteration, microbatch, stage)
        return int.from_bytes(hashlib.blake2b(fields, digest_size=4).digest(), "little")


@dataclass(eq=False)
class Kept:
    """What a stage keeps of one micro-batch from F to B."""

    inputs: Tensors
    key: int
    end: Callable[[Any], Tensor] | None  # output -> loss, on the last stage
    roots: Tensors | None = None  # of the autograd graph; None until recomputed
    buffers: Tensors = ()  # values that F started from, for the recompute


@dataclass(eq=False)
class JobStage:
    """Modules, parameters and optimizer of one job on one stage; resident for the whole run.

    `sends_gradient` and `clones_input` are found out by a rehearsal (`blocks.rehearse`).
    """

    job: int
    index: int
    last: bool
    modules: tuple[nn.Module, ...]
    parameters: NamedParameters
    prefixes: tuple[str, ...]
    optimizer: Optimizer | None
    holders: tuple[tuple[nn.Module, str], ...]  # where the buffers hang
    packed: bool = False  # whether its input is a tuple
    needs_gradient: tuple[bool, ...] = ()
    clones_input: bool = False
    kept: dict[int, Kept] = field(default_factory=dict)

    def run(self, inputs: Tensors) -> Any:
        """The forward of the stage."""
        x: Any = inputs if self.packed else inputs[0]
        for module in self.modules:
            x = module(x)
        return x

    def buffers(self) -> Tensors:
        """The buffers in the order of `holders`."""
        return tuple(module._buffers[name] for module, name in self.holders)  # type: ignore[misc]

    def set_buffers(self, values: Sequence[Tensor]) -> None:
        """Point the modules at other buffers."""
        for (module, name), value in zip(self.holders, values, strict=True):
            module._buffers[name] = value


def buffer_holders(modules: Sequence[nn.Module]) -> tuple[tuple[nn.Module, str], ...]:
    """Every place in the modules where a buffer hangs."""
    seen: dict[int, nn.Module] = {}
    for module in modules:
        seen.update((id(part), part) for part in module.modules())
    return tuple(
        (part, name)
        for part in seen.values()
        for name, buffer in part._buffers.items()
        if buffer is not None
    )


def seed_generator(key: int) -> None:
    """Seed the CPU generator alone (two orders of magnitude cheaper than `torch.manual_seed`)."""
    torch.default_generator.manual_seed(key)
