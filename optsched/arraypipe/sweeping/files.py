"""What a sweep keeps beside the checkpoints of its jobs, so that a killed one can go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.io.files import read_text, write_atomic

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from optuna.trial import FrozenTrial

_FORMAT = "optsched.sweep/1"
_PATTERN = "trial{}.sweep.json"


class TrialFiles:
    """``<folder>/trial<number>.sweep.json``: the losses of a trial, at least up to its checkpoint.

    The loss of an iteration is known before its update, hence written before its checkpoint.

    Parameters
    ----------
    folder
        That of the checkpoints.
    study
        Name of the study.
    every
        Iterations between checkpoints; None: only at the end of a job.
    """

    def __init__(self, folder: str | os.PathLike[str], study: str, every: int | None) -> None:
        self.folder, self.study, self.every = Path(folder), study, every

    @property
    def count(self) -> int:
        """Trials that were begun."""
        return len(list(self.folder.glob(_PATTERN.format("*"))))

    def has(self, trial: FrozenTrial) -> bool:
        """Whether the trial was begun with this folder; others may be at work on the study."""
        return self._path(trial.number).exists()

    def due(self, done: int, steps: int) -> bool:
        """Whether a checkpoint is written after so many iterations."""
        return done == steps or (self.every is not None and done % self.every == 0)

    def write(self, number: int, losses: Sequence[float]) -> None:
        """Keep the losses of a trial; the first call says that it was begun."""
        row = {"format": _FORMAT, "study": self.study, "trial": number, "losses": list(losses)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"checkpoint: {self.folder} cannot be made ({error})") from error
        write_atomic(self._path(number), json.dumps(row) + "\n")

    def read(self, number: int) -> list[float]:
        """The losses of a trial.

        Raises
        ------
        InputError
            The file is damaged, or of another study.
        """
        path = self._path(number)
        try:
            row: Any = json.loads(read_text(path))
            losses = [float(x) for x in row["losses"]]
            study, kind = row["study"], row["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: is no file of a sweep ({error})") from None
        if kind != _FORMAT:
            raise InputError(f"{path}: format: expected {_FORMAT!r}, got {kind!r:.60}")
        if study != self.study:
            raise InputError(f"{path}: belongs to the study {study!r}, not to {self.study!r}")
        return losses

    def _path(self, number: int) -> Path:
        return self.folder / _PATTERN.format(number)
