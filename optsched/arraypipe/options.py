"""Settings and arguments of one call of `ArrayTrainer.fit`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from optsched.arraypipe.callbacks import Callback, is_first_rank
from optsched.errors import InputError
from optsched.io.values import boolean, bytes_of, format_value, integer, number, one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        Iterations over which the jobs are first compared with training alone. 0: no comparison; an
        optimizer that looks across tensors then trains every stage differently, without a word.
    verbose
        Print what is done, and progress.

    Examples
    --------
    >>> from optsched.arraypipe import RunConfig
    >>> RunConfig(memory="40GB", every=100).bytes
    42949672960
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
        one_of("backend", self.backend or "inline", ("inline", "process"))
        one_of("mode", self.mode, ("min", "max"))
        one_of("on_error", self.on_error, ("continue", "raise"))
        integer("every", 1 if self.every is None else self.every, 1, None)
        integer("keep", self.keep, 1, None)
        integer("check", self.check, 0, None)
        integer("replicas", self.replicas, 1, None)
        number("timeout", self.timeout, 0.0, 1e6, above=True, what="seconds")
        boolean("verbose", self.verbose)
        if self.memory is not None:
            integer("memory", self.bytes, 1)
        try:
            kind = torch.device(self.device or "cpu").type
        except (RuntimeError, TypeError) as error:
            raise InputError(f"device: {self.device!r} is not a valid torch.device") from error
        if kind not in ("cpu", "cuda"):
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
    def is_first(self) -> bool:
        """False on ranks above 0."""
        return not self.on_ranks or is_first_rank()

    @property
    def strict(self) -> bool:
        """Whether the first failure of a job ends the run."""
        return self.on_error == "raise"


@dataclass(frozen=True, eq=False)
class Request:
    """Arguments of one call of `ArrayTrainer.fit`, validated."""

    steps: int
    checkpoint: str | os.PathLike[str] | None = None
    resume: bool = False
    callbacks: Sequence[Callback] = ()
    evaluate: Any = None

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
