"""`Profile`, what the blocks of a job array take, and its document ``optsched.profile/1``."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.arraypipe.profiling.entries import (
    NOISY,
    BlockEntry,
    BoundaryEntry,
    DeviceEntry,
    Duration,
    Link,
    Links,
    ProfiledJob,
    SavedEntry,
    StageEntry,
)
from optsched.arraypipe.profiling.fit import Curve, FitError, fit_error
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, check_format, decode, format_json, parse

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray

__all__ = [
    "FORMAT", "NOISY", "BlockEntry", "BoundaryEntry", "DeviceEntry", "Duration", "FitError",
    "Link", "Links", "Profile", "ProfiledJob", "SavedEntry", "StageEntry", "from_text",
    "profile_of", "to_bytes",
]  # fmt: skip

FORMAT: Final = "optsched.profile/1"

_HASH = re.compile("[0-9a-f]{16,64}")
_HASH_IN_NAME = re.compile(r"(?:^| )profile ([0-9a-f]{16})$")


class _Document(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    device: DeviceEntry
    stages: tuple[StageEntry, ...]
    jobs: tuple[ProfiledJob, ...]
    blocks: tuple[BlockEntry, ...]
    boundaries: tuple[BoundaryEntry, ...]
    saved: tuple[SavedEntry, ...]
    links: Links


@dataclass(frozen=True)
class Profile:
    """What the blocks of a job array take and keep, with provenance; immutable.

    Made by `ArrayTrainer.profile`; the way from a model to a `JobArray` (`problem`). Times are in
    nanoseconds: medians; the minima are for the record and nothing is predicted from them.

    Parameters
    ----------
    device
        Where, when and with which versions it was measured.
    stages, jobs
        In the order of the trainer's.
    blocks
        One entry per (kind, stage, micro-batch size, dtype), and U per (stage, optimizer).
    boundaries, saved
        Bytes per (stage, micro-batch size, dtype).
    links
        Bandwidth and latency between devices, and from the host to a device.

    Raises
    ------
    InputError
        Entries contradict each other or are missing; the sentence names the field.
    """

    device: DeviceEntry
    stages: tuple[StageEntry, ...]
    jobs: tuple[ProfiledJob, ...]
    blocks: tuple[BlockEntry, ...]
    boundaries: tuple[BoundaryEntry, ...]
    saved: tuple[SavedEntry, ...]
    links: Links

    def __post_init__(self) -> None:
        from optsched.arraypipe.profiling.checks import check

        check(self)

    def __hash__(self) -> int:
        return hash(self.sha256)

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    # files

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a ``*.profile.json`` document strictly; `InputError` names place, rule and value."""
        from optsched.io.files import read_text

        return from_text(read_text(path), str(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the document (whole file or nothing)."""
        from optsched.io.files import write_atomic

        write_atomic(path, to_bytes(self))

    save = write

    @cached_property
    def sha256(self) -> str:
        """Hash of the canonical document; the problem's name carries its beginning."""
        return hashlib.sha256(to_bytes(self)).hexdigest()

    # times and bytes

    def duration(self, kind: str, stage: int, batch: int, job: int = 0) -> Duration:
        """Time of a block at a micro-batch size, measured or else predicted.

        Parameters
        ----------
        kind
            ``"F"``, ``"B"``, ``"R"`` or ``"U"``.
        stage
            Number of the stage.
        batch
            Micro-batch size; an update does not depend on it.
        job
            Whose precision, and for ``"U"`` whose optimizer.

        Raises
        ------
        InputError
            There is no such kind, stage or job, or the size is below 1.
        """
        self._known(stage, job)
        return self.duration_of(kind, stage, batch, self.jobs[job])

    def duration_of(self, kind: str, stage: int, batch: int, job: ProfiledJob) -> Duration:
        """`duration` of a job that need not be one of the profile's."""
        if kind == "U":
            found = self._updates.get((stage, job.precision, job.optimizer))
            if found is None:
                raise InputError(
                    f"job: no update of {job.optimizer!r} in {job.precision} was measured"
                )
            return Duration(found, False)
        return _at(self._curve(kind, stage, job), batch)

    def kept(self, stage: int, batch: int, job: int = 0) -> tuple[int, int]:
        """Bytes from F to B without and with recomputation, measured or predicted."""
        self._known(stage, job)
        precision = self.jobs[job].precision
        return self.bytes_of("saved", stage, batch, precision), self.bytes_of(
            "input", stage, batch, precision
        )

    def bytes_of(self, what: str, stage: int, batch: int, precision: str) -> int:
        """Bytes at a micro-batch size: ``"output"``, ``"gradient"``, ``"saved"``, ``"input"``."""
        curve = self._curves.get((what, stage, precision))
        if curve is None:
            raise InputError(f"precision: {precision} was not measured")
        return _at(curve, batch).median_ns

    def state_bytes(self, stage: int, job: int) -> int:
        """Bytes of a job's parameters, moments and buffers on a stage."""
        self._known(stage, job)
        return self.stages[stage].state[self.jobs[job].name]

    def sizes(self, precision: str = "fp32") -> list[int]:
        """Measured micro-batch sizes, ascending; empty for a precision that was not measured."""
        curve = self._curves.get(("F", 0, precision))
        return [] if curve is None else list(curve.sizes)

    def extrapolates(self, batch: int, precision: str = "fp32") -> bool:
        """Whether a micro-batch size lies outside the measured ones."""
        sizes = self.sizes(precision)
        return bool(sizes) and not sizes[0] <= batch <= sizes[-1]

    @cached_property
    def fit_error(self) -> FitError:
        """How well the sizes that were measured predict each other (each left out once)."""
        return fit_error([c for (what, _, _), c in self._curves.items() if what in "FRB"])

    def noisy(self) -> list[str]:
        """A sentence per case whose IQR is above a quarter of its median, the worst first."""
        rows = [b for b in self.blocks if b.noisy]
        return [
            f"{self.title(b)}: IQR {b.iqr_ns / b.median_ns:.0%} of the median after {b.n} repeats"
            for b in sorted(rows, key=lambda b: -b.iqr_ns / b.median_ns)
        ]

    def title(self, block: BlockEntry) -> str:
        """A case in words: ``F of stage 1 (layer4), micro-batch 8, fp32``."""
        place = f"{block.kind} of stage {block.stage} ({self.stages[block.stage].name})"
        if block.kind == "U":
            return f"{place}, {self.jobs[block.job].optimizer or 'no optimizer'}, {block.dtype}"
        return f"{place}, micro-batch {block.batch}, {block.dtype}"

    # what it is for

    def problem(
        self,
        jobs: Sequence[Any] | None = None,
        *,
        objective: str = "period",
        recompute_mode: str | Sequence[bool] | None = None,
        update_mode: str | None = None,
        memory: str | int | Sequence[int] | None = None,
        place: Sequence[int] | None = None,
        **options: Any,
    ) -> JobArray:
        """The job array of these times; see `optsched.arraypipe.profiling.problem.job_array`."""
        from optsched.arraypipe.profiling.problem import job_array

        return job_array(
            self, jobs, objective=objective, recompute_mode=recompute_mode,
            update_mode=update_mode, memory=memory, place=place, **options,
        )  # fmt: skip

    def made(self, schedule: Schedule) -> bool:
        """Whether a schedule was made from this very profile.

        Its provenance says so (``profile_sha256``), or its name, which it has from the problem.
        """
        told = profile_of(schedule)
        return bool(told) and self.sha256.startswith(told)

    def gap(self, schedule: Schedule) -> str:
        """A sentence if a schedule was made from another profile, else nothing.

        Of a schedule that names no profile nothing can be said.
        """
        told = profile_of(schedule)
        if not told or self.made(schedule):
            return ""
        return (
            f"the schedule was made with profile {told[:12]}, not with {self.sha256[:12]}: its "
            f"times may be wrong, the report shows by how much; results do not depend on them"
        )

    def table(self) -> str:
        """Medians with their spread, as people read them."""
        from optsched.arraypipe.profiling.table import table

        return table(self)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return (
            f"<Profile {self.sha256[:16]}: {len(self.jobs)} jobs, {self.n_stages} stages "
            f"on {self.device.name}>"
        )

    def _known(self, stage: int, job: int) -> None:
        for key, value, count in (("stage", stage, self.n_stages), ("job", job, len(self.jobs))):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
                raise InputError(f"{key}: expected 0..{count - 1}, got {value!r}")

    def _curve(self, kind: str, stage: int, job: ProfiledJob) -> Curve:
        curve = self._curves.get((kind, stage, job.precision))
        if curve is None:
            if kind not in ("F", "B", "R"):
                raise InputError(f"kind: expected F, B, R or U, got {format_json(kind)}")
            raise InputError(f"precision: {job.precision} of job {job.name} was not measured")
        return curve

    @cached_property
    def _curves(self) -> Mapping[tuple[str, int, str], Curve]:
        points: dict[tuple[str, int, str], dict[int, int]] = {}

        def add(what: str, stage: int, dtype: str, batch: int, value: int) -> None:
            points.setdefault((what, stage, dtype), {})[batch] = value

        for b in self.blocks:
            if b.kind != "U":
                add(b.kind, b.stage, b.dtype, b.batch, b.median_ns)
        for c in self.boundaries:
            add("output", c.stage, c.dtype, c.batch, c.bytes)
            add("gradient", c.stage, c.dtype, c.batch, c.gradient_bytes)
        for k in self.saved:
            add("saved", k.stage, k.dtype, k.batch, k.bytes)
            add("input", k.stage, k.dtype, k.batch, k.input_bytes)
        return {key: Curve(sorted(row.items())) for key, row in points.items()}

    @cached_property
    def _updates(self) -> Mapping[tuple[int, str, str], int]:
        return {
            (b.stage, b.dtype, self.jobs[b.job].optimizer): b.median_ns
            for b in self.blocks
            if b.kind == "U"
        }


def profile_of(schedule: Schedule) -> str:
    """The hash, or how it begins, of the profile that a schedule was made from; empty: none."""
    told = schedule.provenance.get("profile_sha256")
    if isinstance(told, str):
        return told if _HASH.fullmatch(told) else ""
    match = _HASH_IN_NAME.search(schedule.name)
    return "" if match is None else match[1]


def from_text(text: str, name: str = "profile") -> Profile:
    """Read a profile from JSON text; `InputError` names place, rule and value."""
    tree = parse(text, name)
    check_format(tree, FORMAT, name)
    document = decode(tree, _Document, name)
    fields = {key: getattr(document, key) for key in _FIELDS}
    try:
        return Profile(**fields)
    except InputError as error:
        error.args = (f"{name}: {error.args[0]}",)
        raise


def to_bytes(profile: Profile) -> bytes:
    """Canonical JSON: one entry a line."""
    encode = msgspec.json.Encoder(order="sorted").encode
    lines = [b'"format": "%s"' % FORMAT.encode()]
    for key in _FIELDS:
        value = getattr(profile, key)
        if isinstance(value, tuple):
            rows = b",\n    ".join(map(encode, value))
            lines.append(b'"%s": [\n    %s\n  ]' % (key.encode(), rows))
        else:
            lines.append(b'"%s": %s' % (key.encode(), encode(value)))
    return b"{\n  " + b",\n  ".join(lines) + b"\n}\n"


def _at(curve: Curve, batch: int) -> Duration:
    """A measured value as it is; a predicted one rounded up."""
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_INTEGER:
        raise InputError(f"batch: expected an integer >= 1, got {batch!r}")
    for size, value in curve.points:
        if size == batch:
            return Duration(value, False)
    return Duration(ceil(curve(batch)), True)


_FIELDS: Final = ("device", "stages", "jobs", "blocks", "boundaries", "saved", "links")
