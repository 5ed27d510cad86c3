"""Settings and arguments of one call of `ArrayTrainer.fit`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist

from optsched.arraypipe.callbacks import Callback
from optsched.errors import InputError
from optsched.io.values import boolean, bytes_of, format_value, integer, number, one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.job import BuildModel, Data, Job
    from optsched.arraypipe.model.calls import Cut
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.types import Routes
    from optsched.arraypipe.runtime.losses import Weight
    from optsched.problems.jobarray.problem import JobArray


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run.

    Parameters
    ----------
    backend
        ``"inline"``: all devices of the schedule in this process; ``"process"``: one per rank of
        `torchrun`. None: ``"process"`` under `torchrun`.
    device
        Torch device of this process, such as ``"cuda:1"``. None: its GPU if there is one (by
        LOCAL_RANK), else the CPU.
    memory
        Limit in bytes (or ``"40GB"``) of every device for states, gradients, activations and
        messages; states that do not fit take turns in slots. None: all states fit.
    replicas
        Ranks that train every stage, each on a part of the batch.
    timeout
        Seconds after which a message between ranks counts as lost.
    on_error
        ``"continue"``: a job that raises or whose loss is not finite fails, and the others go on;
        ``"raise"``: the run raises.
    replan
        Look for a better order when a job has ended and no job takes its slot. With a given
        schedule: the `JobArray` it was made for.
    every
        Iterations between two evaluations, and between two checkpoints. None: only after the last.
    keep, mode
        Number of newest checkpoints of a job that are kept. The one with the lowest (``"min"``) or
        highest (``"max"``) value of `evaluate` is kept too; ``<job>/best`` names it.
    check
        Iterations over which the jobs are first compared with training alone; 0: no comparison.
    verbose
        Print what is done, and progress.
    """

    backend: Literal["inline", "process"] | None = None
    device: str | torch.device | None = None
    memory: int | str | None = None
    replicas: int = 1
    timeout: float = 600.0
    on_error: Literal["continue", "raise"] = "continue"
    replan: bool | JobArray = False
    every: int | None = None
    keep: int = 2
    mode: Literal["min", "max"] = "min"
    check: int = 2
    verbose: bool = True

    def __post_init__(self) -> None:
        if self.backend is not None:
            one_of("backend", self.backend, ("inline", "process"))
        one_of("mode", self.mode, ("min", "max"))
        one_of("on_error", self.on_error, ("continue", "raise"))
        if self.every is not None:
            integer("every", self.every, 1, None)
        integer("keep", self.keep, 1, None)
        integer("check", self.check, 0, None)
        integer("replicas", self.replicas, 1, None)
        number("timeout", self.timeout, 0.0, 1e6, above=True, what="seconds")
        boolean("verbose", self.verbose)
        if self.memory is not None:
            integer("memory", self.bytes, 1)
        try:
            kind = None if self.device is None else torch.device(self.device).type
        except (RuntimeError, TypeError) as error:
            raise InputError(f"device: {self.device!r} is not a valid torch.device") from error
        if kind not in (None, "cpu", "cuda"):
            raise InputError(f"device: expected cpu or cuda, got {self.device!r}")

    @property
    def bytes(self) -> int | None:
        """Limit of the memory of a device."""
        return bytes_of(self.memory) if isinstance(self.memory, str) else self.memory

    @property
    def on_ranks(self) -> bool:
        """Whether this process is one of several ranks of the run."""
        if self.backend is None:
            return "RANK" in os.environ and "WORLD_SIZE" in os.environ
        return self.backend == "process"

    @property
    def strict(self) -> bool:
        """Whether the first failure of a job ends the run."""
        return self.on_error == "raise"


class Trainer(Protocol):
    """Part of `ArrayTrainer` that a run reads."""

    build_model: BuildModel
    data: Data
    loss: Any
    weight: Weight
    cut: Cut
    jobs: tuple[Job, ...]

    @property
    def titles(self) -> list[str]:
        """Names of the jobs."""

    @property
    def cuts(self) -> tuple[str, ...]:
        """Names of the blocks at which stages 1, 2, ... begin."""

    @property
    def n_stages(self) -> int:
        """Number of stages."""

    def routes(self, plan: ExecutionPlan) -> Routes:
        """Return the messages of a plan."""


@dataclass(frozen=True, eq=False)
class Request:
    """Arguments of one call of `ArrayTrainer.fit`, validated."""

    steps: int
    checkpoint: str | os.PathLike[str] | None
    resume: bool
    callbacks: Sequence[Callback]
    evaluate: Any
    config: RunConfig

    def __post_init__(self) -> None:
        integer("steps", self.steps, 1, None)
        boolean("resume", self.resume)
        if not isinstance(self.callbacks, (list, tuple)):
            raise InputError(f"callbacks: expected a list, got {self.callbacks!r:.60}")
        for k, callback in enumerate(self.callbacks):
            if not isinstance(callback, Callback):
                raise InputError(f"callbacks[{k}]: expected a Callback, got {callback!r:.60}")
        folder = self.checkpoint
        if folder is None and self.resume:
            raise InputError("checkpoint: expected a folder to resume from")
        if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not str(folder)):
            raise InputError(f"checkpoint: expected a folder, got {format_value(folder)}")
        if folder is None and self.evaluate is not None and self.config.on_ranks:
            raise InputError(
                "evaluate: a rank has only its stages of the model, so that checkpoints are "
                "evaluated; expected checkpoint=..."
            )

    @property
    def is_first(self) -> bool:
        """False on ranks above 0."""
        return not self.config.on_ranks or is_first_rank()


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
