"""Siblings and what each is alone, children that are killed, a folder that processes share."""

from __future__ import annotations

import os
import signal
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from arraypipe_models import adamw, build_model, data, loss, sgd

from optsched.arraypipe import Job
from optsched.arraypipe.checkpoint.files import numbered, train_files
from optsched.arraypipe.checkpoint.folder import CheckpointFolder
from optsched.arraypipe.checkpoint.weights import read_weights
from optsched.arraypipe.train_alone import Trained, differences, train_alone

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 5
PARTS = [1, 2, 1]


def jobs_of(n: int = 3) -> list[Job]:
    """Siblings that differ in all that they may differ in."""
    makers = (adamw, sgd, adamw)
    return [
        Job(j, 8 + j, makers[j % 3], microbatches=PARTS[j % 3], recompute=j % 3 == 1)
        for j in range(n)
    ]


@cache
def alone(j: int, steps: int) -> Trained:
    """The reference for job j of `jobs_of`."""
    return train_alone(build_model, jobs_of(j + 1)[j], ("4", "6"), loss, data, steps)


def same(got: Trained, j: int, steps: int, start: int = 0) -> bool:
    """Whether a job has the bits that it has alone after so many steps, losses included."""
    reference = alone(j, steps)
    wanted = (reference.parameters, reference.buffers, reference.optimizer)
    return differences(got, Trained(*wanted, reference.losses[start:])) == []


def saved_is_exact(folder: Path, j: int, title: str = "") -> int:
    """Compare the newest checkpoint of a job with the reference; its iteration, 0 without one."""
    place = folder / (title or f"job{j}")
    done = max(numbered(place), default=0)
    if not done:
        return 0
    model, states = read_weights(place / str(done)), {}
    for path in train_files(place / str(done)):
        states |= torch.load(path, weights_only=True)["parameters"]
    reference = alone(j, done)
    for name, value in {**reference.parameters, **reference.buffers}.items():
        assert torch.equal(model[name], value)
    for name, state in reference.optimizer.items():
        for key, value in state.items():
            assert torch.equal(states[name]["state"][key], value)
    return done


def killed_before(moment: int, run: Callable[[], object]) -> bool:
    """Run in a child that is killed before its n-th change of the file system; whether it was."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == signal.SIGKILL
    try:
        left = iter(range(moment))

        def counted(honest: Any) -> Any:
            def call(*given: Any, **named: Any) -> Any:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return honest(*given, **named)

            return call

        torch.set_num_threads(1)
        for name in ("mkdir", "fsync", "rename", "replace", "rmdir", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        run()
    finally:
        os._exit(0)


def use_folder(monkeypatch: Any, kind: Any) -> None:
    """Have runs use another class of checkpoint folders."""
    for name in ("trainer", "training_run"):
        module = import_module(f"optsched.arraypipe.{name}")
        if hasattr(module, "CheckpointFolder"):
            monkeypatch.setattr(module, "CheckpointFolder", kind)


class Halves(CheckpointFolder):
    """Two processes in one: the other one has the stages 0 and 2."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.other = CheckpointFolder(*given)
        self.stages_of, self.other.stages_of = (lambda run: [1]), (lambda run: [0, 2])
        self.other.is_first = False

    def prepare(self, titles: Any, resume: bool) -> None:
        """Both."""
        super().prepare(titles, resume)
        self.other.prepare(titles, resume)

    def begin(self, run: Any, at: int) -> None:
        """Both."""
        super().begin(run, at)
        self.other.begin(run, at)

    def watched(self, run: Any, data: Any) -> Any:
        """The one that has the first stage; here there is one iterator."""
        return self.other.watched(run, data)

    def note(self, run: Any, stage: int, iteration: int) -> None:
        """The one that has the stage."""
        CheckpointFolder.note(self if stage == 1 else self.other, run, stage, iteration)

    def finish(self, run: Any) -> None:
        """Both."""
        super().finish(run)
        self.other.finish(run)

    def close(self) -> None:
        """Both."""
        super().close()
        self.other.close()
