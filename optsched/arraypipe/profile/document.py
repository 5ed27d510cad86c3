"""`Profile`, what the blocks of a job array take, and its document ``optsched.profile/1``."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from optsched.arraypipe.profile.fit import Curve
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, check_format, decode, format_json, parse
from optsched.io.values import label
from optsched.model.document import Count  # noqa: TC001 (msgspec reads the annotations)

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


NOISY: Final = 0.25
"""IQR over median from which on a case is measured more often, and then warned about."""

Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Precision: TypeAlias = Literal["fp64", "fp32", "bf16"]
Update: TypeAlias = Literal["fused", "block", "global"]


class DeviceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where and when it was measured; `memory_bytes` 0 = not known.

    `block_overhead_ns` is what the executor adds to every block, messages included; 0 on a GPU,
    where the host is ahead of the device.
    """

    name: Text
    kind: Literal["cpu", "cuda"]
    memory_bytes: Count = 0
    threads: Positive
    block_overhead_ns: Count = 0
    torch: Text
    date: Text
    optsched: Text


class StageEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes of a stage; `state` per job: parameters, moments of the optimizer and buffers."""

    name: Text
    parameters_bytes: Count
    gradients_bytes: Count
    state: dict[str, Count]


class ProfiledJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job that was profiled.

    `optimizer` is its class and the settings that change its cost; jobs with the same one share
    the times of their updates.
    """

    name: Text
    batch_size: Positive
    microbatches: Positive = 1
    recompute: bool = False
    precision: Precision = "fp32"
    optimizer: str = ""
    update: Update = "fused"

    @property
    def batch(self) -> int:
        """Size of its largest micro-batch."""
        return -(-self.batch_size // self.microbatches)


class BlockEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times of one block in nanoseconds; `batch` is the micro-batch size.

    `job` is -1; for U the first job with that optimizer, and `batch` is 0. `launch_ns` is what the
    host needs to launch it on a GPU, 0 on a CPU.
    """

    kind: Literal["F", "B", "R", "U"]
    stage: Count
    batch: Count
    job: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INTEGER)] = -1
    dtype: Precision
    n: Positive
    median_ns: Positive
    iqr_ns: Count
    minimum_ns: Count
    launch_ns: Count = 0

    @property
    def launch_bound(self) -> bool:
        """Whether the GPU may have waited for the host, so that the time is that of the launch."""
        return 1.3 * self.launch_ns > self.median_ns

    @property
    def noisy(self) -> bool:
        """Whether the spread makes the median doubtful."""
        return self.iqr_ns > NOISY * self.median_ns


class BoundaryEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes that leave a stage: its output, and the gradient that comes back for it."""

    stage: Count
    batch: Positive
    dtype: Precision
    bytes: Count
    gradient_bytes: Count


class SavedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes kept from F to B: `bytes` without and `input_bytes` with recomputation."""

    stage: Count
    batch: Positive
    dtype: Precision
    bytes: Count
    input_bytes: Count


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A way that bytes go: bytes per second, and nanoseconds of an empty message."""

    bandwidth: Positive
    latency_ns: Count

    def time_ns(self, size: int) -> float:
        """Nanoseconds of a message of so many bytes."""
        return self.latency_ns + size * 1e9 / self.bandwidth


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From device to device, and from the host's memory to a device."""

    activation: Link
    host: Link


class Duration(NamedTuple):
    """A median in nanoseconds, and whether it was predicted from other sizes."""

    median_ns: int
    predicted: bool


def check(profile: Profile) -> None:
    """Refuse a profile that could not answer for all its jobs; the sentence names the field."""
    named = {"stages": [s.name for s in profile.stages], "jobs": [j.name for j in profile.jobs]}
    for key, row in named.items():
        if not row:
            raise InputError(f"{key}: expected at least one, got none")
        _once({f"{key}[{k}].name": label(f"{key}[{k}].name", name) for k, name in enumerate(row)})
    for key in ("name", "torch", "date", "optsched"):
        label(f"device.{key}", getattr(profile.device, key))
    try:
        datetime.fromisoformat(profile.device.date)
    except ValueError:
        raise InputError(
            f"device.date: expected a date such as 2025-01-31T12:00:00+00:00, "
            f"got {format_json(profile.device.date)}"
        ) from None
    names = {job.name for job in profile.jobs}
    for j, job in enumerate(profile.jobs):
        label(f"jobs[{j}].optimizer", job.optimizer, 1000)
        if job.microbatches > job.batch_size:
            raise InputError(
                f"jobs[{j}].microbatches: expected 1..{job.batch_size} (the batch size), "
                f"got {job.microbatches}"
            )
    for s, stage in enumerate(profile.stages):
        for name in sorted(names ^ stage.state.keys()):
            fault = f"job {format_json(name)} is missing"
            if name not in names:
                fault = f"there is no job {format_json(name)}"
            raise InputError(f"stages[{s}].state: {fault}")
    for i, block in enumerate(profile.blocks):
        _check_block(profile, f"blocks[{i}]", block)
    _check_cases(profile)


def _check_block(profile: Profile, place: str, b: BlockEntry) -> None:
    """A block by itself."""
    if not 0 <= b.stage < len(profile.stages):
        raise InputError(f"{place}.stage: expected 0..{len(profile.stages) - 1}, got {b.stage}")
    if b.kind != "U":
        if b.job != -1:
            raise InputError(f"{place}.job: expected -1 for {b.kind}, got {b.job}")
        if not b.batch:
            raise InputError(f"{place}.batch: expected an integer >= 1, got 0")
    elif not 0 <= b.job < len(profile.jobs):
        raise InputError(f"{place}.job: expected 0..{len(profile.jobs) - 1}, got {b.job}")
    elif b.batch:
        raise InputError(f"{place}.batch: expected 0 for U, got {b.batch}")
    elif b.dtype != (precision := profile.jobs[b.job].precision):
        raise InputError(
            f"{place}.dtype: expected {precision} (the precision of job {b.job}), got {b.dtype}"
        )
    if b.minimum_ns > b.median_ns:
        raise InputError(f"{place}.minimum_ns: {b.minimum_ns} is above the median {b.median_ns}")


def _check_cases(profile: Profile) -> None:
    """Every stage has the same measured sizes for F, R and B, and U of every optimizer; once."""
    blocks, jobs, stages = profile.blocks, profile.jobs, range(len(profile.stages))
    there = _once({
        f"blocks[{i}]": (
            f"{b.kind} of stage {b.stage} for {jobs[b.job].optimizer} in {b.dtype}"
            if b.kind == "U"
            else f"{b.kind} of stage {b.stage} at micro-batch {b.batch} in {b.dtype}"
        )
        for i, b in enumerate(blocks)
    })  # fmt: skip
    sizes = {(b.batch, b.dtype) for b in blocks if b.kind != "U"}
    cases = [f"stage {s} at micro-batch {n} in {t}" for s in stages for n, t in sorted(sizes)]
    for j, job in enumerate(jobs):
        if job.precision not in {dtype for _, dtype in sizes}:
            raise InputError(f"blocks: there are none in {job.precision}, as job {j} needs")
        for s in stages:
            if f"U of stage {s} for {job.optimizer} in {job.precision}" not in there:
                raise InputError(f"blocks: U of stage {s} for job {j} is missing")
    _complete("blocks", [f"{kind} of {case}" for kind in "FRB" for case in cases], there)
    told = {
        "boundaries": [(e.stage, e.batch, e.dtype) for e in profile.boundaries],
        "saved": [(e.stage, e.batch, e.dtype) for e in profile.saved],
    }
    for key, rows in told.items():
        names = [f"stage {s} at micro-batch {n} in {t}" for s, n, t in rows]
        found = _once({f"{key}[{i}]": name for i, name in enumerate(names)})
        for case in sorted(found - {*cases}):
            raise InputError(f"{key}: there is no block of {case}")
        _complete(key, cases, found)


def _once(named: Mapping[str, str]) -> set[str]:
    """Values that must differ, by their place."""
    seen: dict[str, str] = {}
    for place, value in named.items():
        if seen.setdefault(value, place) != place:
            raise InputError(f"{place}: {format_json(value)} is also in {seen[value]}")
    return {*seen}


def _complete(key: str, needed: Iterable[str], there: Collection[str]) -> None:
    for case in needed:
        if case not in there:
            raise InputError(f"{key}: {case} is missing")


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
    def fit_error(self) -> float | None:
        """Largest relative error of a measured size that the others predict; None: under three."""
        curves = [c for (what, _, _), c in self._curves.items() if what in "FRB"]
        return max((error for c in curves for error in c.left_out()), default=None)

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
        """The job array of these times; see `optsched.arraypipe.profile.problem.job_array`."""
        from optsched.arraypipe.profile.problem import job_array

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
        from optsched.arraypipe.profile.table import table

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
