"""A checkpoint folder that two processes share, both of them in this one."""

from __future__ import annotations

from typing import Any

from optsched.arraypipe.checkpoint.folder import CheckpointFolder


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
