"""Checkpoints of a job: its training, the position within a pass, and what cannot be kept."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from optsched.arraypipe.checkpoint import plain
from optsched.arraypipe.checkpoint.files import copied, load, replace_file
from optsched.arraypipe.checkpoint.states import check_same, scheduler_state
from optsched.arraypipe.model.inputs import same
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.elastic.job import TrainingJob

FORMAT: Final = "optsched.elastic/3"
_KEYS: Final = {"job", "passes", "log", "model", "optimizer", "scheduler", "made", "position"}


class Position(NamedTuple):
    """Where a pass was stopped: its order, the next step, and the state of every rank."""

    order: tuple[int, list[int], list[int], float]
    step: int
    part: float  # of the steps that is done, in [0, 1]
    ranks: list[dict[str, Any]]


class Checkpoint:
    """Write and read the checkpoint of a job, in ``<folder>/checkpoint.pt``."""

    def __init__(self, job: TrainingJob, folder: str, device: torch.device) -> None:
        """Make model, optimizer and scheduler, which depend on the seed alone."""
        seed_all(job.seed, 0, 0)
        self.job, self.file = job, Path(folder) / "checkpoint.pt"
        self.place = f"checkpoint of job {job.name}"
        model = job.model().to(device)
        optimizer: Any = plain.python_settings(job.optimizer(model.parameters()))
        settings = [  # before a scheduler changes them
            copied({key: value for key, value in group.items() if not key.startswith("param")},
                   f"{self.place}: optimizer setting")
            for group in optimizer.param_groups
        ]  # fmt: skip
        scheduler = None if job.scheduler is None else job.scheduler(optimizer)
        plain.python_numbers(optimizer, scheduler)
        self.trained = model, optimizer, scheduler
        self.made: dict[str, Any] = {
            "optimizer": _kind(optimizer),
            "settings": settings,
            "scheduler": _kind(scheduler),
            "schedule": copied(scheduler_state(scheduler, job.name), f"{self.place}: scheduler"),
        }

    def check_kept(self) -> None:
        """Refuse state that no checkpoint can keep before the first pass."""
        plain.reread(plain.kept(self._state([], None), self.place, plain.empty))
        parameters = [*self.trained[0].parameters()]
        plain.check_kept(self.job.optimizer, self.job.scheduler, parameters, self.place)

    def save(self, log: list[dict[str, Any]], position: Position | None = None) -> None:
        """Replace the file; within a pass with the position."""
        where = None if position is None else position._asdict()
        replace_file(self.file, copied(self._state(log, where), self.place))

    def _state(self, log: list[dict[str, Any]], position: dict[str, Any] | None) -> dict[str, Any]:
        model, optimizer, scheduler = self.trained
        return {
            "format": FORMAT, "job": self.job.name, "passes": len(log), "log": log,
            "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "scheduler": scheduler_state(scheduler, self.job.name),
            "made": self.made, "position": position,
        }  # fmt: skip

    def restore(self) -> tuple[list[dict[str, Any]], Position | None]:
        """Load the file into model, optimizer and scheduler; return the log and the position."""
        state = read_checkpoint(self.file, self.job.name)
        model, optimizer, scheduler = self.trained
        try:
            before, now = state["made"], self.made
            model.load_state_dict(state["model"])
            for key in ("optimizer", "scheduler"):
                check_same({key: before[key]}, {key: now[key]}, "{}", self.file)
            optimizer.load_state_dict(state["optimizer"])
            self._uncast(state["optimizer"]["state"])
            rows = optimizer.param_groups, before["settings"], now["settings"]
            for group, old, new in zip(*rows, strict=True):
                if scheduler is not None:  # its state follows from them
                    check_same(old, new, "optimizer setting {!r}", self.file)
                group.update({k: v for k, v in new.items() if not same(old.get(k), v)})
            check_same(before["schedule"], now["schedule"], "scheduler setting {!r}", self.file)
            if scheduler is not None:
                scheduler.load_state_dict(state["scheduler"])
        except InputError:
            raise
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            line = str(error).strip().splitlines()[0]
            raise InputError(f"{self.file}: is of another model or optimizer ({line})") from None
        return state["log"], state["position"] and Position(**state["position"])

    def _uncast(self, saved: dict[int, dict[str, Any]]) -> None:
        """Assign states that were cast to the type of their parameter, which changes bits."""
        optimizer = self.trained[1]
        rows = (p for group in optimizer.param_groups for p in group["params"])
        for k, parameter in enumerate(rows):
            now = optimizer.state.get(parameter, {})
            for key, value in saved.get(k, {}).items():
                if isinstance(value, Tensor) and value.dtype != now[key].dtype:
                    now[key] = value.to(now[key].device)


def read_checkpoint(file: Path | str, name: str) -> dict[str, Any]:
    """Read a job's ``passes``, ``log``, ``model``, ``optimizer``; `InputError`: no such file.

    Examples
    --------
    >>> from optsched.elastic import read_checkpoint
    >>> state = read_checkpoint("run1/wide/checkpoint.pt", "wide")  # doctest: +SKIP
    >>> weights = state["model"]  # doctest: +SKIP
    """
    state: Any = load(Path(file))
    if not isinstance(state, dict) or (found := state.get("format")) != FORMAT:
        of = f"of format {found}" if isinstance(state, dict) and found else "no checkpoint"
        raise InputError(f"{file}: is {of}, expected format {FORMAT}; resume in another folder")
    if not state.keys() >= _KEYS or not isinstance(state["log"], list):
        raise InputError(f"{file}: is damaged")
    if state["job"] != name or len(state["log"]) != state["passes"]:
        raise InputError(f"{file}: is of job {state['job']!r}, expected {name!r}")
    return state


def seed_all(*key: int) -> None:
    """Seed torch, Python and NumPy by some numbers."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (of user code)


def random_state(device: torch.device) -> dict[str, Any]:
    """States of all global random generators, as a checkpoint keeps them."""
    numpy: Any = np.random.get_state()  # noqa: NPY002 (of user code)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (numpy[0], numpy[1].tolist(), *numpy[2:]),
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue the random streams of `random_state`."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 (of user code)


def counters(model: nn.Module) -> dict[str, Any]:
    """Numbers that modules hold as Python attributes, which no state dict has."""
    found = {}
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            continue
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, (int, float)) and key != "training":
                found[f"{name}.{key}" if name else key] = value
    return found


def check_counters(model: nn.Module, before: dict[str, Any]) -> None:
    """Refuse modules that count in Python attributes, which a resize would reset."""
    now = counters(model)
    if changed := [key for key in now if key not in before or not same(now[key], before[key])]:
        raise InputError(
            f"model: training changes the attribute {changed[0]} of a module, which a resize would "
            "reset: register a buffer, or keep it by the module's get_extra_state"
        )


def _kind(made: Any) -> str:
    return "none" if made is None else f"{type(made).__module__}.{type(made).__qualname__}"
