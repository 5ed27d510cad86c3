"""Where ``optsched pipeline`` takes its job from: equal stages, a model, or a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from optsched.problems.jobarray.problem import JobArray

STAGES: Final = 8
MICRO_BATCHES: Final = 32
CHUNKS: Final = 2
TIME: Final = 12
"""A multiple of the usual numbers of chunks."""


class Jobs(Protocol):
    """A job for every pipeline."""

    def job(self, name: str) -> tuple[JobArray, int]:
        """The job as this pipeline wants it, and the chunks per device; 0 if it keeps bytes."""

    def published(self, name: str) -> str:
        """The published bubble, or in words why there is none."""


class EqualStages:
    """Equal stages without communication."""

    def __init__(self, times: dict[str, int | None], sizes: dict[str, int | None]) -> None:
        self.arguments, last = {}, TIME
        for key in ("forward", "backward", "weight"):  # what is not said is as the one before
            given = times[key]
            last = self.arguments[key] = last if given is None else given
        self.arguments |= _filled(sizes)

    def job(self, name: str) -> tuple[JobArray, int]:
        """The job as this pipeline wants it, and how many activations a device's share is."""
        from optsched.pipelines import uniform
        from optsched.pipelines.formulas import CHUNKED

        chunks = self.arguments["chunks"] if name in CHUNKED else 1
        return uniform(name, **self.arguments), chunks

    def published(self, name: str) -> str:
        """The published bubble, or in words why there is none."""
        from optsched.pipelines import bubble

        try:
            value = bubble(name, **self.arguments)
        except InputError as error:  # it says for which numbers there is one
            about, _, reason = str(error).partition(": ")
            return reason if about == name else ""
        return f"{100 * float(value):.2f} % = {value}" + (" of a period" if name == "zb_h2" else "")


class ModelJob:
    """A job of a real model by the analytic cost model."""

    def __init__(self, model: str, profile: dict[str, Any], sizes: dict[str, int | None]) -> None:
        given = {key: value for key, value in profile.items() if value is not None}
        self.model, self.batch_size = model, given.pop("batch_size", 1)
        self.options, self.sizes = given, _filled(sizes)

    def job(self, name: str) -> tuple[JobArray, int]:
        """The job as this pipeline wants it; activations are bytes."""
        from optsched.pipelines.equal_stages import layout
        from optsched.pipelines.formulas import SPLIT
        from optsched.problems.jobarray.problem import JobArray

        stages, m = self.sizes["stages"], self.sizes["micro_batches"]
        _, place = layout(name, stages, self.sizes["chunks"])
        job = JobArray.from_profile(
            self.model, len(place), [self.batch_size * m], micro_batches=m, place=place,
            split_backward=name in SPLIT, name=f"{name}-{self.model}-{stages}x{m}", **self.options,
        )  # fmt: skip
        return job, 0

    def published(self, name: str) -> str:
        """Nothing: stages differ."""
        return ""


class JobFile:
    """A job array from a file; its jobs follow each other as micro-batches."""

    def __init__(self, file: Path) -> None:
        from optsched.problems.jobarray.problem import JobArray

        self.array = JobArray.read(file)

    def job(self, name: str) -> tuple[JobArray, int]:
        """The array of the file for every pipeline; activations are bytes."""
        return self.array, 0

    def published(self, name: str) -> str:
        """Nothing: stages may differ."""
        return ""


def _filled(sizes: dict[str, int | None]) -> dict[str, int]:
    defaults = {"stages": STAGES, "micro_batches": MICRO_BATCHES, "chunks": CHUNKS}
    return {key: defaults[key] if size is None else size for key, size in sizes.items()}
